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
from tuner.runs.directory import RunDirectory

Answer = TypeVar("Answer")
_POLL_S = 0.1
_OTHERS_S = 900.0
"""NCCL notices a lost peer after 10 minutes at the latest (its default time-out), and ranks have 5 to end."""


def ended(run: RunDirectory, node_rank: int, objection: str | None) -> None:
    """Say that this node's ranks have ended, and what speaks against another attempt."""
    write_text(_word(run, f"node-{node_rank}"), objection or "")


def objection(run: RunDirectory, num_nodes: int) -> str | None:
    """Wait until the ranks of all nodes have ended, and return the first objection of one.

    Ranks of the last attempt that still live would write into the next one's folder.
    """
    words = [_word(run, f"node-{rank}") for rank in range(num_nodes)]
    said = _await(lambda: [word.read_text() for word in words] if all(map(Path.is_file, words)) else None)
    if said is None:
        missing = [str(rank) for rank, word in enumerate(words) if not word.is_file()]
        return f"no word of node {', '.join(missing)} for {_OTHERS_S:.0f} s"
    return next(filter(None, said), None)


def refuse(run: RunDirectory, why: str) -> None:
    """Say to the other nodes that there is no other attempt."""
    write_text(_word(run, "restart"), why)


def decision(run: RunDirectory, launch_id: str) -> tuple[str | None, str | None]:
    """Wait for node 0's word: the next attempt's launch id, or why there is none."""
    refusal = _word(run, "restart")

    def heard() -> tuple[str | None, str | None] | None:
        if refusal.is_file():
            return None, refusal.read_text()
        try:
            latest = str(run.read_json(run.run).get("launch_id"))
        except RunDirectoryError:  # a shared file system may show it late
            return None
        return (latest, None) if latest != launch_id else None

    return _await(heard) or (None, f"no word of node 0 for {_OTHERS_S:.0f} s")


def _word(run: RunDirectory, name: str) -> Path:
    return run.ranks / f"{name}.word"


def _await(look: Callable[[], Answer | None]) -> Answer | None:
    deadline = time.monotonic() + _OTHERS_S
    while time.monotonic() < deadline:
        found = look()
        if found is not None:
            return found
        time.sleep(_POLL_S)
    return None
