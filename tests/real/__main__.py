"""Prepare the model and the rows: `python -m tests.real [FOLDER]`."""

from __future__ import annotations

import sys
from pathlib import Path

import filelock

from tests.real import files, model

MISSING = 3
"""The exit code if the rows are there and the model is not."""


def main() -> int:
    folder = Path(sys.argv[1]).absolute() if sys.argv[1:] else model.folder()
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder / ".lock"):  # two workers of pytest may start at once
        for name, (train, held_out) in files.write(folder).items():
            rows, validation = files.paths(folder, name)
            print(f"{rows}: {train} rows, and {held_out} held out in {validation.name}")
        try:
            print(f"{model.prepare(folder)}: SmolLM2-135M-Instruct")
        except model.Unavailable as reason:
            print(f"The model is missing: {reason}", file=sys.stderr)
            return MISSING
    return 0


if __name__ == "__main__":
    sys.exit(main())
