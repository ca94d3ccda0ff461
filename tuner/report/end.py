"""The report that every run ends with; whatever is wrong with it changes nothing about the run.

Whoever ends the run calls it: the command line after its ranks, or the rank that nobody supervises.
"""

from __future__ import annotations

import sys

from tuner.runs.directory import RunDirectory


def write(run: RunDirectory) -> None:
    """Write RUN/report.html; a failure is one line on standard error."""
    try:
        from tuner.report import page  # Plotly and Jinja, after training and not before

        page.write([run.path], run.report)
    except (Exception, KeyboardInterrupt) as error:
        told = f"WARNING: no report: {type(error).__name__}: {error}"
        print(told, file=sys.stderr)  # effect: nobody else is left to say it
