"""`tuner report`: what happened in one run or several, as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from tuner.cli import complete
from tuner.cli.say import say
from tuner.errors import RunDirectoryError, UsageError


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, shell_complete=complete.files)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file to write.")
def command(runs: Sequence[str], output: Path | None) -> None:
    """Write what happened in RUN as one HTML file that needs no network: curves, memory, samples, restarts, warnings.

    Several runs are overlaid, with the values in which their recipes differ. The file is RUN/report.html; for several
    runs it is report.html here.
    """
    from tuner.report import page
    from tuner.runs.directory import RunDirectory

    paths = list(dict.fromkeys(_run(name) for name in runs))
    file = output or (RunDirectory(paths[0]).report if len(paths) == 1 else Path("report.html"))
    _check_free(file, page.MARK)
    page.write(paths, file.absolute())
    say(str(file))


def _run(name: str) -> Path:
    from tuner.runs import listing

    path = Path(name).absolute()
    if not listing.looks_like_a_run(path):
        fix = "Name a run's folder; tuner runs lists them."
        raise RunDirectoryError(
            f"{name!r} is not a run directory: it has no run.json and recipe.py", where="RUN", fix=fix
        )
    return path


def _check_free(file: Path, mark: str) -> None:
    """Refuse to write over what is no report, and where nothing can be written.

    Raises:
        UsageError: something else stands there, or there is no such folder.
    """
    if not file.absolute().parent.is_dir():
        raise UsageError(f"no folder {str(file.parent)!r}", where="--output", fix="Create it, or choose another.")
    if file.is_dir():
        raise UsageError(f"{file} is a folder", where="--output", fix=f"Give a file: {file}/report.html.")
    if file.exists() and not file.is_file():
        raise UsageError(f"{file} is not a file", where="--output", fix="Choose another file.")
    if file.exists():
        with file.open("rb") as stream:
            if mark.encode() not in stream.read(1000):
                raise UsageError(f"{file} exists and is not a report", where="--output", fix="Choose another file.")
