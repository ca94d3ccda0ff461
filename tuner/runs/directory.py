"""The run directory: its files' names, its creation (never over an older one), and what ranks report in it.

recipe.py       the whole recipe; `tuner train RUN/recipe.py` runs it again
deepspeed.json  the DeepSpeed config that training used, to the byte
run.json        versions, command, hardware, seeds, and what the worker has to know beside the recipe
status.json     running, done, failed or stopped, with the exit code and the diagnosis of a failure
metrics.jsonl   one line for each logged step
ranks/          N.log for all that a rank prints, N.json for one that ended badly, torchrun-NODE.log for its launcher
checkpoints/    checkpoint-STEP, to resume from
final/          the result, for transformers and peft
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tuner.errors import DiskError, RunDirectoryError
from tuner.files import append_line, disk_errors, write_json, write_new_text, write_text

State = Literal["running", "done", "failed", "stopped"]
_WAIT_S = 300.0


@dataclass(frozen=True)
class RunDirectory:
    """One run's files, by name."""

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.py"

    @property
    def deepspeed(self) -> Path:
        return self.path / "deepspeed.json"

    @property
    def run(self) -> Path:
        return self.path / "run.json"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def ranks(self) -> Path:
        return self.path / "ranks"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def final(self) -> Path:
        return self.path / "final"

    def read_json(self, file: Path) -> Any:
        """Read one of the run's JSON files.

        Raises:
            RunDirectoryError: it is missing or not JSON.
        """
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunDirectoryError(f"{file.name} is missing or not JSON", where=self.path) from error

    def write_status(self, state: State, **facts: Any) -> None:
        """Write status.json; facts such as exit_code, step, message."""
        write_json(self.status, {"state": state, "pid": os.getpid(), **facts})

    def report_failure(self, rank: int, exit_code: int, message: str, **facts: Any) -> None:
        """Leave word of how a rank ended, for the supervisor; torchrun turns every failure into 1.

        Facts are `cause` (a TunerError's code) and `step` (the optimizer step at work, from 1), where there are any.
        """
        self.ranks.mkdir(exist_ok=True)
        write_json(self.ranks / f"{rank}.json", {"rank": rank, "exit_code": exit_code, "message": message, **facts})

    def failures(self) -> list[dict[str, Any]]:
        """Return what ranks reported, the earliest report first."""
        files = sorted(self.ranks.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        return [self.read_json(file) for file in files]

    def log_metrics(self, metrics: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        append_line(self.metrics, json.dumps(metrics, allow_nan=False))


def is_run(path: Path) -> bool:
    """Return whether a folder is a run directory."""
    names = ("run.json", "recipe.py")
    return all(os.path.isfile(path / name) for name in names)  # noqa: PTH113 (a name too long is no run, and no error)


def check_free(path: Path, *, resume: bool) -> None:
    """Check that a run may be written to `path`, creating nothing.

    Raises:
        RunDirectoryError: the folder holds something and this is no resume, or a file is in its way.
        DiskError: it cannot be written to, or not even looked at.
    """
    with disk_errors(path):
        _check_free(path, resume)


def _check_free(path: Path, resume: bool) -> None:
    if os.path.lexists(path) and not path.is_dir():
        raise RunDirectoryError(f"{path} is a file", where="--work-dir", fix="Choose a folder.")
    if not resume and path.is_dir() and any(path.iterdir()):
        hint = "Add --resume auto to go on with it, or choose another." if is_run(path) else "Choose another."
        raise RunDirectoryError(f"{path} is not empty", where="--work-dir", fix=hint)
    parent = next(folder for folder in (path, *path.parents) if folder.exists())
    if not parent.is_dir():
        raise RunDirectoryError(f"{parent} is a file", where="--work-dir", fix="Choose a folder.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise DiskError(f"cannot write to {parent}", where="--work-dir", fix="Choose a folder you may write to.")


def create(path: Path, files: dict[str, str], *, resume: bool) -> RunDirectory:
    """Make the directory and write `files` into it, run.json last: who sees run.json sees all.

    Raises:
        RunDirectoryError, DiskError: as `check_free`.
    """
    check_free(path, resume=resume)
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        if resume:
            _keep_earlier_attempt(path)
        else:
            _claim(path, files["recipe.py"])
    for name in sorted(files, key=lambda name: name == "run.json"):
        write_text(path / name, files[name])
    run = RunDirectory(path)
    run.write_status("running")
    return run


def _claim(path: Path, recipe: str) -> None:
    # Two runs that start in the same second have both seen this folder empty: one file can be made only once.
    try:
        write_new_text(path / "recipe.py", recipe)
    except FileExistsError:
        fix = "Choose another."
        raise RunDirectoryError(f"{path} was just taken by another run", where="--work-dir", fix=fix) from None


def _keep_earlier_attempt(path: Path) -> None:
    """Keep what an earlier attempt wrote, in attempts/N; its files stay too until each is replaced, for who looks."""
    earlier = [path / name for name in ("recipe.py", "deepspeed.json", "run.json", "status.json", "ranks")]
    if not any(file.exists() for file in earlier):
        return
    home = path / "attempts"
    folder = home / str(1 + sum(1 for _ in home.glob("*")))
    folder.mkdir(parents=True)
    for file in earlier:
        if file.is_dir():
            file.rename(folder / file.name)
        elif file.exists():
            shutil.copy2(file, folder / file.name)


def wait_for(path: Path, launch_id: str) -> RunDirectory:
    """Wait until rank 0 has written the directory of this launch.

    Raises:
        RunDirectoryError: it did not within five minutes.
    """
    run, deadline = RunDirectory(path), time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        if run.run.is_file() and run.read_json(run.run).get("launch_id") == launch_id:
            return run
        time.sleep(0.1)
    raise RunDirectoryError(
        f"rank 0 did not write {path} within {_WAIT_S:.0f} s",
        where="--work-dir",
        fix="All nodes must share this folder; see rank 0's message first.",
    )


def newest_run(folder: Path) -> Path | None:
    """Return the run below `folder` whose checkpoint or start is the newest, or None."""
    runs: Iterable[Path] = (path for path in folder.glob("*") if is_run(path)) if folder.is_dir() else ()
    return max(runs, key=lambda path: (path / "run.json").stat().st_mtime_ns, default=None)
