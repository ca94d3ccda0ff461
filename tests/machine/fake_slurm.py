"""Slurm's commands as a script that writes down what it is given: it stands for a Slurm that is not here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

_SCRIPT = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path
home = Path(__file__).parent
name = Path(sys.argv[0]).name
with (home / "calls").open("a") as stream:
    stream.write(json.dumps([name, *sys.argv[1:]]) + "\\n")
(home / "environ").write_text(json.dumps(dict(os.environ)))
if (home / "error").exists():
    sys.exit((home / "error").read_text())
print((home / "answer").read_text())
"""


class FakeSlurm:
    """Its commands lie in a folder that `path` holds; they answer with what `says` was given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("scontrol", "sbatch", "sinfo", "squeue"):
            (folder / name).write_text(_SCRIPT)
            (folder / name).chmod(0o755)
        self.says("JobId=8 JobState=RUNNING Reason=None")

    @property
    def path(self) -> str:
        return f"{self.folder}{os.pathsep}{os.environ['PATH']}"

    def says(self, text: str) -> None:
        (self.folder / "answer").write_text(text)

    def fails(self, text: str) -> None:
        (self.folder / "error").write_text(text)

    def calls(self) -> list[list[str]]:
        """Return what was called, with its arguments."""
        file = self.folder / "calls"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def environ(self) -> dict[str, str]:
        """Return the environment of the last call."""
        found: dict[str, str] = json.loads((self.folder / "environ").read_text())
        return found
