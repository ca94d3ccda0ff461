"""Losses from whole logits, and from tiles of them once, against TRL's: the same losses, gradients and metrics."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from trl.trainer.utils import add_fused_lm_head

from tests.data.conftest import make_tokenizer
from tuner.data.text_encoder import TextEncoder
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides
from tuner.worker import loss as losses
from tuner.worker import trainer_setup
from tuner.worker.loss import METRICS, compute_once, tiles_give_its_logits, use_whole_logits

IDS = torch.tensor([[3, 5, 6, 7, 8, 9], [10, 11, 12, 13, 0, 0]])
LABELS = torch.tensor([[-100, -100, 6, 7, 8, 9], [-100, 11, 12, 13, -100, -100]])


def model(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=3000, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    made = LlamaForCausalLM(config).to(dtype)
    with torch.no_grad():
        made.lm_head.weight.normal_(std=0.3)
    return made


@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_whole_logits_give_what_trls_head_gives(dtype: torch.dtype, apart: float) -> None:
    found = {}
    for loss in ("chunked", "whole"):
        made = model(dtype)
        add_fused_lm_head(made, outputs=("log_probs", *METRICS))
        if loss == "whole":
            use_whole_logits(made, METRICS)
        outputs = made(input_ids=IDS, labels=LABELS, fused_lm_head=True)
        (-outputs.log_probs.sum() / 7).backward()
        found[loss] = outputs, made.lm_head.weight.grad, made.model.embed_tokens.weight.grad

    (chunked, *its_gradients), (whole, *gradients) = found.values()
    assert whole.log_probs.dtype == torch.float32
    assert torch.equal(whole.label_mask, chunked.label_mask) and torch.equal(whole.is_top1, chunked.is_top1)
    for name in ("log_probs", "entropy", "mean_logits", "log_sum_sq_probs"):
        torch.testing.assert_close(getattr(whole, name), getattr(chunked, name), rtol=apart, atol=apart)
    for gradient, other in zip(gradients, its_gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=apart, atol=apart * float(other.abs().max()))


def test_training_and_validation_call_the_module_of_the_head_and_generation_stays_as_it_is() -> None:
    made, calls = model(), list[int]()
    add_fused_lm_head(made)
    plain = made(input_ids=IDS).logits
    use_whole_logits(made, ["is_top1"])
    made.lm_head.register_forward_hook(lambda *_: calls.append(1))

    training = made.train()(input_ids=IDS, labels=LABELS, fused_lm_head=True)
    with torch.no_grad():
        reference = made(input_ids=IDS, labels=LABELS, fused_lm_head=True)
        validation = made.eval()(input_ids=IDS, labels=LABELS, fused_lm_head=True)

    assert len(calls) == 3, "at ZeRO-3 its hooks gather the weight"
    assert torch.equal(training.log_probs, validation.log_probs)
    assert training.is_top1 is not None and validation.is_top1 is not None and reference.is_top1 is None
    assert torch.equal(made(input_ids=IDS).logits, plain)


SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
RECURRENT = {"lru_width": 32, "attention_window_size": 16, "block_types": ("recurrent", "attention")}
MPT = {"d_model": 32, "n_heads": 2, "n_layers": 1, "expansion_ratio": 2, "max_seq_len": 64, "vocab_size": 300}
XLSTM = {"embedding_dim": 32, "num_heads": 2, "num_blocks": 1, "chunkwise_kernel": "chunkwise--native_autograd"}
XLSTM |= {"sequence_kernel": "native_sequence__native", "step_kernel": "native", "mode": "inference"}


@pytest.mark.parametrize(
    ("model_type", "more", "is_matrix"),
    [
        ("llama", {}, True),
        ("llama", {"tie_word_embeddings": True}, True),
        ("gemma2", {"final_logit_softcapping": 5.0}, True),
        ("cohere", {"logit_scale": 0.25}, True),
        ("granite", {"logits_scaling": 4.0}, True),
        ("recurrent_gemma", {"logits_soft_cap": 5.0, **RECURRENT}, False),
        ("mpt", MPT, True),
        ("mpt", {**MPT, "logit_scale": 0.5}, False),  # transformers 5.24 leaves it out, TRL 1.16 does not
        ("mpt", {**MPT, "logit_scale": "inv_sqrt_d_model"}, False),
        ("xlstm", {"output_logit_soft_cap": 5.0, **XLSTM}, False),
    ],
)
def test_a_head_that_is_more_than_a_matrix_is_seen(model_type: str, more: dict[str, Any], is_matrix: bool) -> None:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SMALL | more))
    with torch.no_grad():
        made.get_output_embeddings().weight.normal_(std=2.0)
    add_fused_lm_head(made)

    assert tiles_give_its_logits(made, made) is is_matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_difference_and_the_model_trains_on(dtype: torch.dtype) -> None:
    made = model(dtype)
    add_fused_lm_head(made)

    assert tiles_give_its_logits(made, made) and made.training


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_not_compared(number: float) -> None:
    made = model(torch.float32)
    add_fused_lm_head(made)
    with torch.no_grad():
        made.get_output_embeddings().weight[0, 0] = number

    assert tiles_give_its_logits(made, made)


def one_loss(
    objective: str, loss: str, rows: list[dict[str, Any]], folder: Path, *, loss_type: str = ""
) -> tuple[float, torch.Tensor]:
    """Return the loss of one micro-batch of the objective's trainer, and the gradient of the head."""
    pairs = [("--set", f"objective.loss_type={loss_type}")] if loss_type else []
    recipe = load(f"tiny_{objective}full_custom_e1", Overrides(data=__file__, pairs=pairs)).config
    tokenizer = make_tokenizer(pads=True)
    policy, reference = model(), model() if objective else None
    if reference is not None:
        with torch.no_grad():
            reference.lm_head.weight.mul_(1.01)
    made = trainer_setup.evaluator(
        recipe, (policy, reference), TextEncoder(tokenizer), datasets.Dataset.from_list(rows), len(rows), str(folder)
    )
    if loss == "whole":
        trainer_setup.use_whole_logits(made, (policy, reference), recipe)
    policy.train()
    made.current_gradient_accumulation_steps = 1
    found = made.compute_loss(policy, made.data_collator(rows), num_items_in_batch=torch.tensor(7))
    found.backward()
    return found.item(), policy.lm_head.weight.grad


