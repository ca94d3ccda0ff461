"""Why a run ended badly: the first cause among what all ranks reported, logged and were ended by.

It is pure: it gets an `Evidence` (runs.ending), and reads, writes and prints nothing.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from tuner.errors import Stopped, TunerError, exit_code_of, heading
from tuner.runs import causes
from tuner.runs.causes import Cause, Role, classify
from tuner.runs.directory import RunDirectory
from tuner.runs.records import DiagnosisRecord, RankReport, RunRecord

_ENQUEUED = re.compile(r"last enqueued (?:NCCL )?work: (-?\d+)")
_FAILED_BARRIER = re.compile(r"Ranks? ([\d, ]+) failed to pass")
_IN_COLLECTIVE = re.compile(r"torch/distributed/distributed_c10d\.py|worker/consensus\.py.* in _sums")
"""Where a rank waits for the others; on a GPU, where collectives are queued, it is where their result is read."""
_NEVER = float("inf")
_FULL_BYTES = 1 << 20
_TAIL_LINES = 30


class OtherNode(NamedTuple):
    """What has happened to another node: its ranks have failed, or it is gone.

    Args:
        text: In words, with the node's name.
        cause: The error's code.
        rank: The first rank on it, if that is known.
        is_down: Slurm has lost it: whatever the other ranks report follows from that.
    """

    text: str
    cause: str
    exit_code: int
    rank: int | None = None
    is_down: bool = False


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What the process that watched the ranks has seen, and no file says.

    Args:
        child_code: The exit code of the first rank that ended; below 0: a signal ended it.
        exits: Rank and exit code of each rank that ended by itself, in this order, and None for a rank that is not
            known.
        num_oom_kills: The number of the run's processes that the kernel killed for lack of memory.
        frozen: Ranks that a signal had stopped when another failed.
        overdue: Ranks that did not end after SIGTERM, and were killed `overdue_s` seconds later.
        other_node: Why the ranks here had to end, where that is known.
        node_rank: The node where this is, of several that tuner started.
    """

    child_code: int = 1
    exits: Sequence[tuple[int | None, int]] = ()
    num_oom_kills: int = 0
    frozen: Sequence[int] = ()
    overdue: Sequence[int] = ()
    overdue_s: float = 0.0
    other_node: OtherNode | None = None
    node_rank: int | None = None


@dataclass(frozen=True)
class Evidence(Watched):
    """What is known after the ranks have ended.

    Args:
        reports: What ranks reported of their own end, the earliest first.
        logs: The end of each rank's log.
        launcher: The end of what ranks said before they had logs of their own.
        last_step: The last optimizer step in the metrics.
        free_bytes: Space left on the disk of the run directory.
        record: run.json; None if it cannot be read.
        counts: The progress of each rank, from its last sign of life.
    """

    folder: Path
    reports: Sequence[RankReport] = ()
    logs: Mapping[int, str] = field(default_factory=dict)
    launcher: str = ""
    last_step: int | None = None
    free_bytes: int | None = None
    record: RunRecord | None = None
    counts: Mapping[int, int] = field(default_factory=dict)

    @property
    def ranks(self) -> range:
        return range(self.record.world_size if self.record else 0)


@dataclass(frozen=True)
class Diagnosis:
    """What to tell the user.

    Args:
        record: What status.json holds of it.
        message: The original error, whole.
        detail: What to show of it (or of a log) above the three lines, where they do not say enough.
    """

    record: DiagnosisRecord
    exit_code: int
    message: str
    detail: str
    folder: Path
    role: Role = Role.CAUSE

    @property
    def lines(self) -> list[str]:
        """What happened; on which rank and step, and where to read more; what to type next."""
        record = self.record
        rank = "On a rank" if record.rank is None else f"On rank {record.rank}"
        step = f"in step {record.step}" if record.step else "before the first step"
        return [
            f"{heading(record.cause)} {record.what}",
            f"{rank}, {step}. More: tuner explain {record.cause}. Logs: {self.folder / 'ranks'}",
            f"Next: {record.next_command}",
        ]

    @property
    def text(self) -> str:
        return "\n".join([self.detail, *self.lines] if self.detail else self.lines)


@dataclass(frozen=True)
class _Suspect:
    """One rank's failure; `order` is its place among those of the same role."""

    rank: int | None
    cause: Cause
    problem: str
    exit_code: int
    order: float
    step: int | None = None
    message: str = ""
    detail: str = ""


