"""Code of the user's in a process of its own, which a deadline can end: `Isolated` starts it, `serve` is what it runs.

A thread cannot be ended: a loop in it, or a regular expression inside C, would hold the rank for ever. The process
answers calls over a pipe until its parent ends. A message is JSON in UTF-8. The first answer is {'place': 'file:line'}
once the code is imported. Each call is an object, and so is its answer. Instead of an answer there may be a
`_Failure`. Not pebble: it ends a worker alone, without what the user's function
has started, and its worker runs the rank's own main module again.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tuner.errors import MachineError, TunerError
from tuner.files import JsonObject, append_line
from tuner.machine import kernel
from tuner.recipes.schema.rewards import file_of
from tuner.rewards import leftovers

_PROGRAM = (
    "import importlib, sys; sys.path[:] = sys.argv.pop(1).split('\\n'); importlib.import_module(sys.argv.pop(1)).main()"
)

_MAX_TEXT = 2000
_MAX_WAIT_S = 1e6
"""`poll` takes no more than 24 days; a recipe may say 1e9 for no limit."""
_IN_PIPE_S = 5.0
"""Seconds that a call and its answer may take in the pipe, beside the time limit."""
_MAX_ERROR = 10_000
"""Characters of an exception on its way to the rank."""
_MAX_LISTED = 16 * 1024**2
"""The most bytes of a file of failures: a run of weeks with calls that fail does not fill the disk."""
_FULL = "the file is full: what fails later is counted in metrics.jsonl alone"

Answers = Callable[[JsonObject], JsonObject]
"""Answers a call in the process."""


class _Failure(NamedTuple):
    """What the process answers if the code raised an exception; `code` is that of a `TunerError`."""

    error: str
    where: str | None
    fix: str | None = None
    code: str | None = None


class CallFailure(Exception):
    """A call of the user's code that failed; `where` is `file:line` in it, or its name."""

    def __init__(self, problem: str, where: str, fix: str | None = None) -> None:
        super().__init__(problem, where)
        self.problem, self.where, self.fix = problem, where, fix


def list_failure(file: Path, name: JsonObject, failure: CallFailure, **call: str) -> None:
    """Append a line to a file: what was called, the failure, and the beginning of what it was called with.

    From 16 MiB on nothing is listed, and the last line says so.
    """
    size = file.stat().st_size if file.exists() else 0
    if size > _MAX_LISTED:
        return
    line = name | {"problem": failure.problem[:_MAX_TEXT], "where": failure.where[:_MAX_TEXT]}
    text = json.dumps(line | {key: value[:_MAX_TEXT] for key, value in call.items()})
    append_line(file, text)
    if size + len(text) + 1 > _MAX_LISTED:
        append_line(file, json.dumps({"problem": _FULL}))


class Isolated:
    """Code in a process of its own, which starts at the first call and again after each failure that ended it."""

    def __init__(
        self, module: str, document: JsonObject, name: str, *, timeout_s: float, start_s: float, error: type[TunerError]
    ) -> None:
        """Name the code; nothing is started.

        Args:
            module: Its `main` calls `serve`, with the document.
            error: What is raised if the code cannot be loaded.
        """
        self._module, self._document, self._name = module, document, name
        self._timeout_s, self._start_s, self._error = timeout_s, start_s, error
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._is_loaded = False
        self.place = name
        """`file:line` of the code, once it was loaded; before, its name."""

    @property
    def is_running(self) -> bool:
        """Whether the process has been started, and no failure has ended it since."""
        return self._pipe is not None

    def __call__(self, call: Mapping[str, object], limit_s: float | None = None) -> JsonObject:
        """Return what the process answers; it has `limit_s` seconds, by default those of any call.

        Raises:
            CallFailure: the code raised an exception, its process ended, or it took more than its timeout.
            TunerError: it cannot be loaded, or a library is not installed.
        """
        self.start()
        assert self._pipe is not None, "it was started"
        limit_s = min(limit_s or self._timeout_s, _MAX_WAIT_S)
        message = json.dumps(call, default=str).encode()
        # A process that reads no more, or writes half of an answer, would block this one in the pipe.
        deadline = threading.Timer(limit_s + _IN_PIPE_S, self._kill)
        deadline.daemon = True
        deadline.start()
        try:
            with suppress(OSError):  # the process has ended: the answer says how
                self._pipe.send_bytes(message)
            answer = self._answer(limit_s, "one call")
        finally:
            deadline.cancel()
        if "error" in answer:
            failure = _Failure(**answer)
            raise CallFailure(failure.error, failure.where or self.place, failure.fix)
        return answer

    def spawn(self) -> None:
        """Start the process, unless it runs, and do not wait until the code is imported: several import at a time.

        The thread that calls it must live as long as the process: Linux ends a child with its parent's thread.
        """
        if self._pipe is not None:
            return
        self._is_loaded = False
        self._pipe, end_of_child = Pipe()
        argv = [sys.executable, "-P", "-c", _PROGRAM, "\n".join(sys.path), self._module, json.dumps(self._document)]
        # In a session of its own: Ctrl-C is for the run, which ends this process when it ends itself.
        fds = (end_of_child.fileno(),)
        self._process = subprocess.Popen(
            [*argv, str(fds[0])], stdin=subprocess.DEVNULL, pass_fds=fds, start_new_session=True
        )
        end_of_child.close()
        leftovers.watch(self._process.pid)

    def start(self) -> None:
        """Start the process, unless it runs. Errors as for a call."""
        self.spawn()
        if self._is_loaded:
            return
        answer = self._answer(min(self._start_s, _MAX_WAIT_S), "importing it")
        if "error" in answer:
            self.end()
            failure = _Failure(**answer)
            error = MachineError if failure.code == MachineError.code else self._error
            raise error(failure.error, where=failure.where or self._name, fix=failure.fix)
        self.place, self._is_loaded = answer["place"], True

    def _answer(self, limit_s: float, work: str) -> dict[str, Any]:
        """Return the answer of the process; end it if it does not answer in time."""
        assert self._pipe is not None and self._process is not None, "it was started"
        try:
            if self._pipe.poll(limit_s):
                answer: dict[str, Any] = json.loads(self._pipe.recv_bytes())
                return answer
        except (EOFError, OSError):
            code = self._process.wait()
            self.end()
            cause = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            raise CallFailure(f"its process ended {cause}", self.place) from None
        self.end()
        raise CallFailure(f"{work} took more than {limit_s:g} s (its timeout)", self.place)

    def _kill(self) -> None:
        if (process := self._process) is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what the user's function started

    def end(self) -> None:
        """End the process; the next call starts it again."""
        self._kill()
        if self._process is not None:
            self._process.wait()
            leftovers.forget(self._process.pid)
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of Python its modules may be gone
            self.end()


