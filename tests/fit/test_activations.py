"""Activation bytes against what autograd really saves, layer by layer, in models that transformers builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessorList, TemperatureLogitsWarper
from transformers.models.llama import modeling_llama

from bench.live import Live
from tests.fit.built import on_meta
from tests.fit.recipes import lightest
from tests.fit.small import SMALL, name_of
from tuner.fit import activations
from tuner.fit.activations import WITHOUT_SDPA, default_attention, layer_bytes, of_generation, of_recipe, of_validation
from tuner.fit.parameters import built
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.architecture import Architecture
from tuner.recipes.schema.objectives import OBJECTIVES
from tuner.worker.objectives.completions import Sampled

TOKENS = 256
FACTS = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 176}


def saved_bytes(
    model_type: str,
    num_layers: int,
    extra: dict[str, Any],
    lora: LoraConfig | None,
    *,
    attention: str | None = "sdpa",
    packed: bool = False,
) -> int:
    """Return the bytes of all tensors that the forward pass saves for backward, weights left out."""
    facts = {**FACTS, **extra, "num_hidden_layers": num_layers}
    facts["num_local_experts"] = facts.get("num_experts", 4)
    config = AutoConfig.for_model(model_type, **{**facts, "pad_token_id": 0})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    if lora:
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        positions = torch.arange(TOKENS).remainder(TOKENS // 2)[None] if packed else None
        output = model.train()(input_ids=torch.randint(1, 60, (1, TOKENS)), position_ids=positions, use_cache=False)
    assert output.logits is not None
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def per_token_and_layer(
    model_type: str, extra: dict[str, Any], lora: LoraConfig | None = None, **options: Any
) -> float:
    """Measure one layer: the difference between two more and two of the same kinds of layers."""
    four, two = (saved_bytes(model_type, count, extra, lora, **options) for count in (4, 2))
    return (four - two) / 2 / TOKENS


def on_paper(recipe: RecipeConfig, model_type: str, extra: dict[str, Any], *, packed: bool = False) -> float:
    """Return the plan's bytes of one token in a layer, for one row of TOKENS tokens."""
    row = {"train_dataloader.dataset.packing": packed, "train_dataloader.dataset.max_length": TOKENS}
    recipe = recipe.with_values({**row, "train_dataloader.batch_size": 1})
    facts = Architecture(model_type=model_type, **{**FACTS, **extra})
    return layer_bytes(recipe, facts, built(facts).layers[-1])


def full(*sets: str) -> RecipeConfig:
    return lightest("tiny_full_sample_e1", *sets)


ONE_SAMPLE = ("train_dataloader.dataset.packing=False", "train_dataloader.batch_size=1")


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "granite", "smollm3"])
def test_full_training_saves_exactly_the_planned_bytes(model_type: str) -> None:
    assert on_paper(full(), model_type, {}) == per_token_and_layer(model_type, {})


class SavesAsLigersNorm(torch.autograd.Function):
    """Stands in for liger-kernel 0.8.5's RMS norm, a Triton kernel that needs a GPU: it saves the same tensors."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, torch.ones(hidden.shape[:-1]))
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError


class SavesAsLigersGate(torch.autograd.Function):
    """Stands in for its SiLU and product."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return gate * up

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError


def test_ligers_kernels_save_the_inputs_of_norms_and_gates_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        modeling_llama.LlamaRMSNorm, "forward", lambda self, hidden: SavesAsLigersNorm.apply(hidden, self.weight)
    )
    monkeypatch.setattr(
        modeling_llama.LlamaMLP,
        "forward",
        lambda self, x: self.down_proj(SavesAsLigersGate.apply(self.gate_proj(x), self.up_proj(x))),
    )
    saved = per_token_and_layer("llama", {})

    with_liger = on_paper(full("use_liger_kernel=True"), "llama", {})

    assert with_liger == saved < on_paper(full(), "llama", {})


