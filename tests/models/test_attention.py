"""Attention without a mask: packed samples get what each of them gets alone, in every family that may use it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.configs.test_packing import LENGTHS, is_as_alone, model_of, packed, samples, small_config
from tests.each import each
from tuner.models import attention
from tuner.models.mixers import keep_samples_apart
from tuner.recipes.schema.architecture import KEEPS_APART, VARLEN, WITH_VARLEN
from tuner.worker import compat

ENDS = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
LENGTHS_OF_BATCH = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ENDS) | dict.fromkeys(
    ("max_length_q", "max_length_k"), max(LENGTHS)
)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]


@pytest.fixture(autouse=True)
def registered() -> None:
    attention.register()


def small(kind: str = "llama", **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **heads, **more)).eval()


def computed(model: PreTrainedModel, batches: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of samples that lie end to end in all batches, and the gradient of a fixed sum of them."""
    model.zero_grad()
    logits = torch.cat([model(**batch, use_cache=False).logits for batch in batches], dim=1)
    torch.manual_seed(1)
    (logits * torch.randn(1, logits.shape[1], 1)).sum().backward()
    gradients = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
    return logits.detach(), torch.cat(gradients)


def distances(model: PreTrainedModel, **of_batch: Any) -> list[float]:
    """Return how far logits and gradients of packed samples are from those of samples alone, in eager attention."""
    parts, before = samples(model), compat.attention_of(model)
    model.set_attn_implementation("eager")
    alone = computed(model, [{"input_ids": part} for part in parts])
    model.set_attn_implementation(VARLEN)
    row = {"input_ids": torch.cat(parts, dim=1), "position_ids": POSITIONS, **of_batch}
    together = computed(model, [row])
    model.set_attn_implementation(before)  # others measure the same model
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(together, alone, strict=True)]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # of no shared experts
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(("llama", "gemma3_text", "gpt_oss", "qwen3_moe"), id="few"),
        pytest.param(sorted(WITH_VARLEN), id="all", marks=pytest.mark.long),
    ],
)
def test_packed_samples_get_the_logits_and_gradients_that_they_get_alone(kinds: Sequence[str]) -> None:
    apart = {kind: [*distances(model_of(kind), **LENGTHS_OF_BATCH), *distances(model_of(kind))] for kind in kinds}

    assert {kind: found for kind, found in apart.items() if max(found) > 2e-5} == {}


@each(sorted(KEEPS_APART - WITH_VARLEN))
def test_a_family_is_left_out_where_it_does_not_use_this_attention_or_computes_something_else(kind: str) -> None:
    used: list[object] = []

    def recorded(module: object, *states: Any, **options: Any) -> tuple[torch.Tensor, None]:
        used.append(module)
        return attention.attend(module, *states, **options)

    model = model_of(kind)
    before = compat.attention_of(model)
    AttentionInterface.register(VARLEN, recorded)
    model.set_attn_implementation(VARLEN)
    try:
        assert not is_as_alone(kind, packed) or not used or max(distances(windowed(kind))) > 0.1
    except NotImplementedError as error:  # a cap on the scores, or sinks
        assert "softcap" in str(error) or "s_aux" in str(error)
    finally:
        model.set_attn_implementation(before)


def windowed(kind: str) -> Any:
    """Return a small model whose first layer has a window of 4 tokens, or one without where its kind has none."""
    config = small_config(kind)
    if hasattr(config, "sliding_window"):
        config.sliding_window = 4
        config.use_sliding_window, config.max_window_layers = True, 0
        types = getattr(config, "layer_types", None) or ()
        if {*types} <= {"full_attention", "sliding_attention"} and types:  # no hybrid
            config.layer_types = ["sliding_attention", *types[1:]]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    keep_samples_apart(model)
    return model


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(("mistral", "gpt_oss", "qwen2"), id="few"),
        pytest.param(sorted(WITH_VARLEN), id="all", marks=pytest.mark.long),
    ],
)
def test_a_window_is_kept_within_each_sample(kinds: Sequence[str]) -> None:
    apart = {kind: [*distances(windowed(kind), **LENGTHS_OF_BATCH), *distances(windowed(kind))] for kind in kinds}

    assert {kind: found for kind, found in apart.items() if max(found) > 5e-5} == {}


def test_a_window_of_a_kind_that_has_it_in_the_mask_alone_would_be_lost() -> None:
    assert max(distances(windowed("qwen2_moe"))) > 0.1
    assert max(distances(windowed("mistral"))) < 2e-5


def test_no_mask_is_made_for_a_packed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    model.set_attn_implementation(VARLEN)
    made: list[int] = []
    monkeypatch.setattr(attention, "sdpa_mask", lambda *given, **_: made.append(given[1]))

    model(input_ids=torch.ones(1, sum(LENGTHS), dtype=torch.long), position_ids=POSITIONS)
    assert not made

    model(input_ids=torch.ones(2, 4, dtype=torch.long))
    assert made == [4]


PADDED = {
    "input_ids": torch.tensor([[0, 0, 7, 8], [4, 5, 6, 7]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]),
}
"""Prompts."""


