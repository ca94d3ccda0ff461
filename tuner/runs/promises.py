"""What the plan of a run had promised, beside what the run has measured: memory, seconds, tokens, hours, the disk.

A promise that is missed by more than `MISSED` names the term that explains most of it, where a run measures that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tuner.files import JsonObject, sized
from tuner.runs import beats, checkpoints
from tuner.runs.directory import RunDirectory
from tuner.runs.records import Planned, RanksPace

MISSED = 0.1
"""The part of what was planned by which a measurement may differ."""
PARTS = {
    "useful": "steps that count",
    "lost": "steps that were repeated after a resume",
    "startup": "start-up: processes, data, model, checkpoint",
    "saves": "saves: what the steps waited for",
    "validation": "validation",
    "waiting": "waiting for nodes, and between attempts that tuner restarted",
    "stalled": "without progress before an attempt ended",
    "finish": "the result, samples, uploads",
}
"""What time goes into, and how a reader is told so."""
_SHOWN: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "peak_bytes": ("memory of a GPU", sized),
    "step_s": ("a step", "{:,.2f} s".format),
    "tokens_per_second": ("tokens a second", "{:,.0f}".format),
    "hours": ("hours", "{:,.2f}".format),
    "disk_bytes": ("room on the disk", sized),
}
"""How a quantity is called, and how it is written."""
_WEIGHTS = (".safetensors", ".bin", ".pt")
"""The files of a checkpoint and of a result that the plan counts."""


@dataclass(frozen=True)
class Promise:
    """One quantity, by its key in `_SHOWN`.

    Args:
        term: What explains most of a miss, in words; None: it is kept, or nothing that a run measures explains it.
    """

    quantity: str
    planned: float
    measured: float
    term: str | None = None

    @property
    def ratio(self) -> float:
        """How many times the planned value was measured."""
        return self.measured / self.planned

    @property
    def is_missed(self) -> bool:
        return abs(self.ratio - 1) > MISSED

    def to_json(self) -> JsonObject:
        return {**asdict(self), "ratio": round(self.ratio, 3), "is_missed": self.is_missed}

    def __str__(self) -> str:
        """Return it in words, such as "memory 33.1 GiB, measured 40.0 GiB (+21%: activations)"."""
        title, written = _SHOWN[self.quantity]
        missed = f" ({self.ratio - 1:+.0%}{f': {self.term}' if self.term else ''})" if self.is_missed else ""
        return f"{title} {written(self.planned)}, measured {written(self.measured)}{missed}"


def line(promises: Sequence[Promise]) -> str:
    """Return all of them in one line; an empty one if nothing was promised."""
    return f"Planned: {'; '.join(map(str, promises))}." if promises else ""


def of(
    run_dir: RunDirectory, step_s: float | None, tokens_per_second: float | None, of_last: Mapping[str, float]
) -> tuple[Promise, ...]:
    """Return the promises of a run's last start that something was measured of.

    Args:
        step_s: The mean time of its steps.
        tokens_per_second: Over all steps that count.
        of_last: What the time of the last attempt went into, as PARTS names it; empty if it is not done.
    """
    record, status = run_dir.run_or_none, run_dir.status_or_none
    if record is None or record.planned is None:
        return ()
    planned, pace = record.planned, run_dir.pace_or_none
    peak = max(beats.peak_bytes(run_dir), (status.peak_bytes if status else None) or 0)
    wall_s = sum(of_last.values())
    comparisons = (
        ("peak_bytes", planned.peak_bytes, peak, None),
        ("step_s", planned.step_s, step_s, _of_step(planned, step_s, pace)),
        ("tokens_per_second", planned.tokens_per_second, tokens_per_second, None),
        ("hours", planned.hours, wall_s / 3600, _of_hours(planned, of_last)),
        ("disk_bytes", planned.disk_bytes, *_on_disk(run_dir, planned)),
    )
    promises = (
        Promise(name, planned, measured, term) for name, planned, measured, term in comparisons if planned and measured
    )
    return tuple(promise if promise.is_missed else replace(promise, term=None) for promise in promises)


def _of_step(planned: Planned, step_s: float | None, pace: RanksPace | None) -> str | None:
    """Return what the last comparison of ranks says of a step that takes longer than planned."""
    if pace is None or not pace.ranks or planned.step_s is None or step_s is None:
        return None
    more_s, num = step_s - planned.step_s, len(pace.ranks)
    data_s = sum(rank.data_s for rank in pace.ranks) / num
    waiting_s = sum(rank.waiting_s for rank in pace.ranks) / num - (planned.sending_s or 0.0)
    term, largest_s = max((("reading rows", data_s), ("waiting for other ranks", waiting_s)), key=lambda wait: wait[1])
    return term if more_s > 0 and largest_s > more_s / 2 else None


def _of_hours(planned: Planned, seconds: Mapping[str, float]) -> str | None:
    """Return what took most of the time beyond the planned: a part beside the steps, or the steps themselves."""
    if planned.hours is None or not seconds:
        return None
    planned_s = 3600 * planned.hours
    beyond = {part: spent_s - planned_s if part == "useful" else spent_s for part, spent_s in seconds.items()}
    largest = max(beyond, key=lambda part: beyond[part]) if sum(seconds.values()) > planned_s else "useful"
    return PARTS[largest]


def _on_disk(run_dir: RunDirectory, planned: Planned) -> tuple[float | None, str | None]:
    """Return the room that so many checkpoints and the result take with their true sizes, and which differs more."""
    saved = next(
        (checkpoint.path for checkpoint in checkpoints.listed(run_dir.checkpoints) if not checkpoint.problem), None
    )
    if saved is None or not run_dir.final.is_dir() or planned.disk_bytes is None:
        return None, None
    try:
        one_bytes, result_bytes = _bytes(saved), _bytes(run_dir.final)
    except OSError:  # somebody has moved a file away, or a part of it
        return None, None
    number = planned.num_checkpoints or 0
    of_saves = number * abs(one_bytes - (planned.checkpoint_bytes or 0))
    term = "checkpoints" if of_saves > abs(result_bytes - (planned.result_bytes or 0)) else "the result"
    return number * one_bytes + result_bytes, term


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.suffix in _WEIGHTS)
