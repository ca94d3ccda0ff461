"""What happens in a run, for programs that watch it: `train --json` prints it, one JSON object a line, and functions of
Python's callers get it.

It reads the run directory alone; a reader that stops reading holds up nothing but these lines.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

from tuner.files import read_json_object
from tuner.runs import checkpoints
from tuner.runs.directory import RunDirectory
from tuner.runs.follow import Growing, Poller, write_all

OnEvent = Callable[[dict[str, Any]], None]
_STDOUT = 1
_STARTED = ("name", "launch_id", "started", "world_size", "resume_step")


class Events:
    """The lines of one attempt: started, then step, validation and checkpoint as they come.

    Args:
        run: Written, and not started yet.
        target: The descriptor that the lines go to.
        on_event: Gets each event instead, in a thread of this process.
    """

    def __init__(self, run: RunDirectory, target: int = _STDOUT, on_event: OnEvent | None = None) -> None:
        self._run, self._target, self._on_event = run, target, on_event
        self._metrics = Growing(run.metrics, run.metrics.stat().st_size if run.metrics.is_file() else 0)
        self._seen = {path for _, path in checkpoints.newest_first(run.checkpoints)}

    @contextlib.contextmanager
    def printed(self):  # type: ignore[no-untyped-def]
        """Print the events of an attempt from its start until its ranks have ended."""
        facts = read_json_object(self._run.run)
        self._write("started", {"run": str(self._run.path), **{key: facts[key] for key in _STARTED if key in facts}})
        poller = Poller(self._look, "events")
        poller.start()
        try:
            yield
        finally:
            poller.stop()

    def end(self, code: int) -> None:
        """Print how the run ended; nothing comes after it."""
        self._write("ended", self._run.ending(code))

    def _look(self, _: bool) -> None:
        while lines := self._metrics.read():
            for text in filter(bytes.strip, lines.splitlines()):
                line = json.loads(text)
                self._write("step" if "loss" in line else "validation", line)
        for step, path in reversed(checkpoints.newest_first(self._run.checkpoints)):
            if path not in self._seen and checkpoints.inspect(path, hashes=False) is None:
                self._seen.add(path)
                self._write("checkpoint", {"step": step, "path": str(path)})

    def _write(self, event: str, facts: dict[str, Any]) -> None:
        if self._on_event:
            self._on_event({"event": event, **facts})
            return
        write_all(self._target, (json.dumps({"event": event, **facts}) + "\n").encode())
