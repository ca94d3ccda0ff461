"""Serves a model with OpenAI's protocol, by transformers or by vLLM; `Server` is one in a process of its own.

What a request may ask and how it is answered is in `serving`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import subprocess  # effect: the server is a process of its own, which outlives no program
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from tuner.errors import MachineError, ModelError, Option, TunerError, UsageError
from tuner.machine.hardware import Hardware
from tuner.progress import POLL_S
from tuner.results.loaded_model import ModelSpec, encoder_of, load
from tuner.results.peft_adapter import STEM, read_config
from tuner.results.saved import SOURCE
from tuner.results.serving import answers, engine, prompts
from tuner.results.serving.engine import Engine
from tuner.results.serving.vllm import KEY_VARIABLE, Vllm
from tuner.results.tensors import Stored
from tuner.runs.follow import tail

_GRACE_S = 1
_MAX_CONNECTIONS = 256
_HEAD_S = 10.0
"""Within which a request must arrive, without its body: who sends none takes one of the connections."""


@dataclass(frozen=True)
class Address:
    """Where a server listens, and who may ask.

    Args:
        key: What a client sends as OpenAI's api_key.
        allowed_hosts: Further values of the header `Host`.
    """

    host: str
    port: int
    key: str
    allowed_hosts: Sequence[str] = ()


def name_of(source: str) -> str:
    """Return a model's default name in requests: the name of its folder."""
    return re.sub(r"[^\w.-]", "-", Path(source).resolve().name)


def new_key() -> str:
    return f"sk-{secrets.token_urlsafe(32)}"


def check_key(key: str) -> None:
    """Check that a header can hold a key.

    Raises:
        UsageError: it is empty, or has spaces or other characters than ASCII's.
    """
    if not re.fullmatch(r"[!-~]+", key):
        fix = "Use letters, digits and signs of ASCII, without spaces; or none: then the server makes a key."
        raise UsageError("the key of the server is not one that a client can send", where=Option("api_key"), fix=fix)


def check_installed(*, by_vllm: bool) -> None:
    """Check that the packages for a server are installed. Raises MachineError: they are not."""
    needed = ("fastapi", "uvicorn", "openai") if by_vllm else ("fastapi", "uvicorn")
    if missing := [name for name in needed if find_spec(name) is None]:
        fix = "Install them: pip install 'tuner-deepspeed[serve]'."
        raise MachineError(f"the server needs packages that are not installed: {', '.join(missing)}", fix=fix)


def check_servable(spec: ModelSpec, *, by_vllm: bool) -> None:
    """Check that the server can load the adapter: vLLM supports only LoRA weights.

    Raises:
        ModelError: the adapter has other weights.
    """
    if spec.adapter is None or not by_vllm:
        return
    fix = f"Serve the whole model: tuner export SOURCE DEST --merge. Or use: {Option('engine', 'transformers')}."
    other_tensors = [name for name in Stored(spec.adapter, STEM).shapes if ".lora_" not in name]
    if other_tensors:
        problem = f"{spec.description} hold {other_tensors[0]}, and vLLM supports only LoRA weights"
        raise ModelError(problem, where=SOURCE, fix=fix)
    if read_config(spec.adapter).use_dora:
        raise ModelError(f"{spec.description} use DoRA, which vLLM does not support", where=SOURCE, fix=fix)


def run(
    spec: ModelSpec,
    name: str,
    address: Address,
    hardware: Hardware,
    bits: int | None,
    vllm: str | None,
    on_open: Callable[[], None],
) -> bool:
    """Serve until SIGINT or SIGTERM; return whether nothing runs any more.

    Args:
        bits: As for `load`.
        vllm: vLLM's program, if it is to generate.

    Raises:
        UsageError: the port is in use, or the address is not of this machine.
        TunerError: the model cannot be loaded.
    """
    from tuner.results.serving import app

    encoder = encoder_of(spec)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # effect: ends as Ctrl-C does
    making = prompts.Prompts(encoder, spec.context_tokens)
    running: Engine | Vllm | None = None
    is_over = True

    def stop() -> None:
        nonlocal is_over
        making.end()
        is_over = running is None or running.close()

    try:
        with _bound(address) as port:
            answering: answers.Answers | Vllm
            if vllm is not None:
                answering = running = Vllm(vllm, spec, name, making)
            else:
                loaded = load(spec, hardware, bits)
                model = engine.whole_model(loaded.model)
                sampling = engine.Sampling(model)
                running = engine.begin(model, encoder, spec.context_tokens)
                answering = answers.Answers(name, encoder, making, running, sampling, model.config.model_type)
            hosts = app.Hosts(address.host, address.allowed_hosts)
            _listen(app.make(name, answering, hosts, address.key), port, on_open, stop)
    except KeyboardInterrupt:
        pass
    finally:
        stop()
    return is_over


