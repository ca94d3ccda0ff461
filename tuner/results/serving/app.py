"""The app: who may ask, which routes there are, and how answers and errors leave.

It generates nothing. Whoever may not ask is refused before a byte of the body is read.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, MutableMapping
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from tuner.results.serving.answers import Answer, Answers
from tuner.results.serving.engine import GenerationFailed
from tuner.results.serving.requests import MAX_BODY_BYTES, ChatRequest, CompletionRequest, Refused, read
from tuner.results.serving.vllm import Begun, Vllm

_BODY_S, _DRAIN_S = 60.0, 10.0
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_CLIENT_LEFT = 499
"""nginx's status for it; nobody reads it."""
_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104  compared, not listened on

T = TypeVar("T")


class Hosts:
    """The values of the header `Host` that are answered.

    A page of another site that points its own name to this address sends that name. It cannot send an address in
    numbers, so a server that listens on all interfaces takes those.
    """

    def __init__(self, host: str, allowed: Iterable[str]) -> None:
        self.names = {name.lower() for name in ("127.0.0.1", "localhost", "::1", *allowed)}
        self.any_address = host in _WILDCARDS
        if not self.any_address:
            self.names.add(host.lower())

    def allow(self, header: str) -> bool:
        """Return whether a header names this server; its port is not compared."""
        name = header.lower().rpartition("]")[0].removeprefix("[") if header.startswith("[") else ""
        name = name or header.lower().partition(":")[0]
        return name in self.names or (self.any_address and _is_address(name))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class _Door:
    """Refuses other hosts, other sites' pages, and whoever has no key."""

    def __init__(self, app: ASGIApp, hosts: Hosts, key: str) -> None:
        self._app, self._hosts, self._key = app, hosts, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refused := self._refused(scope)) is not None:
            headers = {"WWW-Authenticate": "Bearer"} if refused.status == 401 else {}
            await JSONResponse(refused.body(), refused.status, {**_HEADERS, **headers})(scope, receive, send)
        else:
            await self._app(scope, receive, _with_headers(send))

    def _refused(self, scope: Scope) -> Refused | None:
        headers = [(name.lower(), value) for name, value in scope["headers"]]
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        if len(hosts) != 1 or not self._hosts.allow(hosts[0]):
            problem = f"this server does not answer to the host {hosts[:1]}: start `tuner serve --allowed-host NAME`"
            return Refused(403, problem, code="host_not_allowed")
        origins = [value.decode("latin-1").lower() for name, value in headers if name == b"origin"]
        if any(origin != f"{scope['scheme']}://{hosts[0].lower()}" for origin in origins):
            return Refused(403, "pages of other sites are not answered", code="origin_not_allowed")
        keys = [value for name, value in headers if name == b"authorization"]
        if scope["path"] != "/health" and not (len(keys) == 1 and hmac.compare_digest(keys[0], self._key)):
            problem = "the key is missing or wrong: send the header 'Authorization: Bearer KEY' (OpenAI's api_key)"
            return Refused(401, problem, code="invalid_api_key")
        return None


def _with_headers(send: Send) -> Send:
    async def wrapped(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            more = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    return wrapped


def make(name: str, answering: Answers | Vllm, hosts: Hosts, key: str) -> ASGIApp:
    """Return the app that serves a model under a name.

    Args:
        name: The model's id.
        key: What a request must send.
    """
    # No pages of documentation: what is not named here is not there.
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    listed = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "tuner"}

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok" if answering.is_alive else "failed"}, 200 if answering.is_alive else 503)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [listed]})

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answered(request, ChatRequest)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answered(request, CompletionRequest)

    async def _answered(request: Request, kind: type[ChatRequest | CompletionRequest]) -> Response:
        wanted = await asyncio.to_thread(read, kind, await _body(request))
        if wanted.model != name:
            problem = f"the model {wanted.model[:200]!r} is not served here, only {name!r}"
            raise Refused(404, problem, parameter="model", code="model_not_found")
        begun: Answer | Begun = await _unless_left(request, answering.begin(wanted))
        if wanted.stream:
            return StreamingResponse(_events(begun), media_type="text/event-stream")
        return JSONResponse(await _unless_left(request, begun.whole()))

    app.add_exception_handler(Refused, _on_refused)  # type: ignore[arg-type]
    app.add_exception_handler(GenerationFailed, _on_failed)
    app.add_exception_handler(HTTPException, _on_no_route)
    app.add_exception_handler(ClientDisconnect, _on_left)
    app.add_exception_handler(Exception, _on_bug)
    return _Door(app, hosts, key)


async def _on_refused(request: Request, error: Refused) -> Response:
    return JSONResponse(error.body(), error.status)


async def _on_failed(request: Request, error: Exception) -> Response:
    return JSONResponse(Refused(500, f"the generation failed: {error}").body(), 500)


async def _on_no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return JSONResponse(Refused(error.status_code, problem).body(), error.status_code, error.headers)


async def _on_left(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_LEFT)


async def _on_bug(request: Request, error: Exception) -> Response:
    # Starlette raises the error again behind this answer, and the server's log shows its traceback.
    return JSONResponse(Refused(500, "the server failed; its log says why").body(), 500)


async def _body(request: Request) -> bytes:
    """Return the body.

    Raises:
        Refused: it is too long, or does not arrive.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S) as patience:
            async for chunk in request.stream():
                if len(body) <= MAX_BODY_BYTES:
                    body += chunk
                    if len(body) > MAX_BODY_BYTES:
                        # A client reads no answer before it has sent everything: the rest is thrown away, for a while.
                        patience.reschedule(asyncio.get_running_loop().time() + _DRAIN_S)
    except TimeoutError as error:
        if len(body) <= MAX_BODY_BYTES:
            raise Refused(408, f"the body did not arrive within {_BODY_S:g} s") from error
    if len(body) > MAX_BODY_BYTES:
        raise Refused(413, f"a body has at most {MAX_BODY_BYTES // 1024**2} MiB", code="body_too_large")
    return bytes(body)


async def _unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what the work gives; end it if the client leaves first.

    Raises:
        ClientDisconnect: the client has left.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(begun: Answer | Begun) -> AsyncIterator[str]:
    parts = begun.parts()
    try:
        async with aclosing(parts):  # type: ignore[type-var]
            async for part in parts:
                yield _event(part)
    except GenerationFailed as error:  # the status has been sent
        yield _event(Refused(500, f"the generation failed: {error}").body())
    except Refused as error:
        yield _event(error.body())
    yield "data: [DONE]\n\n"


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n"
