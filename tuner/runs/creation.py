"""Make a run directory, or take up one again: nothing of an earlier attempt is lost."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from tuner.errors import DiskError, Option, RunDirectoryError
from tuner.files import (
    copy,
    disk_errors,
    is_writable,
    load_json,
    raw_lines,
    read_text,
    replaced,
    write_new_text,
    write_text,
)
from tuner.runs import checkpoints, lock
from tuner.runs.directory import RunDirectory, is_run
from tuner.runs.records import RunRecord, RunStatus

_OF_A_JOB = r"submit\.sh|job|slurm-\d+\.out|meeting|\.meeting\..*\.tmp"
"""`tuner submit`, Slurm and the nodes' meeting put them there before the run begins."""
_OF_A_START = r"lock|recipe\.py|(recipe|deepspeed)\.json|\.(recipe\.py|(recipe|deepspeed|run)\.json)\..*\.tmp"
"""Every file that a start can leave behind if it is killed before run.json exists."""


def create(
    path: Path,
    files: dict[str, str],
    *,
    resume: bool,
    environ: Mapping[str, str] | None = None,
    has_ended: Callable[[str], bool] = lambda _: False,
    is_gone: Callable[[lock.Holder], bool] = lambda _: False,
) -> RunDirectory:
    """Make the directory, lock it for this process, and write `files` into it; run.json comes last.

    `has_ended` returns whether the Slurm job that held the directory is over; `is_gone`: see `lock.take`.

    Raises:
        RunDirectoryError, DiskError: as `check_free`, or another run holds it.
    """
    check_free(path, resume=resume)
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        lock.take(path, environ or {}, has_ended, is_gone)
        checkpoints.require_renames(path)
        if resume:
            _keep_earlier_attempt(path, RunRecord.model_validate_json(files["run.json"]))
        else:
            if not is_run(path):
                for file in path.iterdir():
                    if re.fullmatch(_OF_A_START, file.name) and file.name != lock.NAME:
                        file.unlink()
            _claim(path, files["recipe.py"])
    for name in sorted(files, key=lambda name: name == "run.json"):
        write_text(path / name, files[name])
    run_dir = RunDirectory(path)
    run_dir.write_status(RunStatus(state="running"))
    return run_dir


def _claim(path: Path, recipe: str) -> None:
    # Two runs that start in the same second have both seen this folder empty: one file can be made only once.
    try:
        write_new_text(path / "recipe.py", recipe)
    except FileExistsError:
        fix = "Choose another."
        raise RunDirectoryError(f"another run just took {path}", where=Option("work_dir"), fix=fix) from None


def _keep_earlier_attempt(path: Path, record: RunRecord) -> None:
    """Copy the files of an earlier attempt to attempts/N; each original stays until it is replaced.

    This attempt resumes as its run.json says. Metrics and checkpoints of later steps are moved, and so is a validation
    that this attempt repeats: metrics.jsonl reads as one run, and no run resumes from steps that are repeated.
    """
    step = record.resume_step or 0
    names = ("recipe.py", "recipe.json", "deepspeed.json", "run.json", "status.json", "ranks")
    earlier = [path / name for name in names]
    if not any(file.exists() for file in earlier):
        return
    run_dir = RunDirectory(path)
    # After the last one, not as many as there are: somebody may have removed one, with the checkpoints in it.
    folder = run_dir.attempts / str(1 + max(run_dir.earlier_attempts(), default=0))
    folder.mkdir(parents=True)
    for file in earlier:
        if file.is_dir():
            file.rename(folder / file.name)
        elif file.exists():
            copy(file, folder / file.name)
    for name in ("metrics.jsonl", "answers.jsonl", "completions.jsonl"):
        _cut(path / name, folder / name, step, validates=not _has_validated(Path(record.resume or ""), step))
    checkpoints.set_later_aside(path / "checkpoints", step, folder / "checkpoints")


def _has_validated(checkpoint: Path, step: int) -> bool:
    """Return whether the log of a checkpoint has the validation of its step, which may also have followed the save."""
    try:
        log = load_json(read_text(checkpoint / "trainer_state.json"))["log_history"]
        return any(entry["step"] == step and "eval_loss" in entry for entry in log)
    except (OSError, ValueError, KeyError, TypeError):  # the rank that loads it says what is wrong
        return True


def _cut(metrics: Path, kept: Path, step: int, *, validates: bool) -> None:
    if not metrics.is_file():
        return
    if all(_is_before(line, step, validates) for line in raw_lines(metrics)):
        return
    with replaced(metrics) as earlier, replaced(kept) as later:  # the later ones first: a kill loses none
        for line in raw_lines(metrics):
            (earlier if _is_before(line, step, validates) else later).write(line)


def _is_before(line: bytes, step: int, validates: bool) -> bool:
    """Return whether a line is of what precedes an attempt that resumes at `step`, and first `validates` that step."""
    try:
        logged = json.loads(line)  # scores may be NaN
        if validates and logged["step"] == step and ("eval_loss" in logged or "answer" in logged):
            return False
        # A run that starts again at step 0 validates again before its first step.
        return step > 0 and int(logged["step"]) <= step
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # such as of a rank that was killed
        return False


def check_free(path: Path, *, resume: bool) -> None:
    """Check that a run may be written to `path`, creating nothing.

    Raises:
        RunDirectoryError: the folder holds something and this is no resume, or a file is in its way.
        DiskError: it cannot be written to, or not even looked at.
    """
    with disk_errors(path):
        # Control characters, and what Python makes of bytes that are not UTF-8, cannot stand in a file as text.
        if not is_writable(str(path)) or any(character < " " or character == "\x7f" for character in str(path)):
            problem = f"{str(path)!r} holds a control character, or bytes that are not UTF-8"
            raise RunDirectoryError(
                problem, where=Option("work_dir"), fix="Choose a name without control characters, in UTF-8."
            )
        if os.path.lexists(path) and not path.is_dir():
            raise RunDirectoryError(f"{path} is a file", where=Option("work_dir"), fix="Choose a folder.")
        if not resume and path.is_dir() and any(path.iterdir()):
            _check_remains(path)
        parent = next(folder for folder in (path, *path.parents) if folder.exists())
        if not parent.is_dir():
            raise RunDirectoryError(f"{parent} is a file", where=Option("work_dir"), fix="Choose a folder.")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise DiskError(
                f"cannot write to {parent}", where=Option("work_dir"), fix="Choose a folder you may write to."
            )


def _check_remains(path: Path) -> None:
    """Check that a folder holds only files from before a run, or the remains of a killed start.

    Raises:
        RunDirectoryError: it holds something else.
    """
    names = [file.name for file in path.iterdir() if not re.fullmatch(_OF_A_JOB, file.name)]
    if not names or (lock.NAME in names and all(re.fullmatch(_OF_A_START, name) for name in names)):
        return
    if error := lock.in_use(path, lock.Holder.here({})):
        raise error
    hint = f"Add {Option('resume', 'auto')} to continue it, or choose another." if is_run(path) else "Choose another."
    raise RunDirectoryError(f"{path} is not empty", where=Option("work_dir"), fix=hint)
