"""What every run ends with: its report, its result on the hub where that is asked for, and the user's command.

Whatever is wrong with them changes nothing about the run. Whoever ends the run calls it: the command line after its
ranks, or the rank that nobody supervises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from tuner.report import pushing
from tuner.report.notify import Notice
from tuner.runs.directory import RunDirectory


def tell(run: RunDirectory, exit_code: int) -> Callable[[], None]:
    """Write the report and start the user's command; return what waits for it.

    Where the result goes to the hub, that comes first, and all of it is left to what is returned.
    """
    write(run)
    target = pushing.target_of(run) if exit_code == 0 else None
    if target is None:
        return Notice(run, exit_code).wait

    def push_and_tell() -> None:
        pushing.push_result(run, target)
        write(run)
        Notice(run, exit_code).wait()

    return push_and_tell


def write(run: RunDirectory) -> None:
    """Write RUN/report.html; a failure is one line on standard error."""
    try:
        from tuner.report import page  # Jinja, after training and not before

        page.write([run.path], run.report)
    except (Exception, KeyboardInterrupt) as error:
        message = f"WARNING: no report: {type(error).__name__}: {error}"
        print(message, file=sys.stderr)  # effect: nobody else is left to say it
