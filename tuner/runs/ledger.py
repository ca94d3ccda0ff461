"""The ledger of a run: what the time of all its attempts went into, and each interruption with its cause.

It reads run.json, status.json and the last sign of life of rank 0 of each attempt, and changes nothing. Durations are
those of rank 0's monotonic clock; only what lies before and after its process comes from the machines' time of day.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path

from tuner.files import JsonObject
from tuner.runs import beats, metrics, promises, states
from tuner.runs.beats import Beat, Phase
from tuner.runs.directory import RunDirectory
from tuner.runs.promises import PARTS, Promise
from tuner.runs.records import RunRecord, RunStatus
from tuner.runs.states import State

_PART_OF = {
    Phase.STARTUP: "startup",
    Phase.WAITING: "waiting",
    Phase.SAVES: "saves",
    Phase.VALIDATION: "validation",
    Phase.FINISH: "finish",
}


@dataclass(frozen=True)
class Attempt:
    """One attempt.

    Args:
        number: The name of its folder in attempts/; the last one's, which has none yet, is the next number.
        seconds: By part, as PARTS names them; empty if rank 0 has left no times of it.
        wall_s: From its command to its end; the time between it and a restart by tuner is the next one's.
        began: The step of the checkpoint that it resumed from; 0: it began anew.
        step: The last step that it took.
        lost_steps: Of its steps, those that a later attempt took again.
        cause: Of its end, as `runs.causes` names it.
        rank: Where it began to fail, and `host` that rank's machine.
        recovered_s: From its last progress to the next new step; None: it needed no recovery, or there was none.
    """

    number: int
    started: str
    state: State
    began: int
    step: int
    lost_steps: int
    wall_s: float
    seconds: dict[str, float]
    cause: str | None = None
    why: str = ""
    rank: int | None = None
    host: str | None = None
    recovered_s: float | None = None

    @property
    def was_interrupted(self) -> bool:
        return self.state not in ("running", "done")


@dataclass(frozen=True)
class Ledger:
    """All attempts of a run, the oldest first. The time between two attempts is not counted.

    Args:
        tokens: Those of the steps that count, up to the last logged one; None: not known.
        promises: What the plan of the last attempt had promised, beside what was measured.
    """

    attempts: tuple[Attempt, ...]
    tokens: float | None = None
    promises: tuple[Promise, ...] = ()

    @cached_property
    def seconds(self) -> dict[str, float]:
        """By part, of the attempts that have left their times."""
        known = [attempt.seconds for attempt in self.attempts if attempt.seconds]
        return {part: round(sum(times[part] for times in known), 1) for part in PARTS} if known else {}

    @property
    def wall_s(self) -> float:
        return round(sum(attempt.wall_s for attempt in self.attempts), 1)

    @property
    def goodput(self) -> float | None:
        """The part of the time that went into steps that count, from 0 to 1; None: not known."""
        if not self.seconds or not all(attempt.seconds for attempt in self.attempts):
            return None
        return round(self.seconds["useful"] / max(sum(self.seconds.values()), 1e-9), 4)

    @property
    def useful_tokens_per_second(self) -> float | None:
        """Of all ranks together, over all steps that count; None: not known."""
        if self.goodput is None or not self.tokens or not self.seconds["useful"]:
            return None
        return round(self.tokens / self.seconds["useful"], 1)

    @property
    def interruptions(self) -> tuple[Attempt, ...]:
        return tuple(attempt for attempt in self.attempts if attempt.was_interrupted)

    @property
    def mean_recovery_s(self) -> float | None:
        """The mean time to recover."""
        times = [attempt.recovered_s for attempt in self.attempts if attempt.recovered_s is not None]
        return round(sum(times) / len(times), 1) if times else None

    @property
    def seconds_per_step(self) -> float | None:
        """The mean time of a step, over all steps of all attempts."""
        num_steps = sum(attempt.step - attempt.began for attempt in self.attempts if attempt.seconds)
        taken_s = self.seconds.get("useful", 0.0) + self.seconds.get("lost", 0.0)
        return round(taken_s / num_steps, 4) if num_steps > 0 else None

    def to_json(self) -> JsonObject:
        return {
            "wall_s": self.wall_s,
            "seconds": self.seconds,
            "goodput": self.goodput,
            "mean_recovery_s": self.mean_recovery_s,
            "lost_steps": sum(attempt.lost_steps for attempt in self.attempts),
            "interruptions": len(self.interruptions),
            "seconds_per_step": self.seconds_per_step,
            "useful_tokens_per_second": self.useful_tokens_per_second,
            "promises": [promise.to_json() for promise in self.promises],
            "attempts": [asdict(attempt) for attempt in self.attempts],
        }


def read_ledger(run_dir: RunDirectory, *, died: str | None = None) -> Ledger:
    """Return the ledger of a run. Files that cannot be read are left out.

    Args:
        died: Why its last attempt died, where more than its files tells so, as Slurm; None: its files decide.
    """
    earlier = run_dir.earlier_attempts()
    numbers = [*earlier, 1 + max(earlier, default=0)]
    facts_of_attempts = [*map(_Facts.of, earlier.values()), _Facts.of(run_dir.path, died)]
    # An attempt whose run.json cannot be read does not say where it began.
    kept = [
        min([later.began for later in facts_of_attempts[place + 1 :] if later.record], default=None)
        for place in range(len(facts_of_attempts))
    ]
    attempts = [
        _attempt(numbers[place], attempt_facts, facts_of_attempts[place - 1] if place else None, kept[place])
        for place, attempt_facts in enumerate(facts_of_attempts)
    ]
    recovered = [
        replace(attempt, recovered_s=_recovered_s(attempts[place:])) if attempt.was_interrupted else attempt
        for place, attempt in enumerate(attempts)
    ]
    ledger = Ledger(tuple(recovered), metrics.num_tokens(run_dir, attempts[0].began))
    last = ledger.attempts[-1]
    of_last = last.seconds if last.state == "done" else {}
    of_plan = promises.of(run_dir, ledger.seconds_per_step, ledger.useful_tokens_per_second, of_last)
    return replace(ledger, promises=of_plan)


@dataclass(frozen=True)
class _Facts:
    """What the files of one attempt say."""

    record: RunRecord | None
    status: RunStatus | None
    state: State
    why: str
    beat: Beat | None
    logged_step: int
    """The last one that it logged, if rank 0 has left no beat; 0: none."""
    failed_host: str | None
    seen_at: float
    """When its files were last written, by the file system's clock."""

    @classmethod
    def of(cls, folder: Path, died: str | None = None) -> _Facts:
        run_dir = RunDirectory(folder)
        state, why = states.state_of(run_dir) if died is None else ("died", died)
        status = run_dir.status_or_none
        rank = status.diagnosis.rank if status and status.diagnosis else None
        failed = beats.of_rank(run_dir, rank) if rank is not None else None
        failed_host = failed.host if failed else None
        record, beat, seen_at = run_dir.run_or_none, beats.of_rank(run_dir, 0), states.seen_at(run_dir)
        logged_step = 0 if beat else metrics.latest(run_dir).get("step", 0)
        return cls(record, status, state, why, beat, logged_step, failed_host, seen_at)

    @property
    def began(self) -> int:
        return (self.record.resume_step if self.record else None) or 0

    @property
    def has_trained(self) -> bool:
        """Whether it reached its first step, as far as its end tells."""
        if self.state not in ("failed", "died") or self.logged_step > self.began:
            return True
        status = self.status
        return bool(status and (status.seconds is not None or (status.diagnosis and status.diagnosis.step is not None)))

    @property
    def started_at(self) -> float | None:
        return _seconds_since_1970(self.record.started if self.record else None)

    @property
    def ended_at(self) -> float | None:
        """The last that is known of it: an attempt at work has its last progress."""
        at = None if self.state == "running" else _seconds_since_1970(self.status.ended if self.status else None)
        return at or (self.beat.progress_at if self.beat else self.seen_at or None)