def loaded(name: str, key: str, error: type[TunerError]) -> Callable[..., Any]:
    """Return a function or a class of the user's by its name, 'file.py:function' or 'package.module:function'.

    Raises:
        error: there is no such file, module or function, or importing it failed.
    """
    module_name, _, function_name = name.rpartition(":")
    file = file_of(name)
    if file and not Path(file).is_file():
        raise error(f"there is no file {str(Path(file).absolute())!r}", where=key, fix="Check the path.")
    try:
        module = _import_file(Path(file).absolute()) if file else importlib.import_module(module_name)
    except (Exception, SystemExit) as problem:  # effect: caught: a script may end itself
        message = f"cannot import {module_name!r}: {type(problem).__name__}: {problem}"
        fix = None if file else "Install the package, or put its folder on PYTHONPATH."
        raise error(message, where=line_of(problem) or name, fix=fix) from problem
    function = getattr(module, function_name, None)
    if not callable(function):
        near = ", ".join(routine for routine, value in vars(module).items() if inspect.isroutine(value)) or "none"
        raise error(f"{module_name} has no function {function_name!r}", where=key, fix=f"Its functions: {near}.")
    return function  # type: ignore[no-any-return]


def _import_file(file: Path) -> ModuleType:
    """Return the module of a file; it may import the files beside it. A file is imported once."""
    imported = sys.modules.get(file.stem)
    if imported is not None and getattr(imported, "__file__", None) == str(file):
        return imported
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec and spec.loader, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses look their module up
    sys.path.insert(0, str(file.parent))
    spec.loader.exec_module(module)
    return module


def taken_by(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some named values that a function takes: all of them if it has `**columns`."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(values)
    return {key: values[key] for key in parameters if key in values}


def place_of(function: object, name: str) -> str:
    """Return `file:line` of a function's definition, or its name if it has none."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return f"{code.co_filename}:{code.co_firstlineno}" if code else name


def line_of(error: BaseException) -> str | None:
    """Return `file:line` where the user's code failed: the innermost line outside installed packages and tuner."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    our_folder = str(Path(__file__).parent.parent)
    frames = traceback.extract_tb(error.__traceback__)
    users = [
        frame
        for frame in frames
        if not frame.filename.startswith(("<", our_folder, sys.prefix, sys.base_prefix))
        or "site-packages" in our_folder
    ]
    return f"{users[-1].filename}:{users[-1].lineno}" if users else None


def _report(error: BaseException) -> JsonObject:
    if isinstance(error, TunerError):
        return _Failure(error.what, error.where, error.fix, error.code)._asdict()
    return _Failure(f"{type(error).__name__}: {error}"[:_MAX_ERROR], line_of(error))._asdict()


def serve(load: Callable[[JsonObject], tuple[Answers, str]]) -> None:
    """Load the code that `argv` names, and answer calls until the parent ends.

    Arguments in `argv`: the document as JSON, of which `load` makes what answers calls and the code's place, and the
    number of the pipe.
    """
    kernel.die_with_parent(signal.SIGKILL)  # also out of a regular expression that never ends
    text, number = sys.argv[1:]
    pipe, pid = Connection(int(number)), os.getpid()
    os.dup2(2, 1)  # what the user's function prints is not an answer
    try:
        answers, place = load(json.loads(text))
    except (Exception, SystemExit) as error:  # effect: caught: the parent reports it
        pipe.send_bytes(json.dumps(_report(error)).encode())
        return
    pipe.send_bytes(json.dumps({"place": place}).encode())
    while True:
        try:
            call = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer = answers(call)
        except (Exception, SystemExit) as error:  # effect: caught: whatever the user's function raises
            answer = _report(error)
        if os.getpid() != pid:  # a fork of the user's function that has returned: of two answers the next call gets one
            os._exit(0)  # effect: ends the fork
        pipe.send_bytes(json.dumps(answer, default=repr).encode())
