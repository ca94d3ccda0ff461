"""After a run failed, its next attempt: a lighter one (`--on-oom retry`), or the same once more (`--max-restarts`).

It decides and says so in one line; `execute` starts the attempt. The launchers of several nodes decide together, with
files in the run directory that they share: each node reports that its ranks have ended, and whether it objects. Node 0
reads these reports and decides: it writes the run.json of the next attempt, or the reason why there is no next attempt.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from tuner.errors import DiskError, TunerError
from tuner.files import read_text, write_text
from tuner.launch import preflight
from tuner.launch.pins import Pins
from tuner.launch.remedies import ON_OOM, lighter
from tuner.launch.resolved_run import Request, ResolvedRun
from tuner.machine.hardware import Hardware
from tuner.progress import POLL_S
from tuner.runs import attempts, beats, checkpoints
from tuner.runs.causes import GPU_MEMORY, HOST_MEMORY, NOT_A_NUMBER, SHARED_MEMORY
from tuner.runs.directory import RunDirectory
from tuner.runs.records import Attempt, DiagnosisRecord, EndedAttempt
from tuner.runs.resume_point import IncompatibleStates

RESTARTS = "--max-restarts"
_OUT_OF_MEMORY = (GPU_MEMORY, HOST_MEMORY)
_COMES_AGAIN = (*_OUT_OF_MEMORY, NOT_A_NUMBER, SHARED_MEMORY)
"""Causes that would end the same attempt again."""
_MAY_PASS = (1, 124)
"""Exit codes of a crash and of a hang. Above 128 a rank was killed; other codes are a mistake, a full disk, a stop."""


Resolve = Callable[[Request, Mapping[str, str], Hardware, datetime], ResolvedRun]
"""As `resolve.resolve_run`."""


class _Refused(Exception):
    """Why there is no other attempt."""


def next_attempt(resolved: ResolvedRun, run_dir: RunDirectory, code: int, resolve: Resolve) -> ResolvedRun | None:
    """Return the next attempt, or None: no retry was requested, it would not help, or it is not allowed.

    Args:
        code: The exit code of this node's attempt.
        resolve: Resolves a request, as `resolve.resolve_run` does.
    """
    request = resolved.request
    if request.max_restarts and resolved.topology.num_nodes > 1:
        return _with_other_nodes(resolved, run_dir, code, resolve)
    flag = ON_OOM if request.on_oom == "retry" else RESTARTS
    if not code or (flag == RESTARTS and not request.max_restarts):
        return None
    try:
        status = run_dir.read_status()
        failure = status.diagnosis
        if status.signal:  # a run that was told to stop must not start again
            return None
        if request.on_oom == "retry" and (change := _lighter(resolved, failure)):
            return _announced(resolved, _resolve_lighter(resolved, run_dir, failure, change, resolve), ON_OOM)
        flag = RESTARTS
        if not request.max_restarts or not _may_pass(code, failure):
            return None
        return _announced(resolved, _resolve_again(resolved, run_dir, failure, resolve), RESTARTS)
    except (TunerError, _Refused) as error:
        _print(f"{flag}: not possible: {error}")
    return None


def _with_other_nodes(resolved: ResolvedRun, run_dir: RunDirectory, code: int, resolve: Resolve) -> ResolvedRun | None:
    """Return what all nodes do next: node 0 decides when the ranks of every node have ended."""
    topology, objection = resolved.topology, None
    patience_s = node_patience_s(resolved.recipe.config.train_cfg.hang_timeout, resolved.request.grace_s)
    try:
        status = run_dir.read_status()
        failure = status.diagnosis
        if status.signal or not _may_pass(code, failure):
            objection = f"node {topology.node_rank} ended with code {code}"
        report_ended(run_dir, topology.node_rank, objection)
        if topology.leads:
            if refusal := objection or await_objection(run_dir, topology.num_nodes, patience_s):
                raise _Refused(refusal)
            return _announced(resolved, _resolve_again(resolved, run_dir, failure, resolve), RESTARTS)
        if objection:
            return None
        launch_id, refusal = await_decision(run_dir, resolved.launch_id, patience_s)
        if launch_id is None:
            raise _Refused(refusal)
        preflight.check(resolved)
        # Node 0 has chosen and hashed the checkpoint; all ranks read its path in run.json.
        return replace(resolved, launch_id=launch_id)
    except (TunerError, _Refused) as error:
        if topology.leads:
            with contextlib.suppress(DiskError):
                refuse_restart(run_dir, str(error))
        if not (objection and isinstance(error, _Refused)):  # the failure of this node is printed already
            _print(f"{RESTARTS}: not possible: {error}")
    return None


def _may_pass(code: int, failure: DiagnosisRecord | None) -> bool:
    """Return whether the next attempt may succeed: the failure is neither a mistake nor one that would come again."""
    return (code in _MAY_PASS or code > 128) and (failure is None or failure.cause not in _COMES_AGAIN)


def _resolve_again(
    resolved: ResolvedRun, run_dir: RunDirectory, failure: DiagnosisRecord | None, resolve: Resolve
) -> ResolvedRun:
    """Return the same attempt once more. A checkpoint is hashed once, for the attempt and for the check of progress.

    Raises:
        _Refused: too many restarts without progress.
    """
    again = _resolve(_same_request(resolved, failure), resolved, resolve)
    earlier = again.request.attempts
    saved_steps = [*(attempt.began for attempt in earlier[1:]), _resume_step(again)]
    ended = [
        EndedAttempt(cause=attempt.cause, step=attempt.step, began=attempt.began, saved=saved)
        for attempt, saved in zip(earlier, saved_steps, strict=True)
        if attempt.cause not in _OUT_OF_MEMORY
    ]
    if refusal := attempts.refusal(ended, resolved.request.max_restarts):
        raise _Refused(refusal)
    return again


def _lighter(resolved: ResolvedRun, failure: DiagnosisRecord | None) -> Pins | None:
    if failure is None:
        return None
    return lighter(resolved.recipe.config, resolved.level, resolved.topology.world_size, failure.cause)


def _resolve_lighter(
    resolved: ResolvedRun,
    run_dir: RunDirectory,
    failure: DiagnosisRecord | None,
    change: Pins,
    resolve: Resolve,
) -> ResolvedRun:
    same = _same_request(resolved, failure)
    request = same._replace(
        pins=(*same.pins, change),
        command=(*same.command, *change.flags) if same.command else (),
    )
    with contextlib.suppress(IncompatibleStates):  # if all checkpoints are damaged that is another error
        return _resolve(request, resolved, resolve)
    checkpoints.set_aside(run_dir.checkpoints, len(request.attempts))
    return _resolve(request, resolved, resolve)


def _same_request(resolved: ResolvedRun, failure: DiagnosisRecord | None) -> Request:
    request, batch = resolved.request, resolved.batch
    # With a smaller batch `auto` might take a lower level than the one that ran out of memory.
    kept = (Pins("the level of the first attempt", level=resolved.level),) if resolved.final.from_catalog else ()
    attempt = Attempt(
        deepspeed=resolved.level,
        micro_batch=batch.micro_batch,
        accumulation=batch.accumulation,
        began=_resume_step(resolved),
    )
    if failure:
        attempt = attempt.model_copy(update=failure.model_dump(include={"cause", "what", "rank", "step"}))
    return request._replace(
        pins=(*request.pins, *kept),
        work_dir=resolved.run_path,
        resume="auto",
        attempts=(*request.attempts, attempt),
    )


def _resume_step(resolved: ResolvedRun) -> int:
    return resolved.resume.checkpoint.step if resolved.resume else 0


def _resolve(request: Request, resolved: ResolvedRun, resolve: Resolve) -> ResolvedRun:
    following = resolve(request, resolved.environ, resolved.hardware, datetime.now().astimezone())
    preflight.check(following)
    return following


def _announced(before: ResolvedRun, following: ResolvedRun, flag: str) -> ResolvedRun:
    batch, attempts_so_far = following.batch, following.request.attempts
    now, then = following.recipe.config.split, before.recipe.config.split
    recomputes = now.recompute and (not then.recompute or now.recomputed_layers != then.recomputed_layers)
    lighter_by = (
        f" with micro-batch {batch.micro_batch} x accumulation {batch.accumulation} "
        f"(global batch {batch.global_batch}) at {following.level}{', recomputing activations' if recomputes else ''}"
    )
    change = lighter_by if flag == ON_OOM else ""
    begin = following.resume.path.name if following.resume else "the start"
    _print(f"{flag} after {attempts_so_far[-1].cause}: attempt {len(attempts_so_far) + 1}{change}, from {begin}.")
    return following


def _print(line: str) -> None:
    print(line, file=sys.stderr)


Answer = TypeVar("Answer")
_LOOK_S = 10.0
_ENDING_S = 120.0
"""Two looks of a rank's watchdog (a minute), its stacks, the end of the others, and the shared folder's delay."""
_DECIDING_S = 600.0
"""What node 0 has to make the next attempt's plan: it hashes a checkpoint."""


