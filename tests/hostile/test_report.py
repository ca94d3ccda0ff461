"""A report shows control characters as symbols, and its server keeps few connections."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from tests.launch.plans import written_run
from tuner.report import page
from tuner.report.gathered import gather
from tuner.report.live import Server


def test_control_characters_are_symbols(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run")
    run.log_warning("\x1b[2J\x07 \u202e \x9b")

    text = page.render(gather([run.path]))

    assert not {"\x1b", "\x07", "\u202e", "\x9b"} & set(text)
    assert "␛[2J␇ � �" in text


def test_the_library_that_draws_is_as_it_was() -> None:
    for name in ("uplot.min.js", "page.js"):
        assert page._script(name).translate(page._SYMBOLS) == page._script(name)


def test_a_server_of_a_report_keeps_at_most_32_connections(tmp_path: Path) -> None:
    with Server([tmp_path / "run"]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        held = [socket.create_connection(server.server_address) for _ in range(32)]
        later = socket.create_connection(server.server_address)
        later.settimeout(10)

        assert later.recv(1) == b""

        for connection in (*held, later):
            connection.close()
        server.shutdown()
