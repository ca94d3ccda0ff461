"""Serve the report while runs go on: only to this machine, and only with the token in its address.

An open page asks for what has changed since its version. Nothing is written, and no file of a run is served as it is.
Runs that do not exist yet, are half written or were removed are shown with what exists of them.
"""

from __future__ import annotations

import hmac
import json
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socket import socket
from socketserver import ThreadingTCPServer
from urllib.parse import parse_qs

from tuner.files import JsonObject
from tuner.report import page
from tuner.report.gathered import KEYS, Gathered, look, names
from tuner.runs.directory import RunDirectory
from tuner.runs.metrics import Curves

_ADDRESS = "127.0.0.1"
_HOSTS = ("127.0.0.1", "localhost")
"""Host names that a browser may send. A page of another site that points its name to this machine sends that name."""
_EVERY_S = 1.0
_PATIENCE_S = 30.0
_MAX_CONNECTIONS = 32
"""Each has a thread; a browser opens six to a server, so this serves five at once."""
_NOTHING = "default-src 'none'"


class Watched:
    """Some runs, read again at most once a second; each change gets a higher version."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._runs = [_Run(path, name) for path, name in zip(paths, names(paths), strict=True)]
        self._found: list[Gathered] = []
        self._version, self._looked_s = 0, 0.0
        self._charts: dict[str, tuple[int, JsonObject]] = {}
        self._parts: dict[str, tuple[int, str]] = {}
        """Each chart, and each part of the page, with the version in which it changed last."""
        self._lock = threading.Lock()

    def page(self) -> str:
        """Return the whole page."""
        news = self.news(0)
        chart_data = {"version": news["version"], "charts": news["charts"]}
        return page.page(self._found, news["parts"], chart_data, page.policy(is_live=True))

    def news(self, since: int) -> JsonObject:
        """Return what has changed since a version: charts, and parts of the page by their ids."""
        with self._lock:
            self._look()
            changed = {name: html for name, (version, html) in self._parts.items() if version > since}
            drawn = [chart for version, chart in self._charts.values() if version > since]
            return {"version": self._version, "charts": drawn, "parts": changed}

    def _look(self) -> None:
        if self._found and time.monotonic() - self._looked_s < _EVERY_S:
            return
        runs = [run.look() for run in self._runs]
        if [*map(id, runs)] != [*map(id, self._found)]:
            self._found, self._version = runs, self._version + 1
            now = {chart["id"]: chart for chart in page.charts(runs)}
            gone = {name: {**chart, "lines": []} for name, (_, chart) in self._charts.items()}  # a run that began again
            for chart in {**gone, **now}.values():
                if self._charts.get(chart["id"], (0, None))[1] != chart:
                    self._charts[chart["id"]] = self._version, chart
            for name, html in page.parts(runs).items():
                if self._parts.get(name, (0, None))[1] != html:
                    self._parts[name] = self._version, html
        self._looked_s = time.monotonic()  # a look at many runs may take long: the next one waits after its end


class _Run:
    """One run; only new lines of its files are read."""

    def __init__(self, path: Path, name: str) -> None:
        self._run_dir, self._name = RunDirectory(path), name
        self._curves = Curves(self._run_dir, KEYS)
        self._times: tuple[int | None, ...] = ()
        self._found: Gathered | None = None

    def look(self) -> Gathered:
        """Return the run as it is now; the same object as before if nothing can have changed."""
        self._curves.read()
        run_dir, curves = self._run_dir, self._curves.by_key
        files = (
            run_dir.run_json,
            run_dir.status,
            run_dir.resolved_recipe,
            run_dir.data,
            run_dir.samples,
            run_dir.completions,
            run_dir.warnings,
            run_dir.checkpoints,
            run_dir.metrics,
        )
        times = tuple(map(_changed, files))
        # The process of one that runs may be gone, which no file of it says.
        is_known = times == self._times and self._found is not None and self._found.listed.state != "running"
        if not is_known:
            self._times, self._found = times, look(run_dir, self._name, curves)
        assert self._found
        return self._found


def _changed(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


class Server(ThreadingTCPServer):
    """Serves the page of some runs at `url`.

    It is no http.server.HTTPServer, which asks the name service what this machine is called.

    Args:
        port: 0: a free one.

    Raises:
        OSError: the port is taken.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, paths: Sequence[Path], port: int = 0) -> None:
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self.watched, self.token = Watched(paths), secrets.token_urlsafe(24)
        super().__init__((_ADDRESS, port), _Handler)
        self.url = f"http://{_ADDRESS}:{self.server_address[1]}/{self.token}/"

    def process_request(self, request: socket | tuple[bytes, socket], client_address: object) -> None:
        """Answer in a thread; close a connection beyond the largest number at once."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: socket | tuple[bytes, socket], client_address: object) -> None:
        """Answer, and let the next connection in."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: object) -> None:
        """Show the traceback of a bug; ignore a browser that left early."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "tuner", ""
    timeout = _PATIENCE_S

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        _, token, *rest = [*path.split("/", 2), ""]
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in _HOSTS or not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN)
        elif rest == ["", ""]:
            policy = f"{page.policy(is_live=True)}; frame-ancestors 'none'"
            self._answer(HTTPStatus.OK, "text/html", self.server.watched.page(), policy)
        elif rest[0] == "news" and (since := parse_qs(query).get("since", [""])[0]).isdecimal():
            news = json.dumps(self.server.watched.news(int(since[:18])))
            self._answer(HTTPStatus.OK, "application/json", news, _NOTHING)
        else:
            self._refuse(HTTPStatus.NOT_FOUND)

    def _refuse(self, status: HTTPStatus) -> None:
        self._answer(
            status, "text/plain", f"{status.phrase}. The address is what tuner report --watch prints.\n", _NOTHING
        )

    def _answer(self, status: HTTPStatus, kind: str, text: str, policy: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", policy),
            ("Referrer-Policy", "no-referrer"),  # the address holds the token
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: each line would show the token."""