SFT = [{"input_ids": [3, 5, 6, 7, 8, 9], "labels": [-100, -100, 6, 7, 8, 9], "seq_lengths": [6]}]
PAIR = [
    {
        "chosen_ids": [5, 6, 7, 8],
        "chosen_labels": [-100, -100, 7, 8],
        "rejected_ids": [5, 6, 9],
        "rejected_labels": [-100, -100, 9],
    }
]
JUDGED = [
    {"answer_ids": [5, 6, 7, 8], "answer_labels": [-100, -100, 7, 8], "is_good": True},
    {"answer_ids": [5, 6, 9], "answer_labels": [-100, -100, 9], "is_good": False},
]


@pytest.mark.parametrize(("objective", "rows"), [("", SFT), ("dpo_", PAIR), ("kto_", JUDGED)])
def test_an_objective_has_the_same_loss_and_gradient_either_way(
    objective: str, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    chunked, its_gradient = one_loss(objective, "chunked", rows, tmp_path)

    whole, gradient = one_loss(objective, "whole", rows, tmp_path)

    assert whole == pytest.approx(chunked, rel=1e-5)
    torch.testing.assert_close(gradient, its_gradient, rtol=1e-4, atol=1e-7)


# Tiles of logits that are computed once


HEADS = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("gemma2", {"final_logit_softcapping": 5.0}),
    ("cohere", {"logit_scale": 0.25}),
    ("granite", {"logits_scaling": 4.0}),
    ("phi", {}),  # whose head has a bias
]


def of_family(model_type: str, more: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SMALL | more)).to(dtype)
    with torch.no_grad():
        made.get_output_embeddings().weight.normal_(std=0.5)
    add_fused_lm_head(made, outputs=("log_probs", "entropy", "is_top1"))
    return made


def gradients(made: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    loss.backward()
    return {name: weight.grad for name, weight in made.named_parameters() if weight.grad is not None}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], apart: float = 1e-5) -> None:
    assert {*found} == {*expected}
    for name, gradient in found.items():
        assert float((gradient - expected[name]).norm()) <= apart * float(expected[name].norm()), name


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a tile hold three tokens; the gradient of a weight does not make it larger."""
    monkeypatch.setattr(losses, "tile_tokens", lambda device, vocab_size, trained_width: 3)


@pytest.mark.parametrize(("model_type", "more"), HEADS)
def test_logits_that_are_computed_once_give_what_trls_head_gives(
    model_type: str, more: dict[str, Any], small_tiles: None
) -> None:
    twice, once = of_family(model_type, more), of_family(model_type, more)
    compute_once(once, ["entropy", "is_top1"])

    expected = twice(input_ids=IDS, labels=LABELS, fused_lm_head=True)
    found = once(input_ids=IDS, labels=LABELS, fused_lm_head=True, num_trained=7)

    assert torch.equal(found.label_mask, expected.label_mask) and torch.equal(found.is_top1, expected.is_top1)
    torch.testing.assert_close(found.log_probs, expected.log_probs)
    torch.testing.assert_close(found.entropy, expected.entropy)
    of_twice = gradients(twice, -expected.log_probs.sum() / 7)
    assert_same(gradients(once, found.loss / 7), of_twice)


def test_in_16_bits_a_sum_has_the_gradients_of_trls_head_up_to_their_last_bits() -> None:
    found = {}
    for is_once in (False, True):
        made = model(torch.bfloat16)
        add_fused_lm_head(made)
        if is_once:
            compute_once(made, ())
        outputs = made(input_ids=IDS, labels=LABELS, fused_lm_head=True)
        total = outputs.loss if is_once else -outputs.log_probs.sum()
        found[is_once] = total.item(), gradients(made, total / 7)

    assert found[True][0] == pytest.approx(found[False][0], rel=1e-6)
    assert_same(found[True][1], found[False][1], apart=2**-6)


class Recorded(TorchDispatchMode):
    """Counts the operations inside by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function.__name__.partition(".")[0]] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("is_frozen", "of_gradients"), [(False, 2), (True, 1)], ids=["trained", "frozen"])