def node_patience_s(hang_timeout_s: float, grace_s: float) -> float:
    """Return how long the ranks of another node may take to end after their last sign of life, in seconds.

    A lost peer ends no collective by itself: the process group waits for ever. So a rank ends when its watchdog has
    seen no progress for `hang_timeout_s`, or `grace_s` after it was told to stop.
    """
    return hang_timeout_s + grace_s + _ENDING_S


def report_ended(run_dir: RunDirectory, node_rank: int, objection: str | None) -> None:
    """Report that this node's ranks have ended, and what speaks against another attempt."""
    write_text(_word(run_dir, f"node-{node_rank}"), objection or "")


def await_objection(run_dir: RunDirectory, num_nodes: int, patience_s: float) -> str | None:
    """Wait until the ranks of all nodes have ended, and return the first objection of one.

    Ranks of the last attempt that still live would write into the next one's folder. `patience_s` counts from their
    last sign of life.
    """
    words = [_word(run_dir, f"node-{rank}") for rank in range(num_nodes)]

    def heard() -> list[str] | None:
        return [read_text(word) for word in words] if all(map(Path.is_file, words)) else None

    objections = _await(heard, run_dir, patience_s)
    if objections is None:
        missing = [str(rank) for rank, word in enumerate(words) if not word.is_file()]
        return f"no status from node {', '.join(missing)} for {patience_s:.0f} s"
    return next(filter(None, objections), None)