def _seconds_since_1970(text: str | None) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None


def _attempt(number: int, attempt: _Facts, before: _Facts | None, kept: int | None) -> Attempt:
    """Return one attempt.

    Args:
        before: The attempt before it.
        kept: The earliest step that a later attempt resumed from; None: there is no later one.
    """
    beat, status = attempt.beat, attempt.status
    diagnosis = status.diagnosis if status else None
    reported = max(status.step or 0 if status else 0, (diagnosis.step or 1) - 1 if diagnosis else 0)
    # A killed rank 0 wrote its last beat up to 1 s before.
    taken = max(beat.step if beat else attempt.logged_step, reported, attempt.began)
    useful = taken if kept is None else min(max(kept, attempt.began), taken)
    seconds = _seconds(attempt, before, taken, useful)
    wall_s = sum(seconds.values()) if seconds else _known_wall_s(attempt)
    return Attempt(
        number=number,
        started=attempt.record.started if attempt.record else "",
        state=attempt.state,
        began=attempt.began,
        step=taken,
        lost_steps=taken - useful,
        wall_s=round(wall_s, 1),
        seconds={part: round(spent, 2) for part, spent in seconds.items()},
        cause=diagnosis.cause if diagnosis else None,
        why=attempt.why,
        rank=diagnosis.rank if diagnosis else None,
        host=attempt.failed_host,
    )


