"""Samples of one row stay apart in models with convolutions, states, or masks that know no positions."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed

from tests.configs.test_packing import LENGTHS, samples, small_config
from tests.each import each
from tuner.models import mixers

KINDS = ("qwen3_5_text", "jamba", "lfm2", "granitemoehybrid")
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(kind: str, *, apart: bool = True) -> PreTrainedModel:
    set_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(small_config(kind), experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    if apart:
        mixers.keep_samples_apart(model)
    return model.double()


def gradients(model: PreTrainedModel, batches: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the gradients of a sum over the logits of all batches, in which each token has a factor of its own."""
    model.zero_grad()
    logits = torch.cat([model(**batch, use_cache=False).logits.flatten(0, 1) for batch in batches])
    factors = torch.randn(len(logits), 1, generator=torch.Generator().manual_seed(1), dtype=logits.dtype)
    (logits * factors.to(logits.device)).sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def farthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - grad).abs().max() / grad.abs().max()) for name, grad in expected.items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recomputes", [False, True])
def test_packed_samples_give_the_gradients_that_they_give_alone(kind: str, recomputes: bool) -> None:
    model = made(kind)
    alone = gradients(model, [{"input_ids": part} for part in samples(model)])
    if recomputes:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()

    row = {"input_ids": torch.cat(samples(model), dim=1), "position_ids": POSITIONS}

    assert farthest(gradients(model, [row]), alone) < 1e-5


def test_a_layer_that_is_recomputed_after_another_batch_keeps_its_own_samples_apart() -> None:
    model = made("qwen3_5_text")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    row = {"input_ids": torch.cat(samples(model), dim=1), "position_ids": POSITIONS}
    expected = gradients(model, [row])

    model.zero_grad()
    logits = model(**row, use_cache=False).logits.flatten(0, 1)
    with torch.no_grad():  # as a reference does, between the forward and the backward pass
        model(input_ids=row["input_ids"], use_cache=False)
    factors = torch.randn(len(logits), 1, generator=torch.Generator().manual_seed(1), dtype=logits.dtype)
    (logits * factors).sum().backward()

    assert farthest({name: weight.grad for name, weight in model.named_parameters() if name in expected}, expected) == 0


@each(KINDS)
def test_a_batch_of_single_samples_is_computed_as_before(kind: str) -> None:
    changed, plain = made(kind).eval(), made(kind, apart=False).eval()
    ids = torch.randint(3, 100, (2, 8))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8])
    positions = (mask.cumsum(1) - 1).clamp(min=1)  # generation's, which jump where padding ends

    for batch in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask, "position_ids": positions}):
        with torch.no_grad():
            assert torch.equal(*(model(**batch, use_cache=False).logits for model in (changed, plain)))


@pytest.mark.parametrize("lengths", [(8,), (3, 5)])
def test_lengths_for_kernels_that_are_not_there_change_nothing(lengths: tuple[int, ...]) -> None:
    model = made("qwen3_5_text").eval()
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    row = {
        "input_ids": torch.arange(3, 11)[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
    }
    of_collator = {
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ends),
        **dict.fromkeys(("max_length_q", "max_length_k"), max(lengths)),
        "seq_idx": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()[None],
    }

    with torch.no_grad():
        logits = [model(**row, **told, use_cache=False).logits for told in ({}, of_collator)]

    assert torch.equal(*logits)


def test_answers_are_generated_as_before() -> None:
    prompts = {"input_ids": torch.tensor([[0, 0, 7, 8], [4, 5, 6, 7]]), "attention_mask": torch.ones(2, 4).long()}
    prompts["attention_mask"][0, :2] = 0

    answers = [
        made("lfm2", apart=apart).eval().generate(**prompts, max_new_tokens=8, do_sample=False)
        for apart in (True, False)
    ]

    assert answers[0].tolist() == answers[1].tolist()


@pytest.mark.parametrize(
    ("kind", "more"),
    [("gpt_oss", {"position_ids": torch.arange(5, 8)[None]}), ("gpt2", {"attention_mask": torch.ones(1, 8)})],
)
def test_tokens_after_a_cache_are_computed_as_before(kind: str, more: dict[str, Any]) -> None:
    ids, logits = torch.arange(3, 11)[None], []
    for apart in (True, False):
        model = made(kind, apart=apart).eval()
        with torch.no_grad():
            cache = model(input_ids=ids[:, :5], use_cache=True).past_key_values
            logits.append(model(input_ids=ids[:, 5:], **more, past_key_values=cache, use_cache=True).logits)

    assert torch.equal(*logits)


