"""Lines of JSON between two processes that share a secret. Each side proves first that it knows it.

Whoever connects without it gets a random number and no more. Each line of the others carries a code (HMAC) of its
number and direction, so that none can be changed, repeated or sent back. Nothing is encrypted: who can read the network
reads the lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
from collections.abc import Mapping

from tuner.files import JsonObject, load_json

MAX_BYTES = 1 << 16
"""Of a line. What a peer that does not read has not taken yet may be as long."""
GREETING_S = 5.0
"""For each answer of a greeting."""
_RANDOM_BYTES = 32
_CODE_BYTES = 64


class Broken(Exception):
    """The other side has gone, does not know the secret, or sends what is no line of it."""


def proof(key: bytes, *parts: str) -> str:
    """Return a code that only who knows the key can make for these parts."""
    return hmac.new(key, json.dumps(parts).encode(), "sha256").hexdigest()


class Lines:
    """The lines to and from the other side of a connection, once both have shown that they know `key`.

    Args:
        by: The name of the secret that both know.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, by: str, side: str, other: str
    ) -> None:
        self._reader, self._writer, self._key, self.by = reader, writer, key, by
        self._own, self._other = side, other
        self._num_sent = self._num_read = 0

    @property
    def address(self) -> str:
        """The address of the other side."""
        return address_of(self._writer)

    def proof(self, key: bytes) -> str:
        """Return a code of another key that is worth something on this connection alone."""
        return proof(key, self._key.hex())

    def send(self, message: JsonObject) -> None:
        """Send a message; a peer that reads too little is given up."""
        body = json.dumps(message)
        line = f"{proof(self._key, self._own, str(self._num_sent), body)}{body}\n".encode()
        if len(line) > MAX_BYTES:
            raise ValueError(f"a line of {len(line)} bytes")
        self._num_sent += 1
        if self._writer.transport.get_write_buffer_size() > MAX_BYTES:
            self._writer.transport.abort()
        self._writer.write(line)

    async def read(self, timeout_s: float) -> JsonObject:
        """Return the next message.

        Raises:
            Broken: no message comes within the time, or it is not from the other side.
        """
        line = (await _line(self._reader, timeout_s)).decode(errors="replace")
        code, body = line[:_CODE_BYTES], line[_CODE_BYTES:]
        right = proof(self._key, self._other, str(self._num_read), body)
        if not hmac.compare_digest(code.encode(), right.encode()):
            raise Broken("a line that is not of the other side")
        self._num_read += 1
        return _object(body)

    def close(self) -> None:
        """Close the connection; what was sent still goes out."""
        self._writer.close()

    async def closed(self) -> None:
        """Close the connection, and wait until what was sent has gone out."""
        self.close()
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), GREETING_S)


def address_of(writer: asyncio.StreamWriter) -> str:
    """Return the address of the other side of a connection."""
    peer = writer.get_extra_info("peername")
    return str(peer[0]).removeprefix("::ffff:") if peer else "?"


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: Mapping[str, bytes]) -> Lines:
    """Greet a process that has connected, and return its lines.

    Args:
        keys: The secrets by name; of those that both sides know, the first counts.

    Raises:
        Broken: the process does not know a secret, or does not answer.
    """
    own_random = os.urandom(_RANDOM_BYTES).hex()
    _write(writer, {"random": own_random})
    answer = _object((await _line(reader, GREETING_S)).decode(errors="replace"))
    caller_random, proofs = str(answer.get("random")), answer.get("proofs")
    for by, key in keys.items():
        shown = proofs.get(by) if isinstance(proofs, dict) else None
        if isinstance(shown, str) and hmac.compare_digest(
            shown.encode(), proof(key, "caller", own_random, caller_random).encode()
        ):
            _write(writer, {"by": by, "proof": proof(key, "called", own_random, caller_random)})
            return Lines(reader, writer, _session(key, own_random, caller_random), by, "called", "caller")
    raise Broken("it does not know the secret")


async def present(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: Mapping[str, bytes]) -> Lines:
    """Greet the process that was called, and return its lines.

    Raises:
        Broken: the process does not know a secret, or does not answer.
    """
    called_random = str(_object((await _line(reader, GREETING_S)).decode(errors="replace")).get("random"))
    own_random = os.urandom(_RANDOM_BYTES).hex()
    proofs = {by: proof(key, "caller", called_random, own_random) for by, key in keys.items()}
    _write(writer, {"random": own_random, "proofs": proofs})
    answer = _object((await _line(reader, GREETING_S)).decode(errors="replace"))
    by, shown = str(answer.get("by")), str(answer.get("proof")).encode(errors="replace")
    if by not in keys or not hmac.compare_digest(shown, proof(keys[by], "called", called_random, own_random).encode()):
        raise Broken("it does not know the secret")
    return Lines(reader, writer, _session(keys[by], called_random, own_random), by, "caller", "called")


def _session(key: bytes, of_called: str, of_caller: str) -> bytes:
    return bytes.fromhex(proof(key, "session", of_called, of_caller))


def _write(writer: asyncio.StreamWriter, message: JsonObject) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


async def _line(reader: asyncio.StreamReader, timeout_s: float) -> bytes:
    try:
        line = await asyncio.wait_for(reader.readline(), timeout_s)
    except TimeoutError as error:
        raise Broken("it does not answer") from error
    except (OSError, ValueError) as error:  # a ValueError: a line that is too long
        raise Broken(str(error)) from error
    if not line.endswith(b"\n"):
        raise Broken("the connection was closed")
    return line[:-1]


def _object(text: str) -> JsonObject:
    try:
        value = load_json(text)
    except (ValueError, RecursionError) as error:
        raise Broken("a line that is no JSON") from error
    if not isinstance(value, dict):
        raise Broken("a line that is no JSON object")
    return value
