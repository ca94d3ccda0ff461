"""Distillation: the loss is the divergence of the student's probabilities from its teacher's on its own completions."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.data.conftest import make_tokenizer
from tests.refused import refused
from tests.worker.test_every_objective import SHAPE, check_step, recipe_of, trainer_of
from tests.worker.test_every_objective import cache as cache
from tuner.data.prepare import prepare
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError, ModelError
from tuner.worker.objectives import matched_tokens
from tuner.worker.objectives.distill_training import Distill
from tuner.worker.objectives.matched_tokens import COMPARED
from tuner.worker.trainer_setup import evaluator

Batch = dict[str, Tensor]


def trainer_with(folder: Path, *pairs: str, num_rows: int = 1) -> tuple[Any, Batch]:
    """Return a trainer, and the completions of its first step."""
    sets = ("objective.max_completion_length=6", *pairs)
    made = trainer_of(recipe_of("distill", folder, *sets), 3, folder)
    made.model.train()
    made.current_gradient_accumulation_steps, made.args.per_device_train_batch_size = 1, num_rows
    return made, made._prepare_inputs(next(iter(made.get_train_dataloader())))


def by_hand(student: Any, teacher: Any, inputs: Batch, beta: float, temperature: float) -> Tensor:
    """Return the divergence of equation 1 of Agarwal et al., 2023 (arXiv:2306.13649), a mean over the tokens."""
    prompt_BP, tokens_BC, mask_BC = (inputs[key] for key in ("prompt_ids", "completion_ids", "completion_mask"))
    ids_BT, seen_BT = torch.cat([prompt_BP, tokens_BC], 1), torch.cat([inputs["prompt_mask"], mask_BC], 1)

    def log_probs(of_model: Any) -> Tensor:
        logits_BCV = of_model(input_ids=ids_BT, attention_mask=seen_BT).logits[:, prompt_BP.shape[1] - 1 : -1]
        return torch.log_softmax(logits_BCV / temperature, -1)

    def divergence(left_BCV: Tensor, right_BCV: Tensor) -> Tensor:
        return (left_BCV.exp() * (left_BCV - right_BCV)).sum(-1)

    ours_BCV, theirs_BCV = log_probs(student), log_probs(teacher).detach()
    if beta == 0:
        each_BC = divergence(theirs_BCV, ours_BCV)
    elif beta == 1:
        each_BC = divergence(ours_BCV, theirs_BCV)
    else:
        mean_BCV = (beta * theirs_BCV.exp() + (1 - beta) * ours_BCV.exp()).log()
        each_BC = beta * divergence(theirs_BCV, mean_BCV) + (1 - beta) * divergence(ours_BCV, mean_BCV)
    return (each_BC * mask_BC).sum() / mask_BC.sum()


@pytest.mark.parametrize(("beta", "temperature"), [(0.0, 1.0), (0.3, 1.0), (0.3, 2.0), (1.0, 1.0)])
def test_a_step_is_that_of_the_papers_equation(beta: float, temperature: float, tmp_path: Path, cache: Path) -> None:
    made, inputs = trainer_with(tmp_path, f"objective.beta={beta}", f"objective.temperature={temperature}")
    expected = by_hand(made.model, made.teacher_model, inputs, beta, temperature)
    weights = [*made.model.parameters()]
    expected_grads = torch.autograd.grad(expected, weights)

    loss = made.compute_loss(made.model, inputs)
    grads = torch.autograd.grad(loss, weights)

    assert loss.item() == pytest.approx(expected.item(), abs=1e-5) and loss > 1e-4
    torch.testing.assert_close(grads, expected_grads, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_student_that_is_its_teacher_has_no_loss(beta: float, tmp_path: Path, cache: Path) -> None:
    made, inputs = trainer_with(tmp_path, f"objective.beta={beta}")
    made.teacher_model = copy.deepcopy(made.model)

    loss = made.compute_loss(made.model, inputs)
    loss.backward()

    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert all(parameter.grad.abs().max() < 1e-6 for parameter in made.model.parameters() if parameter.grad is not None)


def test_a_rank_refuses_a_teacher_with_another_vocabulary() -> None:
    student, teacher = (LlamaForCausalLM(LlamaConfig(vocab_size=size, **SHAPE)) for size in (16, 32))

    with refused(ModelError, "objective.teacher", 32, 16):
        Distill(model=student, ref_model=teacher)


TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}<end>{% endfor %}[assistant] "
TEXTS = ("The colours are red and blue.", "No, a dog!", "It is so \N{EM DASH} or not")
"""Completions; the last one is cut before its end."""
ENDS = ("<end>", "<|im_end|>")
QUESTION = [{"role": "user", "content": "Why?"}]


def teachers(folder: Path, *, changes_text: bool = False) -> PreTrainedTokenizerFast:
    """Save a teacher with a vocabulary and a chat template of its own, and return its tokenizer."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=changes_text)
    backend.decoder = decoders.ByteLevel()
    corpus = ["the colours are read", "color and red, a doggy", "It isn't so", *TEXTS]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=alphabet, special_tokens=["<pad>", "<end>"], show_progress=False
    )
    backend.train_from_iterator(corpus, trainer)
    names = {"eos_token": "<end>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer) + 6, **SHAPE)).save_pretrained(folder)
    return tokenizer


def with_other_vocabulary(folder: Path, *pairs: str, tokenizer: Any = None) -> tuple[Any, Batch]:
    """Return a trainer whose teacher has another tokenizer, and a step on `TEXTS`."""
    torch.manual_seed(1)
    of_student, teacher = make_tokenizer(pads=True), folder / "teacher"
    if tokenizer is None:
        teachers(teacher)
    else:
        tokenizer.save_pretrained(teacher)
        LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SHAPE)).save_pretrained(teacher)
    sets = (f"objective.teacher={teacher}", "objective.max_completion_length=32", *pairs)
    config, encoder = recipe_of("distill", folder, *sets), TextEncoder(of_student)
    (folder / "rows.jsonl").write_text(f"{json.dumps({'prompt': QUESTION})}\n" * 3)
    student = LlamaForCausalLM(LlamaConfig(vocab_size=len(of_student), pad_token_id=0, **SHAPE))
    rows = prepare(config.train_dataloader.dataset, encoder, objective="distill").dataset
    both = student, LlamaForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    with torch.no_grad():
        for weight in itertools.chain(*(model.parameters() for model in both)):
            if weight.ndim > 1:
                weight.mul_(8)  # far from equal probabilities
    made = evaluator(config, both, encoder, rows, 3, str(folder))
    ends = ([encoder.answer_end()], [encoder.answer_end()], [])
    written = [
        [*of_student(text, add_special_tokens=False)["input_ids"], *end] for text, end in zip(TEXTS, ends, strict=True)
    ]
    made._generate_single_turn = lambda *_, **__: written
    made.model.train()
    made.current_gradient_accumulation_steps, made.args.per_device_train_batch_size = 1, 3
    inputs = made._generate_and_score_completions(next(iter(made.get_train_dataloader())))
    return made, inputs


