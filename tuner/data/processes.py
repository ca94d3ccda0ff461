"""Runs a function over values in several processes, and yields what it returns in the order of the values.

It knows nothing of data. The processes are forks: they have what the function holds, such as a tokenizer, without
loading it, and values alone travel.
"""

from __future__ import annotations

import itertools
import multiprocessing  # effect: rows become tokens on all cores
import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection  # effect: as above
from typing import Any, Literal, TypeVar

from tuner.errors import Key, MachineError, TunerError
from tuner.machine.hardware import num_cpus
from tuner.machine.kernel import STOPS, die_with_parent

T = TypeVar("T")
R = TypeVar("R")

_MOST = 16
"""'auto' takes no more. One process takes 23 s for 30,000 conversations; where others do the work, 2.7 s to read them,
to hand them out and to write what comes back (measured): nine would wait for it, some more where a template is slow."""
ALONE = 4
"""With 'auto', so many values are worked on before other processes start: what is over by then was small."""


def in_order(function: Callable[[T], R], values: Iterable[T], num_proc: int | Literal["auto"]) -> Iterator[R]:
    """Yield `function(value)` of each value; no more values are taken ahead than two for each process.

    The function is called in this process for the first values, so that what it makes once is there for all. 'auto'
    processes are one for each core that this one may use, none where there are few values.

    Raises:
        MachineError: one of the processes was killed.
    """
    values = iter(values)
    yield from map(function, itertools.islice(values, ALONE if num_proc == "auto" else 1))
    count = max(1, min(num_cpus(), _MOST)) if num_proc == "auto" else num_proc
    if count == 1:
        yield from map(function, values)
    for value in values:  # there are more
        yield from _in_processes(function, itertools.chain([value], values), count)


def _in_processes(function: Callable[[T], R], values: Iterator[T], count: int) -> Iterator[R]:
    workers = [Worker(function) for _ in range(count)]
    this_thread, free_workers = threading.local(), list(workers)
    # A thread for each process waits for it, so that the next value goes to whichever is free.
    threads = ThreadPoolExecutor(count, initializer=lambda: setattr(this_thread, "worker", free_workers.pop()))
    running: deque[Future[R]] = deque()
    end: Exception | None = None
    try:
        while running or not end:
            if not end and len(running) < 2 * count:
                try:
                    running.append(threads.submit(lambda value: this_thread.worker.run(value), next(values)))
                except Exception as error:  # the end of the values too; what was taken before comes first
                    end = error
            else:
                yield running.popleft().result()
        if end and not isinstance(end, StopIteration):
            raise end
    finally:
        for worker in workers:
            worker.end()
        threads.shutdown(cancel_futures=True)


class Worker:
    """A process that calls a function on what it is sent, one value at a time; `end` it."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, process_connection = context.Pipe()
        self._process = context.Process(target=_serve, args=(function, process_connection, os.getpid()), daemon=True)
        self._process.start()
        process_connection.close()  # so that the end of the process is the end of what is read

    def run(self, value: Any) -> Any:
        """Return what the function makes of a value, or raise what it raises."""
        self.begin(value)
        return self.result()

    def begin(self, value: Any) -> None:
        """Have the function called on a value; `result` is to be asked before the next one.

        Raises:
            MachineError: the process was killed.
        """
        try:
            self._connection.send(value)
        except OSError as error:
            raise self._ended() from error

    def is_done(self, wait_s: float = 0.0) -> bool:
        """Return whether `result` would not wait, at once or as soon as it would not, within so many seconds."""
        return self._connection.poll(wait_s)

    def result(self) -> Any:
        """Return what the function made of the value, or raise what it raised.

        Raises:
            MachineError: the process was killed.
        """
        try:
            is_error, result = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if is_error:
            raise result
        return result

    def _ended(self) -> MachineError:
        self._process.join()
        problem = f"a process that prepares the data ended with code {self._process.exitcode}"
        fix = f"If the kernel killed it, it needs more memory. Or use fewer processes: {Key('dataset.num_proc', 1)}."
        return MachineError(problem, fix=fix)

    def end(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.join()


def _serve(function: Callable[[Any], Any], connection: Connection, parent: int) -> None:
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before that was asked
        return
    # They reach all processes of a terminal, or of a rank that has a step to finish: this one's parent ends it.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    multiprocessing.current_process().daemon = False  # it may have processes of its own
    # The threads of tokenizers did not come along; it says so at length, unless it is told that it has one core.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # effect: see above
    while True:
        value = connection.recv()
        try:
            answer = False, function(value)
        except Exception as error:
            if not isinstance(error, TunerError):
                error.add_note(f"In a process that prepares the data:\n{traceback.format_exc()}")
            answer = True, _sendable(error)
        connection.send(answer)


def _sendable(error: Exception) -> Exception:
    """Return the error, or what it says where it cannot travel: an `__init__` of other arguments is enough for that."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 (this process's own bytes)
    except Exception:
        sendable = RuntimeError(f"{type(error).__name__}: {error}")
        sendable.__notes__ = getattr(error, "__notes__", [])
        return sendable
    return error