def _known_wall_s(attempt: _Facts) -> float:
    """Return how long an attempt took of which rank 0 has left no times."""
    if attempt.status and attempt.status.seconds is not None:
        return attempt.status.seconds
    started_at, ended_at = attempt.started_at, attempt.ended_at
    return max(0.0, ended_at - started_at) if started_at and ended_at else 0.0


def _seconds(attempt: _Facts, before: _Facts | None, taken: int, useful: int) -> dict[str, float]:
    """Return what the time of an attempt went into; empty if rank 0 has left no times of it."""
    beat, started_at, ended_at = attempt.beat, attempt.started_at, attempt.ended_at
    if beat is None and attempt.has_trained:
        return {}
    seconds = dict.fromkeys(PARTS, 0.0)
    if started_at and before and before.ended_at and attempt.record and attempt.record.attempts:
        seconds["waiting"] += max(0.0, started_at - before.ended_at)
    if beat is None:  # it ended before rank 0 began
        seconds["startup"] += max(0.0, ended_at - started_at) if started_at and ended_at else 0.0
        return seconds
    for phase, part in _PART_OF.items():
        seconds[part] += beat.seconds.get(phase, 0.0)
    in_steps = beats.in_steps_s(beat.seconds)
    seconds["useful"] = _useful_s(beat, attempt.began, taken, useful)
    seconds["lost"] = in_steps - seconds["useful"]
    if started_at:
        seconds["startup"] += max(0.0, beat.progress_at - sum(beat.seconds.values()) - started_at)
    if ended_at:
        is_ending = attempt.state in ("done", "stopped") or beat.phase in (Phase.STARTUP, Phase.WAITING, Phase.FINISH)
        last = "finish" if attempt.state in ("done", "stopped") else _PART_OF.get(Phase(beat.phase), "")
        seconds[last if is_ending else "stalled"] += max(0.0, ended_at - beat.progress_at)
    return seconds


def _useful_s(beat: Beat, began: int, taken: int, useful: int) -> float:
    in_steps = beats.in_steps_s(beat.seconds)
    if useful == taken:
        return in_steps
    at_saves = {step: spent for step, spent in beat.saves}
    # A checkpoint before the last two is rarely resumed from: only then do all steps count alike.
    return at_saves.get(useful, in_steps * (useful - began) / max(taken - began, 1))


def _recovered_s(attempts: Sequence[Attempt]) -> float | None:
    """Return the time from the last progress of the first one to a step that is new; None if there was none."""
    first, *later = attempts
    spent_s = first.seconds.get("stalled", 0.0)
    for attempt in later:
        if not attempt.seconds:
            return None
        if attempt.step > attempt.began:
            return round(spent_s + attempt.seconds["startup"] + attempt.seconds["waiting"], 1)
        spent_s += attempt.wall_s
    return None
