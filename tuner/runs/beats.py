"""Signs of life: what each rank did last, in ranks/N.beat. A rank writes its own file, and the supervisor reads all.

The limits, after which a rank counts as hung, are those of `time_limits`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field

from tuner.errors import RunDirectoryError
from tuner.files import load_json, read_bytes
from tuner.runs.directory import RunDirectory
from tuner.runs.records import Versioned

_NAME = re.compile(r"([0-9]{1,7})\.beat")
_WIDTH = 2048
"""Bytes of a beat. All have the same length, so a new one replaces the old one completely."""


class Phase(StrEnum):
    """What a rank's time goes into."""

    STARTUP = "startup"
    """Until the first step: imports, data, model, checkpoint."""
    WAITING = "waiting"
    """Until all ranks have joined."""
    STEPS = "steps"
    SAVES = "saves"
    """What a save holds the steps up; the rest of it is done while they go on."""
    VALIDATION = "validation"
    GENERATION = "generation"
    """Of completions, which is a part of a step."""
    FINISH = "finish"
    """After the last step: the result, samples, the last upload."""


def in_steps_s(seconds: Mapping[str, float]) -> float:
    """Return the time that steps took, from the time in each phase."""
    return seconds.get(Phase.STEPS, 0.0) + seconds.get(Phase.GENERATION, 0.0)


class Beat(Versioned):
    """One rank's last sign of life.

    Args:
        pid: Its process id on `host`.
        count: The number of micro-batches, evaluation steps, saves and phases begun so far; it is the same on all ranks
            that are in step.
        doing: What the rank does, in a few words.
        at_s: The host's monotonic clock, in seconds; the file's own time is for other machines.
        save_s: The longest save so far, in seconds.
        log_bytes: The size of its log when it failed; its error follows there. None: it has not failed. Unlike a
            report, a beat needs no free space on a full disk.
        limit_s: How long it may stand still in what it does, in seconds; it then counts as hung. 0: not known yet.
        step: The last optimizer step that it has taken; 0: none.
        phase: The `Phase` that it is in.
        seconds: The time in each phase, from the start of its process to its last progress.
        progress_at: The time of its last progress, in seconds since 1970 by its host's clock.
        saves: The last two saves that it began: the step, and the time that steps had taken by then.
        peak_bytes: The most memory that it has held; 0: not known.
    """

    rank: int
    pid: int
    host: str
    count: int
    doing: str
    at_s: float
    save_s: float
    log_bytes: int | None = None
    limit_s: float = 0.0
    step: int = 0
    phase: Annotated[Phase, Field(strict=False)] = Phase.STARTUP
    seconds: dict[str, float] = Field(default_factory=dict)
    progress_at: float = 0.0
    saves: list[Annotated[tuple[int, float], Field(strict=False)]] = Field(default_factory=list)
    peak_bytes: int = 0

    def to_bytes(self) -> bytes:
        return json.dumps(self.to_json()).encode().ljust(_WIDTH - 1) + b"\n"


def path_of(run_dir: RunDirectory, rank: int) -> Path:
    return run_dir.ranks / f"{rank}.beat"


def of_rank(run_dir: RunDirectory, rank: int) -> Beat | None:
    """Return the last beat of one rank, or None if it has none."""
    return _read(path_of(run_dir, rank))


def read_beats(run_dir: RunDirectory) -> dict[int, Beat]:
    """Return the last beat of every rank that has one."""
    beats = filter(None, map(_read, run_dir.ranks.glob("*.beat")))
    return {beat.rank: beat for beat in beats}


def peak_bytes(run_dir: RunDirectory) -> int:
    """Return the most memory that a rank of the last attempt has held; 0: none is known."""
    return max((beat.peak_bytes for beat in read_beats(run_dir).values()), default=0)


def log_size(run_dir: RunDirectory, rank: int) -> int:
    """Return the size of a rank's log in bytes."""
    try:
        return run_dir.log_of(rank).stat().st_size
    except OSError:
        return 0


def log_before_failure(run_dir: RunDirectory) -> int | None:
    """Return how many bytes rank 0 wrote to its log before a rank failed; None: no rank has failed.

    It is 0 if the other ranks failed alone: how far rank 0 was then is not known.
    """
    beat = of_rank(run_dir, 0)
    if beat is not None and beat.log_bytes is not None:
        return beat.log_bytes
    return 0 if run_dir.failures() else None


def _read(file: Path) -> Beat | None:
    """Return a beat; None if it is half written, damaged, or of a later version: it is then as if it was not there."""
    with contextlib.suppress(OSError, ValueError, RunDirectoryError):
        content = load_json(read_bytes(file))
        return Beat.of(content, file) if isinstance(content, dict) else None
    return None


def written(run_dir: RunDirectory) -> dict[int, int]:
    """Return the time at which each rank wrote its beat. Compare for change only: clocks of machines differ."""
    times = {}
    with contextlib.suppress(OSError):
        for file in os.scandir(run_dir.ranks):
            if match := _NAME.fullmatch(file.name):
                times[int(match[1])] = file.stat().st_mtime_ns
    return times


def here(run_dir: RunDirectory) -> dict[int, Beat]:
    """Return the beats of the ranks on this machine."""
    return {rank: beat for rank, beat in read_beats(run_dir).items() if beat.host == socket.gethostname()}
