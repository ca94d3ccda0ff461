"""An open port answers only who may ask, and no request ends, blocks or fills the server."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.runs import environment, free_port
from tests.e2e.warm import Forked, warm
from tests.results.scripted import CONTEXT, write_scripted
from tests.results.test_serve import END_S, KEY, START_S, client_of, served

openai = pytest.importorskip("openai")

MIB = 1024**2
CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "[count]"}], "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Forked, int]]:
    """A server, and its port, for all tests of this module: each leaves it answering."""
    folder = tmp_path_factory.mktemp("served")
    limit = "from tuner.cli import main; from tuner.results.serving import prompts; prompts._MAX_ANSWER_S = 2.0; main()"
    with served(folder, write_scripted(folder / "scripted"), "--name", "scripted", code=limit) as (process, address):
        yield process, int(address.rpartition(":")[2])


@pytest.fixture(autouse=True)
def still_answers(server: tuple[Forked, int]) -> Iterator[None]:
    yield
    assert server[0].poll() is None
    assert post(server[1], CHAT)[0] == 200


def raw(port: int, data: bytes, timeout_s: float = 60) -> bytes:
    """Return all that the server sends for these bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout_s) as connection:
        connection.sendall(data)
        reply = b""
        while part := connection.recv(65_536):
            reply += part
        return reply


def request(method: str, path: str, body: bytes = b"", **headers: str | None) -> bytes:
    """Return the bytes of a request; a header of None is left out."""
    lines = {"Host": "127.0.0.1", "Authorization": f"Bearer {KEY}", "Connection": "close"}
    named = lines | {name.replace("_", "-"): value for name, value in headers.items()}
    if body:
        named.setdefault("Content-Length", str(len(body)))
    head = "".join(f"{name}: {value}\r\n" for name, value in named.items() if value is not None)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def status_of(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1])


