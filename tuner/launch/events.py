"""`train --json`: what happens in a run as one JSON object a line, for programs that watch it.

It reads the run directory alone; a reader that stops reading holds up nothing but these lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from typing import Any

from tuner.errors import RunDirectoryError
from tuner.runs import checkpoints
from tuner.runs.directory import RunDirectory

_POLL_S = 0.2
_LAST_S = 3.0
_STDOUT = 1
_STARTED = ("name", "launch_id", "started", "world_size", "resume_step")
_ENDED = ("state", "exit_code", "message", "step", "max_steps", "loss", "seconds")


class Events:
    """The lines of one attempt: started, then step, validation and checkpoint as they come.

    Args:
        run: Written, and not started yet.
        target: The descriptor that the lines go to.
    """

    def __init__(self, run: RunDirectory, target: int = _STDOUT) -> None:
        self._run, self._target = run, target
        self._num_read = run.metrics.stat().st_size if run.metrics.is_file() else 0
        self._seen = {found.path for found in checkpoints.listed(run.checkpoints)}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True, name="events")

    @contextlib.contextmanager
    def printed(self):  # type: ignore[no-untyped-def]
        """Print the events of an attempt from its start until its ranks have ended."""
        facts = _object(self._run, "run")
        shown = {key: facts[key] for key in _STARTED if key in facts}
        self._write("started", {"run": str(self._run.path), **shown})
        self._thread.start()
        try:
            yield
        finally:
            self._ending.set()
            self._thread.join(_LAST_S)

    def end(self, code: int) -> None:
        """Print how the run ended; nothing comes after it."""
        status = _object(self._run, "status")
        facts = {key: status[key] for key in _ENDED if key in status} | {"exit_code": code}
        self._write("ended", {"run": str(self._run.path), **facts})

    def _loop(self) -> None:
        while not self._ending.wait(_POLL_S):
            self._look()
        self._look()

    def _look(self) -> None:
        for line in self._new_lines():
            self._write("step" if "loss" in line else "validation", line)
        for found in reversed(checkpoints.listed(self._run.checkpoints)):
            if found.problem is None and found.path not in self._seen:
                self._seen.add(found.path)
                self._write("checkpoint", {"step": found.step, "path": str(found.path)})

    def _new_lines(self) -> list[dict[str, Any]]:
        try:
            with self._run.metrics.open("rb") as stream:
                stream.seek(self._num_read)
                data = stream.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._num_read += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line.strip()]

    def _write(self, event: str, facts: dict[str, Any]) -> None:
        data = (json.dumps({"event": event, **facts}) + "\n").encode()
        with contextlib.suppress(OSError):  # the reader has gone: the run goes on
            while data:
                data = data[os.write(self._target, data) :]


def _object(run: RunDirectory, name: str) -> dict[str, Any]:
    with contextlib.suppress(RunDirectoryError):
        found = run.read_json(run.run if name == "run" else run.status)
        return found if isinstance(found, dict) else {}
    return {}
