"""What a job of `tuner submit` does when its srun has ended: say how the run ended, and start it again or requeue it.

The job's script calls it (`launch.sbatch`), on the first node of the job: no rank that was killed can say so itself. It
prints the options of the next srun; if it prints none, its exit code is the job's.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tuner import hooks
from tuner.errors import MachineError, Stopped, TunerError
from tuner.launch.retry import RESTARTS, may_pass
from tuner.machine import slurm
from tuner.machine.kernel import STOPS
from tuner.runs import beats, causes, checkpoints, ending, lock, restarts
from tuner.runs.diagnose import OtherNode, Watched
from tuner.runs.directory import RunDirectory
from tuner.runs.follow import tail
from tuner.runs.records import EndedAttempt, RunStatus

_FAULTS = 2
"""A node on which the run failed this often is left out, if Slurm has others."""
_OF_A_NODE = {
    *(causes.KILLED.name, causes.CRASHED.name, causes.LOST_PEER),
    *("hang", "collective-timeout", "nccl", "gpu-hardware", "cuda-error"),
}
"""Causes that can lie in a node; an error in Python code comes on every node."""
_ENDED = re.compile(r"^srun: error: \S+: tasks? ([\d,-]+): (.+)$", re.MULTILINE)
_BEGINS = re.compile(rf"^(?:{RESTARTS} after |slurmstepd\S*: error: \*\*\* JOB \d)", re.MULTILINE)
"""What stands in the log between two sruns of a job: what this module says, or Slurm of a job that it requeues."""
_DRAINS = re.compile(r"drain(?:ing|ed)[^*]?")
"""States of a node that answers; a `*` says that it does not."""
_EXITED = re.compile(r"Exited with exit code (\d+)")
_OUT_OF_MEMORY = "Out Of Memory"
"""What srun says of a task that the kernel has killed for the memory of its node, or of the job there."""
_LATE_S = 70
"""An srun needs seconds before its ranks hear a signal, and Slurm may send that of the time limit 60 s early."""
_SIGNALLED = 128
_SIGNALS = {text: number for number in signal.Signals if (text := signal.strsignal(number))}
_SIGNALS |= {_OUT_OF_MEMORY: signal.SIGKILL}


class Job(NamedTuple):
    """The job around this process, with the counts of `machine.slurm.Job`.

    Args:
        nodelist: Its nodes at its start, as Slurm writes them.
        num_nodes: The nodes of the run; the others are spare.
        log: What srun printed.
        stop_before_s: Slurm tells the ranks to stop this long before the time limit.
    """

    id: str
    nodelist: str
    num_restarts: int
    max_requeues: int
    max_restarts: int
    num_nodes: int
    tasks_per_node: int
    log: Path
    stop_before_s: int = 0


def after_srun(run_dir: RunDirectory, code: int, job: Job) -> tuple[int, list[str]]:
    """Return the exit code of the job and no options, or the options of the srun that goes on with the run.

    srun's own code does not say how a run ended: it was 0 after the loss of a node (22.05).
    """
    status = run_dir.status_or_none
    if status and status.state == "done":
        return 0, []
    if status and status.state == "stopped":
        return Stopped.exit_code, []
    if code and not may_pass(code, None):  # a mistake, which a rank has told
        if status and status.state == "failed":
            hooks.run_has_ended(run_dir, code)()
        return code, []
    try:
        allocated = slurm.hosts(job.nodelist)
        unwell = slurm.unwell(allocated)
    except MachineError as error:
        _print(str(error))
        allocated, unwell = [], {}
    lost = _lost(run_dir, unwell)
    if status is None and not lost:  # no rank began, and Slurm's log says why
        return code or TunerError.exit_code, []
    ends = _ends(tail(job.log))
    exits = _exits(ends)
    status = _told(run_dir, status, code, ends, lost)
    lock.release_of_job(run_dir.path, job.id)
    exit_code = (status and status.exit_code) or code or TunerError.exit_code
    if job.max_restarts and allocated and not (exits and exits[0][1] - _SIGNALLED in STOPS):
        try:
            return 0, _next(run_dir, status, exit_code, job, allocated, unwell)
        except (_Ends, TunerError) as reason:
            _print(f"{RESTARTS}: not possible: {reason}")
    # The user's command starts once: a rank has started it where srun may not be started again.
    hooks.run_has_ended(run_dir, exit_code)()
    return exit_code, []


class _Ends(Exception):
    """Why the job goes on in no way."""


class _Lost(NamedTuple):
    """A node of the run that Slurm has lost, and the first rank on it, if one has begun there."""

    node: str
    state: str
    rank: int | None


def _lost(run_dir: RunDirectory, unwell: Mapping[str, str]) -> _Lost | None:
    """Return the node that the run has lost, or None; what a spare node is like does not matter."""
    # A node that somebody drains gets no new work, and keeps what it has.
    unwell = {node: state for node, state in unwell.items() if not _DRAINS.fullmatch(state)}
    last_beats = sorted(beats.read_beats(run_dir).items())
    for rank, beat in last_beats:
        if (node := _short(beat.host)) in unwell:
            return _Lost(node, unwell[node], rank)
    return None if last_beats else next((_Lost(node, state, None) for node, state in unwell.items()), None)


def _told(
    run_dir: RunDirectory, status: RunStatus | None, code: int, ends: Sequence[tuple[str, str]], lost: _Lost | None
) -> RunStatus | None:
    """Return how the run ended; write it down if no rank could, or if ranks know only that they lost another one."""
    exits = _exits(ends)
    failure = status.diagnosis if status and status.state == "failed" else None
    if failure and (failure.cause != causes.LOST_PEER or not (lost or any(number < 0 for _, number in exits))):
        return status
    child_code = _SIGNALLED - code if code > _SIGNALLED else code or TunerError.exit_code
    other_node = None
    if lost:
        text = f"a node was lost: {lost.node} is {lost.state}"
        other_node = OtherNode(text, causes.LOST_PEER, TunerError.exit_code, lost.rank, is_down=True)
    watched = Watched(
        child_code=child_code,
        exits=exits or [(None, child_code)],
        other_node=other_node,
        num_oom_kills=sum(end == _OUT_OF_MEMORY for _, end in ends),
    )
    ending.fail(run_dir, _print, watched)
    return run_dir.status_or_none


def _ends(log: str) -> list[tuple[str, str]]:
    """Return which tasks ended badly in the last srun, and how, in Slurm's words and in this order."""
    matches = _ENDED.findall(log, max((begin.end() for begin in _BEGINS.finditer(log)), default=0))
    return [(tasks, end.strip()) for tasks, end in matches]


