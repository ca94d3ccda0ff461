"""What is printed is whole: no figure is cut in a terminal of 80 columns, and a pipe gets a line for each thing."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click import unstyle

from tests.cli.command import Result, Tuner
from tests.launch.plans import checkpoint, written_run
from tuner.recipes import catalog
from tuner.runs.records import RunStatus
from tuner.zero import presets

WIDE = ("llama3_1_405b_full_alpaca_e3", "--gpus", "8", "--gpu", "h100", "--host-memory", "64GB")
LEVELS = tuple(catalog.short_name(rung.name) for rung in presets.rungs())


@pytest.fixture
def narrow(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> Tuner:
    """Return the command line in a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        done = tuner(*arguments)
        return replace(done, out=unstyle(done.out))

    return run


def _assert_whole(done: Result) -> None:
    assert done.code == 0, done.err
    assert "…" not in done.out
    assert "..." not in done.out
    assert [line for line in done.out.splitlines() if len(line.rstrip()) > 80] == []


def _rows(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}


def _assert_planned(text: str) -> None:
    rows = _rows(text)
    heads = text.partition("(row 'host')\n")[2].partition("\nsplit")[0]
    assert sorted(re.findall("[a-z0-9]+", heads)) == sorted("_".join(LEVELS).split("_")), "heads may be broken"
    for part in ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "context", "total", "spare"):
        assert len(rows[part]) == len(LEVELS)
        assert all(re.fullmatch(r"-?\d+\.\d+", size) for size in rows[part])
    assert len(rows["host"]) == len(LEVELS)


def test_a_plan_is_whole_in_80_columns(narrow: Tuner) -> None:
    done = narrow("plan", *WIDE, "--nodes", "16", "--interconnect", "8x400Gb/s")

    _assert_whole(done)
    _assert_planned(done.out)
    assert len(_rows(done.out)["zero3_hpz"]) == 7


def test_a_plan_that_is_piped_is_whole(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    done = tuner("plan", *WIDE)

    _assert_planned(done.out)
    assert "Nothing fits. " in done.out or "Take " in done.out
    assert any(line.startswith("Estimates: ") and line.endswith("measured.") for line in done.out.splitlines())


def _two_runs() -> None:
    long = "qwen3_235b_a22b_qlora_orpo_dpo_mix_40k_e3/20261122_103741"
    run = written_run(Path(f"work_dirs/{long}").absolute())
    run.log_metrics({"step": 123456, "loss": 1.23456, "tokens_per_second": 4321000.0})
    run.write_status(
        RunStatus(state="stopped", exit_code=75, message="stopped: at step 123456 on request, with words to spare.")
    )
    checkpoint(run.path, 123456)
    written_run(Path("work_dirs/second").absolute()).write_status(RunStatus(state="done"))


def test_runs_are_whole_in_80_columns(narrow: Tuner) -> None:
    _two_runs()

    done = narrow("runs")

    _assert_whole(done)
    assert "qwen3_235b_a22b_qlora_orpo_dpo_mix_40k_e3/20261122_103741\n" in done.out
    assert "stopped  step 123,456  loss 1.2346  4,321,000 tokens/s" in done.out
    assert "Resumes from step 123,456" in " ".join(done.out.split())


def test_runs_that_are_piped_have_a_line_each(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _two_runs()

    lines = tuner("runs").out.splitlines()

    assert [line.split()[0] for line in lines] == [
        "run",
        "qwen3_235b_a22b_qlora_orpo_dpo_mix_40k_e3/20261122_103741",
        "second",
    ]
    assert "with words to spare. Resumes from step 123,456" in lines[1]


def test_an_import_is_whole_in_80_columns_and_a_line_a_key_on_a_pipe(narrow: Tuner, tmp_path: Path) -> None:
    keys = {"cutoff_len": 1024, "preprocessing_num_workers": 16, "gradient_accumulation_steps": 8, "do_train": True}
    text = "model_name_or_path: a/b\nstage: sft\nfinetuning_type: lora\n"
    Path("sft.yaml").write_text(text + "".join(f"{key}: {value}\n" for key, value in keys.items()))

    done = narrow("import", "sft.yaml", "-o", "mine.py")

    _assert_whole(done)
    lines = done.out.splitlines()
    for key in keys:
        assert len([line for line in lines if line.split()[1:2] == [key]]) == 1
    assert lines.index("changed in meaning:") < lines.index("no counterpart:") < lines.index("taken:")
