"""Checkpoints on the hub while training goes on: one upload at a time, in a process of its own.

A save during an upload is left out: the next one, or the result, is newer. A failure is a warning of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tuner.report.pushing import Target, Upload
from tuner.runs.directory import RunDirectory
from tuner.worker.output import warn

LIMIT_S = 600.0
"""The longest that the end of training waits for the last upload."""


class PushesCheckpoints:
    """Uploads the weights of checkpoints.

    Args:
        run: It saves them.
        target: Where they go.
    """

    def __init__(self, run: RunDirectory, target: Target) -> None:
        self._run, self._target = run, target
        self._upload: Upload | None = None

    def push(self, checkpoint: Path) -> None:
        """Begin to upload a checkpoint, if no upload is going on."""
        if self._upload and not self._upload.has_ended:
            return
        self._tell()
        self._upload = Upload(self._run, checkpoint, checkpoint.name, self._target)

    def finish(self, tick: Callable[[], None]) -> None:
        """Wait for the last upload: two at once would change the repository under each other.

        Args:
            tick: Called while it waits.
        """
        if self._upload and not self._upload.has_ended:
            print(f"Waiting for the upload of {self._upload.name}; at most {LIMIT_S / 60:g} min.", flush=True)
            self._upload.wait(LIMIT_S, tick)
        self._tell()

    def stop(self) -> None:
        """End an upload that is going on: the run has failed, or was stopped."""
        if self._upload:
            self._upload.stop("the run ended before.")
        self._tell()

    def _tell(self) -> None:
        if self._upload and self._upload.has_ended:
            if problem := self._upload.problem:
                warn(self._run, problem)
            self._upload = None