def test_answers_of_padded_prompts_and_with_a_cache_are_those_of_sdpa() -> None:
    plain, ours = small(), small()
    ours.set_attn_implementation(VARLEN)

    for batch in (PADDED, {name: rows[:1] for name, rows in PADDED.items()}):
        answers = [model.generate(**batch, max_new_tokens=8, do_sample=False).tolist() for model in (plain, ours)]
        assert answers[0] == answers[1]


def reference(
    query: torch.Tensor, key: torch.Tensor, begins: torch.Tensor, scale: float | None, window: Sequence[int]
) -> torch.Tensor:
    """Return the scores of the kernel, [H, T, T] in the type of the query; -inf for what a token does not see."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * (scale or query.shape[-1] ** -0.5)
    sample = torch.bucketize(torch.arange(len(query)), begins[1:], right=True)
    ago = torch.arange(len(query))[:, None] - torch.arange(len(query))
    seen = (sample[:, None] == sample) & (ago >= 0) & ((ago <= window[0]) | (window[0] < 0))
    return scores.masked_fill(~seen, -torch.inf)


def varlen_attn(
    query: Any, key: Any, value: Any, begins: Any, _: Any, *lengths: int, scale: Any, window_size: Any, **more: Any
) -> Any:
    """Stand for torch's kernel on a CPU: its values and log-sum-exp have no gradient but by `varlen_backward`."""
    assert more["enable_gqa"] and set(lengths) == {int(begins.diff().max())}
    scores = reference(query, key, begins, scale, window_size)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
    return (out, scores.logsumexp(-1)) if "return_aux" in more else out


def varlen_backward(
    of_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    begins: Any,
    *_: Any,
    scale: Any,
    window_size: Any,
) -> Any:
    """Compute as FlashAttention-2's backward pass does (Dao 2023, algorithm 2), from the output and the log-sum-exp."""
    groups = query.shape[1] // key.shape[1]
    weights = (reference(query, key, begins, scale, window_size) - lse[..., None]).exp()
    of_weights = torch.einsum("qhd,khd->hqk", of_out, value.repeat_interleave(groups, dim=1))
    of_scores = weights * (of_weights - (of_out * out).sum(-1).t()[..., None]) * (scale or query.shape[-1] ** -0.5)
    of_key = torch.einsum("hqk,qhd->khd", of_scores, query).unflatten(1, (-1, groups)).sum(2)
    of_value = torch.einsum("hqk,qhd->khd", weights, of_out).unflatten(1, (-1, groups)).sum(2)
    return torch.einsum("hqk,khd->qhd", of_scores, key.repeat_interleave(groups, dim=1)), of_key, of_value


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("has_sinks", [True, False])
def test_the_kernels_own_backward_pass_gives_the_gradients_of_sinks_and_of_all_that_they_change(
    window: int | None, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    states = [torch.randn(1, heads, sum(LENGTHS), 8, dtype=torch.float64) for heads in (4, 2, 2)]
    states += [torch.randn(4, dtype=torch.float64)] if has_sinks else []
    of_out = torch.randn(1, sum(LENGTHS), 4, 8, dtype=torch.float64)
    module, options = torch.nn.Module(), {"sliding_window": window, "cu_seq_lens_q": ENDS, "max_length_q": max(LENGTHS)}
    module.num_key_value_groups = 2  # type: ignore[assignment]
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(attention.compat, "varlen_backward", varlen_backward)

    def found(call: Any) -> list[torch.Tensor]:
        leaves = [state.clone().requires_grad_() for state in states]
        out = call(*leaves)
        out.backward(of_out)
        return [out, *(leaf.grad for leaf in leaves)]

    def on_a_gpu(query: Any, key: Any, value: Any, sinks: Any = None) -> Any:
        seen = window if window and window < max(LENGTHS) else None
        return attention._flash(query, key, value, ENDS, max(LENGTHS), None, seen, sinks)

    def one_by_one(query: Any, key: Any, value: Any, sinks: Any = None) -> Any:
        return attention.attend(module, query, key, value, None, s_aux=sinks, **options)[0]

    for ours, wanted in zip(found(on_a_gpu), found(one_by_one), strict=True):
        assert (ours - wanted).abs().max() < 1e-6 * wanted.abs().max()


def test_answers_of_a_model_with_sinks_are_those_of_its_own_attention() -> None:
    model = model_of("gpt_oss")
    logits = []
    for name in ("eager", VARLEN):
        model.set_attn_implementation(name)
        answers = model.generate(
            **PADDED, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        logits.append(torch.stack(answers.logits))
    model.set_attn_implementation("eager")

    assert (logits[0] - logits[1]).abs().max() < 1e-4 * logits[0].abs().max()


@pytest.mark.parametrize("option", ["softcap", "position_bias"])
def test_what_would_change_the_scores_is_never_left_out(option: str) -> None:
    states = torch.randn(1, 2, 3, 8)

    with pytest.raises(NotImplementedError):
        attention.attend(torch.nn.Module(), states, states, states, None, **{option: 1.0})


def test_the_name_of_this_attention_is_not_saved_with_the_model(tmp_path: Path) -> None:
    model = small()
    model.set_attn_implementation(VARLEN)

    model.save_pretrained(tmp_path)

    assert VARLEN not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
