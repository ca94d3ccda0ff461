"""Distillation from a teacher with another vocabulary (GOLD): spans of the same text, and probabilities side by side.

    spans          the teacher reads the prompt in its own chat template and the completion in its own tokens; a span is
                   the shortest text that ends with a token of both
    probabilities  of a span: those of its last token, times the probabilities of the tokens before it (chain rule)
    loss           of a span: of 'sorted', the distance of both sorted lists (Boizard et al., 2024, arXiv:2402.12030);
                   of 'hybrid', the divergence over the tokens that both have, and that distance over the others
                   (Patiño et al., 2025, "Unlocking On-Policy Distillation for Any Model Family")

S is the student, T the teacher; N tokens of spans, G spans, V words, H width. Seen with TRL 1.16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pad_sequence
from trl.models.utils import prepare_deepspeed

from tuner.data.sample import Chat
from tuner.data.text_encoder import TextEncoder
from tuner.data.token_bytes import Span, spans
from tuner.errors import DataError, ModelError
from tuner.vocabulary import TEACHER
from tuner.worker import compat, compat_loss
from tuner.worker.compat_loss import Scales
from tuner.worker.trainer_types import MixedIn

_NO_SPAN = -1
_TILE_LOGITS = 2**22
"""In a tile of each model: 16 MiB in fp32, with about 16 copies at the peak, which is what a plan has for one tile."""
COMPARED = "compared"
"""The metric of the share of the completions' tokens that are in spans."""


@dataclass(frozen=True)
class Comparison:
    """How the probabilities of two vocabularies are compared.

    Args:
        beta: The divergence over the tokens that both have: 0 is the forward KL divergence, 1 the reverse one.
        temperature: Of both models.
        same: The ids of the tokens that both have, of S and of T; None: all probabilities are sorted.
        weights: Of the divergence over these tokens, and of the distance of the others.
    """

    beta: float
    temperature: float
    same: tuple[Tensor, Tensor] | None
    weights: tuple[float, float]

    def loss(self, log_probs_GS: Tensor, log_probs_GT: Tensor) -> Tensor:
        """Return the sum of the losses of spans; shapes [G, V] of each model."""
        if self.same is None:
            return _distance(log_probs_GS.exp(), log_probs_GT.exp())
        student_ids, teacher_ids = self.same
        of_same = _divergence(log_probs_GS[:, student_ids], log_probs_GT[:, teacher_ids], self.beta)
        of_others = _distance(_without(log_probs_GS.exp(), student_ids), _without(log_probs_GT.exp(), teacher_ids))
        return self.weights[0] * of_same + self.weights[1] * of_others


def _without(probs_GV: Tensor, ids: Tensor) -> Tensor:
    is_other = torch.ones(probs_GV.shape[1], dtype=torch.bool, device=probs_GV.device)
    is_other[ids] = False
    return probs_GV[:, is_other]


def _distance(probs_GS: Tensor, probs_GT: Tensor) -> Tensor:
    """Return the sum of the distances of sorted probabilities; the shorter list is filled up with zeros."""
    width = max(probs_GS.shape[1], probs_GT.shape[1])
    sides = [probs.sort(-1, descending=True).values for probs in (probs_GS, probs_GT)]
    student_GV, teacher_GV = (F.pad(side, (0, width - side.shape[1])) for side in sides)
    return (student_GV - teacher_GV).abs().sum()


def _divergence(log_probs_GV: Tensor, log_teacher_GV: Tensor, beta: float) -> Tensor:
    """Return the sum of the divergences (Agarwal et al., 2023, arXiv:2306.13649, equation 1) of parts of probabilities.

    These do not add up to 1. So the KL divergences have the term by which they are 0 and smallest where both are equal
    (the I-divergence, Csiszár 1975): without it, they push probability into these tokens or out of them. In the
    divergence of Jensen and Shannon these terms cancel.
    """
    probs_GV, teacher_GV = log_probs_GV.exp(), log_teacher_GV.exp()
    if beta == 0:
        return (teacher_GV * (log_teacher_GV - log_probs_GV) - teacher_GV + probs_GV).sum()
    if beta == 1:
        return (probs_GV * (log_probs_GV - log_teacher_GV) - probs_GV + teacher_GV).sum()
    # Not the logarithm of the mean: of a long span both probabilities may be too small for a number in fp32.
    mean = torch.logaddexp(log_teacher_GV + math.log(beta), log_probs_GV + math.log1p(-beta))
    return (beta * teacher_GV * (log_teacher_GV - mean) + (1 - beta) * probs_GV * (log_probs_GV - mean)).sum()


