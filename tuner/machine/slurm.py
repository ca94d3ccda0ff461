"""Slurm: the forms of its variables, the job that this process is part of, and its commands.

What ranks follow from its variables is `topology`'s work; what a job runs is written in `launch.sbatch`.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from tuner.errors import MachineError, TunerError, UsageError
from tuner.machine.variables import COUNT

MAX_REQUEUES = "TUNER_MAX_REQUEUES"
"""Set by the script of `tuner submit`: how often a job may put itself back into the queue; unset: never."""
MAX_RESTARTS = "TUNER_MAX_RESTARTS"
"""Set by it too: how often the script may start srun again; unset: never."""
_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
}
_WELL = {"idle", "mixed", "allocated", "completing", "planned", "reserved"}
"""States of a node that runs what it is given; a `*` behind a state says that the node does not answer."""
_HARMLESS = "$@#+-"
"""Marks behind a state: in a reservation for maintenance, to be started anew later, still starting, planned."""
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_PAUSES_S = (0.1, 0.2, 0.5, 1, 2)
_FORGOTTEN = "Invalid job id"
_MAX_NODES = 1 << 20
_ANSWER_S = 30


class Job(NamedTuple):
    """The job of this process, where it may requeue itself.

    Args:
        id: As scontrol takes it: one task of an array by itself.
        num_restarts: How often Slurm has started it again.
        max_requeues: How often it may be.
        max_restarts: How often its script may start srun again.
    """

    id: str
    num_restarts: int
    max_requeues: int
    max_restarts: int = 0

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Job | None:
        """Return the job of the environment; None outside of a task, or without requeues."""
        limit, restarts = environ.get(MAX_REQUEUES, ""), environ.get("SLURM_RESTART_COUNT", "")
        if "SLURM_STEP_ID" not in environ or not COUNT.fullmatch(limit):
            return None
        array, index = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        # The raw id of one task of an array is also the id of the whole array.
        name = f"{array}_{index}" if array and index else environ["SLURM_JOB_ID"]
        texts = (restarts, limit, environ.get(MAX_RESTARTS, ""))
        return cls(name, *(int(text) if COUNT.fullmatch(text) else 0 for text in texts))


def prepare_for_signals() -> None:
    """Until a rank listens: keep back the signal of `tuner submit` (USR2), and end with 1 at SIGTERM.

    The mask and the signal that waits both outlive the change from launcher to rank. srun ends all tasks when one has
    failed, and returns the highest code of all: 128 + 15 of those would hide the code of the one.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    signal.signal(signal.SIGTERM, _end)


def _end(*_: object) -> NoReturn:
    raise SystemExit(TunerError.exit_code)  # effect: of a task that srun ends before it is a rank


def not_running(job: str) -> str | None:
    """Return Slurm's state of a job that it is ending, or None if the job goes on.

    A job that is being cancelled, or that was requeued already, must not be requeued once more.

    Raises:
        MachineError: Slurm does not answer.
    """
    state = re.search(r"\bJobState=(\w+)", _ask("scontrol", "show", "job", "--oneliner", job))
    return None if state and state[1] == "RUNNING" else f"Slurm says that it is {state[1] if state else 'gone'}"


def has_ended(job: str) -> bool:
    """Return whether a job is over for certain: False where Slurm does not answer."""
    try:
        states = re.findall(r"\bJobState=(\w+)", _ask("scontrol", "show", "job", "--oneliner", job))
    except MachineError as error:
        return _FORGOTTEN in error.what  # minutes after its end
    return bool(states) and _ENDED.issuperset(states)  # several for an array, whose id is also that of one of its tasks


def queued() -> dict[str, str] | None:
    """Return the state and the reason of this user's jobs in the queue, such as "PENDING Priority", by their numbers.

    An array has one number, and waits if a task of it does. None: there is no Slurm here, or it does not answer.
    """
    try:
        answer = _ask("squeue", "--me", "--noheader", "-o", "%F %T %r")
    except MachineError:
        return None
    lines = [line.split(maxsplit=1) for line in answer.splitlines() if " " in line.strip()]
    return dict(sorted(lines, key=lambda line: line[1].startswith("PENDING")))  # of one number the last line counts


def seconds_left(job: str) -> int | None:
    """Return the seconds that are left of a job's time limit; None: it has none.

    Raises:
        MachineError: Slurm does not answer.
    """
    answer = _ask("squeue", "--noheader", f"--jobs={job}", "--format=%L").strip()
    return 0 if answer == "INVALID" else seconds_of(answer)  # INVALID: it is over


def seconds_of(text: str) -> int | None:
    """Return a time in Slurm's forms, M, M:S, H:M:S, D-H, D-H:M or D-H:M:S, in seconds; None: it is in none of them."""
    match = _TIME.fullmatch(text)
    if not match:
        return None
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is None and len(parts) < 3:
        parts = [0, *parts]
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def requeue(job: str) -> None:
    """Put a job back into the queue. Slurm then ends all its processes, this one too.

    Raises:
        MachineError: Slurm refuses, or does not answer.
    """
    _ask("scontrol", "requeue", job)


