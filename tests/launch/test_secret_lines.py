"""Whoever sits between two processes that share a secret can change, repeat and reflect nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tuner.launch.meeting import secret_lines
from tuner.launch.meeting.secret_lines import Broken, Lines, admit, present

pytestmark = pytest.mark.timeout(30)
KEYS = {"call": b"k" * 32}
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def pair() -> tuple[Streams, Streams]:
    left, right = socket.socketpair()
    return await asyncio.open_connection(sock=left), await asyncio.open_connection(sock=right)


async def greeted(called: dict[str, bytes], caller: dict[str, bytes]) -> tuple[Any, Any, Streams, Streams]:
    """Return what both sides of a greeting end with, and their streams."""
    left, right = await pair()
    ends = await asyncio.gather(admit(*left, called), present(*right, caller), return_exceptions=True)
    return *ends, left, right


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def test_lines_arrive_in_both_directions() -> None:
    async def test() -> None:
        called, caller, left, right = await greeted(KEYS, KEYS)
        called.send({"a": 1})
        called.send({"a": 2})
        caller.send({"b": "é\n"})

        assert [await caller.read(5), await caller.read(5), await called.read(5)] == [{"a": 1}, {"a": 2}, {"b": "é\n"}]
        for _, writer in (left, right):
            writer.close()

    run(test)


def test_the_strongest_secret_that_both_know_counts() -> None:
    async def test() -> None:
        both = {"folder": b"f" * 32, **KEYS}
        for theirs, by in ((both, "folder"), (KEYS, "call"), ({"folder": b"x" * 32, **KEYS}, "call")):
            called, caller, left, right = await greeted(both, theirs)
            assert (called.by, caller.by) == (by, by)
            left[1].close()
            right[1].close()

    run(test)


def test_who_does_not_know_the_secret_is_not_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_lines, "GREETING_S", 0.2)

    async def test() -> None:
        called, caller, left, right = await greeted(KEYS, {"call": b"x" * 32})
        assert isinstance(called, Broken) and isinstance(caller, Broken)
        left[1].close()
        right[1].close()

    run(test)


@pytest.mark.parametrize("does", ["changes", "repeats", "reflects", "sends no JSON", "sends too much"])
def test_a_line_of_somebody_between_is_refused(does: str) -> None:
    async def test() -> None:
        called, caller, left, right = await greeted(KEYS, KEYS)
        line = await _of(called, left)
        sent = {
            "changes": line.replace(b'"n": 1', b'"n": 2'),
            "repeats": line + line,
            "reflects": await _of(caller, right),
            "sends no JSON": b"\xff" * 80 + b"\n",
            "sends too much": b"a" * 200_000,
        }[does]
        left[1].write(sent)

        if does == "repeats":
            assert await caller.read(5) == {"n": 1}
        with pytest.raises(Broken, match=r"not of the other side|limit"):
            await caller.read(5)
        left[1].close()
        right[1].close()

    async def _of(lines: Lines, streams: Streams) -> bytes:
        """Return a line that one side has sent, and that has not arrived."""
        taken: list[bytes] = []
        write, streams[1].write = streams[1].write, taken.append  # type: ignore[method-assign]
        lines.send({"n": 1})
        streams[1].write = write  # type: ignore[method-assign]
        return taken[0]

    run(test)


def test_a_line_beyond_the_bound_is_not_sent() -> None:
    async def test() -> None:
        called, _, left, right = await greeted(KEYS, KEYS)
        with pytest.raises(ValueError):
            called.send({"a": "x" * secret_lines.MAX_BYTES})
        left[1].close()
        right[1].close()

    run(test)
