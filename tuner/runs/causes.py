"""The causes of failed runs: each one's name, its message, its signs in logs, and the next command to type.

Causes with signs are the rows of causes.toml. This module looks at text only; `diagnose` decides which cause came
first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tuner.errors import Stopped
from tuner.files import read_text

_ROWS = Path(__file__).with_suffix(".toml")
_AGAIN = "{again}"
_SHOW_LOG = "tail -n 50 {log}"
_MAX_LINE = 300
_INDENTED = r'^(?:\s{4,}|\s+File "|\s*[\^~]+$)'
_PREFIX = r"^\[(?:rank|default)\d+\]:\s?"
_GREETING = r"\. This is typically caused by a remote worker hanging or bugs in the application\.?.*"
"""What gloo adds to each error of a connection (torch 2.13): advice for those who develop it, and good wishes."""


class Role(IntEnum):
    """How a failure relates to others of the same run; a lower value explains a higher one."""

    CAUSE = 0
    WAITED = 1
    """It gave up waiting for another rank."""
    LOST = 2
    """It lost another rank, or received SIGTERM."""


class Cause(NamedTuple):
    """One cause.

    Args:
        name: As it stands in status.json.
        says: What happened, in a few words.
        signs: Regular expressions; one of them in a line of a log means this cause.
        command: The next command; {again}, {log} (of the rank), {run} and {recipe} are filled in.
        exit_code: The run's exit code where the rank did not give one of its own (1 is not its own).
    """

    name: str
    says: str = ""
    signs: tuple[str, ...] = ()
    command: str = _AGAIN
    exit_code: int = 1
    role: Role = Role.CAUSE

    def found_in(self, text: str) -> str | None:
        """Return the line that shows this cause, or None."""
        for sign in self.signs:
            match = re.search(sign, text, re.MULTILINE)
            if match:
                begin = text.rfind("\n", 0, match.start()) + 1
                line = re.sub(_PREFIX, "", text[begin:].partition("\n")[0])
                return without_greeting(line).strip()[:_MAX_LINE]
        return None


GPU_MEMORY = "gpu-out-of-memory"
HOST_MEMORY = "host-out-of-memory"
SHARED_MEMORY = "shared-memory"
NOT_A_NUMBER = "not-a-number"
LOST_PEER = "lost-peer"

KILLED = Cause("killed", "killed by SIGKILL, usually because memory ran out", (), "dmesg --ctime | tail -n 20", 137)
CRASHED = Cause("crashed", "crashed", (), _SHOW_LOG, 139)
OVERDUE = Cause("did-not-stop", "did not stop when asked to", (), _SHOW_LOG, 137, Role.WAITED)
TOLD_TO_END = Cause("told-to-end", "received SIGTERM", exit_code=143, role=Role.LOST)
BUG = Cause("bug", "an error that tuner does not know", (), _SHOW_LOG)
SILENT = Cause("unknown", "ended without a report", (), _SHOW_LOG)


@cache
def table() -> Sequence[Cause]:
    """Return the causes that a log or a report can show; a specific sign stands before a general one."""
    import tomllib  # only after a failure

    rows = tomllib.loads(read_text(_ROWS))["cause"]
    return tuple(
        Cause(**{**row, "signs": tuple(row.get("signs", ())), "role": Role[row.get("role", Role.CAUSE.name)]})
        for row in rows
    )


def every() -> Sequence[Cause]:
    """Return all causes; several of them can have one name."""
    return (*table(), KILLED, CRASHED, OVERDUE, TOLD_TO_END, BUG, SILENT)


def without_greeting(text: str) -> str:
    """Return an error's text without what gloo adds to it."""
    return re.sub(_GREETING, ".", text)


def classify(text: str) -> tuple[Cause, str] | None:
    """Return the cause that a text shows and the line that shows it; source lines of tracebacks are no signs."""
    signs = "\n".join(line for line in text.splitlines() if not re.match(_INDENTED, line))
    for cause in table():
        line = cause.found_in(signs)
        if line is not None:
            return cause, line
    return None


def named(name: str) -> Cause:
    """Return the first cause of that name, or a new one for the code of a TunerError, which needs no more words.

    After a mistake the same command fails in the same way, so the next one shows the end of the log: it says what to
    change. `tuner check` finds less there, because the start has made the same checks.
    """
    cause_of_name = next((cause for cause in table() if cause.name == name), None)
    return cause_of_name or Cause(name, command=_AGAIN if name == Stopped.code else _SHOW_LOG)
