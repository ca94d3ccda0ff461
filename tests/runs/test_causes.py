"""Every sign of every cause in a log as the library writes it, and none in what is ordinary.

logs/CAUSE.log holds excerpts, each below a line `=== what it is`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.each import each
from tuner.runs.causes import classify, table

LOGS = Path(__file__).parent / "logs"


def _excerpts(file: Path) -> Iterator[tuple[str, str]]:
    for part in re.split(r"^=== ", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        yield title, text


CASES = [(file.stem, title, text) for file in sorted(LOGS.glob("*.log")) for title, text in _excerpts(file)]
FAILURES = [case for case in CASES if case[0] != "ordinary"]


@pytest.mark.parametrize(("cause", "title", "text"), FAILURES, ids=[f"{case[0]}: {case[1]}" for case in FAILURES])
def test_a_log_shows_its_cause(cause: str, title: str, text: str) -> None:
    found = classify(text)

    assert found is not None
    assert found[0].name == cause
    assert found[1] and found[1] in text


@pytest.mark.parametrize(("title", "text"), [case[1:] for case in CASES if case[0] == "ordinary"])
def test_ordinary_logs_show_none(title: str, text: str) -> None:
    assert classify(text) is None


@each([(cause, sign) for cause in table() for sign in cause.signs])
def test_every_sign_is_in_a_log(cause: object, sign: str) -> None:
    texts = [text for name, _, text in CASES if name == getattr(cause, "name", None)]

    assert any(re.search(sign, text, re.MULTILINE) for text in texts)


def test_the_line_that_shows_it_is_told_without_the_launchers_prefix() -> None:
    found = classify("fine\n[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:1\nmore\n")

    assert found and found[1] == "RuntimeError: Connection closed by peer [127.0.0.1]:1"


def test_a_line_without_an_end_is_cut() -> None:
    found = classify("CUDA out of memory " + "x" * 10_000)

    assert found and len(found[1]) == 300


def test_the_source_lines_of_a_traceback_are_no_signs() -> None:
    text = 'Traceback:\n  File "a.py", line 1, in EADDRINUSE\n    raise MemoryError()\nKeyError: 1\n'

    assert classify(text) is None


def test_what_a_rank_lost_is_no_cause_beside_its_own_error() -> None:
    text = "RuntimeError: Connection closed by peer\nDuring handling:\ntorch.OutOfMemoryError: CUDA out of memory.\n"

    found = classify(text)

    assert found and found[0].name == "gpu-out-of-memory"