def spans_by_hand(made: Any, folder: Path, inputs: Batch) -> list[tuple[Tensor, Tensor]]:
    """Return the probabilities of each span, of the student and of the teacher, from one sequence at a time."""
    ours, theirs = made.processing_class, PreTrainedTokenizerFast.from_pretrained(folder / "teacher")
    spans = []
    for at, text in enumerate(TEXTS):
        sides = []
        prompt = inputs["prompt_ids"][at][inputs["prompt_mask"][at].bool()].tolist()
        completion = inputs["completion_ids"][at][inputs["completion_mask"][at].bool()].tolist()
        asked = theirs.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]
        answer = theirs(text)["input_ids"]
        if at < 2:  # they end
            answer.append(theirs.eos_token_id)
        for model, tokenizer, start, ids in (
            (made.model, ours, prompt, completion),
            (made.teacher_model, theirs, asked, answer),
        ):
            with torch.set_grad_enabled(model is made.model):
                probs = model(torch.tensor([[*start, *ids]])).logits[0, len(start) - 1 : -1].softmax(-1)
            # The name of a byte-level token has a letter for each byte; the tokens that end an answer count as one.
            names = ["|" if token in ENDS else token for token in tokenizer.convert_ids_to_tokens(ids)]
            ends = [*itertools.accumulate(map(len, names))]
            sides.append((probs, ids, ends))
        starts = [0, 0]
        for end in sorted({*sides[0][2]} & {*sides[1][2]}):
            of_span = []
            for side, (probs, ids, ends) in enumerate(sides):
                last, product = ends.index(end), 1.0
                for number in range(starts[side], last):
                    product = product * probs[number, ids[number]]
                of_span.append(product * probs[last])
                starts[side] = last + 1
            spans.append(tuple(of_span))
    return spans