def refuse_restart(run_dir: RunDirectory, why: str) -> None:
    """Report to the other nodes that there is no other attempt."""
    write_text(_word(run_dir, "restart"), why)


def await_decision(run_dir: RunDirectory, launch_id: str, patience_s: float) -> tuple[str | None, str | None]:
    """Wait for node 0's decision; return the next attempt's launch id, or None and the reason against one."""
    refusal, waits_s = _word(run_dir, "restart"), patience_s + _DECIDING_S

    def heard() -> tuple[str | None, str | None] | None:
        if refusal.is_file():
            return None, read_text(refusal)
        latest = run_dir.run_or_none  # a shared file system may show it late
        return (latest.launch_id, None) if latest and latest.launch_id != launch_id else None

    return _await(heard, run_dir, waits_s) or (None, f"no status from node 0 for {waits_s:.0f} s")


def _word(run_dir: RunDirectory, name: str) -> Path:
    return run_dir.ranks / f"{name}.word"


def _await(look: Callable[[], Answer | None], run_dir: RunDirectory, patience_s: float) -> Answer | None:
    """Return the first result of `look`, or None once no rank has given a sign of life for `patience_s` seconds."""
    moved_s = looked_s = time.monotonic()
    latest = beats.written(run_dir)
    while time.monotonic() - moved_s < patience_s:
        answer = look()
        if answer is not None:
            return answer
        time.sleep(POLL_S)
        if time.monotonic() - looked_s >= min(_LOOK_S, patience_s / 4):  # many ranks have as many files
            before, latest, looked_s = latest, beats.written(run_dir), time.monotonic()
            moved_s = looked_s if latest != before else moved_s
    return None