def _bound(address: Address) -> socket.socket:
    """Return a socket that has the port, and does not listen yet: a port in use is told before weights are read."""
    where = f"{address.host}:{address.port}"
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        fix = "Use 127.0.0.1 for this machine alone, 0.0.0.0 for all interfaces."
        raise UsageError(f"{address.host!r} is no address: {error.strerror}", where=Option("host"), fix=fix) from error
    port = socket.socket(family, kind, protocol)
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        port.bind(place)
    except OSError as error:
        port.close()
        fix = f"Use another {Option('port')}, or stop the server that has it."
        raise UsageError(f"cannot listen on {where}: {error.strerror}", where=Option("port"), fix=fix) from error
    return port


def _listen(served: Any, port: socket.socket, on_open: Callable[[], None], on_stop: Callable[[], None]) -> None:
    import uvicorn  # an extra
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Connection(H11Protocol):
        """One that is closed if no request arrives: uvicorn waits for ever for the end of its headers."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def on_response_complete(self) -> None:
            self._waiting.cancel()
            self._wait()  # before the next request, which may have arrived already
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._waiting.cancel()
            super().connection_lost(exc)

        def _wait(self) -> None:
            self._waiting = self.loop.call_later(_HEAD_S, self._close_if_idle)

        def _close_if_idle(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    class Listening(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if not self.should_exit:
                on_open()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # What is cut off now is no error. Requests end with one of their own; the loop would wait for threads that
            # wait for a chat template.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            await asyncio.to_thread(on_stop)
            await super().shutdown(sockets)

    config = uvicorn.Config(
        served,
        http=Connection,  # of h11: all headers together have at most 64 KiB
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        log_level="error",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=_GRACE_S,
    )
    Listening(config).run([port])


_STOP_S, _REPLY_S = 20.0, 2.0
_MAX_LINES = 5


class Server:
    """A model server with OpenAI's protocol, until `stop()` or the end of a `with` block.

    Attributes:
        url: The address, such as http://127.0.0.1:8000/v1.
        name: The model's name in requests.
        api_key: What clients send as `api_key`; no other process is shown it.
    """

    def __init__(self, argv: Sequence[str], url: str, name: str, api_key: str) -> None:
        """Start the server, and return when it answers.

        Args:
            argv: The arguments of `tuner serve`, which gets `api_key` by its environment.

        Raises:
            UsageError: another server uses the address.
            TunerError: the server ended before it answered; the error holds its last lines of output.
        """
        self.url, self.name, self.api_key = url, name, api_key
        if self._status({}) is not None:  # without the key: that server may be a stranger's
            fix = "Use another port, or stop that server."
            raise UsageError(f"another server answers at {url}", where="port", fix=fix)
        self._log = tempfile.NamedTemporaryFile(prefix="tuner-serve-", suffix=".log")  # noqa: SIM115  closed by stop
        command = [sys.executable, "-m", "tuner", "serve", *argv]
        environment = {**os.environ, KEY_VARIABLE: api_key}  # effect: not among the arguments, which others see
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
        )
        atexit.register(self.stop)
        try:
            while self._status({"Authorization": f"Bearer {api_key}"}) != 200:
                if self._process.poll() is not None:
                    lines = [line for line in tail(Path(self._log.name)).splitlines() if line.strip()]
                    last_lines = " ".join(lines[-_MAX_LINES:]) or f"exit code {self._process.returncode}"
                    raise TunerError(f"the server of {name} ended: {last_lines}")
                time.sleep(POLL_S)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server; do nothing if it has ended."""
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

    def _status(self, headers: Mapping[str, str]) -> int | None:
        """Return the status that the address answers with; None if nothing listens."""
        request = urllib.request.Request(f"{self.url}/models", headers={**headers})  # noqa: S310  http, ours
        try:
            with urllib.request.urlopen(request, timeout=_REPLY_S) as reply:  # noqa: S310  as above
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None