def _exits(ends: Sequence[tuple[str, str]]) -> list[tuple[int, int]]:
    """Return rank and exit code (below 0: a signal) of each of these tasks."""
    exits = []
    for tasks, end in ends:
        exited = _EXITED.search(end)
        number = _SIGNALS.get(end.removesuffix(" (core dumped)"))
        code = int(exited[1]) if exited else -number if number else TunerError.exit_code
        exits += [(rank, code) for rank in _ranks(tasks)]
    return exits


def _ranks(tasks: str) -> list[int]:
    ranks: list[int] = []
    for part in tasks.split(","):
        first, _, last = part.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return ranks


def _next(
    run_dir: RunDirectory,
    status: RunStatus | None,
    exit_code: int,
    job: Job,
    allocated: Sequence[str],
    unwell: Mapping[str, str],
) -> list[str]:
    """Return the options of the next srun, or put the job back into the queue without the nodes that failed.

    It goes back where too few nodes are left, or too little time: a signal that comes before an srun has begun is lost.
    `_Ends` says that neither would help, or is allowed.
    """
    failure = status.diagnosis if status else None
    if not may_pass(exit_code, failure):
        raise _Ends(f"it ended with code {exit_code}")
    if state := slurm.not_running(job.id):
        raise _Ends(state)
    record = run_dir.run_or_none
    newest, _ = checkpoints.newest_valid(run_dir.checkpoints, hashes=False)
    lost, last_beats = _lost(run_dir, unwell), beats.read_beats(run_dir)
    host = _short(last_beats[failure.rank].host) if failure and failure.rank in last_beats else None
    ended = EndedAttempt(
        cause=failure.cause if failure else None,
        step=failure.step if failure else None,
        began=(record and record.resume_step) or 0,
        saved=newest.step if newest else 0,
        node=lost.node if lost else host if host in allocated else None,
    )
    earlier = restarts.of_job(run_dir, job.id)
    if refusal := restarts.refusal([*earlier, ended], job.max_restarts):
        raise _Ends(refusal)
    restarts.note_restart(run_dir, job.id, ended)
    faults = Counter(attempt.node for attempt in (*earlier, ended) if attempt.cause in _OF_A_NODE)
    left_out = {node: f"is {state}" for node, state in unwell.items()}
    for node in allocated:
        if node not in unwell and faults[node] >= _FAULTS:
            left_out[node] = f"failed {faults[node]} times"
    reasons = "; ".join(f"{node} {reason}" for node, reason in left_out.items())
    usable = sorted((node for node in allocated if node not in left_out), key=lambda node: faults[node])
    if late := _late(job):
        reasons = "; ".join(filter(None, (late, reasons)))
    elif len(usable) >= job.num_nodes:
        chosen = [node for node in allocated if node in usable[: job.num_nodes]]
        begin = newest.path.name if newest else "the start"
        where = f"on {', '.join(chosen)}{f' ({reasons})' if reasons else ''}"
        _print(f"{RESTARTS} after {ended.cause}: attempt {len(earlier) + 2} {where}, from {begin}.")
        counts = [f"--nodes={job.num_nodes}", f"--ntasks={job.num_nodes * job.tasks_per_node}"]
        return [*counts, f"--nodelist={','.join(chosen)}"]
    _requeue(run_dir, job, ended, left_out, reasons)
    return []


