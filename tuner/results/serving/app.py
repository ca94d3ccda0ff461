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
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from tuner.results.serving.answers import Answer, Answers
from tuner.results.serving.engine import GenerationFailed
from tuner.results.serving.requests import MAX_BODY_BYTES, ChatRequest, CompletionRequest, Refused, read_request
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
        with suppress(ValueError):  # it is no address
            return name in self.names or (self.any_address and ipaddress.ip_address(name) is not None)
        return False


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
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._hosts.allow(hosts[0]):
            problem = f"this server does not answer to the host {hosts[:1]}: start `tuner serve --allowed-host NAME`"
            return Refused(403, problem, code="host_not_allowed")
        if any(origin.lower() != f"{scope['scheme']}://{hosts[0].lower()}" for origin in headers.getlist("origin")):
            return Refused(403, "pages of other sites are not answered", code="origin_not_allowed")
        keys = [value.encode("latin-1") for value in headers.getlist("authorization")]
        if scope["path"] != "/health" and not (len(keys) == 1 and hmac.compare_digest(keys[0], self._key)):
            problem = "the key is missing or wrong: send the header 'Authorization: Bearer KEY' (OpenAI's api_key)"
            return Refused(401, problem, code="invalid_api_key")
        return None


def _with_headers(send: Send) -> Send:
    async def wrapped(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            added_headers = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", ()), *added_headers]}
        await send(message)

    return wrapped


def make(name: str, answering: Answers | Vllm, hosts: Hosts, key: str) -> ASGIApp:
    """Return the app that serves a model under the id `name` to those who send the key."""
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
        parsed_request = await asyncio.to_thread(read_request, kind, await _body(request))
        if parsed_request.model != name:
            problem = f"the model {parsed_request.model[:200]!r} is not served here, only {name!r}"
            raise Refused(404, problem, parameter="model", code="model_not_found")
        begun: Answer | Begun = await _unless_left(request, answering.begin(parsed_request))
        if parsed_request.stream:
            return StreamingResponse(_events(request, begun), media_type="text/event-stream")
        return JSONResponse(await _unless_left(request, begun.whole()))

    for kind in (Refused, GenerationFailed, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _on_error)
    return _Door(app, hosts, key)


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=_CLIENT_LEFT)
    headers = error.headers if isinstance(error, HTTPException) else None
    refused = _refused(request, error)
    return JSONResponse(refused.body(), refused.status, headers)


def _refused(request: Request, error: Exception) -> Refused:
    match error:
        case Refused():
            return error
        case GenerationFailed():
            return Refused(500, f"the generation failed: {error}")
        case HTTPException():  # there is no such route
            return Refused(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}")
        case _:  # Starlette raises it again behind this answer, and the server's log shows its traceback
            return Refused(500, "the server failed; its log says why")


async def _body(request: Request) -> bytes:
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
    """Return what the work gives; end it, and raise ClientDisconnect, if the client leaves first."""
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


async def _events(request: Request, begun: Answer | Begun) -> AsyncIterator[str]:
    parts = begun.parts()
    try:
        async with aclosing(parts):  # type: ignore[type-var]
            async for part in parts:
                yield _event(part)
    except (GenerationFailed, Refused) as error:  # the status has been sent
        yield _event(_refused(request, error).body())
    yield "data: [DONE]\n\n"


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n"