@pytest.mark.parametrize(
    ("model_type", "extra"),
    [
        ("gemma", {}),
        ("gemma3_text", {}),
        ("olmo2", {}),
        ("phi3", {}),
        ("starcoder2", {}),
        ("cohere", {}),
        ("glm4", {}),
        ("mixtral", {**EXPERTS, "intermediate_size": 176}),
        ("qwen3_moe", EXPERTS),
    ],
)
def test_other_families_save_the_planned_bytes_within_an_eighth(model_type: str, extra: dict[str, Any]) -> None:
    assert on_paper(full(), model_type, extra) == pytest.approx(per_token_and_layer(model_type, extra), rel=0.12)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_mask_has_keys_and_values_copied_to_all_heads_and_is_saved_in_each_layer(model_type: str) -> None:
    saved = per_token_and_layer(model_type, {}, packed=True)

    assert on_paper(full(), model_type, {}, packed=True) + 2 * TOKENS == saved


@pytest.mark.parametrize("model_type", ["gemma2", "llama", "qwen2"])
def test_eager_attention_saves_the_scores_of_all_pairs_of_tokens(model_type: str) -> None:
    attention = None if model_type in WITHOUT_SDPA else "eager"
    recipe = full(f"attn_implementation={attention}")
    saved = per_token_and_layer(model_type, {}, attention=attention)

    assert on_paper(recipe, model_type, {}) == pytest.approx(saved, rel=0.03)


def test_the_attention_of_a_model_that_names_none_is_the_one_that_transformers_takes() -> None:
    planned = {name_of(facts): default_attention(facts) for facts in SMALL}

    assert planned == {name_of(facts): on_meta(facts).config.get_text_config()._attn_implementation for facts in SMALL}


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("rank", [8, 32])
def test_lora_saves_exactly_the_planned_bytes(model_type: str, rank: int) -> None:
    recipe = lightest("tiny_lora_sample_e1", f"adapter.r={rank}", "lora_dropout=0.0")
    lora = LoraConfig(task_type="CAUSAL_LM", r=rank, target_modules="all-linear")

    assert on_paper(recipe, model_type, {}) == per_token_and_layer(model_type, {}, lora)


def test_checkpointing_keeps_one_hidden_state_a_layer_and_one_layer_at_work() -> None:
    facts = Architecture(model_type="llama", **{**FACTS, "num_hidden_layers": 32, "vocab_size": 1})
    plain, kept = (of_recipe(full(*ONE_SAMPLE, f"gradient_checkpointing={again}"), facts) for again in (False, True))
    tokens = full().train_dataloader.dataset.max_length

    assert kept.kept == 32 * 2 * 128 * tokens
    assert kept.at_layer == pytest.approx(plain.kept / 32 + 2 * (128 + 2 * 352) * tokens)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_gradients_of_experts_stand_beside_what_is_left_of_their_layer(method: str) -> None:
    width, num = 176, 4096
    sizes = {**FACTS, "num_local_experts": num, "num_experts_per_tok": 2, "intermediate_size": width}
    facts = Architecture(model_type="mixtral", **sizes)
    recipe = lightest(f"tiny_{method}_sample_e1")
    values = {"train_dataloader.batch_size": 1, "train_cfg.gradient_checkpointing": True}
    no_mask = {"model.attn_implementation": "flash_attention_2"}
    targets = {"adapter.target_modules": ["w1", "w2", "w3"]} if method == "lora" else {}
    recipe = recipe.with_values({**values, **no_mask, **targets, "architecture": facts})
    tokens, of_down = recipe.train_dataloader.dataset.max_length, num * width * 128
    kept = tokens * layer_bytes(recipe, facts, built(facts).layers[0])

    beside = of_recipe(recipe, facts).at_layer - kept

    if method == "full":  # what the gate and up layers have made is gone, and has a gradient, of two times two widths
        assert beside == pytest.approx(2 * 3 * of_down + 2 * tokens * (128 - 2 * 2 * width))
    else:  # there are copies of all three, and the gradient of the down layers, beside that of their inputs
        assert beside == pytest.approx(2 * (3 + 1) * of_down + 2 * tokens * (128 + 2 * width))