def post(port: int, document: Any, path: str = "/v1/chat/completions", **headers: str | None) -> tuple[int, Any]:
    """Return the status and the object that answer a document, or the bytes of a body."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    reply = raw(port, request("POST", path, body, **headers))
    return status_of(reply), json.loads(reply.partition(b"\r\n\r\n")[2])


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", None, "10.0.0.1"])
def test_another_host_is_refused_though_its_name_leads_here(server: tuple[Forked, int], host: str | None) -> None:
    for method, path in (("GET", "/v1/models"), ("GET", "/health"), ("POST", "/v1/chat/completions")):
        reply = raw(server[1], request(method, path, Host=host))

        assert status_of(reply) in (400, 403)
        assert b"scripted" not in reply


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://127.0.0.1"])
def test_a_page_of_another_site_is_refused(server: tuple[Forked, int], origin: str) -> None:
    port = server[1]

    for reply in (
        raw(port, request("GET", "/v1/models", Origin=origin)),
        raw(port, request("POST", "/v1/chat/completions", json.dumps(CHAT).encode(), Origin=origin)),
        raw(port, request("OPTIONS", "/v1/models", Origin=origin, Access_Control_Request_Method="GET")),
    ):
        assert status_of(reply) == 403
        assert b"access-control-allow" not in reply.lower()


@pytest.mark.parametrize(
    "key", [None, "Bearer", "Bearer ", f"Bearer {KEY}x", f"Basic {KEY}", KEY, f"Bearer {KEY[:-1]}", "Bearer é"]
)
def test_who_has_no_key_is_told_nothing(server: tuple[Forked, int], key: str | None) -> None:
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/docs"), ("GET", "/nothing")):
        reply = raw(server[1], request(method, path, Authorization=key))

        assert status_of(reply) == 401
        assert b"scripted" not in reply
    assert status_of(raw(server[1], request("GET", "/health", Authorization=key))) == 200


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/",
            "/reset",
            "/load_model",
            "/docs",
            "/redoc",
            "/openapi.json",
            "/v1/responses",
            "/v1/audio/transcriptions",
        ),
        *("/v1/models/", "/v1/chat/completions/..", "/../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//health"),
    ],
)
def test_nothing_else_is_answered(server: tuple[Forked, int], path: str) -> None:
    for method in ("GET", "POST", "PUT", "DELETE"):
        reply = raw(server[1], request(method, path))

        assert status_of(reply) in (404, 405)
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def deep(of: bytes, count: int = 100_000) -> bytes:
    return b'{"model": "scripted", "messages": ' + of * count


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"null", b"[]", b"1", b'"text"', b"\xff\xfe", b"{}" * 2, b"\x00" * 100, b"\xed\xa0\x80"),
        *(deep(b"["), deep(b'{"a":'), b"[" * MIB, b'{"model": 1e999}', b'{"model": "scripted", "messages": NaN}'),
        b'{"model": "scripted", "messages": [' + b",".join([b"{}"] * 2_000_000) + b"]}",
        b"--x\r\nContent-Disposition: form-data; name=model\r\n\r\nscripted\r\n--x--",
    ],
    ids=lambda body: repr(body[:24]),
)
def test_a_body_that_is_no_request_is_refused(server: tuple[Forked, int], body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        status, document = post(server[1], body, path, Content_Length=str(len(body)))

        assert status == 400
        assert document["error"]["message"]


MESSAGES: list[Any] = [
    None,
    1,
    "text",
    [],
    [None],
    [1],
    [[]],
    [{}],
    [{"role": "user"}, 1],
    {"role": "user", "content": "hi"},
    [{"role": "nobody", "content": "hi"}],
    [{"role": ["user"], "content": "hi"}],
    [{"role": "user", "content": 1}],
    [{"role": "user", "content": {"type": "text"}}],
    [{"role": "user", "content": [1]}],
    [{"role": "user", "content": [{}]}],
    [{"role": "user", "content": [{"type": ["text"], "text": "hi"}]}],
    [{"role": "user", "content": [{"type": {}, "text": "hi"}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "text", "text": None}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png;base64,AAAA"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost/a.png"}}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}],
    [{"role": "assistant", "tool_calls": "call"}],
    [{"role": "assistant", "tool_calls": [{"function": None}]}],
    [{"role": "user", "content": "hi", "chat_template": "x"}],
    [{"role": "user", "content": "hi"}] * 10_000,
]
MORE: list[dict[str, Any]] = [
    {"model": None},
    {"model": 1},
    {"model": "../../etc"},
    {"stop": ["x"] * 10_000},
    {"stop": "x" * 100_000},
    {"stop": {}},
    {"n": 10**6},
    {"n": -1},
    {"n": "2"},
    {"n": True},
    {"seed": 10**30},
    {"seed": "x"},
    {"max_tokens": -5},
    {"max_tokens": 1.5},
    {"temperature": -1},
    {"temperature": []},
    {"top_p": 7},
    {"top_logprobs": 10**6, "logprobs": True},
    {"logprobs": 5},
    {"stream": "yes"},
    {"stream": 1},
    {"stream_options": []},
    {"stream_options": {"include_usage": True}},
    {"tools": "x"},
    {"tools": [{}]},
    {"tools": [{"type": "function"}]},
    {"tools": [{"type": "function", "function": {"name": ""}}]},
    {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
    {"tool_choice": {"type": "function"}},
    {"chat_template": "{% for a in range(9**9) %}{% for b in range(9**9) %}{% endfor %}{% endfor %}"},
    {"chat_template_kwargs": {"tools": []}},
    {"generation_config": "{}"},
    {"logit_bias": {"x": "y"}},
    {"metadata": 1},
    {"x" * 100_000: 1},
    {"response_format": "json"},
    {"functions": []},
    {"__class__": "x"},
]


def test_a_request_with_wrong_values_is_refused_and_none_of_them_is_an_error_of_the_server(
    server: tuple[Forked, int],
) -> None:
    wrong = [{"messages": messages} for messages in MESSAGES] + MORE

    statuses = {repr(more)[:80]: post(server[1], CHAT | more)[0] for more in wrong}

    assert {name: status for name, status in statuses.items() if status not in (400, 404)} == {}


@pytest.mark.parametrize("size", ["declared", "chunked"])
def test_a_body_without_end_is_refused_and_not_kept(server: tuple[Forked, int], size: str) -> None:
    process = psutil.Process(server[0].pid)
    before = process.memory_info().rss
    most = before
    chunk = b"x" * MIB
    head = {"Content-Length": str(600 * MIB)} if size == "declared" else {"Transfer-Encoding": "chunked"}
    sent = chunk if size == "declared" else b"%x\r\n" % MIB + chunk + b"\r\n"
    with socket.create_connection(("127.0.0.1", server[1]), 60) as connection:
        connection.sendall(request("POST", "/v1/chat/completions", **{k.replace("-", "_"): v for k, v in head.items()}))
        for number in range(600):
            connection.sendall(sent)
            most = max(most, process.memory_info().rss) if number % 20 == 0 else most
        connection.sendall(b"0\r\n\r\n" if size == "chunked" else b"")
        reply = connection.recv(65_536)

    assert status_of(reply) == 413
    assert most - before < 200 * MIB


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00" + b"\x00" * 200,
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"X: " + b"y" * 10 * MIB + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    ],
    ids=lambda data: repr(data[:32]),
)
def test_what_is_no_http_gets_no_answer_of_the_app(server: tuple[Forked, int], data: bytes) -> None:
    try:
        with socket.create_connection(("127.0.0.1", server[1]), 60) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            reply = connection.recv(65_536)
    except ConnectionError:
        return  # closed while it was sent

    assert not reply or status_of(reply) in range(400, 500)


def test_a_prompt_beyond_the_context_is_refused_at_once(server: tuple[Forked, int]) -> None:
    for text in ("one two " * CONTEXT, "x" * 20 * MIB, "\u00e9 \U0001f642" * MIB):
        start = time.monotonic()

        status, document = post(server[1], CHAT | {"messages": [{"role": "user", "content": text}]})

        assert (status, document["error"]["param"]) == (400, "messages"), document
        assert time.monotonic() - start < 20


@pytest.mark.long  # tests/results/test_chat.py
def test_a_template_that_loops_is_ended_while_others_are_answered(server: tuple[Forked, int]) -> None:
    hostile = CHAT | {"messages": [{"role": "user", "content": "[nested]"}]}
    body = json.dumps(hostile).encode()
    with socket.create_connection(("127.0.0.1", server[1]), 60) as connection:
        connection.sendall(request("POST", "/v1/chat/completions", body))
        assert status_of(raw(server[1], request("GET", "/v1/models"))) == 200
        assert not select.select([connection], [], [], 0)[0], "it is answered while the template runs"
        reply = connection.recv(65_536)
        while b"}" not in reply:  # the body may come after the headers
            reply += connection.recv(65_536)

    assert status_of(reply) == 400
    assert "processor time" in json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_who_leaves_while_a_template_is_rendered_gets_nobody_else_a_wrong_answer(server: tuple[Forked, int]) -> None:
    body = json.dumps(CHAT | {"messages": [{"role": "user", "content": "[slow]"}]}).encode()
    with socket.create_connection(("127.0.0.1", server[1]), 60) as connection:
        connection.sendall(request("POST", "/v1/chat/completions", body))
        time.sleep(0.05)

    for _ in range(2):
        status, document = post(server[1], CHAT)

        assert (status, document["choices"][0]["message"]["content"]) == (200, "one two three four")


@pytest.mark.long
def test_a_template_that_hangs_in_c_is_killed(server: tuple[Forked, int]) -> None:
    status, document = post(server[1], CHAT | {"messages": [{"role": "user", "content": "[power]"}]})

    assert status == 400
    assert document["error"]["param"] == "messages"


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-45, 1e-10])
def test_a_temperature_near_zero_does_not_end_the_server(server: tuple[Forked, int], temperature: float) -> None:
    """Scores that are divided by it are no numbers: the draw of one request failed for all."""
    status, document = post(server[1], CHAT | {"temperature": temperature})

    assert (status, document["choices"][0]["message"]["content"]) == (200, "one two three four")


def test_more_choices_than_one_request_may_have_are_refused(server: tuple[Forked, int]) -> None:
    asked = {"model": "scripted", "prompt": ["hi"] * 128, "n": 128, "max_tokens": 1}

    status, document = post(server[1], asked, "/v1/completions")

    assert (status, document["error"]["param"]) == (400, "n")


@pytest.mark.long  # it waits until they are
def test_connections_that_send_no_request_are_closed_and_others_are_answered(server: tuple[Forked, int]) -> None:
    opened = [socket.create_connection(("127.0.0.1", server[1]), 60) for _ in range(260)]
    try:
        for number, connection in enumerate(opened):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " if number % 2 else b"")
        deadline = time.monotonic() + 40
        while (status := status_of(raw(server[1], request("GET", "/health")))) != 200 and time.monotonic() < deadline:
            for connection in opened[1::2]:  # a byte now and then
                with suppress(OSError):
                    connection.sendall(b"y")
            time.sleep(1)
    finally:
        for connection in opened:
            connection.close()

    assert status == 200


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def test_a_pattern_of_the_model_that_never_ends_holds_up_nobody_else(server: tuple[Forked, int]) -> None:
    """What tells a tool call from text are patterns that come with a tokenizer."""
    body = json.dumps(CHAT | {"messages": [{"role": "user", "content": "[evil]"}], "tools": [TOOL]}).encode()
    with socket.create_connection(("127.0.0.1", server[1]), 60) as connection:
        connection.sendall(request("POST", "/v1/chat/completions", body))
        time.sleep(0.4)
        assert status_of(raw(server[1], request("GET", "/health"))) == 200
        assert not select.select([connection], [], [], 0)[0], "it is answered while the pattern runs"
        reply = b""
        while part := connection.recv(65_536):
            reply += part

    message = json.loads(reply.partition(b"\r\n\r\n")[2])["choices"][0]["message"]
    assert message["content"].startswith("<evil>a")


def test_a_call_that_is_no_call_is_what_the_model_wrote(server: tuple[Forked, int]) -> None:
    asked = CHAT | {"messages": [{"role": "user", "content": "[textcall]"}], "tools": [TOOL]}

    status, document = post(server[1], asked)

    assert (status, document["choices"][0]["message"]["content"]) == (200, '<tool_call>"text"</tool_call>')


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_stop_ends_within_seconds_whatever_is_asked(number: int, tmp_path: Path) -> None:
    folder = write_scripted(tmp_path / "scripted")
    with served(tmp_path, folder) as (process, address):
        port = int(address.rpartition(":")[2])
        asked = [
            CHAT | {"messages": [{"role": "user", "content": content}]} | more
            for content, more in (("[nested]", {}), ("[loop]", {}), ("[loop]", {"stream": True, "n": 4}))
        ]
        connections = [socket.create_connection(("127.0.0.1", port), 60) for _ in range(4)]
        for connection, document in zip(connections, asked, strict=False):
            connection.sendall(request("POST", "/v1/chat/completions", json.dumps(document).encode()))
        connections[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-")  # and waits
        time.sleep(1)
        start = time.monotonic()
        os.kill(process.pid, number)
        text, _ = process.communicate(60)
        took_s = time.monotonic() - start
        for connection in connections:
            connection.close()

    assert process.returncode == 0, text
    assert took_s < END_S
    assert "Stopped." in text
    assert "Traceback" not in text


def test_a_key_is_made_and_printed_once_and_serving_means_that_the_port_is_open(tmp_path: Path) -> None:
    port, terminal = free_port(), tmp_path / "output"
    terminal.touch()
    argv = ["serve", write_scripted(tmp_path / "it"), "--port", port]
    process = warm().start(argv, env=environment(TMPDIR=str(tmp_path)), terminal=str(terminal))
    try:
        deadline = time.monotonic() + START_S
        while "sk-" not in (text := terminal.read_text()) and time.monotonic() < deadline:
            assert process.poll() is None, text
            time.sleep(0.05)
        keys = re.findall(r"sk-[\w-]{43}", text)
        with client_of(f"http://127.0.0.1:{port}") as client:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
            listed = [model.id for model in client.with_options(api_key=keys[0]).models.list()]
        children = psutil.Process(process.pid).children(recursive=True)
        shown = [" ".join(of_server.cmdline()) for of_server in (psutil.Process(process.pid), *children)]
    finally:
        process.kill()
        process.wait()

    assert len(keys) == 1
    assert listed == ["it"]
    assert children
    assert not any(keys[0] in line for line in shown)