def without(values: Tensor, places: Tensor) -> Tensor:
    return values[~torch.isin(torch.arange(len(values)), places)]


def names_of(tokenizer: Any) -> list[str]:
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return ["the end of an answer" if name in ENDS else name for name in names]


@pytest.mark.parametrize(
    "settings",
    [
        ("vocabulary_matching=sorted",),
        *(("vocabulary_matching=hybrid", f"objective.beta={beta}") for beta in (0.0, 0.3, 1.0)),
        ("vocabulary_matching=hybrid", "uld_hybrid_matched_weight=0.7", "uld_hybrid_unmatched_weight=2.0"),
    ],
)
def test_a_teacher_with_another_vocabulary_is_compared_span_by_span(
    settings: tuple[str, ...], tmp_path: Path, cache: Path
) -> None:
    made, inputs = with_other_vocabulary(tmp_path, *settings)
    ours, theirs = (names_of(tokenizer) for tokenizer in (made.processing_class, made.other.encoder.library_object))
    here, there = torch.tensor([(ours.index(name), at) for at, name in enumerate(theirs) if name in ours]).T
    num_both, words = len(here), made.teacher_model.config.vocab_size
    shares = (0.7, 2.0) if len(settings) == 3 else (num_both / words, 1 - num_both / words)
    beta, hybrid = made.beta, settings[0] == "vocabulary_matching=hybrid"
    spans, losses = spans_by_hand(made, tmp_path, inputs), []
    assert 0.1 < num_both / words < 0.99

    for mine, other in spans:
        loss, left = torch.zeros(()), [mine, other]
        if hybrid:
            p, q = mine[here], other[there]
            mean = (1 - beta) * p + beta * q
            parts = beta * q * torch.log(q / mean) + (1 - beta) * p * torch.log(p / mean)
            if beta in (0, 1):
                parts = p * torch.log(p / q) - p + q if beta else q * torch.log(q / p) - q + p
            loss = shares[0] * parts.sum()
            left = [without(mine, here), without(other, there)]
        p, q = pad_sequence([probs.sort(descending=True).values for probs in left], batch_first=True)
        losses.append(loss + (shares[1] if hybrid else 1.0) * (p - q).abs().sum())
    expected = sum(losses) / len(losses)
    weights = [*made.model.parameters()]
    expected_grads = torch.autograd.grad(expected, weights)

    loss = made.compute_loss(made.model, inputs)

    assert int(inputs["num_items_in_batch"]) == len(spans) > 20
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5) and loss > 1e-2
    torch.testing.assert_close(torch.autograd.grad(loss, weights), expected_grads, atol=1e-5, rtol=1e-5)
    assert made._metrics["train"][COMPARED] == [1.0]


@pytest.mark.parametrize("tile", [2**22, 3000])
def test_a_teacher_with_the_same_tokens_has_the_loss_of_one_vocabulary(
    tile: int, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matched_tokens, "_TILE_LOGITS", tile)
    made, inputs = with_other_vocabulary(
        tmp_path,
        "vocabulary_matching=hybrid",
        "objective.beta=0.3",
        "objective.temperature=1.5",
        tokenizer=make_tokenizer(),
    )
    expected = by_hand(made.model, made.teacher_model, inputs, 0.3, 1.5)
    weights = [*made.model.parameters()]

    loss = made.compute_loss(made.model, inputs)

    assert loss.item() == pytest.approx(expected.item(), abs=1e-5) and loss > 1e-2
    grads = [torch.autograd.grad(total, weights) for total in (loss, expected)]
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_equal_parts_of_probabilities_push_nothing_in_or_out(beta: float) -> None:
    theirs = torch.randn(3, 9).log_softmax(-1)[:, :4]
    ours = theirs.clone().requires_grad_()

    matched_tokens._divergence(ours, theirs, beta).backward()

    assert ours.grad is not None and ours.grad.abs().max() < 1e-6


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_tokens_that_neither_model_believes_in_after_a_long_span_have_no_loss(beta: float) -> None:
    ours = torch.tensor([[-1.0, -150.0]], requires_grad=True)

    loss = matched_tokens._divergence(ours, torch.tensor([[-1.0, -160.0]]), beta)
    loss.backward()

    assert loss.item() == 0 and ours.grad is not None and not ours.grad.any()


