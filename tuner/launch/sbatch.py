"""The text of a Slurm job: sbatch's options and a shell script around one srun. It reads and writes nothing.

No value can become shell code or another option: options hold only characters that sbatch neither splits nor expands,
and all other values are quoted.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.errors import Option, UsageError
from tuner.machine.slurm import MAX_REQUEUES, MAX_RESTARTS, seconds_of

INDEX = "{index}"
"""Stands in a value for the number of the array's task."""
_OPTION = re.compile(r"[A-Za-z0-9_.,:=+@%/()\[\]&|*!~-]+")
_KEY = re.compile(r"[a-z][a-z0-9-]*")
_ARRAY = re.compile(r"(\d+)(?:-\d+(?::\d+)?)?(?:,\d+(?:-\d+(?::\d+)?)?)*(?:%\d+)?")
_OURS = (
    *("job-name", "nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "partition", "account"),
    *("qos", "time", "mem", "constraint", "array", "signal", "requeue", "no-requeue", "open-mode", "output", "error"),
    *("wrap", "parsable", "quiet", "test-only", "wait", "chdir", "no-kill"),
)
_MAY_COME_EARLY_S = 60
"""Slurm may send the signal this much earlier (sbatch's manual, --signal)."""


@dataclass(frozen=True)
class Job:
    """The job to request from Slurm.

    Args:
        tasks_per_node: Ranks on each node: one for each GPU, if there are GPUs.
        options: Further options by their long names; None for an option without a value.
        array: As sbatch takes it, such as `0-3` or `0-15%4`.
        stop_before_s: The run saves its last checkpoint this long before the time limit; it ends a validation first.
        max_restarts: How often the job may start srun again after a failure.
        spare_nodes: Nodes of the job that take the place of those that fail.
    """

    name: str
    nodes: int
    gpus_per_node: int
    tasks_per_node: int
    cpus_per_task: int | None
    time: str | None
    options: Sequence[tuple[str, str | None]]
    array: str | None
    max_requeues: int
    stop_before_s: int
    max_restarts: int = 0
    spare_nodes: int = 0

    @property
    def first_index(self) -> str | None:
        """The first task's number of an array."""
        match = _ARRAY.fullmatch(self.array) if self.array else None
        return match[1] if match else None


def check(job: Job) -> None:
    """Refuse values that sbatch would split, expand or misread.

    Raises:
        UsageError: an option with a character that has no place in one, no time or array that Slurm reads, or a time
            limit that leaves nothing before the signal.
    """
    for key, value in (("name", job.name), *job.options):
        if value is not None and not _OPTION.fullmatch(value):
            fix = "sbatch options may only contain letters, digits and .,:=+@%/()[]&|*!~-_"
            raise UsageError(f"{value!r} is not a valid sbatch option", where=f"--{key}", fix=fix)
    if job.array is not None and not _ARRAY.fullmatch(job.array):
        fix = "Use numbers and ranges: 0-3, 1,4,7, or 0-15%4 for four at a time."
        raise UsageError(f"{job.array!r} is not a list of array tasks", where="--array", fix=fix)
    if job.time is None or job.time.upper() in {"UNLIMITED", "INFINITE"}:
        return
    limit_s = seconds_of(job.time)
    if limit_s is None:
        fix = "Use minutes, H:MM:SS or D-HH:MM:SS."
        raise UsageError(f"{job.time!r} is not a Slurm time", where="--time", fix=fix)
    if 0 < limit_s <= job.stop_before_s + _MAY_COME_EARLY_S:  # to Slurm, 0 is no limit
        fix = f"Raise --time, or lower --stop-before (it is {job.stop_before_s} s, and Slurm may be 60 s early)."
        raise UsageError(f"a time limit of {limit_s} s leaves no time to train", where="--time", fix=fix)


def parse_option(text: str) -> tuple[str, str | None]:
    """Return the option and the value of one `--sbatch KEY=VALUE`; None as the value of a KEY that stands alone.

    Raises:
        UsageError: no such form, or an option that `tuner submit` sets itself.
    """
    key, equals, value = text.partition("=")
    key = key.removeprefix("--")
    if not _KEY.fullmatch(key):
        fix = "Use a long option of sbatch: --sbatch reservation=mine, or --sbatch exclusive."
        raise UsageError(f"{text!r} is neither KEY=VALUE nor KEY", where="--sbatch", fix=fix)
    if any(name.startswith(key) for name in _OURS):  # sbatch takes the beginning of a name for the whole
        fix = "Use the flag of `tuner submit`, or change the script that --dry-run prints."
        raise UsageError(f"{key} is set by tuner submit itself", where="--sbatch", fix=fix)
    return key, value if equals else None


def options(job: Job, folder: Path) -> list[str]:
    """Return sbatch's options, as they stand on its command line.

    Raises:
        UsageError: the folder's name cannot stand in the name of a log.
    """
    _check_path(folder)
    # Slurm replaces %j, %A and %a in the log's name, and nothing where a backslash is in it.
    log = f"{folder}/".replace("%", "%%") + ("slurm-%A_%a.out" if job.array else "slurm-%j.out")
    # At the end: one that takes a value after all takes the script for it, which sbatch refuses, and no option of ours.
    alone = [f"--{key}" for key, value in job.options if value is None]
    alone += ["--no-kill"] if job.max_restarts else []  # the job outlives a node, and the script starts srun again
    settings = [
        *job.options,
        ("job-name", job.name),
        ("nodes", job.nodes + job.spare_nodes),
        ("ntasks-per-node", job.tasks_per_node),
        ("gpus-per-node", job.gpus_per_node or None),
        ("cpus-per-task", job.cpus_per_task),
        ("time", job.time),
        ("array", job.array),
        ("signal", f"USR2@{job.stop_before_s}"),
        ("output", log),
        ("open-mode", "append"),
    ]
    return [*(f"--{key}={value}" for key, value in settings if value is not None), "--requeue", *alone]


def script(job: Job, folder: Path, train: Sequence[str], cwd: Path, after: Sequence[str] = ()) -> str:
    """Return the batch script: an srun of `tuner train`, which resumes whenever the job starts again.

    Args:
        folder: The run directory; that of an array's task is the folder of its number in it.
        train: Interpreter and arguments up to the launcher; {index} in it is the number of an array's task.
        cwd: Where relative paths begin.
        after: Interpreter and module of `after_srun`, which says how the run ended, and may start it again.

    Raises:
        UsageError: a control character in one of them.
    """
    for word in (*train, str(cwd)):
        _check_characters(word)
    run = f"{folder}/{INDEX}" if job.array else str(folder)
    words = [*train, "--launcher", "slurm", "--resume", "auto", "--work-dir"]
    quoted_run = _quoted(run, job.array is not None)
    command = [*(_quoted(word, is_array=job.array is not None) for word in words), quoted_run]
    srun = ["srun", "--kill-on-bad-exit=1"]
    srun += [f"--cpus-per-task={job.cpus_per_task}"] if job.cpus_per_task else []  # no longer taken from sbatch
    counts = [f"--nodes={job.nodes}", f"--tasks-per-node={job.tasks_per_node}", f"--max-restarts={job.max_restarts}"]
    counts += [f"--stop-before={job.stop_before_s}"] if job.max_restarts else []
    after_command = [*map(shlex.quote, after), '"$?"', quoted_run, *counts] if after else []
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {shlex.quote(option)}" for option in options(job, folder)),
        "",
        f"# The job requeues itself {job.stop_before_s} s before its time limit, and when it is preempted; this often",
        "# without a newer checkpoint. Preemptions do not count.",
        "set -u",
        f"export {MAX_REQUEUES}={job.max_requeues}",
        *([f"export {MAX_RESTARTS}={job.max_restarts}"] if after and job.max_restarts else []),
        f"cd -- {shlex.quote(str(cwd))} || exit 74",
        "",
        *(_again(job, srun, command, after_command) if after and job.max_restarts else [" ".join((*srun, *command))]),
        *([f"exec {' '.join(after_command)}"] if after and not job.max_restarts else []),
    ]
    return "\n".join(lines) + "\n"