@dataclass(frozen=True)
class Side:
    """The tokens of one model that are in spans, one after another.

    Args:
        tokens_N: Their ids.
        spans_N: The number of the span that each is in; they do not fall.
        is_last_N: Whether it is the last one of its span.
    """

    tokens_N: Tensor
    spans_N: Tensor
    is_last_N: Tensor

    @classmethod
    def of(cls, ids_BT: Tensor, spans_BT: Tensor) -> Side:
        """Return the tokens in spans, from tensors with the span in its sequence of each token, or -1."""
        is_last_BT = (spans_BT != F.pad(spans_BT[:, 1:], (0, 1), value=_NO_SPAN)) & (spans_BT != _NO_SPAN)
        kept_BT = spans_BT != _NO_SPAN
        is_last_N = is_last_BT[kept_BT]
        return cls(ids_BT[kept_BT], is_last_N.long().cumsum(0) - is_last_N.long(), is_last_N)

    def part(self, first: int, last: int) -> tuple[slice, Side]:
        """Return which tokens are in some spans, and these alone."""
        start, end = torch.searchsorted(self.spans_N, torch.tensor([first, last], device=self.spans_N.device)).tolist()
        tokens = slice(start, end)
        return tokens, Side(self.tokens_N[tokens], self.spans_N[tokens] - first, self.is_last_N[tokens])

    def of_spans(self, log_probs_NV: Tensor) -> Tensor:
        own_N = log_probs_NV.gather(1, self.tokens_N[:, None])[:, 0].masked_fill(self.is_last_N, 0)
        last_GV = log_probs_NV[self.is_last_N]
        return last_GV + own_N.new_zeros(len(last_GV)).index_add(0, self.spans_N, own_N)[:, None]


@dataclass(frozen=True)
class Head:
    """The output embeddings of a model, and what becomes of their products."""

    weight_VH: Tensor
    bias_V: Tensor | None
    scales: Scales

    def log_probs(self, hidden_NH: Tensor, temperature: float) -> Tensor:
        """Return the log-probabilities of the next token, [N, V] in fp32."""
        logits_NV = F.linear(hidden_NH, self.weight_VH.to(hidden_NH.dtype)).float()
        if self.bias_V is not None:
            logits_NV = logits_NV + self.bias_V.float()
        if self.scales.scale != 1:
            logits_NV = logits_NV * self.scales.scale
        if self.scales.cap is not None:
            logits_NV = (logits_NV / self.scales.cap).tanh() * self.scales.cap
        if temperature != 1:
            logits_NV = logits_NV / temperature
        return logits_NV.log_softmax(-1)