def test_each_logit_is_computed_once_and_a_frozen_head_gets_no_gradient(
    is_frozen: bool, of_gradients: int, small_tiles: None
) -> None:
    hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(50, 8, requires_grad=not is_frozen)

    with Recorded() as operations:
        total_of(SimpleNamespace(weight=weight, bias=None), hidden, torch.arange(9)).backward()

    assert (operations.counts["mm"], operations.counts["addmm_"]) == (3, 3 * of_gradients)
    assert (weight.grad is None) == is_frozen


def test_a_cpu_copies_nothing_in_16_bits_into_fp32_for_a_product_that_is_added_to_no_other() -> None:
    hidden, weight = (torch.randn(9, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))

    with Recorded() as operations:
        total_of(SimpleNamespace(weight=weight, bias=None), hidden, torch.arange(9)).backward()

    assert (operations.counts["mm"], operations.counts["addmm_"]) == (3, 0)


def total_of(head: Any, hidden: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> Any:
    """Return the sum of the losses of tokens that all have a target."""
    weights = torch.ones(len(hidden)) if weights is None else weights
    places = torch.arange(len(hidden))
    return losses._SumOfTokens.apply(
        hidden, head.weight, head.bias, places, targets, weights, losses.Scales(), (), torch.is_grad_enabled()
    )[0]


@pytest.mark.parametrize("by_probability", [False, True], ids=["nll", "dft"])
@pytest.mark.parametrize("is_shifted", [False, True], ids=["labels", "shift_labels"])
@pytest.mark.parametrize("way", ["tiles", "whole", "compiled"])
def test_weights_of_tokens_count_in_the_sum_and_in_its_gradients(
    way: str, is_shifted: bool, by_probability: bool, small_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, plain = of_family("llama", {}), of_family("llama", {})
    compute_once(made, ())
    if way == "whole":
        use_whole_logits(made, ())
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: way == "compiled")
    weights = torch.rand(LABELS.shape)
    targets = {"labels": LABELS}
    if is_shifted:  # of a rank that has a part of the row
        targets = {"shift_labels": torch.nn.functional.pad(LABELS[:, 1:], (0, 1), value=-100)}
    given = torch.nn.functional.pad(weights[:, 1:], (0, 1)) if is_shifted else weights

    found = made(input_ids=IDS, **targets, fused_lm_head=True, token_weights=given, by_probability=by_probability).loss
    log_probs = plain(input_ids=IDS).logits[:, :-1].log_softmax(-1)
    of_labels = log_probs.gather(-1, LABELS[:, 1:, None].clamp(min=0))[..., 0]
    factors = weights[:, 1:] * (LABELS[:, 1:] != -100)
    pulled = factors * of_labels.detach().exp() if by_probability else factors

    torch.testing.assert_close(found, -(of_labels * factors).sum())
    assert_same(gradients(made, found), gradients(plain, -(of_labels * pulled).sum()))


@pytest.mark.parametrize(("model_type", "more"), HEADS)
@pytest.mark.parametrize("is_whole", [False, True], ids=["tiles", "whole"])
def test_dynamic_fine_tuning_weighs_the_gradient_of_a_token_by_its_probability(
    model_type: str, more: dict[str, Any], is_whole: bool, small_tiles: None
) -> None:
    made, plain = of_family(model_type, more), of_family(model_type, more)
    use_whole_logits(made, ()) if is_whole else compute_once(made, ())

    found = made(input_ids=IDS, labels=LABELS, fused_lm_head=True, by_probability=True).loss
    log_probs = plain(input_ids=IDS).logits[:, :-1].log_softmax(-1)
    of_labels = log_probs.gather(-1, LABELS[:, 1:, None].clamp(min=0))[..., 0][LABELS[:, 1:] != -100]

    torch.testing.assert_close(found, -of_labels.sum())
    of_formula = -(of_labels.exp().detach() * of_labels).sum()  # arXiv 2508.05629
    assert_same(gradients(made, found), gradients(plain, of_formula))


def test_the_head_that_takes_over_for_a_router_weighs_gradients_too() -> None:
    made, heard = of_family("llama", {}), []
    plain = made.forward

    def forward(self: Any, input_ids: Any, fused_lm_head: bool = False, **options: Any) -> Any:
        heard.append((fused_lm_head, options.get("by_probability", False)))
        return plain(input_ids=input_ids)

    made.forward = MethodType(forward, made)
    use_whole_logits(made, ())

    for _ in range(2):
        made(input_ids=IDS, labels=LABELS, fused_lm_head=True, output_router_logits=True, by_probability=True)

    assert heard == [(False, False), (True, True), (True, True)]


@pytest.mark.parametrize("kind", ["chunked", "whole"])
def test_a_recipe_with_dft_trains_with_its_gradient_and_logs_nats(kind: str, tmp_path: Path) -> None:
    policy, (row,) = model(), SFT
    log_probs = policy(input_ids=torch.tensor([row["input_ids"]])).logits[0, 1:5].log_softmax(-1)
    of_labels = log_probs[range(4), row["input_ids"][2:]]
    (-(of_labels.exp().detach() * of_labels).sum() / 7).backward()

    found, gradient = one_loss("", kind, SFT, tmp_path, loss_type="dft")

    assert found == pytest.approx(one_loss("", kind, SFT, tmp_path)[0], rel=1e-6)
    torch.testing.assert_close(gradient, policy.lm_head.weight.grad, rtol=1e-4, atol=1e-9)


def test_a_batch_without_a_label_has_gradients_of_zero() -> None:
    made = of_family("llama", {})
    compute_once(made, ["entropy"])

    outputs = made(input_ids=IDS, labels=torch.full_like(LABELS, -100), fused_lm_head=True, num_trained=0)

    assert outputs.loss.item() == 0 and outputs.entropy.shape == (2, 5)
    found = gradients(made, outputs.loss)
    assert {*found} == {name for name, _ in made.named_parameters()}
    assert all(not gradient.any() for gradient in found.values())


def test_labels_that_are_shifted_already_are_those_of_the_next_tokens() -> None:
    made = of_family("llama", {})
    compute_once(made, ["entropy"])
    shifted = torch.nn.functional.pad(LABELS[:, 1:], (0, 1), value=-100)

    plain = made(input_ids=IDS, labels=LABELS, fused_lm_head=True)
    found = made(input_ids=IDS, shift_labels=shifted, fused_lm_head=True)

    assert torch.equal(found.loss, plain.loss) and torch.equal(found.log_probs[:, :-1], plain.log_probs)
    assert found.log_probs.shape == IDS.shape


def test_a_validation_computes_no_gradient_and_generation_stays_as_it_is() -> None:
    made = of_family("llama", {})
    plain = made(input_ids=IDS).logits
    compute_once(made, ())

    with torch.no_grad(), Recorded() as operations:
        found = made(input_ids=IDS, labels=LABELS, fused_lm_head=True, num_trained=7)

    assert operations.counts["addmm_"] == 0 and not found.loss.requires_grad
    assert torch.equal(made(input_ids=IDS).logits, plain)


def test_the_host_waits_for_nothing_where_it_knows_the_number_of_labels() -> None:
    made = of_family("llama", {})
    compute_once(made, ["entropy", "is_top1"])
    waits = ("nonzero", "masked_select", "_local_scalar_dense", "is_nonzero", "equal")

    with Recorded() as of_model:
        made.model(input_ids=IDS, use_cache=False).last_hidden_state.sum().backward()
    with Recorded() as operations:
        made(input_ids=IDS, labels=LABELS, fused_lm_head=True, num_trained=7).loss.backward()

    assert operations.counts["mm"] > of_model.counts["mm"]
    assert [operations.counts[name] for name in waits] == [of_model.counts[name] for name in waits]


def test_a_second_backward_pass_is_an_error_and_no_wrong_gradient() -> None:
    hidden = torch.randn(4, 8, requires_grad=True)
    total = total_of(SimpleNamespace(weight=torch.randn(9, 8), bias=None), hidden, torch.arange(4))
    total.backward(retain_graph=True)

    with pytest.raises(RuntimeError):
        total.backward()


def test_a_tile_of_a_trained_head_has_as_many_tokens_as_its_width() -> None:
    gpu = torch.device("meta")

    assert losses.tile_tokens(gpu, 131072, 0) == 1024, "TRL's 4,096 x 32,768 logits"
    assert losses.tile_tokens(gpu, 131072, 4096) == 4096
