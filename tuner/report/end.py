"""What follows when a run has ended: its report, the upload that `--push` asks for, and the command in `log.notify`.

The command runs once. It can delay the run by 30 seconds at most. A failure in any of the three is a warning and
changes nothing about the run. The recipe was checked before the start: a command in a recipe file needs --allow-code.
`tuner.hooks` calls these functions.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess  # effect: the user's command, with which a launcher ends a run, and a rank without a supervisor
import sys
import tempfile
import time
from collections.abc import Callable
from typing import IO

from tuner.files import JsonObject
from tuner.hub import upload
from tuner.report import page
from tuner.runs.directory import RunDirectory
from tuner.runs.follow import tail

LIMIT_S = 30.0
_REAP_S = 5.0
"""A killed process that is writing to a slow disk ends only when the write returns."""
_MAX_VARIABLE = 4000
"""Characters. The kernel starts no command with a variable of more than 128 KiB; the JSON holds the whole message."""


def follow_up(run_dir: RunDirectory, exit_code: int) -> Callable[[], None]:
    """Write the report and start the user's command; return the function that waits for the command.

    If the result is to be pushed, the command comes after the upload, and the returned function does both.
    """
    write(run_dir)
    target = upload.target_of(run_dir) if exit_code == 0 else None
    if target is None:
        return Notice(run_dir, exit_code).wait

    def push_and_notify() -> None:
        upload.push_result(run_dir, target)
        write(run_dir)
        Notice(run_dir, exit_code).wait()

    return push_and_notify


def write(run_dir: RunDirectory) -> None:
    """Write RUN/report.html; a failure is one line on standard error."""
    try:
        page.write([run_dir.path], run_dir.report)
    except (Exception, KeyboardInterrupt) as error:
        message = f"WARNING: no report: {type(error).__name__}: {error}"
        print(message, file=sys.stderr)  # effect: the run has ended, and only this process can print it


class Notice:
    """The command of a run, which gets the run's ending; if several ranks end at once, only the first one starts it."""

    def __init__(self, run_dir: RunDirectory, exit_code: int) -> None:
        self._log = run_dir.ranks / "notify.log"
        self._command = _command(run_dir)
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline_s = time.monotonic() + LIMIT_S
        try:
            if self._command:
                self._start(run_dir.ending(exit_code))
        except (OSError, ValueError) as error:  # ValueError: a NUL in a word or in a variable
            self._warn(f"cannot be started: {error}")

    def wait(self) -> None:
        """Wait until the command has ended, and kill it after the limit."""
        if self._process is None:
            return
        try:
            code = self._process.wait(max(0.0, self._deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._kill()
            self._warn(f"took more than {LIMIT_S:.0f} s and was killed")
        except KeyboardInterrupt:
            self._kill()
            self._warn("was interrupted")
        else:
            if code:
                *_, last = ["", *tail(self._log).split("\n")[-2:-1]]
                self._warn(f"failed with exit code {code}{': ' * bool(last)}{last[:200]}")

    def _start(self, ended: JsonObject) -> None:
        with contextlib.ExitStack() as files:
            try:
                output: IO[bytes] | int = files.enter_context(self._claimed())
            except FileExistsError:  # another rank that failed at the same moment was faster
                return
            except OSError:  # the disk is full: the command may report just that
                output = subprocess.DEVNULL
            # A file: a pipe would block on a command that does not read.
            stdin = files.enter_context(tempfile.TemporaryFile())
            stdin.write(json.dumps({"event": "ended", **ended}).encode() + b"\n")
            stdin.seek(0)
            self._process = subprocess.Popen(
                self._command,
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_variables(ended)},  # effect: the command may need a token that is in it
                start_new_session=True,  # it is killed whole, and Ctrl-C reaches it through us alone
            )

    def _claimed(self) -> IO[bytes]:
        """Make the log, which only one process of a run can do."""
        self._log.parent.mkdir(exist_ok=True)  # effect: a run that failed before its ranks has no such folder
        return self._log.open("xb")  # effect: what the command prints has no other place

    def _kill(self) -> None:
        assert self._process
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_REAP_S)

    def _warn(self, problem: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone: that was why the run was to stop
            line = f"WARNING: the command of log.notify, {shlex.join(self._command)!r}, {problem}"
            print(line, file=sys.stderr)  # effect: no other process is left to print it


def _command(run_dir: RunDirectory) -> tuple[str, ...]:
    """Return the words of the command; a run with an unreadable recipe.json has no command."""
    command = run_dir.recipe_block("log").get("notify")
    try:
        return tuple(shlex.split(command) if isinstance(command, str) else map(str, command or ()))
    except (TypeError, ValueError):
        return ()


def _variables(ended: JsonObject) -> dict[str, str]:
    message = str(ended.get("message") or "")[:_MAX_VARIABLE].replace("\0", "")
    return {
        "TUNER_STATE": str(ended.get("state")),
        "TUNER_EXIT_CODE": str(ended["exit_code"]),
        "TUNER_RUN": ended["run"],
        "TUNER_MESSAGE": message.encode(errors="backslashreplace").decode(),
    }