def test_a_copy_of_a_model_computes_with_its_own_weights() -> None:
    model = made("lfm2").eval()
    copied = copy.deepcopy(model)
    row = {"input_ids": torch.cat(samples(model), dim=1), "position_ids": POSITIONS}
    with torch.no_grad():
        before = copied(**row, use_cache=False).logits
        for mixer in mixers.mixers(model):
            for weight in mixer.parameters():
                weight.zero_()

        assert torch.equal(copied(**row, use_cache=False).logits, before)
        assert not torch.equal(model(**row, use_cache=False).logits, before)


def test_padding_at_the_end_of_a_row_is_one_piece_for_a_mixer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("lfm2").eval()
    lengths: list[int] = []
    mixer = mixers.mixers(model)[0]
    compute = type(mixer).forward

    def counted(module: Any, states: torch.Tensor, **options: Any) -> Any:
        lengths.append(states.shape[1])
        return compute(module, states, **options)

    monkeypatch.setattr(type(mixer), "forward", counted)
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0]])
    model(input_ids=torch.ones(1, 8, dtype=torch.long), position_ids=positions, use_cache=False)

    assert lengths == [3, 2, 3] * 2  # in two layers


def test_a_model_of_attention_alone_is_left_as_it_is() -> None:
    model = made("llama")

    assert not mixers.mixers(model)
    assert not model.get_decoder()._forward_pre_hooks


Kernel = Callable[..., Any]


def by_sample(compute: Kernel, name: str, axis: int) -> Kernel:
    """Stand in for a GPU kernel that is told where samples begin: the same, computed one after the other.

    Args:
        name: What it calls the places where samples begin and end.
        axis: The axis of tokens.
    """

    def kernel(*args: Any, **options: Any) -> Any:
        ends = options.pop(name, None)
        options = {key: value for key, value in options.items() if key not in ("cu_seq_lens_q", "seq_idx")}
        if ends is None:
            return compute(*args, **options)
        lengths = ends.diff().tolist()

        def cut(value: Any) -> list[Any]:
            has_tokens = isinstance(value, torch.Tensor) and value.ndim > 2 and value.shape[axis] == sum(lengths)
            return list(value.split(lengths, dim=axis)) if has_tokens else [value] * len(lengths)

        of_samples = zip(*map(cut, args), strict=True)
        named = [dict(zip(options, values, strict=True)) for values in zip(*map(cut, options.values()), strict=True)]
        named = named or [{}] * len(lengths)
        parts = [compute(*values, **more) for values, more in zip(of_samples, named, strict=True)]
        if isinstance(parts[0], tuple):
            return torch.cat([part[0] for part in parts], dim=axis), None
        return torch.cat(parts, dim=axis)

    return kernel


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, bool], list[int]]:
    """Let a family compute with stand-ins for GPU kernels; it returns the tokens of each call of its convolution."""

    def use(module_name: str, convolution_mixes: bool) -> list[int]:
        module = importlib.import_module(f"transformers.models.{module_name}.modeling_{module_name}")
        told: list[int] = []
        convolution = inspect.unwrap(module.causal_conv1d_fn)
        apart = convolution if convolution_mixes else by_sample(convolution, "cu_seq_lens_q", 2)

        def counted(states: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            told.append(states.shape[2])
            mixed: torch.Tensor = apart(states, *args, **options)
            return mixed

        monkeypatch.setattr(module, "causal_conv1d_fn", counted)
        if rule := getattr(module, "torch_chunk_gated_delta_rule", None):
            plain = inspect.unwrap(rule)
            monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", by_sample(plain, "cu_seqlens", 1))
        monkeypatch.setattr(mixers, "_has_kernels", lambda _: True)
        return told

    return use


@pytest.mark.parametrize(("kind", "family"), [("qwen3_5_text", "qwen3_5"), ("lfm2", "lfm2")])
@pytest.mark.parametrize("mixes", [False, True])
def test_kernels_that_keep_samples_apart_get_a_row_at_once_and_those_that_mix_them_are_not_used(
    kind: str, family: str, mixes: bool, kernels: Callable[[str, bool], list[int]]
) -> None:
    model = made(kind)
    alone = gradients(model, [{"input_ids": part} for part in samples(model)])
    told = kernels(family, mixes)

    row = {"input_ids": torch.cat(samples(model), dim=1), "position_ids": POSITIONS}

    assert farthest(gradients(model, [row]), alone) < 1e-5
    if mixes:
        assert sum(LENGTHS) not in told
    else:
        trial, rows = [83, 83], [sum(LENGTHS)] * (len(told) - 2)
        assert told == [*trial, *rows], "a trial of two rows, and then each row in one call"
