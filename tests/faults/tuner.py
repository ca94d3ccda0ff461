"""The command line, with ranks that TUNER_FAULT makes go wrong."""

from __future__ import annotations

from tuner.cli import main
from tuner.launch import render
from tuner.runs import lock

if __name__ == "__main__":
    render.WORKER = lock.WORKER = "tests.faults.worker"
    main()