def _again(job: Job, srun: Sequence[str], command: Sequence[str], after_command: Sequence[str]) -> list[str]:
    """Return the lines that start srun again after a failure, on the nodes that are well."""
    command_line = " ".join((srun[0], '"${on[@]}"', *srun[1:], *command))
    return [
        "# After a failure srun is started again, on nodes that are well: `after_srun` prints which.",
        f"on=(-N {job.nodes} -n {job.nodes * job.tasks_per_node})",
        "while true; do",
        f"    {command_line}",
        f"    next=$({' '.join(after_command)}) || exit",
        '    [ -n "$next" ] || exit 0',
        '    read -ra on <<<"$next"',
        "done",
    ]


def at_index(text: str, index: str | None) -> str:
    """Return a value for one task of an array."""
    return text if index is None else text.replace(INDEX, index)


def _quoted(word: str, is_array: bool) -> str:
    if not is_array:
        return shlex.quote(word)
    parts = [shlex.quote(part) if part else "" for part in word.split(INDEX)]
    return '"$SLURM_ARRAY_TASK_ID"'.join(parts) or "''"


def _check_path(folder: Path) -> None:
    _check_characters(str(folder))
    if "\\" in str(folder):
        fix = f"Choose another {Option('work_dir')}: Slurm does not fill in a log's name that has a backslash."
        raise UsageError(f"a backslash in {str(folder)!r}", where=Option("work_dir"), fix=fix)


def _check_characters(text: str) -> None:
    # Cc: control characters. Cs: bytes that are no UTF-8. Zl and Zp: ends of lines to some readers.
    if any(unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"} for character in text):
        fix = "Remove line breaks and control characters."
        raise UsageError(f"{text!r} is not allowed in a job script", where="tuner submit", fix=fix)
