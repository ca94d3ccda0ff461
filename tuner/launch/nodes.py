"""How the launchers of several nodes agree to start a run again: words in the run directory that they share.

Each node says that its ranks have ended, and whether it objects; node 0 hears all and decides. Its word is the next
attempt's run.json, or why there is none. What speaks for or against another attempt, `retry` knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tuner.errors import RunDirectoryError
from tuner.files import write_text
from tuner.runs import beats
from tuner.runs.directory import RunDirectory

Answer = TypeVar("Answer")
_POLL_S = 0.1
_LOOK_S = 10.0
_ENDING_S = 120.0
"""Two looks of a rank's watchdog (a minute), its stacks, the end of the others, and the shared folder's delay."""
_DECIDING_S = 600.0
"""What node 0 has to make the next attempt's plan: it hashes a checkpoint."""


def patience_s(hang_timeout_s: float, grace_s: float) -> float:
    """Return how long another node's ranks can take to end after their last sign of life, in seconds.

    A lost peer ends no collective by itself: the process group waits for ever. So a rank ends when its watchdog has
    seen no progress for `hang_timeout_s`, or `grace_s` after it was told to stop.
    """
    return hang_timeout_s + grace_s + _ENDING_S


def ended(run: RunDirectory, node_rank: int, objection: str | None) -> None:
    """Say that this node's ranks have ended, and what speaks against another attempt."""
    write_text(_word(run, f"node-{node_rank}"), objection or "")


def objection(run: RunDirectory, num_nodes: int, patience_s: float) -> str | None:
    """Wait until the ranks of all nodes have ended, and return the first objection of one.

    Ranks of the last attempt that still live would write into the next one's folder. `patience_s` counts from their
    last sign of life.
    """
    words = [_word(run, f"node-{rank}") for rank in range(num_nodes)]

    def heard() -> list[str] | None:
        return [word.read_text() for word in words] if all(map(Path.is_file, words)) else None

    said = _await(heard, run, patience_s)
    if said is None:
        missing = [str(rank) for rank, word in enumerate(words) if not word.is_file()]
        return f"no status from node {', '.join(missing)} for {patience_s:.0f} s"
    return next(filter(None, said), None)


def refuse(run: RunDirectory, why: str) -> None:
    """Say to the other nodes that there is no other attempt."""
    write_text(_word(run, "restart"), why)


def decision(run: RunDirectory, launch_id: str, patience_s: float) -> tuple[str | None, str | None]:
    """Wait for node 0's word: the next attempt's launch id, or why there is none."""
    refusal, waits_s = _word(run, "restart"), patience_s + _DECIDING_S

    def heard() -> tuple[str | None, str | None] | None:
        if refusal.is_file():
            return None, refusal.read_text()
        try:
            latest = str(run.read_json(run.run).get("launch_id"))
        except RunDirectoryError:  # a shared file system may show it late
            return None
        return (latest, None) if latest != launch_id else None

    return _await(heard, run, waits_s) or (None, f"no status from node 0 for {waits_s:.0f} s")


def _word(run: RunDirectory, name: str) -> Path:
    return run.ranks / f"{name}.word"


def _await(look: Callable[[], Answer | None], run: RunDirectory, patience_s: float) -> Answer | None:
    """Return what `look` sees in the end, or None once no rank has given a sign of life for `patience_s` seconds."""
    moved_s = looked_s = time.monotonic()
    seen = beats.written(run)
    while time.monotonic() - moved_s < patience_s:
        answer = look()
        if answer is not None:
            return answer
        time.sleep(_POLL_S)
        if time.monotonic() - looked_s >= min(_LOOK_S, patience_s / 4):  # many ranks have as many files
            before, seen, looked_s = seen, beats.written(run), time.monotonic()
            moved_s = looked_s if seen != before else moved_s
    return None
