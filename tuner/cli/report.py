"""`tuner report`: what happened in one run or several, as one HTML file, or served while it happens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from tuner.cli.help import Command
from tuner.cli.models import RUN
from tuner.cli.say import say, say_json
from tuner.errors import UsageError, visible
from tuner.files import open_regular
from tuner.report import page
from tuner.report.live import Server
from tuner.runs import listing
from tuner.runs.directory import RunDirectory


@click.command(
    cls=Command,
    examples=(
        "tuner report work_dirs/NAME/TIME",
        "tuner report RUN_A RUN_B -o compared.html",
    ),
    json_keys={
        "tuner report RUN --json": "`written`, `runs`; with `--watch` a first line with the address",
    },
    uses={
        "a page about runs": "`tuner report RUN`",
    },
)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=RUN)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="HTML file to write. [default: RUN/report.html]",
)
@click.option("--watch", is_flag=True, help="Serve the report on this machine and keep it up to date.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port of --watch. [default: a free one]")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the answer as one JSON object; with --watch, a first line of JSON."
)
def command(runs: Sequence[str], output: Path | None, watch: bool, port: int | None, as_json: bool) -> None:
    """Write a report of one or several runs as one HTML file: curves, memory, samples, time, warnings.

    The curves of several runs are overlaid, with the values in which their recipes differ; the file is then
    ./report.html. The file needs no network.
    """
    if watch and output:
        raise UsageError("--output with --watch", where="--output", fix="Leave one of them out.")
    if port and not watch:
        raise UsageError("--port without --watch", where="--port", fix="Add --watch, or leave --port out.")
    if watch:
        _watch(list(dict.fromkeys(_place(name) for name in runs)), port or 0, as_json=as_json)
        return
    paths = list(dict.fromkeys(map(listing.require_run, runs)))
    file = output or (RunDirectory(paths[0]).report if len(paths) == 1 else Path("report.html"))
    _check_free(file, page.MARK)
    page.write(paths, file.absolute())
    if as_json:
        say_json({"written": [str(file)], "runs": [str(path) for path in paths]})
    else:
        say(str(file))


def _watch(paths: Sequence[Path], port: int, *, as_json: bool) -> None:
    try:
        server = Server(paths, port)
    except OSError as error:
        fix = "Choose another, or leave --port out: a free one is taken."
        raise UsageError(f"port {port} cannot be opened: {error.strerror}", where="--port", fix=fix) from None
    with server:
        if as_json:
            say_json({"address": server.url, "runs": [str(path) for path in paths]}, is_first=True)
        else:
            say(server.url)
        say("Press Ctrl-C to stop. Open the address above in a browser.", err=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def _place(name: str) -> Path:
    """Return where a run is, or will be: one that starts later is shown from then on."""
    path = Path(name).absolute()
    if path.exists() and not path.is_dir():
        raise listing.no_run(name)
    if not listing.looks_like_a_run(path):
        say(f"{visible(name)} is no run directory yet; it is shown once its run has started.", err=True)
    return path


def _check_free(file: Path, mark: str) -> None:
    """Refuse to write over what is no report, and where nothing can be written."""
    if not file.absolute().parent.is_dir():
        raise UsageError(f"no folder {str(file.parent)!r}", where="--output", fix="Create it, or choose another.")
    if file.is_dir():
        raise UsageError(f"{file} is a folder", where="--output", fix=f"Give a file: {file}/report.html.")
    if file.exists() and not file.is_file():
        raise UsageError(f"{file} is not a file", where="--output", fix="Choose another file.")
    if file.exists():
        with open_regular(file) as stream:
            if mark.encode() not in stream.read(1000):
                raise UsageError(f"{file} exists and is not a report", where="--output", fix="Choose another file.")
