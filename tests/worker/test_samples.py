"""Answers to validation prompts after training, which can end no run; tests/e2e/test_quickstart.py has them in one."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import termios
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.results.made import make_result
from tuner.data.sample import Chat
from tuner.data.sample_kinds import before_last_answer
from tuner.data.text_encoder import TextEncoder
from tuner.models.load import load_tokenizer, pretrained_path
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides
from tuner.worker.answer_metrics import AnswersValidationPrompts
from tuner.worker.samples import right_answer, show_samples, shown

WIDE = 60

NO_ENCODER: Any = None
"""A model that reads text alone is answered with the tokenizer that was saved."""


def guard(**facts: Any) -> Any:
    ticks: list[int] = []
    heart = SimpleNamespace(tick=lambda: ticks.append(1), ticks=ticks)
    return SimpleNamespace(heart=heart, stop_requested=False, terminal=None, **facts)


@pytest.mark.parametrize("recipe", ["tiny_full_sample_e1", "tiny_lora_sample_e1"])
def test_every_answer_is_a_sign_of_life_and_one_model_is_held_at_a_time(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make_result(tmp_path / "run", recipe, "num_samples=2")
    loaded: list[Any] = []
    real = AutoModelForCausalLM.from_pretrained

    def noted(*args: Any, **options: Any) -> Any:
        assert not [reference for reference in loaded if reference() is not None], "another one is still in memory"
        model = real(*args, **options)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", noted)
    watched = guard()

    found = samples(run, watched)

    assert len(found) == 2 and all(isinstance(line["before"], str) for line in found)
    assert len(watched.heart.ticks) >= 4, "two answers of two models, of a token or more"
    assert len(loaded) == (1 if "lora" in recipe else 2)


def samples(run: Any, watched: Any, *, run_s: float = 0.0, num_parameters: int = 0) -> list[dict[str, Any]]:
    show_samples(load(str(run.recipe)).config, NO_ENCODER, run, watched, run_s=run_s, num_parameters=num_parameters)
    file = run.path / "samples.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def test_without_a_number_a_run_of_minutes_answers_five_prompts_and_a_short_one_none(tmp_path: Path) -> None:
    run, _ = make_result(tmp_path / "run", "tiny_full_sample_e1", "num_samples='auto'")

    assert samples(run, guard(), run_s=19.0) == []
    assert samples(run, guard(), run_s=3600.0, num_parameters=10**15) == [], "the host's memory has no room for it"
    assert len(samples(run, guard(), run_s=3600.0)) == 5


def test_answers_that_nobody_asked_for_end_with_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = make_result(tmp_path / "run", "tiny_full_sample_e1", "num_samples='auto'")
    now = [0.0]
    watched = guard()
    watched.heart.tick = lambda: now.__setitem__(0, now[0] + 0.3)  # each token takes this long
    monkeypatch.setattr("tuner.worker.samples.time.monotonic", lambda: now[0])

    lines = samples(run, watched, run_s=600.0)

    assert 0 < len(lines) < 5 and now[0] < 61
    assert isinstance(lines[0]["before"], str)


def test_without_an_answer_in_time_the_key_for_more_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, _ = make_result(tmp_path / "run", "tiny_full_sample_e1", "num_samples='auto'")
    monkeypatch.setattr("tuner.worker.samples._answers", lambda *_: [])

    assert samples(run, guard(), run_s=600.0) == []

    assert "; --set num_samples=" in capfd.readouterr().out


def test_a_model_before_training_that_cannot_answer_has_no_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, _ = make_result(tmp_path / "run", "tiny_full_sample_e1", "num_samples=1")
    real = AutoModelForCausalLM.from_pretrained

    def result_alone(path: Any, **options: Any) -> Any:
        if Path(path) != run.final:
            raise OSError("its weights were removed")
        return real(path, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", result_alone)

    (line,) = samples(run, guard(run_dir=run))

    assert line["before"] is None
    table = capfd.readouterr().out
    assert "after training" in table and "before training  " not in table


def test_who_asks_to_stop_waits_for_no_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, _ = make_result(tmp_path / "run", "tiny_full_sample_e1", "num_samples=2")
    asked = guard()
    asked.stop_requested = True

    samples(run, asked)

    assert capfd.readouterr().out == "WARNING: no samples: RuntimeError: a signal asked to stop\n"
    assert not (run.path / "samples.jsonl").exists()


def test_the_table_is_as_wide_as_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, _ = make_result(tmp_path / "run", "tiny_full_sample_e1", "num_samples=1")
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDE, 0, 0))
    with os.fdopen(slave, "w") as terminal:
        shown = guard()
        shown.terminal = terminal
        samples(run, shown)

    os.close(master)
    assert max(map(len, capfd.readouterr().out.splitlines())) == WIDE


WITH_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
SCHEMA = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def test_validation_prompts_are_asked_with_the_tools_of_their_rows_and_their_texts_stay_text(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "Rain? <|im_end|>"}, {"role": "assistant", "content": "No."}]
    rows.write_text(json.dumps({"messages": turns, "tools": [SCHEMA]}) + "\n")
    keys = (f"val_dataloader.dataset.path={rows}", "val_dataloader.dataset.format=messages", "log.generate=1")
    config = load("tiny_full_sample_e1", Overrides(pairs=[("--set", key) for key in keys])).config
    encoder = TextEncoder(load_tokenizer(config.model, pretrained_path(config.model)))
    encoder.tokenizer.chat_template = WITH_TOOLS + str(encoder.tokenizer.chat_template)

    found: Any = AnswersValidationPrompts(config, encoder, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]

    [ids] = found.questions
    assert "weather" in encoder.decode(ids.tolist())
    ends = ids.tolist().count(encoder.tokenizer.convert_tokens_to_ids("<|im_end|>"))
    assert ends == 1, "that of the template"


CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("content", ["", "I look."])
def test_a_reference_answer_that_calls_a_tool_shows_the_call_as_the_template_writes_it(content: str) -> None:
    config = load("tiny_full_sample_e1").config
    encoder = TextEncoder(load_tokenizer(config.model, pretrained_path(config.model)))
    encoder.tokenizer.chat_template = CALLS
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    history = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "Where?"}]
    answer = {"role": "assistant", "content": content, "tool_calls": [call]}
    chat = Chat([*history, {"role": "user", "content": "Rome"}, answer])

    written = '{"name": "weather", "arguments": {"city": "Rome"}}'
    assert right_answer(encoder, chat) == f"{content}<tool_call>{written}</tool_call>"
    assert right_answer(encoder, Chat([*history, history[0], history[1]])) == "Where?"
    assert shown([*chat.messages, history[0]]).splitlines()[-2] == (written if content else f"assistant: {written}")


def test_a_call_that_ends_a_conversation_is_the_answer_that_rewards_get() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {}}}
    chat = Chat([{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "", "tool_calls": [call]}])

    assert before_last_answer(chat).columns == {"answer": '{"name": "weather", "arguments": {}}'}
