"""What the launchers of several nodes tell each other: a type for each kind of message.

A line is a JSON object: the sender's version of tuner, the kind, and the fields of that type. Only `message_of`
makes a message of a line. Nodes with different versions refuse each other, so a type may change with any version.
"""

import contextlib
import json
import socket
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tuner import __version__
from tuner.errors import Stopped, TunerError, UsageError, shortened
from tuner.files import JsonObject, sha256
from tuner.launch.meeting.secret_lines import MAX_BYTES, Broken, Lines

MAX_TEXTS, MAX_TEXT = 8, 2_000
_MAX_NAME, _MAX_VALUE = 200, 60
_Name = Annotated[str, Field(max_length=_MAX_NAME)]
_Code = Annotated[str, Field(pattern="^[A-Za-z0-9-]{1,39}$")]
"""Of an error."""
_ExitCode = Annotated[int, Field(gt=0, lt=256)]
Item = TypeVar("Item")


class OtherVersion(Broken):
    """The other side has another version of tuner."""

    def __init__(self, address: str, version: str) -> None:
        problem = f"{address} has tuner {shortened(version, _MAX_NAME)}, and {socket.gethostname()} has {__version__}"
        super().__init__(problem)
        fix = "Install the same version of tuner on every node."
        self.refusal = UsageError(problem, where="the nodes differ", fix=fix)


class _Checked(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Process(_Checked):
    """A node's launcher. Another one of the same node has another `instance`."""

    host: _Name
    pid: int
    instance: _Name

    def __str__(self) -> str:
        return f"{self.host}, process {self.pid}"


class Plan(_Checked):
    """What a node is about to run; all nodes must be about to run the same.

    Args:
        command: As it was typed.
        digest: Of everything that must be equal.
        values: The same by name and shortened, to show what differs.
    """

    command: str
    digest: str
    values: dict[str, str]

    @classmethod
    def of(cls, command: str, parts: Mapping[str, object]) -> Self:
        """Return a plan from the values that must be equal."""
        texts = {key: json.dumps(value, sort_keys=True, default=str) for key, value in sorted(parts.items())}
        values = dict(_within([(key[:_MAX_VALUE], _brief(text)) for key, text in texts.items()]))
        return cls(command=shortened(command, MAX_TEXT), digest=sha256(json.dumps(texts).encode()), values=values)


class Message(_Checked):
    """A message of one launcher to another."""


# In both directions


class Error(Message):
    """An error that ends all nodes.

    Args:
        who: The node, as node 0 names it; empty from another node.
        texts: One for each part of the error.
    """

    who: str
    texts: list[str]
    code: _Code
    exit_code: _ExitCode

    @classmethod
    def of(cls, error: TunerError, who: str = "") -> Self:
        """Return an error as the other nodes are told of it."""
        texts = [shortened(part.message, MAX_TEXT) for part in error.each()]
        return cls(who=who, texts=_within(texts[:MAX_TEXTS]), code=error.code, exit_code=error.exit_code)


class Bye(Message):
    """This node leaves; `is_done`: it is node 0, and the run is done."""

    is_done: bool = False


# To node 0


class Who(Message):
    """A question of a process that is no node: which nodes answer."""


class Hello(Message):
    """A node that calls; `lost`: the earlier node 0 that it has lost."""

    process: Process
    rank: int
    nodes: int
    lost: Process | None


class Beat(Message):
    """A sign of life; `is_adrift`: the ssh connection over which the node was started is gone."""

    is_adrift: bool


class Seen(Message):
    """The node sees the folder's secret."""

    proof: str


class Planned(Message):
    """The node is ready; `launch`: the launch that it ran last."""

    plan: Plan
    launch: str | None


class Ended(Message):
    """How a launch has ended on a node; `objection`: what speaks against another attempt."""

    launch: str
    code: int
    text: str = ""
    cause: _Code | None = None
    objection: str | None = None

    @property
    def has_failed(self) -> bool:
        """Whether it neither was done nor was told to stop."""
        return self.code not in (0, Stopped.exit_code)


# From node 0


class Answering(Message):
    """The answer to `Who`: the nodes that are there, or have told how they ended."""

    process: Process
    ranks: list[int]


class Welcome(Message):
    """The answer to a `Hello` that fits."""

    process: Process


class LeaderBeat(Message):
    """A sign of life; whom node 0 waits for and why, and on how many nodes the ranks run."""

    missing: dict[str, str]
    runs_on: int


class Folder(Message):
    """Node 0 has written the secret into this run directory."""

    path: str


class Shared(Message):
    """The node has shown that it sees the run directory."""


class Go(Message):
    """The ranks of these nodes begin a launch."""

    launch: str
    nodes: list[int]


class Stop(Message):
    """The ranks of the launch must end: what has happened to another node."""

    text: str
    cause: _Code
    exit_code: _ExitCode


class Refused(Message):
    """There is no other attempt."""

    why: str


_KINDS = {kind.__name__: kind for kind in Message.__subclasses__()}


def send(lines: Lines | None, message: Message) -> None:
    """Send a message, if there is a connection. That it is lost is what its reader hears."""
    if lines:
        with contextlib.suppress(OSError, RuntimeError):
            lines.send({"version": __version__, "kind": type(message).__name__, **message.model_dump()})


async def read(lines: Lines, timeout_s: float) -> Message:
    """Return the next message.

    Raises:
        OtherVersion: the other side has another version of tuner.
        Broken: no message comes within the time, or it is none that this version sends.
    """
    return message_of(await lines.read(timeout_s), lines.address)


def message_of(line: JsonObject, address: str) -> Message:
    """Return the message of a line that was sent from an address. Errors as of `read`."""
    fields = {**line}
    version, kind = fields.pop("version", None), fields.pop("kind", None)
    if version != __version__:
        raise OtherVersion(address, str(version))
    try:
        return _KINDS[str(kind)].model_validate(fields)
    except (KeyError, ValidationError) as error:
        raise Broken("a line that is no message") from error


def _within(items: Sequence[Item]) -> list[Item]:
    """Return the first of several texts, as many as fit on a line beside what else it holds."""
    sizes = accumulate(len(json.dumps(item)) for item in items)
    return [item for item, size in zip(items, sizes, strict=True) if size <= MAX_BYTES // 2]


def _brief(text: str) -> str:
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}... ({sha256(text.encode())[:8]})"
