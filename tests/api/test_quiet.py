"""Calls of the API let no library speak, and leave the caller's program as they found it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tuner.worker.quiet import QUIET, quiet

SCRIPT = """
import json, logging, os, sys, warnings
if "imported" in sys.argv:
    import datasets, deepspeed, peft, transformers, trl
    datasets.logging.get_verbosity(), deepspeed.get_accelerator()

def state():
    names = ("DeepSpeed", "accelerate", "datasets", "deepspeed", "peft", "torch.distributed", "transformers", "trl")
    loggers = {name: (logging.getLogger(name).level, len(logging.getLogger(name).filters)) for name in names}
    return dict(os.environ), list(map(str, warnings.filters)), loggers

import tuner
rows = [{"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}] * 4
open("rows.jsonl", "w").write("\\n".join(map(json.dumps, rows)))
print("BEGIN", flush=True)
before = state()
tuner.chat("package:tiny", max_new_tokens=2).ask("1 + 1?")
if "chat" in sys.argv:
    sys.exit()
tuner.preview_data(rows, recipe="tiny_lora_sample_e1", val=rows)
tuner.evaluate("package:tiny", data="rows.jsonl", generate=2, max_new_tokens=2)
after = state()
import transformers, huggingface_hub.utils
shown = transformers.logging.is_progress_bar_enabled(), not huggingface_hub.utils.are_progress_bars_disabled()
print("END", json.dumps([before, after, shown]))
"""


def _ran(folder: Path, *argv: str, **variables: str) -> tuple[list[str], str]:
    """Return what the script wrote to stdout after BEGIN, and what to stderr."""
    env = {name: value for name, value in os.environ.items() if name not in {*QUIET, "PYTHONWARNINGS"}}
    env |= {"TUNER_CACHE": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": "", **variables}
    env.pop("DS_ACCELERATOR", None)
    argv = (sys.executable, "-c", SCRIPT, *argv)
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return lines[lines.index("BEGIN") + 1 :], done.stderr


def _assert_kept(before: dict[str, str], after: dict[str, str]) -> None:
    """Check that the variables are as before; torch adds some of its own when its parts are imported."""
    assert before.items() <= after.items()
    assert after.keys().isdisjoint(QUIET)


@pytest.mark.long
def test_a_script_hears_no_library_and_goes_on_as_if_it_had_imported_them_itself(tmp_path: Path) -> None:
    lines, told = _ran(tmp_path)

    (environ, filters, _), (environ_after, filters_after, loggers), shown = json.loads(lines[-1].removeprefix("END "))
    assert (len(lines), told) == (1, "")
    _assert_kept(environ, environ_after)
    assert set(filters) <= set(filters_after)  # libraries add some of their own
    assert str(("ignore", None, Warning, None, 0)) not in filters_after
    assert shown == [True, True]
    assert {loggers[name][0] for name in ("DeepSpeed", "datasets", "transformers")} == {30}
    assert all(level in (0, 30) and filters == 0 for level, filters in loggers.values())


@pytest.mark.long
def test_a_script_that_has_imported_the_libraries_finds_them_unchanged(tmp_path: Path) -> None:
    lines, _ = _ran(tmp_path, "imported")

    (environ, _, loggers), (environ_after, _, loggers_after), shown = json.loads(lines[-1].removeprefix("END "))
    assert len(lines) == 1
    _assert_kept(environ, environ_after)
    assert (loggers_after, shown) == (loggers, [True, True])


@pytest.mark.long
def test_a_script_that_asks_to_see_bars_sees_them(tmp_path: Path) -> None:
    _, told = _ran(tmp_path, "chat", HF_HUB_DISABLE_PROGRESS_BARS="0")

    assert "29/29" in told


State = tuple[dict[str, str], list[object], dict[str, tuple[int, list[object]]]]


def _state() -> State:
    loggers = {name: logging.getLogger(name) for name in ("DeepSpeed", "transformers", "trl")}
    levels = {name: (logger.level, [*logger.filters]) for name, logger in loggers.items()}
    return dict(os.environ), [*warnings.filters], levels


@pytest.fixture
def loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process one that nobody has quieted."""
    monkeypatch.setattr(sys, "warnoptions", [])
    for variable in QUIET:
        monkeypatch.delenv(variable, raising=False)
    for name in ("transformers", "trl"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.WARNING)


@pytest.mark.usefixtures("loud")
def test_what_was_changed_is_put_back_also_after_an_error() -> None:
    before = _state()

    with pytest.raises(ZeroDivisionError), quiet():
        inside = _state()
        warnings.warn("not heard", stacklevel=1)
        1 / 0  # noqa: B018

    assert _state() == before
    assert all(changed != old for changed, old in zip(inside, before, strict=True))


@pytest.mark.usefixtures("loud")
def test_the_last_of_overlapping_calls_puts_back() -> None:
    before = _state()
    first, second = quiet(), quiet()

    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    inside = _state()
    second.__exit__(None, None, None)

    assert inside[0]["TRANSFORMERS_VERBOSITY"] == "error"
    assert _state() == before


@pytest.mark.usefixtures("loud")
def test_what_the_user_has_set_is_kept_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "warning")
    monkeypatch.setattr(logging.getLogger("trl"), "level", logging.INFO)
    monkeypatch.setattr(sys, "warnoptions", ["default"])

    with quiet():
        environ, filters, levels = _state()

    assert environ["TRANSFORMERS_VERBOSITY"] == "warning"
    assert filters == [*warnings.filters]
    assert (levels["transformers"][0], levels["trl"][0]) == (logging.WARNING, logging.INFO)
