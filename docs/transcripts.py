"""Runs the commands of a page whose output the page shows, and puts that output there.

A page shows a command, and below it `<!-- printed by: COMMAND -->`, a block of text and `<!-- end -->`. With
`COMMAND | head -N` it shows the first N lines. The commands run in a folder with the files that the page shows under
their titles. They must start no training.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from pathlib import Path

from click.testing import CliRunner

from tests import pages
from tuner.cli import tuner

_PRINTED = re.compile(r"<!-- printed by: (?P<command>[^\n]+) -->\n.*?<!-- end -->", re.DOTALL)
_HEAD = re.compile(r" \| head -(\d+)$")
_ENVIRONMENT = {"COLUMNS": "100", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": None}
_PLAIN = (
    (re.compile(r"on CPU, \d+ cores?, "), "on CPU, 8 cores, "),
    (re.compile(r"\d{8}_\d{6}"), "20260102_030405"),
)
"""What differs between machines and between times, and the text that the pages have there."""


def filled(markdown: str) -> str:
    """Return a page with the output of each of its marked commands, as this code prints it."""
    if not _PRINTED.search(markdown):
        return markdown
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve() / "project"
        folder.mkdir()
        os.chdir(folder)
        try:
            pages.lay_out(folder, markdown)
            return _PRINTED.sub(lambda match: _block(match["command"], folder), markdown)
        finally:
            os.chdir(before)


def _block(command: str, folder: Path) -> str:
    shown = _HEAD.search(command)
    words = shlex.split(_HEAD.sub("", command))[1:]
    text = CliRunner().invoke(tuner, words, env=_ENVIRONMENT).output.replace(str(folder), "/home/me/project")
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    lines = [line.rstrip() for line in text.rstrip().splitlines()]
    if shown and int(shown[1]) < len(lines):
        lines = [*lines[: int(shown[1])], "..."]
    return f"<!-- printed by: {command} -->\n\n```text\n" + "\n".join(lines) + "\n```\n\n<!-- end -->"