def diagnose(evidence: Evidence) -> Diagnosis:
    """Return the first cause. A rank's own error comes before a timeout, and a timeout before a lost peer."""
    reported = list(_reported(evidence))
    suspects = [*reported, *_silent(evidence, all(suspect.cause.role == Role.LOST for suspect in reported))]
    if node := evidence.other_node:
        failed = [suspect for suspect in reported if suspect.exit_code != Stopped.exit_code]
        own_suspects = [suspect for suspect in failed if suspect.cause.role == Role.CAUSE and not node.is_down]
        suspects = [*own_suspects, _other_node(evidence, node)]
    if evidence.overdue and not suspects:
        suspects = [_overdue(evidence)]
    suspects = suspects or [_silent_rank(evidence, None, evidence.child_code, first=True)]
    first = min(suspects, key=lambda suspect: (suspect.cause.role, suspect.order))
    if first.cause.role == Role.WAITED:
        first = _lagging(evidence, first)
    next_command, cause = _next_command(evidence, first), first.cause
    record = DiagnosisRecord(
        cause=cause.name, what=first.problem, rank=first.rank, step=first.step, next_command=next_command
    )
    message = first.message or first.problem
    return Diagnosis(record, first.exit_code, message, first.detail, evidence.folder, cause.role)


def _reported(evidence: Evidence) -> Iterator[_Suspect]:
    for order, report in enumerate(evidence.reports):
        rank, code, message = report.rank, report.exit_code, report.message
        cause_and_line, name = classify(message), report.cause
        if name and not (name == TunerError.code and cause_and_line):
            suspect = _Suspect(rank, causes.named(name), report.what or message, code, order)
        else:
            cause, line = cause_and_line or classify(evidence.logs.get(rank, "")) or (causes.BUG, "")
            if cause.name == causes.KILLED.name and evidence.num_oom_kills:
                cause = causes.named(causes.HOST_MEMORY)
            line = line or message.strip().splitlines()[-1]
            code = cause.exit_code if code == 1 else code
            suspect = _Suspect(rank, cause, f"{cause.says}: {line}", code, order)
            suspect = suspect if cause_and_line else replace(suspect, detail=message.strip())
        yield replace(suspect, rank=rank if report.origin is None else report.origin, step=report.step, message=message)


def _silent(evidence: Evidence, others_lost_it: bool) -> Iterator[_Suspect]:
    """Yield the ranks that ended without a report; the one that ended first comes first.

    If the others only report a lost peer, a killed rank is that peer, in any order: the supervisor looks every
    tenth of a second, and several ranks can end within that time.
    """
    reported = {report.rank for report in evidence.reports}
    for number, (rank, code) in enumerate((rank, code) for rank, code in evidence.exits if code):
        if rank in reported or code == Stopped.exit_code:
            continue
        yield _silent_rank(evidence, rank, code, first=number == 0 or (others_lost_it and code == -signal.SIGKILL))


def _silent_rank(evidence: Evidence, rank: int | None, code: int, *, first: bool) -> _Suspect:
    """Return the failure of a rank that ended with `code`, below 0 by a signal; None: of one that left no other trace.

    Args:
        first: It ended before all others.
    """
    cause, problem = _ended(evidence, rank, code, first)
    exit_code = exit_code_of(-code) if code < 0 else cause.exit_code if cause.exit_code != 1 else code or 1
    detail = _tail(evidence, rank) if cause is causes.SILENT else ""
    order = -1 if first else _NEVER
    return _Suspect(rank, cause, problem, exit_code, order, _known_step(evidence), detail=detail)


def _ended(evidence: Evidence, rank: int | None, code: int, first: bool) -> tuple[Cause, str]:
    who = "a rank" if rank is None else f"rank {rank}"
    # Without a rank: what it said before it had a log.
    cause_and_line = classify(evidence.launcher if rank is None else evidence.logs.get(rank, ""))
    if abs(code) % 128 == signal.SIGTERM or (code == -signal.SIGKILL and not first):
        return causes.TOLD_TO_END, f"{who} received SIGTERM"
    if code == -signal.SIGKILL:
        return _killed(who, evidence.num_oom_kills, cause_and_line)
    if code == -signal.SIGBUS:
        cause_and_line = cause_and_line or (causes.named(causes.SHARED_MEMORY), "Bus error")
    if cause_and_line := cause_and_line or (_full_disk(evidence) if code > 0 else None):
        return cause_and_line[0], f"{cause_and_line[0].says}: {cause_and_line[1]}"
    if code < 0:
        return causes.CRASHED, f"{who} was killed by {signal.Signals(-code).name}"
    return causes.SILENT, f"{who} ended with code {code} and without a report"


def _killed(who: str, num_oom_kills: int, cause_and_line: tuple[Cause, str] | None) -> tuple[Cause, str]:
    memory = causes.named(causes.HOST_MEMORY)
    if cause_and_line and cause_and_line[0] is memory:
        return memory, f"{memory.says}: {cause_and_line[1]}"
    if num_oom_kills:
        return memory, f"{memory.says}: the kernel killed {who} (SIGKILL)"
    return causes.KILLED, f"{who} was killed by SIGKILL (out of memory?)"


