"""What follows when a run has ended: its report, the upload that `--push` asks for, and the user's command.

A failure in one of them is a warning and changes nothing about the run. `tuner.hooks` calls these functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from tuner.hub import upload
from tuner.report import page
from tuner.report.notify import Notice
from tuner.runs.directory import RunDirectory


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


def notify(run_dir: RunDirectory, exit_code: int) -> None:
    """Run the user's command, and wait for it."""
    Notice(run_dir, exit_code).wait()


def write(run_dir: RunDirectory) -> None:
    """Write RUN/report.html; a failure is one line on standard error."""
    try:
        page.write([run_dir.path], run_dir.report)
    except (Exception, KeyboardInterrupt) as error:
        message = f"WARNING: no report: {type(error).__name__}: {error}"
        print(message, file=sys.stderr)  # effect: the run has ended, and only this process can print it