def _late(job: Job) -> str:
    """Return that the time limit is too near for another srun, where the job may start again; else an empty text."""
    left_s = slurm.seconds_left(job.id) if job.max_requeues else None
    is_late = left_s is not None and left_s <= job.stop_before_s + _LATE_S
    return f"its time limit is {left_s} s away, and a run ends {job.stop_before_s} s before" if is_late else ""


def _requeue(run_dir: RunDirectory, job: Job, ended: EndedAttempt, left_out: Mapping[str, str], reasons: str) -> None:
    refusal = restarts.requeue_refusal(run_dir, job.id, ended, job.max_requeues, job.num_restarts)
    if refusal := refusal or slurm.not_running(job.id):
        raise _Ends(f"{reasons}, and job {job.id} is not requeued: {refusal}")
    # Printed and written first, because Slurm ends this process when it requeues the job.
    without = f" without {', '.join(left_out)}" if left_out else ""
    _print(f"Job {job.id} is requeued{without}: {reasons}.")
    restarts.note_requeue(run_dir, job.id, ended)
    slurm.requeue_without(job.id, list(left_out))


def _short(host: str) -> str:
    """Return the name of a host without its domain, which Slurm's names of nodes rarely have."""
    return host.partition(".")[0]


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print the options of the next srun, if there is one; return the exit code of this process."""
    parser = argparse.ArgumentParser(prog="python -m tuner.launch.after_srun", description=__doc__)
    parser.add_argument("code", type=int)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--tasks-per-node", type=int, required=True)
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--stop-before", type=int, default=0)
    parsed = parser.parse_args(arguments)
    array, index = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    name = f"{array}_{index}" if array and index else environ["SLURM_JOB_ID"]
    log = parsed.run_dir.parent / f"slurm-{name}.out" if index else parsed.run_dir / f"slurm-{name}.out"
    job = Job(
        id=name,
        nodelist=environ["SLURM_JOB_NODELIST"],
        num_restarts=int(environ.get("SLURM_RESTART_COUNT", "0")),
        max_requeues=int(environ.get(slurm.MAX_REQUEUES, "0")),
        max_restarts=parsed.max_restarts,
        num_nodes=parsed.nodes,
        tasks_per_node=parsed.tasks_per_node,
        log=log,
        stop_before_s=parsed.stop_before,
    )
    code, options = after_srun(RunDirectory(parsed.run_dir), parsed.code, job)
    if options:
        print(" ".join(options))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))  # effect: the job's script reads its exit code
