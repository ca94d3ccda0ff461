"""What a step computes and moves, against what the libraries' own operations say: two layers, counted on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from tests.fit.recipes import lightest
from tests.fit.small import small
from tuner.fit import operations
from tuner.fit.levels import Costs
from tuner.fit.operations import model_flops, of_step
from tuner.fit.step_time import Operations
from tuner.models.fused_lora import fuse
from tuner.recipes.schema import RecipeConfig, Split
from tuner.recipes.schema.architecture import Architecture

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")

TOKENS, RANK = 128, 8
WIDTHS: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "num_hidden_layers": 2,
}
FULL, LORA = "qwen3_8b_full_alpaca_e1", "qwen3_8b_lora_alpaca_e1"
NO_KERNELS = {
    "expand",
    "clone",
    "_unsafe_view",
    "detach",
    "alias",
    "empty",
    "empty_like",
    "new_empty",
    "slice_backward",
}
PRODUCTS = ("mm", "addmm", "bmm", "_scaled_dot_product")


class Moved(TorchDispatchMode):
    """Counts operations that start a kernel, and the bytes that all but matrix products read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.kernels = 0, 0

    def __torch_dispatch__(
        self, function: Any, types: object, args: Iterable[object] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        out = function(*args, **(kwargs or {}))
        name = function._schema.name.split("::")[1].rstrip("_")
        if not function.is_view and name not in NO_KERNELS:
            self.kernels += 1
            if not name.startswith(PRODUCTS):
                tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
                self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return out


def passes(kind: str, recompute: bool, lora: str) -> Callable[[], Tensor]:
    """Return the forward pass of a small model of this kind, without its head."""
    config = transformers.AutoConfig.for_model(kind, **WIDTHS)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    base = model.train().get_decoder()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if lora:
        settings = LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        adapted = get_peft_model(model, settings, autocast_adapter_dtype=False)
        if lora == "fused":
            fuse(adapted)
    inputs = torch.randn(1, TOKENS, WIDTHS["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
    return lambda: base(inputs_embeds=inputs, use_cache=False).last_hidden_state


def recipe_of(name: str, recompute: bool) -> RecipeConfig:
    flash = "model.attn_implementation=flash_attention_2"
    config = lightest(name, f"max_length={TOKENS}", "loss=whole", flash).with_split(Split(1, 1, recompute))
    return config.with_values({"adapter.r": RANK, "adapter.lora_dropout": 0.0}) if config.adapter else config


def facts_of(kind: str) -> Architecture:
    return small(kind, **WIDTHS)


def counted(name: str, kind: str, recompute: bool, **how: Any) -> Operations:
    """Return the operations of the layers alone: those of four of them less those of two."""
    recipe, facts = recipe_of(name, recompute), facts_of(kind)
    two, four = (
        of_step(recipe, facts.model_copy(update={"num_hidden_layers": layers}), Costs(0), 1, **how) for layers in (2, 4)
    )
    return four.plus(two.times(-1))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("name", "lora"), [(FULL, ""), (LORA, "peft")])
def test_matrix_products_are_those_that_torch_counts(name: str, lora: str, recompute: bool) -> None:
    forward = passes("llama", recompute, lora)
    with FlopCounterMode(display=False) as flops:
        forward().sum().backward()
    by_name = {str(op): number for op, number in flops.get_flop_counts()["Global"].items()}
    products = sum(number for op, number in by_name.items() if "mm" in op)

    assert counted(name, "llama", recompute).matmul_flops == pytest.approx(products, rel=1e-6 if name == FULL else 1e-3)


@pytest.mark.parametrize(
    ("kind", "recompute", "off_by"), [("llama", True, 0.15), ("qwen3", False, 0.15), ("gemma3_text", False, 0.25)]
)
def test_what_lies_between_the_products_moves_the_bytes_that_torchs_operations_move(
    kind: str, recompute: bool, off_by: float
) -> None:
    forward = passes(kind, recompute, "")
    with Moved() as moved:
        forward().sum().backward()

    assert counted(FULL, kind, recompute).elementwise_bytes == pytest.approx(moved.bytes, rel=off_by)


def test_an_adapter_moves_the_bytes_that_pefts_operations_move_and_one_function_far_fewer() -> None:
    moved = {}
    for lora in ("", "peft", "fused"):
        forward = passes("llama", False, lora)
        with Moved() as of_kind:
            forward().sum().backward()
        moved[lora] = of_kind.bytes

    # Products are left out here: of the adapter's bytes, those that no product reads or writes.
    of_layers = facts_of("llama")
    outputs = sum(linear.outputs for layer in operations.built(of_layers).layers for linear in layer.linears)
    assert moved["peft"] - moved[""] > 12 * TOKENS * outputs
    assert abs(moved["fused"] - moved[""]) < 2 * TOKENS * outputs
    peft, fused = (counted(LORA, "llama", False, lora=how).lora_bytes for how in ("peft", "fused"))
    assert fused < 0.6 * peft


def test_kernels_are_counted_as_torch_starts_them() -> None:
    for name, lora in ((FULL, ""), (LORA, "peft")):
        forward = passes("llama", False, lora)
        with Moved() as moved:
            forward().sum().backward()
        assert counted(name, "llama", False).kernels == pytest.approx(moved.kernels, rel=0.25)


def test_the_adapter_is_computed_as_the_worker_computes_it() -> None:
    recipe = recipe_of(LORA, recompute=False)
    dropped = recipe.with_values({"adapter.lora_dropout": 0.1})

    assert operations.lora_of(recipe, Costs(2)) == "fused"
    assert operations.lora_of(recipe, Costs(3)) == operations.lora_of(dropped, Costs(0)) == "peft"
    assert operations.lora_of(recipe.with_values({"train_cfg.torch_compile": True}), Costs(3)) == "compiled"
    assert operations.lora_of(recipe.with_values({"quantization": {"bits": 4}}), Costs(0)) == "peft"


def test_trls_loss_in_chunks_computes_the_logits_twice_and_our_own_moves_the_fewest_bytes() -> None:
    recipe, facts = recipe_of(FULL, recompute=False), facts_of("llama")
    whole, once = (
        of_step(recipe.with_values({"train_cfg.loss": loss}), facts, Costs(0), 1) for loss in ("whole", "chunked")
    )
    compiled = recipe.with_values({"train_cfg.torch_compile": True})  # which leaves chunks to TRL's head
    of_trl = of_step(compiled.with_values({"train_cfg.loss": "chunked"}), facts, Costs(0), 1)
    logits = TOKENS * facts.vocab_size

    assert of_trl.matmul_flops - whole.matmul_flops == 2 * logits * facts.hidden_size
    assert once.matmul_flops == whole.matmul_flops
    assert [variant.loss_bytes / logits for variant in (whole, of_trl, once)] == [34, 14, 10]


def test_each_micro_batch_unpacks_weights_of_4_bits_again_and_reads_all_others() -> None:
    recipe, facts = recipe_of("qwen3_8b_qlora_alpaca_e1", recompute=True), facts_of("llama")
    one_pass, four_passes = (
        of_step(recipe.with_split(split), facts, Costs(0), 1) for split in (Split(4, 1, True), Split(1, 4, True))
    )
    weights = sum(linear.weights for layer in operations.built(facts).layers for linear in layer.linears)

    assert one_pass.matmul_flops == four_passes.matmul_flops
    assert one_pass.dequantized_bytes == 3 * 2.5 * weights  # forward, again, backward
    assert four_passes.dequantized_bytes == 4 * one_pass.dequantized_bytes
    assert four_passes.matmul_bytes > one_pass.matmul_bytes


def test_a_mask_computes_all_pairs_of_tokens_and_without_one_those_of_a_sample_count() -> None:
    recipe, facts = recipe_of(FULL, recompute=False), facts_of("llama")
    (flash, packed), (masked, with_mask) = (
        [
            of_step(recipe.with_values({"model.attn_implementation": name}), facts, Costs(0), 1, sample_tokens=tokens)
            for tokens in (None, TOKENS / 4)
        ]
        for name in ("flash_attention_2", "sdpa")
    )

    assert (flash.attention, masked.attention) == ("flash", "masked")
    assert masked.attention_flops == with_mask.attention_flops == 2 * flash.attention_flops
    assert packed == flash._replace(attention_flops=flash.attention_flops / 4)
    # By hand: scores and sums of half a row, 2 FLOPs each; backward five products instead of two.
    assert flash.attention_flops == 3.5 * 2 * (2 * 4 * 64) * TOKENS * TOKENS


def test_layers_below_the_trained_ones_have_a_forward_pass_alone() -> None:
    recipe, facts = recipe_of(FULL, recompute=True), facts_of("llama")
    last = of_step(recipe.with_values({"train_cfg.trainable_layers": 1}), facts, Costs(0), 1)
    every = of_step(recipe, facts, Costs(0), 1)
    weights = sum(linear.weights for linear in operations.built(facts).layers[0].linears)
    down, head = WIDTHS["intermediate_size"] * WIDTHS["hidden_size"], facts.vocab_size * facts.hidden_size

    assert every.matmul_flops - last.matmul_flops == TOKENS * (6 * weights - 2 * down + 2 * head)


def test_the_update_is_sharded_and_on_the_host_where_it_is_offloaded() -> None:
    recipe, facts = recipe_of(FULL, recompute=False), facts_of("llama")
    levels = {1: Costs(0), 2: Costs(2), 4: Costs(2, offload_optimizer=True)}
    alone, sharded, offloaded = (of_step(recipe, facts, level, ranks) for ranks, level in levels.items())
    trained = operations.count(recipe, facts).trainable

    assert alone.update_bytes == (6 + 36) * trained
    assert sharded.update_bytes == 6 * trained + 52 * trained / 2
    assert (offloaded.host_updates, offloaded.host_bytes) == (trained / 4, 2 * 2 * trained / 4)
    assert offloaded.update_bytes == 6 * trained


def test_flops_of_a_utilisation_are_six_a_parameter_and_token_and_four_where_they_are_frozen() -> None:
    facts = facts_of("llama")
    parameters = operations.active_parameters(facts)

    assert model_flops(recipe_of(FULL, recompute=True), facts) == pytest.approx(6 * parameters)
    assert model_flops(recipe_of(LORA, recompute=False), facts) == pytest.approx(4 * parameters, rel=0.2)