def _overdue(evidence: Evidence) -> _Suspect:
    """Return the ranks that were killed because they did not end after SIGTERM; no rank failed before that."""
    who = "a rank" if len(evidence.overdue) == 1 else f"{len(evidence.overdue)} ranks"
    problem = f"{who} did not stop within {evidence.overdue_s:.0f} s of SIGTERM: killed by SIGKILL"
    return _Suspect(None, causes.OVERDUE, problem, causes.OVERDUE.exit_code, 0, _known_step(evidence))


def _other_node(evidence: Evidence, node: OtherNode) -> _Suspect:
    """Return the failure of another node, for which the ranks of this one had to end."""
    cause_and_line = classify(node.text)
    causes_of_name = [cause for cause in causes.every() if cause.name == node.cause] or [causes.named(node.cause)]
    # Several can have one name.
    cause = cause_and_line[0] if cause_and_line and cause_and_line[0] in causes_of_name else causes_of_name[0]
    cause = cause._replace(role=Role.CAUSE)
    return _Suspect(node.rank, cause, node.text, node.exit_code, _NEVER, _known_step(evidence))


def _full_disk(evidence: Evidence) -> tuple[Cause, str] | None:
    """Return a full disk as the likely cause if the ranks could write nothing."""
    if evidence.free_bytes is None or evidence.free_bytes >= _FULL_BYTES:
        return None
    return causes.named("disk"), f"{evidence.free_bytes} bytes are free at {evidence.folder}"


def _tail(evidence: Evidence, rank: int | None) -> str:
    text = evidence.logs.get(rank, "") if rank is not None else ""
    return "\n".join((text.strip() or evidence.launcher.strip()).splitlines()[-_TAIL_LINES:])


def _lagging(evidence: Evidence, waited: _Suspect) -> _Suspect:
    """Return the same failure on the rank that the others waited for, if it is known."""
    late, sign = _late_ranks(evidence)
    if not late:
        return replace(waited, problem=f"{waited.problem} (the lagging rank is unknown)")
    ranks = ", ".join(map(str, late))
    problem = f"{waited.problem} (rank{'s' * (len(late) > 1)} {ranks} {sign})"
    return replace(waited, rank=late[0], problem=problem)


def _late_ranks(evidence: Evidence) -> tuple[list[int], str]:
    """Return the ranks that the others waited for, and the sign of it in words; the surest sign is tried first."""
    if evidence.frozen:
        return sorted(evidence.frozen), "was suspended: state T, as after SIGSTOP"
    texts = {rank: evidence.logs.get(rank, "") for rank in evidence.ranks}
    for report in evidence.reports:
        texts[report.rank] = f"{texts.get(report.rank, '')}\n{report.message}"
    listed = [ranks for text in texts.values() for ranks in _FAILED_BARRIER.findall(text)]
    named_ranks = {int(rank) for ranks in listed for rank in re.findall(r"\d+", ranks)}
    if named_ranks:
        return sorted(named_ranks), "lagged"
    if evidence.overdue and len(evidence.overdue) < len(texts):
        return sorted(evidence.overdue), "did not end at SIGTERM"
    counts = {rank: evidence.counts.get(rank, -1) for rank in texts} if evidence.counts else {}
    waiting = {rank for rank, text in texts.items() if _waits(text)}
    queued = {rank: max(map(int, works)) for rank, text in texts.items() if (works := _ENQUEUED.findall(text))}
    for late in (_behind(counts), sorted(texts.keys() - waiting) if waiting else [], _behind(queued)):
        if late:
            return late, "lagged"
    return [], ""


def _behind(numbers: Mapping[int, int]) -> list[int]:
    return sorted(rank for rank, number in numbers.items() if number < max(numbers.values()))


def _waits(text: str) -> bool:
    """Return whether a rank was in a collective when it ended: it timed out, or its last stack shows it."""
    cause_and_line = classify(text)
    return bool(cause_and_line and cause_and_line[0].role == Role.WAITED) or _IN_COLLECTIVE.search(text) is not None


def _known_step(evidence: Evidence) -> int | None:
    """Return the step of a rank that did not report one: all ranks are in the same step."""
    steps = [report.step or 0 for report in evidence.reports]
    return max(steps, default=evidence.last_step)


def _next_command(evidence: Evidence, suspect: _Suspect) -> str:
    record = evidence.record
    commands = (
        {cause: record.on_node(text, evidence.node_rank) for cause, text in record.next.items()} if record else {}
    )
    recipe = shlex.quote(str(evidence.folder / "recipe.py"))
    run_dir = RunDirectory(evidence.folder)
    log = run_dir.launcher_log(0) if suspect.rank is None else run_dir.log_of(suspect.rank)
    again = commands.get("again") or f"tuner train {recipe}"
    command = commands.get(suspect.cause.name) or suspect.cause.command
    places = {"again": again, "log": shlex.quote(str(log)), "run": shlex.quote(str(evidence.folder)), "recipe": recipe}
    return str(command).format(**places) if command == suspect.cause.command else str(command)