def test_the_teacher_reads_its_own_chat_template_and_its_own_end(tmp_path: Path, cache: Path) -> None:
    made, inputs = with_other_vocabulary(tmp_path, "vocabulary_matching=sorted")
    tokenizer = made.other.encoder.library_object

    read = [
        tokenizer.decode(ids[mask.bool()])
        for ids, mask in zip(inputs["teacher_ids"], inputs["teacher_mask"], strict=True)
    ]

    assert read == [
        f"[user] Why?<end>[assistant] {text}{end}" for text, end in zip(TEXTS, ("<end>", "<end>", ""), strict=True)
    ]


def test_the_teacher_is_asked_with_the_values_that_the_students_template_has(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "TEMPLATE", "{{ note }}" + TEMPLATE)
    sets = ("vocabulary_matching=sorted", "model.chat_template_kwargs.note=it", "model.chat_template_kwargs.other=1")
    made, inputs = with_other_vocabulary(tmp_path, *sets)
    tokenizer = made.other.encoder.library_object
    of_row, _ = made.other.read({"prompt": QUESTION, "chat_template_kwargs": {"note": "so"}}, [])

    assert tokenizer.decode(inputs["teacher_ids"][0]).startswith("it[user] Why?")
    assert tokenizer.decode(of_row).startswith("so[user] Why?")


def test_what_a_completion_spells_is_no_special_token_of_the_teacher(tmp_path: Path, cache: Path) -> None:
    made, _ = with_other_vocabulary(tmp_path, "vocabulary_matching=sorted")
    tokenizer = made.other.encoder.library_object

    ids, found = made.other.read(
        {"prompt": "Why?"}, made.processing_class("a <end> b", add_special_tokens=False)["input_ids"]
    )

    assert tokenizer.eos_token_id not in ids and tokenizer.decode(ids[-found[-1].teacher[1] :]) and found


def test_bytes_that_are_no_text_are_not_compared(tmp_path: Path, cache: Path) -> None:
    made, _ = with_other_vocabulary(tmp_path, "vocabulary_matching=sorted")
    half = [number for number, spelled in made.other.student_bytes.items() if spelled == b"\xe2"]
    ids = made.processing_class("No", add_special_tokens=False)["input_ids"]

    _, found = made.other.read({"prompt": "Why?"}, [*ids, *half, *ids])

    assert found[-1].student[1] == len(ids)


def test_a_validation_of_which_nothing_is_compared_is_told(tmp_path: Path, cache: Path) -> None:
    made, _ = with_other_vocabulary(tmp_path, "vocabulary_matching=sorted")
    half = [number for number, spelled in made.other.student_bytes.items() if spelled == b"\xe2"]
    made._generate_single_turn = lambda prompts, *_, **__: [half] * len(prompts)

    with refused(DataError, "val_dataloader"):
        made.evaluate()


def test_a_teacher_whose_tokens_are_not_known_or_change_a_text_is_refused(tmp_path: Path, cache: Path) -> None:
    adding = teachers(tmp_path / "adding", changes_text=True)
    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "One": 2}, **{"unk_token": "<s>"}))
    names = {"eos_token": "</s>", "pad_token": "<s>"}
    for name, tokenizer in (
        ("changes", adding),
        ("words", PreTrainedTokenizerFast(tokenizer_object=words, **names)),
    ):
        folder = tmp_path / name
        folder.mkdir()
        with refused(ModelError, "objective.teacher"):
            with_other_vocabulary(folder, "vocabulary_matching=hybrid", tokenizer=tokenizer)


@pytest.mark.parametrize("num_batches", [1, 3])
def test_a_step_of_spans_is_the_same_in_micro_batches_of_any_size(
    num_batches: int, tmp_path: Path, cache: Path
) -> None:
    made, inputs = with_other_vocabulary(tmp_path, "vocabulary_matching=hybrid", "objective.beta=0.3")

    check_step(made, inputs, num_batches, made.compute_loss(made.model, inputs), most=1e-6)


@pytest.mark.parametrize("num_batches", [1, 3])
def test_a_step_is_the_same_in_micro_batches_of_any_size(num_batches: int, tmp_path: Path, cache: Path) -> None:
    made, inputs = trainer_with(tmp_path, "objective.beta=0.3", num_rows=3)
    inputs["completion_mask"] *= torch.arange(6) < torch.tensor([1, 6, 3])[:, None]
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    expected = by_hand(made.model, made.teacher_model, inputs, 0.3, made.temperature)

    check_step(made, inputs, num_batches, expected, most=1e-6)
    assert expected > 1e-4
