"""How far work is that takes more than two seconds: a bar on a terminal, a plain line every ten seconds elsewhere.

It shows nothing before `show_on` names a stream: a command does, and the first rank of each node. Work inside other
work is not shown beside it. The stream is written by a thread, so work that calls nothing back is shown too.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO, TypeVar

from tuner.errors import visible

T = TypeVar("T")
AFTER_S, EVERY_S, _FRAME_S = 2.0, 10.0, 0.2
POLL_S = 0.1
"""How often code that waits for a process, a file or another rank looks again."""
_stream: TextIO | None = None
_active: Work | None = None


@dataclass
class Work:
    """One piece of work: its name, and how much of it is done. `total` None: that is not known."""

    title: str
    unit: str = ""
    """What is counted, in the plural; "B" for bytes."""
    total: float | None = None
    done: float = 0
    began_s: float = field(default_factory=time.monotonic)

    def advance(self, number: float = 1) -> None:
        """Count more of it as done."""
        self.done += number

    def counted(self, values: Iterable[T]) -> Iterator[T]:
        """Yield the values, and count each."""
        for value in values:
            self.done += 1
            yield value

    @property
    def amount(self) -> str:
        """How much is done, such as "12,000 of 40,000 rows"; the seconds so far if nothing is counted."""
        if not self.unit:
            return f"{time.monotonic() - self.began_s:,.0f} s"
        size, form, unit = (1e9, ".2f", "GB") if self.unit == "B" else (1, ",.0f", self.unit)
        of_total = f" of {self.total / size:{form}}" if self.total else ""
        return f"{self.done / size:{form}}{of_total} {unit}"


def show_on(stream: TextIO | None) -> None:
    """Show the work of this process on a stream from now on; None: nowhere."""
    global _stream
    _stream = stream


def told(*lines: str) -> None:
    """Write lines for the user where this process shows its work."""
    if _stream is not None:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone, and the stream closed
            _stream.writelines(f"{visible(line)}\n" for line in lines)
            _stream.flush()


def say(line: str) -> None:
    """Print a line on standard error, for processes that have to go on when their output is not read any more."""
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(line, file=sys.stderr, flush=True)  # effect: launch and the upload at a run's end say it through here


@contextlib.contextmanager
def shown(title: str, unit: str = "", total: float | None = None) -> Iterator[Work]:
    """Show the work of a `with` block, which counts what is done of it."""
    global _active
    work, stream = Work(title, unit, total), _stream
    if stream is None or _active is not None:
        yield work
        return
    over = threading.Event()
    thread = threading.Thread(target=_show, args=(work, over, stream), name="progress", daemon=True)
    _active = work
    thread.start()
    try:
        yield work
    finally:
        _active = None
        over.set()
        thread.join()


def _show(work: Work, over: threading.Event, stream: TextIO) -> None:
    if over.wait(AFTER_S):
        return
    with contextlib.suppress(OSError, ValueError):  # the terminal may be gone, and the stream closed
        if stream.isatty() and os.environ.get("TERM") != "dumb":  # effect: a dumb terminal cannot draw
            _draw(work, over, stream)
            return
        while True:
            stream.write(f"{work.title}: {work.amount}\n")
            stream.flush()
            if over.wait(EVERY_S):
                return


def _draw(work: Work, over: threading.Event, stream: TextIO) -> None:
    from rich.console import Console  # 0.1 s, of no use to short work
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"), TimeRemainingColumn(),
        console=Console(file=stream), transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False,
    )  # fmt: skip
    with bar:
        task = bar.add_task(work.title, total=None, amount="")
        while not over.wait(_FRAME_S):
            bar.update(
                task, description=work.title, completed=work.done, total=work.total, amount=work.amount, refresh=True
            )


def tqdm_class() -> type[Any]:
    """Return a class of bars for libraries that draw with tqdm: it draws nothing, and counts for the work shown."""
    from tqdm import tqdm  # libraries that draw with it have it

    class Reporter(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
        def __init__(self, *values: object, **options: object) -> None:
            options.pop("name", None)
            super().__init__(*values, **(options | {"disable": False, "leave": False, "delay": 0}))

        def display(self, *_: object, **__: object) -> None:
            if _active is not None:
                _active.title = f"downloading {self.desc}" if self.unit == "B" else str(self.desc).rstrip(": ").lower()
                _active.unit = "parts" if self.unit == "it" else self.unit
                _active.done, _active.total = self.n, self.total

        def clear(self, *_: object, **__: object) -> None:
            """Nothing was drawn."""

    return Reporter


def tqdm_hook(factory: Callable[..., object], values: Sequence[object], options: Mapping[str, object]) -> object:
    """Return the bar that `transformers.utils.logging.set_tqdm_hook` asks for."""
    return factory(*values, **options) if _active is None else tqdm_class()(*values, **options)
