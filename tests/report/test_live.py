"""`tuner report --watch`: who may ask, what is answered, and how it ends; test_browser.py looks at it in a browser."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.report import made
from tuner.report import live
from tuner.report.live import Server, Watched
from tuner.runs.records import RunStatus


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    run = made.trained(tmp_path_factory.mktemp("runs") / "run", num_steps=60)
    with Server([run.path]) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    port = int(server.server_address[1])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, headers={"Host": f"127.0.0.1:{port}", **headers})
    return connection.getresponse()


def test_it_answers_who_knows_the_token_on_this_machine_alone(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1" and len(server.token) >= 32

    answer = ask(server, f"/{server.token}/")

    assert answer.status == 200 and "<h1" in answer.read().decode()
    policy = str(answer.headers["Content-Security-Policy"])
    assert policy.startswith("default-src 'none';") and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy.partition("script-src")[2] and "unsafe-eval" not in policy
    assert answer.headers["Referrer-Policy"] == "no-referrer" and answer.headers["Cache-Control"] == "no-store"
    assert ask(server, f"/{server.token}/", Host="localhost:1234").status == 200, "through a tunnel of ssh"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *[
            (path, 403)
            for path in ("/", "//", "*", "/news?since=0", "/wrong/", "/TOKE/", "/TOKENx/", "/caf\xe9/", "//[")
        ],
        *[(f"/TOKEN{path}", 404) for path in ("", "/run.json", "/../run.json", "//etc/passwd", "/%2e%2e/", "/news")],
        *[(f"/TOKEN/news?since={since}", 404) for since in ("", "x", "-1", "1e3")],
        ("/TOKEN/news?since=" + "9" * 6000, 200),
    ],
)
def test_nothing_else_is_answered(path: str, status: int, server: Server) -> None:
    port = int(server.server_address[1])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.putrequest("GET", "/", skip_host=True)
    connection._buffer[0] = (  # type: ignore[attr-defined]  # what no client of good manners sends
        f"GET {path.replace('TOKEN', server.token).replace('TOKE/', server.token[:-1] + '/')} HTTP/1.1".encode(
            "latin-1"
        )
    )
    connection.putheader("Host", f"127.0.0.1:{port}")
    connection.endheaders()

    assert connection.getresponse().status == status


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example:1", "[::1]:1"])
def test_a_page_elsewhere_whose_name_leads_here_is_refused(host: str, server: Server) -> None:
    assert ask(server, f"/{server.token}/", Host=host).status == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_nothing_can_be_sent(method: str, server: Server) -> None:
    assert ask(server, f"/{server.token}/", method).status == 501


def news(watched: Watched, since: int) -> tuple[int, dict[str, Any], dict[str, str]]:
    watched._looked_s = 0.0
    found = watched.news(since)
    lines = {line["name"]: line for chart in found["charts"] if chart["id"] == "chart-loss" for line in chart["lines"]}
    return found["version"], lines, found["parts"]


def test_what_is_new_is_sent_alone_and_a_run_may_come_go_and_begin_again(tmp_path: Path) -> None:
    watched = Watched([tmp_path / "run"])
    version, lines, parts = news(watched, 0)
    assert lines == {} and "damaged" in parts["runs_table"], "it is not there yet"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.json").write_text('{"recipe": {')  # half written
    version, *_ = news(watched, version)

    run = made.trained(tmp_path / "other", num_steps=30)
    run.write_status(RunStatus(state="running"))
    run.path.rename(tmp_path / "new") and (tmp_path / "run" / "recipe.json").unlink()
    (tmp_path / "run").rmdir()
    run = type(run)((tmp_path / "new").rename(tmp_path / "run"))
    version, lines, _ = news(watched, version)
    assert len(lines["run"]["x"]) == 30

    run.log_metrics({"step": 31, "loss": 0.5})
    version, lines, parts = news(watched, version)
    assert (lines["run"]["x"][-1], lines["run"]["y"][-1], len(lines["run"]["x"])) == (31, 0.5, 31)
    assert "machine" not in parts and "runs_table" in parts

    run.metrics.write_text('{"step": 1, "loss": 9.0}\n')  # it began again
    watched._looked_s = 0.0
    found = watched.news(version)
    drawn = {chart["id"]: [line["x"] for line in chart["lines"]] for chart in found["charts"]}
    assert drawn["chart-loss"] == [[1]]
    assert drawn["chart-grad_norm"] == [], "what it has not logged again is drawn no more"
    version, lines, parts = news(watched, found["version"])
    assert lines == {}, "nothing is new"


def test_a_long_run_is_followed_without_being_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made.trained(tmp_path / "run", num_steps=1)
    run.write_status(RunStatus(state="running"))
    line = {"loss": 1.25, "grad_norm": 0.5, "learning_rate": 1e-5, "memory_bytes": 1 << 30}
    with run.metrics.open("a") as file:
        file.writelines(json.dumps({"step": step, **line}) + "\n" for step in range(2, 200_001))
    watched = Watched([run.path])
    version, lines, _ = news(watched, 0)
    assert lines["run"]["x"][-1] == 200_000
    read = os.times().user

    for step in range(200_001, 200_006):
        run.log_metrics({"step": step, "loss": 2.0})
        version, lines, _ = news(watched, version)
        assert lines["run"]["x"][-1] == step and len(lines["run"]["x"]) <= 2002

    assert os.times().user - read < 5, "processor time of five looks"


def test_the_command_prints_its_address_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    run = made.trained(tmp_path / "run", num_steps=5)
    argv = [sys.executable, "-m", "tuner", "report", str(run.path), str(tmp_path / "later"), "--watch"]
    root = str(Path(live.__file__).parents[2])
    with subprocess.Popen(
        argv, cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, stdout=-1, stderr=-1, text=True
    ) as child:
        assert child.stdout and child.stderr
        url = child.stdout.readline().strip()
        host, _, path = url.removeprefix("http://").partition("/")
        connection = http.client.HTTPConnection(host, timeout=20)
        connection.request("GET", f"/{path}")
        assert connection.getresponse().status == 200
        child.send_signal(signal.SIGINT)
        _, told = child.communicate(timeout=20)

    assert child.returncode == 0
    assert "later is no run directory yet" in told and "Traceback" not in told
    assert not run.report.exists()


def test_a_port_that_is_taken_is_told(server: Server, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from tuner.cli.report import command

    result = CliRunner().invoke(command, [str(tmp_path), "--watch", "--port", str(server.server_address[1])])

    assert "cannot be opened: Address already in use" in str(result.exception)
