"""Answers: the same for the same seed, within the context, and kept as far as they came when interrupted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.machine.gpus import CPU
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError, ModelError, UsageError
from tuner.results.chat import Chat
from tuner.results.loaded_model import LoadedModel, load, spec_of
from tuner.worker.generation import Settings

SAMPLED = Settings(max_new_tokens=12, temperature=1.0)
LIKELIEST = Settings(max_new_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load(spec_of("package:tiny", None), CPU)


def test_the_same_seed_gives_the_same_answers(tiny: LoadedModel) -> None:
    def said(seed: int, settings: Settings) -> str:
        return Chat(tiny, settings, seed=seed).ask("Why?", lambda _: None).text

    assert said(1, SAMPLED) == said(1, SAMPLED) != said(2, SAMPLED)
    assert said(1, LIKELIEST) == said(2, LIKELIEST)


def test_the_pieces_of_an_answer_are_the_answer(tiny: LoadedModel) -> None:
    pieces: list[str] = []

    answer = Chat(tiny, LIKELIEST).ask("Why?", pieces.append)

    assert "".join(pieces) == answer.text
    assert answer.num_tokens == 12 and not answer.is_whole


def test_an_answer_ends_at_a_stop_token(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[int] = []
    monkeypatch.setattr(tiny.encoder, "decode", lambda ids, **_: said.extend(ids) or "")
    Chat(tiny, LIKELIEST).ask("Why?", lambda _: None)
    monkeypatch.undo()
    monkeypatch.setattr(tiny.model.generation_config, "eos_token_id", [said[0]])

    answer = Chat(tiny, LIKELIEST).ask("Why?", lambda _: None)

    assert answer.is_whole and answer.num_tokens == 1


def test_the_system_prompt_and_earlier_turns_are_seen(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[dict[str, str]]] = []
    prompt = tiny.encoder.prompt
    monkeypatch.setattr(tiny.encoder, "prompt", lambda turns: seen.append(turns) or prompt(turns))
    chat = Chat(tiny, LIKELIEST, system="Be kind.")
    first = chat.ask("One?", lambda _: None)
    chat.ask("Two?", lambda _: None)

    assert [turn["content"] for turn in seen[-1]] == ["Be kind.", "One?", first.text, "Two?"]


def test_the_oldest_turns_go_when_the_context_is_full(tiny: LoadedModel) -> None:
    chat = Chat(tiny, LIKELIEST)
    # A turn has some 110 of the context's 512 tokens.
    dropped = [chat.ask(f"{number} " + "why " * 100, lambda _: None).num_dropped for number in range(6)]

    assert dropped[0] == 0 and dropped[-1] == 2
    assert chat.turns[0]["role"] == "user" and chat.turns[0]["content"].startswith(str(sum(dropped) // 2))


def test_a_prompt_that_is_longer_than_the_context_is_refused(tiny: LoadedModel) -> None:
    chat = Chat(tiny, LIKELIEST)

    with pytest.raises(UsageError, match=r"a prompt has [\d,]+ tokens, and the model's context has 512"):
        chat.ask("why " * 1000, lambda _: None)
    assert chat.turns == []


def test_an_interrupted_answer_is_kept_as_far_as_it_came(tiny: LoadedModel) -> None:
    pieces: list[str] = []

    def interrupt(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 1:
            raise KeyboardInterrupt

    chat = Chat(tiny, LIKELIEST)
    answer = chat.ask("Why?", interrupt, interruptible=True)

    assert 0 < answer.num_tokens < 12
    assert chat.turns[-1] == {"role": "assistant", "content": answer.text}
    pieces.clear()
    with pytest.raises(KeyboardInterrupt):
        chat.ask("Why?", interrupt)


def test_a_template_that_refuses_and_a_tokenizer_without_one_are_told(tiny: LoadedModel) -> None:
    other = AutoTokenizer.from_pretrained(tiny.spec.path)
    found = LoadedModel(tiny.spec, tiny.model, TextEncoder(other), tiny.dtype, 16)
    other.chat_template = "{{ raise_exception('no system turns') }}"
    with pytest.raises(DataError, match="no system turns"):
        Chat(found, LIKELIEST).ask("Why?", lambda _: None)
    other.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        Chat(found, LIKELIEST)


@pytest.mark.parametrize(
    "text", ["{{ range(10 ** 9) }}", "{{ 'x' * 10 ** 13 }}", "{{ messages.a.b() }}", "{{ 1 // 0 }}"]
)
def test_whatever_a_template_raises_is_one_message(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(spec_of("package:tiny", None).path)
    tokenizer.chat_template = text

    with pytest.raises(DataError, match="the chat template rejects the conversation"):
        TextEncoder(tokenizer).prompt([{"role": "user", "content": "Why?"}])


@pytest.mark.parametrize(
    "search",
    [{"num_beams": 4}, {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, {"penalty_alpha": 0.6}],
    ids=["beams", "groups of beams", "contrastive search"],
)
def test_a_model_that_searches_among_answers_gives_its_likeliest(
    search: dict[str, float], tiny: LoadedModel, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny.spec.path, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({**search, "top_k": 4}))

    answer = Chat(load(spec_of(str(folder), None), CPU), LIKELIEST).ask("Why?", lambda _: None)

    assert answer.text == Chat(tiny, LIKELIEST).ask("Why?", lambda _: None).text
