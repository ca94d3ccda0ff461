"""A hub that breaks off in the middle of a file: what came is never used, and the same command works once it recovers.

A local server stands in for the hub; the download is huggingface_hub's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants

from tuner import assets
from tuner.errors import MachineError
from tuner.models.load import load_tokenizer
from tuner.recipes import loading
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import Model

ID, COMMIT = "someone/some-model", "a" * 40
TINY = Path(assets.asset("package:tiny"))


class Hub:
    """Serves the tiny tokenizer; while `cut`, every large file ends at half of its length."""

    def __init__(self) -> None:
        self.cut, self.sent = True, 0
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _head(self) -> bytes | None:
                path = TINY / self.path.split("?")[0].rsplit("/", 1)[-1]
                content = path.read_bytes() if "/resolve/" in self.path and path.is_file() else None
                self.send_response(200 if content is not None else 404)
                self.send_header("X-Repo-Commit", COMMIT)
                if content is None:
                    self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("ETag", f'"{hashlib.sha256(content or b"").hexdigest()}"')
                self.send_header("Content-Length", str(len(content or b"")))
                self.end_headers()
                return content

            def do_HEAD(self) -> None:
                self._head()

            def do_GET(self) -> None:
                content = self._head() or b""
                half = hub.cut and len(content) > 1_000
                self.wfile.write(content[: len(content) // 2] if half else content)
                hub.sent += 1
                self.close_connection = half

            def log_message(self, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    found = Hub()
    endpoint = f"http://127.0.0.1:{found.server.server_port}"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    # What HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE set when the library is imported.
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("time.sleep", lambda _: None)  # between its attempts
    yield found
    found.close()


def model() -> Model:
    return loading.load("tiny_full_sample_e1", Overrides(model=ID)).config.model


def test_half_a_file_is_never_used_and_the_next_attempt_starts_clean(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MachineError, match="cannot reach the hub for 'someone/some-model'"):
        load_tokenizer(model(), ID)
    cut, attempts, hub.cut = list((tmp_path / "cache").rglob("tokenizer.json")), hub.sent, False
    tokenizer = load_tokenizer(model(), ID)
    hub.close()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    assert cut == []
    assert 2 < attempts < 50
    assert tokenizer("Why?")["input_ids"]
    assert load_tokenizer(model(), ID)("Why?") == tokenizer("Why?")