class _SumOfSpans(torch.autograd.Function):  # type: ignore[misc]
    """The loss of spans, and the student's entropy; gradients are computed with the logits, tile by tile.

    As `worker.loss` does for tokens: gradients are summed up in fp32, and multiplied in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        scales: Scales,
        student_side: Side,
        hidden_of_teacher_NH: Tensor,
        of_teacher: Head,
        teacher_side: Side,
        comparison: Comparison,
    ) -> tuple[Tensor, Tensor]:
        inputs: list[Any] = [hidden_NH, weight_VH, bias_V]
        needs = [at for at, tensor in enumerate(inputs) if tensor is not None and ctx.needs_input_grad[at]]
        sums = {at: torch.zeros_like(inputs[at], dtype=torch.float32) for at in needs}
        total, entropy = hidden_NH.new_zeros((), dtype=torch.float32), hidden_NH.new_zeros((), dtype=torch.float32)
        widest = max(len(weight_VH), len(of_teacher.weight_VH))
        for first, last in _tiles(student_side, teacher_side, max(1, _TILE_LOGITS // widest)):
            student_tokens, student_tile = student_side.part(first, last)
            teacher_tokens, teacher_tile = teacher_side.part(first, last)
            teacher_GT = teacher_tile.of_spans(
                of_teacher.log_probs(hidden_of_teacher_NH[teacher_tokens], comparison.temperature)
            )
            leaves: list[Any] = [
                None if tensor is None else tensor.detach() for tensor in (hidden_NH[student_tokens], *inputs[1:])
            ]
            for at in needs:
                leaves[at].requires_grad_()
            with torch.enable_grad():
                log_probs_NV = Head(leaves[1], leaves[2], scales).log_probs(leaves[0], comparison.temperature)
                loss = comparison.loss(student_tile.of_spans(log_probs_NV), teacher_GT)
                gradients = torch.autograd.grad(loss, [leaves[at] for at in needs]) if needs else ()
            for at, gradient in zip(needs, gradients, strict=True):
                sums[at][student_tokens if at == 0 else ...] += gradient
            total += loss.detach()
            last_GV = log_probs_NV.detach()[student_tile.is_last_N]
            entropy -= (last_GV.exp() * last_GV).sum()
        ctx.gradients = {at: (sums[at], inputs[at].dtype) for at in needs}
        ctx.mark_non_differentiable(entropy)
        return total, entropy

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, of_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss are gone after its first backward pass")
        scaled = {at: (gradient * of_total).to(dtype) for at, (gradient, dtype) in ctx.gradients.items()}
        ctx.gradients = None
        return *(scaled.get(at) for at in range(3)), *(None,) * 6


def _tiles(student_side: Side, teacher_side: Side, max_tokens: int) -> list[tuple[int, int]]:
    """Return spans one after another, first and one after the last, with at most so many tokens of a model."""
    num_spans = int(student_side.is_last_N.sum())
    counts_2G = [torch.bincount(side.spans_N, minlength=num_spans).tolist() for side in (student_side, teacher_side)]
    starts, sizes = [0], (0, 0)
    for number, (mine, other) in enumerate(zip(*counts_2G, strict=True)):
        sizes = sizes[0] + mine, sizes[1] + other
        if max(sizes) > max_tokens and number > starts[-1]:
            starts.append(number)
            sizes = mine, other
    return list(pairwise([*starts, num_spans])) if num_spans else []


@dataclass(frozen=True)
class OtherVocabulary:
    """A teacher's tokenizer, and how its tokens are compared with the student's.

    Args:
        encoder: The teacher's.
        student_bytes: The bytes of the student's tokens by their ids; a special token has none.
        teacher_bytes: The same of the teacher.
        ends: The tokens that end an answer, of the student and of the teacher.
        same: The ids of the tokens that both have; None: all probabilities are sorted.
        weights: Of the divergence and of the distance; None: the share of the teacher's tokens that are in `same`, and
            the rest.
        most_tokens: The longest sequence that the teacher reads.
    """

    encoder: TextEncoder
    student_bytes: Mapping[int, bytes]
    teacher_bytes: Mapping[int, bytes]
    ends: tuple[int, int]
    same: Sequence[tuple[int, int]] | None
    weights: tuple[float, float] | None
    most_tokens: int | None

    def read(self, row: Mapping[str, Any], completion: Sequence[int]) -> tuple[list[int], list[Span]]:
        """Return what the teacher reads, and the spans of the completion and of that.

        Raises:
            ModelError: the teacher's chat template refuses the prompt.
        """
        prompt, of_template = row["prompt"], (row.get("tools"), row.get("chat_template_kwargs"))
        try:
            ids = self.encoder.prompt_ids(prompt if isinstance(prompt, str) else Chat(prompt, *of_template))
        except DataError as error:
            fix = "Take a teacher with a chat template that renders the prompts of your rows."
            raise ModelError(f"for the teacher {error.what}", where=TEACHER, fix=fix) from error
        start = len(ids)
        texts = [self.student_bytes[token] for token in _before_special(completion, self.student_bytes)]
        text = b"".join(texts).decode(errors="ignore")  # half of a character at the end is none
        tokenizer = self.encoder.library_object
        answer = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        spelled = [self.teacher_bytes[token] for token in _before_special(answer, self.teacher_bytes)]
        matches = spans(texts, spelled)
        student_end, teacher_end = self.ends
        is_whole = (len(texts), len(spelled)) == (
            (matches[-1].student[1], matches[-1].teacher[1]) if matches else (0, 0)
        )
        if is_whole and completion[len(texts) : len(texts) + 1] == [student_end]:
            matches.append(Span((len(texts), len(texts) + 1), (len(spelled), len(spelled) + 1)))
            answer = [*answer, teacher_end]
        ids = [*ids, *answer][: self.most_tokens]
        placed = [Span(of_student, (start + first, start + last)) for of_student, (first, last) in matches]
        return ids, [span for span in placed if span.teacher[1] <= len(ids)]

    def comparison(self, beta: float, temperature: float, num_words: int, device: torch.device) -> Comparison:
        """Return how probabilities are compared; `num_words` are the teacher's."""
        if self.same is None:
            return Comparison(beta, temperature, None, (0.0, 1.0))
        share = len(self.same) / num_words
        student_ids, teacher_ids = torch.tensor(self.same, dtype=torch.long, device=device).reshape(-1, 2).unbind(1)
        return Comparison(beta, temperature, (student_ids, teacher_ids), self.weights or (share, 1 - share))


def _before_special(ids: Sequence[int], bytes_by_id: Mapping[int, bytes]) -> Sequence[int]:
    """Return the tokens before the first one that is no text."""
    return ids[: next((at for at, token in enumerate(ids) if token not in bytes_by_id), len(ids))]


