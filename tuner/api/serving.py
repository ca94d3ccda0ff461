"""A server of a model, as `tuner serve` runs it, in a process of its own that a program starts and stops."""

from __future__ import annotations

import atexit
import contextlib
import subprocess  # effect: the server is a process of its own, which outlives no program
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tuner.errors import TunerError, UsageError
from tuner.runs.follow import tail

_POLL_S, _STOP_S = 0.2, 20.0
_MAX_LINES = 5


class Server:
    """A model behind an OpenAI-style address, until `stop()` or the end of a `with` block.

    Attributes:
        url: The address, such as http://127.0.0.1:8000/v1.
        name: The model's name in requests.
    """

    def __init__(self, argv: Sequence[str], url: str, name: str) -> None:
        """Start it, and return once it answers.

        Args:
            argv: What follows `tuner serve`.
            url: Where it will answer.
            name: As which model.

        Raises:
            UsageError: another server is there.
            TunerError: it ended before it answered, with what it said.
        """
        self.url, self.name = url, name
        if self._answers():
            fix = "Use another port, or stop that server."
            raise UsageError(f"another server answers at {url}", where="port", fix=fix)
        self._log = tempfile.NamedTemporaryFile(prefix="tuner-serve-", suffix=".log")  # noqa: SIM115  closed by stop
        command = [sys.executable, "-m", "tuner", "serve", *argv]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT)
        atexit.register(self.stop)
        try:
            while not self._answers():
                if self._process.poll() is not None:
                    raise TunerError(f"the server of {name} ended: {self._last_words()}")
                time.sleep(_POLL_S)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server; once it has ended, nothing."""
        atexit.unregister(self.stop)
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "stopped" if self._process.poll() is not None else "serving"
        return f"Server({self.name!r} at {self.url}, {state})"

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/models", timeout=_POLL_S * 10) as reply:  # noqa: S310  http, ours
                return bool(reply.status == 200)
        except OSError:  # nobody listens yet
            return False

    def _last_words(self) -> str:
        lines = [line for line in tail(Path(self._log.name)).splitlines() if line.strip()]
        return " ".join(lines[-_MAX_LINES:]) or f"exit code {self._process.returncode}"
