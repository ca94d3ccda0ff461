"""A run's weights on the hub: `tuner export SOURCE --push NAME`, in a process of its own.

So it uses no memory of the run and no GPU, and nothing that goes wrong with it can harm the run. The token is found by
that process; nothing here holds it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess  # effect: the upload, which must not end or slow down the process that starts it
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tuner.errors import DiskError, RunDirectoryError
from tuner.files import text_part
from tuner.machine.variables import without_leftovers
from tuner.progress import say
from tuner.runs.directory import RunDirectory
from tuner.runs.records import Pushed

LIMIT_S = 3600.0
"""The longest upload of a result that the end of a run waits for."""
_LOOK_S = 0.5
_REAP_S = 5.0
_OF_RANKS = re.compile(r"(LOCAL_|GROUP_|ROLE_|CROSS_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|ROLE_NAME")
_ADDRESS = re.compile(r"^Uploaded: (\S+?)\.?(\s|$)", re.MULTILINE)
_SHOWN = 400
"""Characters of a reason."""


class Target(NamedTuple):
    """The repository that a run's weights go to; `private`: it is created private if it does not exist."""

    name: str
    private: bool


class Upload:
    """One upload, from its start on.

    Args:
        run_dir: Its `ranks/push.log` gets what the upload prints.
        source: The run directory, or a checkpoint of it.
        name: What messages call it: "the result".
    """

    def __init__(self, run_dir: RunDirectory, source: Path, name: str, target: Target) -> None:
        self.name, self._target = name, target
        private = ("--private",) if target.private else ()
        self._words = ("export", str(source), "--push", target.name, *private)
        self._log, self._start, self._failure = run_dir.ranks / "push.log", 0, ""
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._log.parent.mkdir(exist_ok=True)  # effect: a run without ranks has no such folder
            with self._log.open("ab") as log:  # effect: what the upload prints has no other place
                self._start = log.tell()
                self._process = subprocess.Popen(
                    (sys.executable, "-P", "-m", "tuner", *self._words),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=_environment(),
                    start_new_session=True,  # it is killed whole, and Ctrl-C reaches it through us alone
                )
        except OSError as error:
            self._failure = f"it cannot be started: {error}"

    @property
    def command(self) -> str:
        """The command that uploads it later."""
        return shlex.join(("tuner", *self._words))

    @property
    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    @property
    def address(self) -> str | None:
        """Where it is, of an upload that succeeded."""
        match = _ADDRESS.search(text_part(self._log, self._start))
        return match[1] if match and self.has_ended and self.problem is None else None

    @property
    def problem(self) -> str | None:
        """What went wrong with an upload that has ended, and the command that uploads later; None if nothing did."""
        if not self._failure and self._process and self._process.returncode:
            self._failure = self._reason()
        if not self._failure:
            return None
        return f"{self.name} was not pushed to {self._target.name}: {self._failure} Push it later: {self.command}"

    def wait(
        self,
        limit_s: float,
        tick: Callable[[], None] = lambda: None,
        is_asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until it has ended, and stop it after `limit_s` seconds, on Ctrl-C or when asked.

        Args:
            tick: Called about twice a second, as is `is_asked_to_stop`.
        """
        deadline_s = time.monotonic() + limit_s
        try:
            while self._process and time.monotonic() < deadline_s:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_LOOK_S)
                    return
                tick()
                if is_asked_to_stop():
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            self.stop("it was interrupted.")
        self.stop(f"it took more than {limit_s / 60:g} min.")

    def stop(self, reason: str) -> None:
        """Stop it if it still runs."""
        if self._process is None or self.has_ended:
            return
        self._failure = reason
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_REAP_S)

    def _reason(self) -> str:
        """Return the last thing that it printed: what a command says of a mistake, before where to read more."""
        lines = [line.strip() for line in text_part(self._log, self._start).splitlines()]
        lines = [line for line in lines if line and not line.startswith("More: ")]
        assert self._process
        return lines[-1][:_SHOWN] if lines else f"it ended with exit code {self._process.returncode}."


def target_of(run_dir: RunDirectory) -> Target | None:
    """Return the repository that the result of a run goes to, or None."""
    checkpoint = run_dir.recipe_block("checkpoint")
    if not checkpoint.get("repository") or not run_dir.final.is_dir():
        return None
    return Target(str(checkpoint["repository"]), bool(checkpoint.get("private")))


def push_result(run_dir: RunDirectory, target: Target) -> None:
    """Push the result of a run that is done; status.json gets its address, or a warning says how to push it later."""
    say(f"Pushing the result to {target.name}; at most {LIMIT_S / 60:g} min, Ctrl-C stops it.")
    upload = Upload(run_dir, run_dir.path, "the result", target)
    upload.wait(LIMIT_S)
    problem, address = upload.problem, upload.address
    say(f"WARNING: {problem}" if problem else f"Pushed: {address or target.name}")
    with contextlib.suppress(DiskError, OSError, RunDirectoryError):
        if problem:
            run_dir.log_warning(problem)
        pushed = Pushed(repository=target.name, address=address, problem=problem)
        run_dir.write_status(run_dir.read_status().model_copy(update={"pushed": pushed}))


def _environment() -> dict[str, str]:
    """Return the environment without what makes a process a rank, or gives it a GPU."""
    environ = without_leftovers(os.environ)  # effect: the process needs the user's token
    environ = {name: value for name, value in environ.items() if not _OF_RANKS.fullmatch(name)}
    return environ | {"CUDA_VISIBLE_DEVICES": ""}
