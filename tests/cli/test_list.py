"""`tuner list`, and what a shell completes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from tests.cli.command import Tuner
from tuner.cli import list as listing
from tuner.cli import parts
from tuner.cli import tuner as group
from tuner.recipes import catalog, patterns
from tuner.recipes.schema.objectives import OBJECTIVES

pytestmark = pytest.mark.usefixtures("nothing_starts")


def first_words(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line.startswith("  ")]


# Parts


def test_a_list_that_is_piped_has_every_part_on_a_line_with_its_summary(tuner: Tuner) -> None:
    result = tuner("list")

    assert result.code == 0
    for kind in catalog.KINDS:
        for name in catalog.names(kind):
            assert any(
                line.startswith(f"  {name} ") and line.endswith(f"  {catalog.summary(catalog.part_file(kind, name))}")
                for line in result.out.splitlines()
            )
    assert all(preset in result.out for preset in catalog.presets())


def test_a_list_on_a_terminal_is_short_and_keeps_every_name(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")

    text = tuner("list").out

    assert max(map(len, text.splitlines())) <= 100
    assert {*text.split()} >= {name for kind in catalog.KINDS for name in catalog.names(kind)}
    assert {*text.split()} >= {*catalog.presets()}
    assert len(text.splitlines()) < sum(len(catalog.names(kind)) for kind in catalog.KINDS) / 2
    assert catalog.summary(catalog.part_file("models", "tiny")) not in text


@pytest.mark.parametrize(
    ("arguments", "held"),
    [
        (["--models", "qwen3_8"], {"models": "qwen3_8"}),
        (["--models", "Qwen3-8"], {"models": "qwen3_8"}),
        (["--models=*qwen3_8*"], {"models": "qwen3_8"}),
        (["--methods"], {"methods": ""}),
        (["--objectives", "--recipes", "tiny_full"], {"objectives": "", "recipes": "tiny_full"}),
        (["--datasets", "oasst", "--methods", "q*"], {"datasets": "oasst", "methods": "q"}),
        (["oasst", "--datasets", "--methods", "q*"], {"datasets": "oasst", "methods": "q"}),
        (["oasst1"], dict.fromkeys(catalog.KINDS, "oasst1")),
    ],
)
def test_kinds_and_texts_narrow_the_list(tuner: Tuner, arguments: list[str], held: dict[str, str]) -> None:
    result = tuner("list", *arguments)

    right = [name for kind, text in held.items() for name in catalog.names(kind) if text in name]
    assert result.code == 0, result.err
    assert sorted(first_words(result.out)) == sorted(right)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--models", "qwne3"], ("'qwne3'", "Did you mean 'qwen3", "tuner list --models")),
        (["--methods", "qloar"], ("Did you mean 'qlora'?",)),
        (["--methods", "z*"], ("'z*'", "See: tuner list --methods")),
        (["alpcaa"], ("'alpcaa'", "Did you mean 'alpaca'?")),
        (["qwen3_8b_qloar_alpaca*"], ("'qwen3_8b_qloar_alpaca*'", "Did you mean 'qwen3_8b_qlora_alpaca_e3'?")),
        (["zzz*"], ("'zzz*'", "See: tuner list")),
    ],
)
def test_what_is_not_there_is_told_with_the_nearest_name(tuner: Tuner, arguments: list[str], told: tuple[str]) -> None:
    result = tuner("list", *arguments)

    assert (result.code, result.out) == (2, "")
    assert len(result.messages) == 1
    for part in told:
        assert part in result.err


def test_as_json_each_kind_holds_its_names_with_what_is_known_of_them(tuner: Tuner) -> None:
    found = json.loads(tuner("list", "--json").out)

    assert [*found] == ["version", *catalog.KINDS, "presets", "own"]
    for kind in catalog.KINDS:
        assert [*found[kind]] == [*catalog.names(kind)]
    facts = {
        "summary": catalog.summary(catalog.part_file("methods", "lora")),
        "origin": "tuner",
        "file": "configs/methods/lora.py",
    }
    assert found["methods"]["lora"] == facts
    assert found["models"]["qwen3_8b"]["path"] == "Qwen/Qwen3-8B"
    assert found["models"]["qwen3_8b"]["parameters"] == 8_190_735_360  # as published
    assert found["datasets"]["alpaca"]["paths"] == ["tatsu-lab/alpaca"]
    rows = {name: block.facts.rows for name, block in OBJECTIVES.items()}
    learned = [name for name, kind in rows.items() if kind in ("conversations", "texts", "prompts")]
    assert found["datasets"]["alpaca"]["objectives"] == learned


def test_as_json_a_filter_filters(tuner: Tuner) -> None:
    found = json.loads(tuner("list", "--json", "--methods", "q").out)

    assert [*found] == ["version", "methods", "presets", "own"]
    assert [*found["methods"]] == ["qlora"]


# Names


def test_a_glob_is_a_pattern_of_whole_names(tuner: Tuner) -> None:
    names = tuner("list", "qwen3_?b_*lora_alpaca").out.split()

    assert {"qwen3_8b_lora_alpaca_e3", "qwen3_8b_qlora_alpaca_e3", "qwen3_4b_rslora_alpaca_e3"} <= {*names}
    assert all(name.startswith("qwen3_") and name.endswith("lora_alpaca_e3") for name in names)
    assert not any("kto" in name for name in names)


def test_every_listed_name_is_a_recipe(tuner: Tuner) -> None:
    names = tuner("list", "tiny_*").out.split()

    assert "tiny_full_sample" in names
    for name in names:
        assert catalog.find(name)


def test_too_many_names_are_cut_with_a_message(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_MAX_NAMES", 3)

    result = tuner("list", "*_alpaca")

    assert len(result.out.splitlines()) == 3
    total = patterns.expand("*_alpaca", 0, parts.learners).total
    assert f"The first 3 of {total:,} names" in result.err
    assert result.code == 0


def test_names_as_json_come_with_how_many_there_are(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_MAX_NAMES", 1)

    found = json.loads(tuner("list", "--json", "tiny_[lq]*ora_alpaca_e2").out)

    assert found == {"version": 1, "names": ["tiny_lora_alpaca_e2"], "total": 2}


# Completion


def completed(*words: str) -> list[tuple[str, str]]:
    complete = BashComplete(group, {}, "tuner", "_TUNER_COMPLETE")
    return [(item.type, item.value) for item in complete.get_completions([*words[:-1]], words[-1])]


@pytest.mark.parametrize("command", ["train", "show", "copy", "data", "list"])
def test_a_recipe_is_completed_part_by_part(command: str) -> None:
    assert ("plain", "qwen3_8b_qlora_") in completed(command, "qwen3_8b_")
    assert ("plain", "qwen3_8b_dpo_lora_") in completed(command, "qwen3_8b_dpo_")
    assert ("plain", "qwen3_8b_qlora_alpaca_e3") in completed(command, "qwen3_8b_q")
    assert ("plain", "qwen3_8b_dpo_lora_alpaca_e3") not in completed(command, "qwen3_8b_dpo_lora_a")


def test_files_are_left_to_the_shell() -> None:
    assert completed("train", "./my") == [("file", "./my")]
    assert completed("train", "x", "--deepspeed", "./my") == [("file", "./my")]
    assert completed("train", "x", "--data", "my") == [("file", "my")]


def test_presets_and_keys_are_completed() -> None:
    presets = completed("train", "x", "--deepspeed", "deepspeed_zero2")

    assert presets == [("plain", name) for name in catalog.presets() if name.startswith("deepspeed_zero2")]
    assert ("plain", "optim_wrapper.optimizer.lr") in completed("train", "x", "--set", "optim_wrapper.o")
    assert completed("show", "x", "--cfg-options", "warmup") == [("plain", "warmup_ratio"), ("plain", "warmup_steps")]
    assert ("plain", "zero_optimization.overlap_comm") in completed("train", "x", "--ds", "zero_optimization.o")
    assert completed("check", "x", "--ds", "overlap_c") == [("plain", "overlap_comm")]


BASH = """
PATH={path}:$PATH
eval "$(_TUNER_COMPLETE=bash_source tuner)"
complete -p tuner
COMP_WORDS=(tuner train qwen3_8b_ql) COMP_CWORD=2
_tuner_completion tuner
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_bash_itself_completes_a_name() -> None:
    script = BASH.format(path=Path(sys.executable).parent)

    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, env={**os.environ})

    assert done.returncode == 0, done.stderr
    first, *names = done.stdout.splitlines()
    assert first == "complete -o nosort -F _tuner_completion tuner"
    assert "qwen3_8b_qlora_alpaca_e3" in names
    assert all(name.startswith("qwen3_8b_qlora_") for name in names)


def num_calls(work: Callable[[], object]) -> int:
    """Return how many functions of Python some work calls."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


def test_a_list_and_a_completion_are_quick(tuner: Tuner) -> None:
    shell = BashComplete(group, {}, "tuner", "_TUNER_COMPLETE")

    assert num_calls(lambda: tuner("list")) < 50_000  # 15,000; there are 300,000 names
    assert num_calls(lambda: tuner("list", "*qlora*")) < 200_000  # 55,000
    assert num_calls(lambda: shell.get_completions(["train"], "qwen3_8b_qlora_")) < 200_000  # 56,000