class MatchedTokens(MixedIn):
    """Mixed into TRL's trainer for distillation, behind what says how completions are generated."""

    # TRL's
    beta: float
    temperature: float
    teacher_model: Any

    _comparison: Comparison | None = None

    def __init__(self, *, teacher_model: Any, other: OtherVocabulary | None = None, **rest: Any) -> None:
        """Make TRL's trainer, which refuses a teacher with another number of words: it gets none then."""
        super().__init__(teacher_model=None if other else teacher_model, **rest)
        self.other = other
        if other is not None:
            takes = self.accelerator.prepare_model
            self.teacher_model = (
                prepare_deepspeed(teacher_model, self.accelerator)
                if self.is_deepspeed_enabled
                else takes(teacher_model, evaluation_mode=True)
            )

    def _generate_and_score_completions(self, inputs: Sequence[Mapping[str, Any]]) -> Any:
        """Return TRL's completions, and what the teacher reads of them."""
        output = super()._generate_and_score_completions(inputs)
        if self.other is None:
            return output
        completions_B = [
            ids[mask.bool()].tolist()
            for ids, mask in zip(output["completion_ids"], output["completion_mask"], strict=True)
        ]
        read_B = [self.other.read(row, ids) for row, ids in zip(inputs, completions_B, strict=True)]
        device, length = self.accelerator.device, output["completion_ids"].shape[1]
        ids_B = [torch.tensor(ids) for ids, _ in read_B]
        spans_B = [_numbered(length, [span.student for span in spans_of_row]) for _, spans_of_row in read_B]
        teacher_spans_B = [_numbered(len(ids), [span.teacher for span in spans_of_row]) for ids, spans_of_row in read_B]

        def batch(rows: list[Tensor], value: int) -> Tensor:
            return pad_sequence(rows, batch_first=True, padding_value=value).to(device)

        pad_id = self.other.encoder.pad_id
        output |= {"teacher_ids": batch(ids_B, pad_id), "teacher_spans": batch(teacher_spans_B, _NO_SPAN)}
        output |= {"teacher_mask": batch([torch.ones_like(ids) for ids in ids_B], 0)}
        output["completion_spans"] = batch(spans_B, _NO_SPAN)
        counts_3 = torch.tensor(
            [
                sum(len(spans_of_row) for _, spans_of_row in read_B),
                int((output["completion_spans"] != _NO_SPAN).sum()),
                sum(map(len, completions_B)),
            ]
        )
        num_spans, num_compared, num_tokens = self.accelerator.reduce(counts_3.to(device)).tolist()
        output["num_items_in_batch"] = torch.tensor(num_spans, device=device)
        metrics = compat.metrics_of(self, "train" if self.model.training else "eval")
        metrics[COMPARED].append(num_compared / max(num_tokens, 1))
        return output

    def _compute_loss(self, unwrapped_student: Any, inputs: Mapping[str, Tensor], num_items_in_batch: Any) -> Any:
        """Return the loss, the sum of the student's entropies, and the number of spans of a micro-batch."""
        if self.other is None:
            return super()._compute_loss(unwrapped_student, inputs, num_items_in_batch)
        ids_BT = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask_BT = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        length = inputs["completion_ids"].shape[1]
        hidden_BCH = compat.last_states(self, unwrapped_student, ids_BT, mask_BT, length)
        self.teacher_model.eval()
        teacher = self.accelerator.unwrap_model(self.teacher_model)
        with torch.no_grad():
            of_teacher_BTH = compat.through_engine(
                self, self.teacher_model, teacher, _states, teacher, inputs["teacher_ids"], inputs["teacher_mask"]
            )
        spans_BC, teacher_spans_BT = inputs["completion_spans"], inputs["teacher_spans"][:, 1:]
        student_side = Side.of(inputs["completion_ids"], spans_BC)
        teacher_side = Side.of(inputs["teacher_ids"][:, 1:], teacher_spans_BT)
        head, of_teacher = unwrapped_student.get_output_embeddings(), teacher.get_output_embeddings()
        with compat_loss.gathered(head.weight, head.bias), compat_loss.gathered(of_teacher.weight, of_teacher.bias):
            if self._comparison is None:
                num_words = len(of_teacher.weight)
                self._comparison = self.other.comparison(self.beta, self.temperature, num_words, hidden_BCH.device)
            total, entropy = _SumOfSpans.apply(
                hidden_BCH[spans_BC != _NO_SPAN],
                head.weight,
                head.bias,
                compat_loss.scales_in(unwrapped_student.config),
                student_side,
                of_teacher_BTH[:, :-1][teacher_spans_BT != _NO_SPAN],
                Head(of_teacher.weight, of_teacher.bias, compat_loss.scales_in(teacher.config)),
                teacher_side,
                self._comparison,
            )
        num_spans = student_side.is_last_N.sum()
        divisor = num_spans.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return total / divisor, entropy, num_spans


def _states(model: Any, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    states: Tensor = model.base_model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).last_hidden_state
    return states


def _numbered(length: int, places: Sequence[tuple[int, int]]) -> Tensor:
    """Return the number of the span that each token is in, or -1."""
    numbers = torch.full((length,), _NO_SPAN)
    for number, (first, last) in enumerate(places):
        numbers[first:last] = number
    return numbers