@pytest.mark.parametrize(
    ("facts", "rows_side_by_side"),
    [
        ({"model_type": "llama", **FACTS}, True),
        ({"model_type": "mixtral", **FACTS, "num_local_experts": 4, "num_experts_per_tok": 2}, False),
    ],
)
def test_packed_rows_have_a_mask_that_each_layer_saves_and_flash_attention_none(
    facts: dict[str, Any], rows_side_by_side: bool
) -> None:
    loader, facts = full().train_dataloader, Architecture(**facts)
    tokens = full().split.micro_batch * loader.dataset.max_length
    pairs = tokens * (loader.dataset.max_length if rows_side_by_side else tokens)
    copies = 4 * 16 * (8 - 2) * tokens
    masked, flash = (
        of_recipe(full(f"attn_implementation={attention}", "gradient_checkpointing=True"), facts)
        for attention in ("sdpa", "flash_attention_2")
    )

    assert loader.dataset.packing
    assert full().split.micro_batch > 1
    assert masked.kept - flash.kept == pairs
    assert masked.at_layer - flash.at_layer == 2 * pairs + copies


def test_when_eager_attention_computes_its_backward_what_the_mlp_and_its_norms_keep_is_gone() -> None:
    facts = Architecture(model_type="gemma2", **FACTS)
    recipe = lightest("tiny_full_sample_e1", "gradient_checkpointing=True", "train_dataloader.batch_size=1")
    values = {"train_dataloader.dataset.max_length": 4096, "train_dataloader.dataset.packing": False}
    recipe = recipe.with_values({**values, "architecture": facts})
    (layer, *_) = built(facts).layers

    kept = layer_bytes(recipe, facts, layer)
    scores = FACTS["num_attention_heads"] * 6 * 4096  # more than is kept of them
    in_mlp, in_norms = 8 * FACTS["intermediate_size"], 2 * (8 * FACTS["hidden_size"] + 4) + 2 * FACTS["hidden_size"]
    assert of_recipe(recipe, facts).at_layer == 4096 * (kept + scores - in_mlp - in_norms)


def test_orpo_holds_five_bytes_a_logit_and_the_fused_head_of_others_one_tile() -> None:
    facts = Architecture(model_type="llama", **{**FACTS, "vocab_size": 128_256})
    for objective, pair in (("orpo", 2), ("dpo", 2), ("kto", 1), ("pretrain", 1)):
        data = "sample" if objective == "pretrain" else "sample_preferences"
        sets = ("train_dataloader.dataset.max_length=4096", "train_dataloader.batch_size=2")
        tokens = 2 * pair * 4096
        logits = of_recipe(lightest(f"tiny_{objective}_full_{data}_e1", *sets), facts).logits

        fused = 2 * 4096 * 32768 + 6 * (tokens + 128_256) * 128
        once = 2 * (1046 * 128_256 + tokens * 128)  # its gradients in fp32 are there after the forward pass
        assert logits == {"orpo": 5 * 128_256 * tokens, "pretrain": once}.get(objective, fused)


def test_a_frozen_layer_saves_nothing_and_a_pair_is_two_samples() -> None:
    facts = Architecture(model_type="llama", **{**FACTS, "num_hidden_layers": 8})
    sets = ("train_dataloader.batch_size=1", "gradient_checkpointing=False", "attn_implementation=flash_attention_2")
    sample = full(*ONE_SAMPLE, *sets)
    whole = of_recipe(sample, facts)
    last = of_recipe(full(*ONE_SAMPLE, *sets, "trainable_layers=2"), facts)
    pairs = lightest("tiny_dpo_full_sample_e1", *sets)
    longer = pairs.train_dataloader.dataset.max_length / sample.train_dataloader.dataset.max_length

    assert last.kept == whole.kept / 4
    assert of_recipe(pairs, facts).kept == 2 * longer * whole.kept


