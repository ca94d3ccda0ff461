"""A stand-in for the hub's HTTP API, as far as an upload asks it: one repository, one user."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants

NAME = "my-org/my-model"
TOKEN = "hf_CANARYCANARYCANARY"


class Hub:
    """Keeps what is uploaded; refuses what `refused` says, and drops the connection at status 0."""

    def __init__(self) -> None:
        self.user: dict[str, Any] = {
            "name": "me",
            "orgs": [{"name": "my-org"}],
            "auth": {"accessToken": {"role": "write"}},
        }
        self.files: dict[str, bytes] | None = None
        """Of the repository; None where there is none."""
        self.private = False
        self.refused: dict[str, int] = {}
        """A part of a path -> the status of the answer."""
        self.asked: list[str] = []
        self.sent = b""
        """All bodies."""
        self.tokens: dict[str, str | None] = {}
        """Path -> the header with the token that came with it."""
        self._large: dict[str, bytes] = {}

    @property
    def changed(self) -> bool:
        return any(asked.startswith("POST /api/") and "yaml" not in asked for asked in self.asked)

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Return the status and the JSON of an answer."""
        for part, status in self.refused.items():
            if part in path:
                return status, {"error": "says the hub"}
        if path == "/api/whoami-v2":
            return 200, self.user
        if path == "/api/repos/create":
            self.files, self.private = {}, json.loads(body).get("visibility") == "private"
            return 200, {"url": f"{constants.ENDPOINT}/{NAME}"}
        if path == "/api/validate-yaml":
            return 200, {"warnings": [], "errors": []}
        if path.startswith("/large/"):
            self._large[path.removeprefix("/large/")] = body
            return 200, {}
        if self.files is None:
            return 404, {}
        return self._of_repository(method, path, body)

    def _of_repository(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        files = self.files
        assert files is not None
        if method == "GET" and path == f"/api/models/{NAME}":
            told = [{"rfilename": name} for name in files]
            return 200, {"id": NAME, "private": self.private, "siblings": told, "sha": "a" * 40}
        if path == f"/api/models/{NAME}/preupload/main":
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in _names(body)}
            return 200, {"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]}
        if path == f"/{NAME}.git/info/lfs/objects/batch":
            oids = [asked["oid"] for asked in json.loads(body)["objects"]]
            objects = [{"oid": oid, "size": 1, "actions": {"upload": {"href": self._large_url(oid)}}} for oid in oids]
            return 200, {"transfer": "basic", "objects": objects}
        if path == f"/api/models/{NAME}/commit/main":
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = self._large[value["oid"]]
            return 200, {"commitUrl": f"{constants.ENDPOINT}/{NAME}/commit/{'b' * 40}", "commitOid": "b" * 40}
        return 404, {}

    def _large_url(self, oid: str) -> str:
        return f"{constants.ENDPOINT}/large/{oid}"


def _names(body: bytes) -> list[str]:
    return [file["path"] for file in json.loads(body)["files"]]


@contextmanager
def serving(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Let huggingface_hub take `hub` for the hub, and a canary for the user's token."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = self.path.split("?")[0]
            hub.asked.append(f"{self.command} {path}")
            hub.sent += body
            hub.tokens[path] = self.headers.get("Authorization")
            status, told = hub.answer(self.command, path, body)
            if status == 0:
                self.close_connection = True
                return
            content = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_HEAD = _answer

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # What HF_ENDPOINT, HF_HUB_OFFLINE and HF_HUB_DISABLE_XET set when the library is imported. The stand-in does not
    # speak the protocol of xet; huggingface_hub then uploads large files by that of Git LFS.
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    for name, value in (("HF_ENDPOINT", constants.ENDPOINT), ("HF_HUB_DISABLE_XET", "1"), ("HF_HUB_OFFLINE", "0")):
        monkeypatch.setenv(name, value)  # of processes that a test starts
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    # Between the attempts of huggingface_hub. Without any pause, what waits for a process would take a core.
    monkeypatch.setattr("time.sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.02)))
    yield hub
    server.shutdown()
    server.server_close()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub(), monkeypatch) as found:
        yield found
