"""Runs the commands of a page whose output the page shows, and puts that output there.

Below a command, a page has `<!-- printed by: COMMAND -->`, a block of text and `<!-- end -->`. `printed 9 by:` shows
the first 9 lines, `printed 9+4 by:` those and the last 4, `printed from "ONE" to "OTHER" by:` the lines from the first
that begins with ONE up to the next that begins with OTHER. `recorded by:` is the same for commands that train: these
run only when they are asked for, because they take minutes and print other figures each time. All commands of a page
run in its order, in one folder with the files that the page shows under their titles.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from itertools import dropwhile, takewhile
from pathlib import Path

from tests import pages

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(
    r"<!-- (?P<kind>printed|recorded)"
    r"(?: (?P<first>\d+)(?:\+(?P<last>\d+))?| from \"(?P<start>[^\"]+)\" to \"(?P<end>[^\"]+)\")?"
    r" by: (?P<command>[^\n]+) -->\n.*?<!-- end -->",
    re.DOTALL,
)
_ENVIRONMENT = {"COLUMNS": "100", "CUDA_VISIBLE_DEVICES": "", "TUNER_CATALOG": ""}
_NOISE = re.compile(r"^WARNING: PYTHONPATH is set.*\n", re.MULTILINE)
_PLAIN = (
    (re.compile(r"on CPU, \d+ cores?, "), "on CPU, 8 cores, "),
    (re.compile(r"\d{8}_\d{6}"), "20260102_030405"),
)
"""What differs between machines and between times, and the text that the pages have there."""


def filled(markdown: str, *, record: bool = False) -> str:
    """Return a page with the output of each of its marked commands, as this code prints it.

    Args:
        record: Also run the commands that train.
    """
    kinds = {"printed", "recorded"} if record else {"printed"}
    if not kinds & {match["kind"] for match in _BLOCK.finditer(markdown)}:
        return markdown
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve() / "project"
        folder.mkdir()
        os.chdir(folder)
        try:
            pages.lay_out(folder, markdown)
            shutil.rmtree(folder / "first", ignore_errors=True)  # the run that the guides train
            return _BLOCK.sub(lambda match: _block(match, folder) if match["kind"] in kinds else match[0], markdown)
        finally:
            os.chdir(before)


def _block(match: re.Match[str], folder: Path) -> str:
    text = _NOISE.sub("", _run(match["command"])).replace(str(folder), "/home/me/project")
    text = text.replace(sys.executable, "/home/me/.venv/bin/python").replace(str(ROOT), "/home/me/tuner")
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    lines = [line.rstrip() for line in text.rstrip().splitlines()]
    first, last = int(match["first"] or len(lines)), int(match["last"] or 0)
    if match["start"]:
        lines = [*dropwhile(lambda line: not line.startswith(match["start"]), lines)]
        lines = [*takewhile(lambda line: not line.startswith(match["end"]), lines)]
    elif first + last < len(lines):
        lines = [*lines[:first], "...", *lines[len(lines) - last :]]
    mark = match[0].splitlines()[0]
    return "\n".join((mark, "", "```text", *lines, "```", "", "<!-- end -->"))


def _run(command: str) -> str:
    """Return what a shell command prints; `tuner` in it is this checkout's."""
    script = command.replace("tuner ", f"{shlex.quote(sys.executable)} -P -m tuner ")
    hub = Path.cwd().with_name("hub")  # no page depends on what this machine has downloaded
    env = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": str(ROOT), "HF_HOME": str(hub)}
    done = subprocess.run(
        ["bash", "-c", script], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900
    )
    return done.stdout