def test_a_4_bit_base_has_one_weight_unpacked_while_a_layer_runs() -> None:
    recipe = lightest("tiny_qlora_sample_e1")
    facts = Architecture(model_type="llama", **FACTS)

    plain, packed = (
        of_recipe(variant, facts) for variant in (recipe.model_copy(update={"quantization": None}), recipe)
    )
    assert packed.at_layer - plain.at_layer == 2 * 128 * 352
    assert packed.kept == plain.kept


def validating(max_length: int, ranks: int = 1) -> RecipeConfig:
    rows = {"batch_size": 1, "dataset.max_length": max_length, "dataset.packing": False}
    sets = (f"val_dataloader.{key}={value}" for key, value in rows.items())
    return full(*sets, f"sequence_parallel_size={ranks}")


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "phi3", "starcoder2"])
@pytest.mark.parametrize("inner", [128, 352, 1024])
def test_a_validation_holds_no_more_than_planned_and_not_much_less(
    model_type: str, inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "_TILE_LOGITS", 0)  # the head is left out
    facts, tokens = {**FACTS, "intermediate_size": inner}, 512
    config = AutoConfig.for_model(model_type, **{**facts, "pad_token_id": 0, "eos_token_id": 0})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()

    live = Live()
    with torch.no_grad(), live:
        before = live.now
        model(input_ids=torch.randint(1, 60, (1, tokens)), use_cache=False, logits_to_keep=1)
    planned = of_validation(validating(tokens), Architecture(model_type=model_type, **facts))

    assert 0.99 * (live.peak - before) <= planned <= 1.5 * (live.peak - before)


def test_ranks_that_share_samples_validate_on_a_part_of_the_tokens_each() -> None:
    facts = Architecture(model_type="llama", **FACTS)
    alone, shared = (of_validation(validating(2**20, ranks), facts) for ranks in (1, 4))

    assert shared < alone / 3
    assert of_validation(full().model_copy(update={"val_dataloader": None}), facts) == 0


@pytest.mark.parametrize(
    ("model_type", "other", "keeps_others"),
    [("gemma4_text", "sliding_attention", True), ("qwen3_5_text", "linear_attention", False)],
)
def test_generation_keeps_keys_of_the_same_layers_whether_their_kinds_are_written_or_counted(
    model_type: str, other: str, keeps_others: bool
) -> None:
    interval, facts = 3, {**FACTS, "num_hidden_layers": 6}
    if other == "linear_attention":
        facts |= dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2)
        facts |= dict.fromkeys(("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"), 4)
    kinds = [other, other, "full_attention"] * 2
    recipe = generating(16, 48, 8)
    written, counted, all_full = (
        of_generation(recipe, Architecture(model_type=model_type, **facts, **more))
        for more in ({"layer_types": kinds}, {"full_attention_interval": interval}, {"full_attention_interval": 1})
    )

    assert written == counted
    assert (counted == all_full) is keeps_others


def generating(prompt: int, completion: int, completions: int) -> RecipeConfig:
    rows = {"batch_size": completions, "dataset.max_length": prompt, "dataset.packing": False}
    sets = (f"train_dataloader.{key}={value}" for key, value in rows.items())
    values = {"type": "grpo", "rewards": "length", "max_completion_length": completion}
    return full(*sets).model_copy(update={"objective": OBJECTIVES["grpo"].model_validate(values)})


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize(("prompt", "completion", "vocabulary"), [(256, 8, 64), (16, 48, 64), (16, 8, 20_000)])
def test_generation_holds_no_more_than_planned_and_not_much_less(
    model_type: str, prompt: int, completion: int, vocabulary: int
) -> None:
    facts = {**FACTS, "vocab_size": vocabulary}
    config = AutoConfig.for_model(model_type, **{**facts, "pad_token_id": 0, "eos_token_id": None})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.9), Sampled(range(8), torch.device("cpu"))])
    prompts = torch.randint(1, 60, (8, prompt))

    live = Live()
    with torch.no_grad(), live:
        before = live.now
        model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=completion, logits_processor=processors
        )
    planned = of_generation(generating(prompt, completion, 8), Architecture(model_type=model_type, **facts))

    assert 0.99 * (live.peak - before) <= planned <= 1.5 * (live.peak - before)