def requeue_without(job: str, nodes: Sequence[str]) -> None:
    """Put the job of this process back into the queue, and keep it away from these nodes and from those of before.

    Slurm changes the nodes of a job only while it waits, and from the requeue on it ends this process: by SIGTERM at
    first, which is ignored for this moment.

    Raises:
        MachineError: Slurm refuses, or does not answer.
    """
    before = re.search(r"\bExcNodeList=(\S+)", _ask("scontrol", "show", "job", "--oneliner", job))
    kept_away = [*([] if not before or before[1] == "(null)" else [before[1]]), *nodes]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    requeue(job)
    if not kept_away:
        return
    for pause_s in _PAUSES_S:
        try:
            _ask("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(kept_away)}")
            return
        except MachineError:  # it still runs
            time.sleep(pause_s)


def hosts(nodelist: str) -> list[str]:
    """Return the names in Slurm's compressed list.

    Raises:
        MachineError: Slurm does not answer.
    """
    return _ask("scontrol", "show", "hostnames", nodelist).split()


def unwell(nodes: Sequence[str]) -> dict[str, str]:
    """Return the state of those nodes that Slurm would start nothing on: down, drained, or they do not answer.

    Raises:
        MachineError: Slurm does not answer.
    """
    lines = _ask("sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "-o", "%N %T").splitlines()
    states = dict(line.split() for line in lines if line)
    return {node: state for node in nodes if (state := states.get(node, "gone")).rstrip(_HARMLESS) not in _WELL}


def submit(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """Give a script to sbatch and return the job's id.

    Raises:
        MachineError: there is no sbatch, it refuses the job, or it prints something else than a job's id.
    """
    # Variables of the job that this command itself runs in would speak for the new one.
    env = {key: value for key, value in environ.items() if key == "SLURM_CONF" or not key.startswith("SLURM_")}
    answer = _ask("sbatch", "--parsable", *arguments, environ=env).strip()
    number = answer.partition(";")[0]
    if not number.isdecimal():  # such as the text of --help
        raise MachineError(f"sbatch prints {answer!r} instead of a job id", where="Slurm")
    return number


def _ask(*command: str, environ: Mapping[str, str] | None = None) -> str:
    import subprocess  # no other command needs it

    try:
        done = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=_ANSWER_S,
        )  # fmt: skip
    except (FileNotFoundError, PermissionError):
        fix = "Run this on a machine of the cluster with Slurm's commands on the PATH."
        raise MachineError(f"{command[0]} is not installed", where="Slurm", fix=fix) from None
    except subprocess.TimeoutExpired:
        raise MachineError(f"{command[0]} did not answer within {_ANSWER_S} s", where="Slurm") from None
    if done.returncode:
        reason = " ".join(done.stderr.replace(f"{command[0]}: error: ", "").split()).rstrip(".")
        raise MachineError(f"{command[0]} fails: {reason or done.returncode}", where="Slurm")
    return done.stdout


def num_nodes_outside_srun(environ: Mapping[str, str]) -> int:
    """Return the nodes of the job in which this process runs without srun; 0 where it does not."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    return int(nodes) if COUNT.fullmatch(nodes) and "SLURM_STEP_ID" not in environ else 0


def first_host(nodelist: str) -> str:
    """Return the first host of Slurm's compressed list: 'n[01-03,7],m2' is n01 ...

    Raises:
        UsageError: no host in it.
    """
    first = re.split(r",(?![^\[]*\])", nodelist)[0]
    host = re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first)
    if not host:
        raise UsageError(f"no host in {nodelist!r}", where="SLURM_STEP_NODELIST")
    return host


def expand_tasks(tasks: str) -> list[int]:
    """Return the tasks of each node from Slurm's form: '2(x3),1' is [2, 2, 2, 1].

    Raises:
        UsageError: it is not in that form.
    """
    counts: list[int] = []
    for part in tasks.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part.strip())
        if not match or len(counts) > _MAX_NODES:
            raise UsageError(f"{tasks!r} is not in Slurm's form", where="SLURM_STEP_TASKS_PER_NODE")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def port(job: str, step: str, restarts: str = "0") -> int:
    """Return a port below the ephemeral range that every rank knows unasked, another one after each requeue."""
    import hashlib  # only a job of Slurm

    digest = hashlib.sha256(f"{job}.{step}.{restarts}".encode()).digest()
    return 12_000 + int.from_bytes(digest[:4], "big") % 20_000


def count(environ: Mapping[str, str], *names: str) -> int:
    """Return the first of some variables that is a count.

    Raises:
        UsageError: none is.
    """
    for name in names:
        if COUNT.fullmatch(environ.get(name, "")):
            return int(environ[name])
    raise UsageError(f"{names[0]} is {environ.get(names[0])!r}, not a count", where="--launcher slurm")


def number(environ: Mapping[str, str], name: str) -> str:
    """Return the number of a job or a step as text: it becomes a part of the run directory's name.

    Raises:
        UsageError: the variable does not hold a number.
    """
    if not re.fullmatch(r"[0-9]{1,12}", environ.get(name, "")):
        raise UsageError(f"{name} is {environ.get(name)!r}, not a number", where="--launcher slurm")
    return environ[name]
