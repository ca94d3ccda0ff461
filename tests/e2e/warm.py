"""Run `tuner` in processes forked from one that has imported the libraries: the imports are over half of a short run.

Use it where a test asks what a run computes or leaves. The launcher and each rank are processes with the environment,
the command line, the output, the signals and the exit codes of a user's run. Tests of how processes start start the
command itself (`runs.start`). A rank that needs bitsandbytes is forked from a process that has imported it too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import email
import gc
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn, cast

import psutil
from filelock import FileLock

from tuner.worker.quiet import QUIET
from tuner.worker.warm import fork

ROOT = Path(__file__).parents[2]
WORKER = "tuner.worker"
_READ_AT_IMPORT = ("HF_", "TRANSFORMERS_", "TUNER_CACHE")
"""How the names of variables begin that libraries and the package read when they are imported."""
_ENVIRON = dict(os.environ)
"""The variables before any test: a command that a test calls in its own process may have set others."""
_LARGE_PAGES = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""A fork copies the tables of all pages: of 400 MB in pages of 2 MB it takes 3 ms, not 15, and its end 6, not 18."""
_LAST_S = 30.0
"""How long what a command leaves behind may take to end: ranks of a killed launcher save first."""
_LONGEST_ARGV = 16_384
"""Bytes of the longest command line of a forked process."""


@dataclass(frozen=True)
class Ended:
    """A command that has ended; `returncode` is negative for a signal, as `subprocess` has it."""

    returncode: int
    stdout: str
    stderr: str


class Forked:
    """A forked command, with the methods of a `Popen` that tests use; `pid` is that of a session of its own."""

    def __init__(self, scratch: tempfile.TemporaryDirectory[str]) -> None:
        self._scratch = scratch
        self._reports = (Path(scratch.name) / "reports").open("rb", buffering=0)  # waits until it is forked
        self.pid = int(self._reports.readline())
        self.returncode: int | None = None
        self._texts = ("", "")

    def poll(self) -> int | None:
        """Return the exit code of a command that has ended; a process that outlives it is an error."""
        if self.returncode is None and select.select([self._reports], [], [], 0)[0]:
            self.returncode, num_left = map(int, self._reports.readline().split())
            self._reports.close()
            files = (Path(self._scratch.name) / name for name in "12")
            out, err = (file.read_text(encoding="utf-8", errors="replace") if file.exists() else "" for file in files)
            self._texts = out, err
            self._scratch.cleanup()
            assert num_left == 0, f"{num_left} processes outlived the command\n{out}{err}"
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the command and return its exit code."""
        if self.returncode is None and not select.select([self._reports], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked command", cast(float, timeout))
        return cast(int, self.poll())

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end of the command and return its standard output and standard error."""
        self.wait(timeout)
        return self._texts

    def send_signal(self, number: int) -> None:
        """Send a signal to the command alone, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the command alone."""
        self.send_signal(signal.SIGKILL)


class Warm:
    """The process that commands are forked from, one for all test processes: it ends with the last of them."""

    def __init__(self, *, has_bitsandbytes: bool) -> None:
        name = f"tuner-warm-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}-{has_bitsandbytes:d}"
        self._folder = Path(tempfile.gettempdir()) / name
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        requests = self._folder / "requests"
        with FileLock(self._folder / "lock"):
            try:
                self._requests = os.open(requests, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # there is no such file, or nobody reads it
                requests.unlink(missing_ok=True)
                os.mkfifo(requests)
                reader = os.open(requests, os.O_RDONLY | os.O_NONBLOCK)
                self._requests = os.open(requests, os.O_WRONLY)
                os.set_blocking(reader, True)
                self._process = _begin(reader, has_bitsandbytes)
                os.close(reader)
        atexit.register(self._end)

    def _end(self) -> None:
        os.close(self._requests)
        if self._process:
            self._process.wait()
            shutil.rmtree(self._folder)

    def suits(self, env: Mapping[str, str]) -> bool:
        """Return whether a command with these variables would import the libraries as they were imported here."""
        asked, here = QUIET | dict(env), QUIET | _ENVIRON
        names = {name for name in (*asked, *here) if name.startswith(_READ_AT_IMPORT)}
        return all(asked.get(name) == here.get(name) for name in names)

    def run(
        self,
        argv: Sequence[object],
        *,
        env: Mapping[str, str],
        cwd: object = None,
        input: str = "",
        worker: str = WORKER,
        code: str = "",
        timeout_s: float = 900,
    ) -> Ended:
        """Run `tuner ARGV...` to its end; a process that outlives it is an error.

        Args:
            worker: The module that ranks are, with a function `main`: the package's, or one that wraps it.
            code: Python to run instead, as `python -c CODE ARGV...` would; see `of_module` too.
        """
        command = self.start(argv, env=env, cwd=cwd, input=input, worker=worker, code=code, has_two_outputs=True)
        killer = threading.Timer(timeout_s, os.kill, (command.pid, signal.SIGKILL))
        killer.start()
        texts = command.communicate()
        killer.cancel()
        return Ended(cast(int, command.returncode), *texts)

    def start(
        self,
        argv: Sequence[object],
        *,
        env: Mapping[str, str],
        cwd: object = None,
        input: str = "",
        worker: str = WORKER,
        code: str = "",
        terminal: str | None = None,
        has_two_outputs: bool = False,
    ) -> Forked:
        """Start `tuner ARGV...`.

        Args:
            worker: As for `run`, and so is `code`.
            terminal: The path of the terminal that the command gets, with its input and its output.
            has_two_outputs: Its output and its errors are not one stream.
        """
        scratch = tempfile.TemporaryDirectory()
        folder = Path(scratch.name)
        (folder / "0").write_text(input, encoding="utf-8")
        os.mkfifo(folder / "reports")
        streams = [terminal] * 3 if terminal else [f"{folder}/{name}" for name in ("0", "1", "12"[has_two_outputs])]
        request = {"argv": [*map(str, argv)], "env": dict(env), "cwd": str(cwd or tempfile.gettempdir())}
        request |= {"worker": worker, "code": code, "streams": streams}
        (folder / "request").write_text(json.dumps(request), encoding="utf-8")
        os.write(self._requests, f"{folder}\n".encode())  # a line that is written at once, whoever else writes
        return Forked(scratch)


def _begin(requests: int, has_bitsandbytes: bool) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = _ENVIRON | _LARGE_PAGES | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": path}
    command = [sys.executable, "-P", "-m", "tests.e2e.warm", "01"[has_bitsandbytes], " " * _LONGEST_ARGV]
    return subprocess.Popen(command, env=env, stdin=requests, stdout=subprocess.DEVNULL)


def warm(*, has_bitsandbytes: bool = False) -> Warm:
    """Return the one such process, or that for runs of quantized models."""
    return _warm(has_bitsandbytes)


@cache
def _warm(has_bitsandbytes: bool) -> Warm:
    return Warm(has_bitsandbytes=has_bitsandbytes)


def of_module(name: str, *, ranks: int = 0) -> str:
    """Return the code that runs a module as `python -m NAME` would, or as `torchrun -m NAME` runs so many ranks."""
    if ranks:
        return f"from tests.e2e.warm import run_ranks; run_ranks({name!r}, {ranks})"
    return f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"


# In the process that commands are forked from, and in its children

_HAS_BITSANDBYTES = __name__ == "__main__" and sys.argv[1] == "1"
OF_A_RANK: set[str] = set()
"""The modules that a rank loads before it trains."""


class _Rank(subprocess.Popen[bytes]):
    """A rank that is forked if it can be; every other process is started."""

    def __init__(self, argv: list[str], **options: Any) -> None:
        if not _is_forked(argv):
            super().__init__(argv, **options)
            return
        self.args, self.returncode = argv, cast(int, None)
        self.stdin, self.stdout, self.stderr = None, None, None
        self._child_created, self._waitpid_lock = True, threading.Lock()  # what Popen.poll and Popen.wait use
        self.pid = fork(lambda: _become_rank(argv, **options))


def _leave_bitsandbytes() -> None:
    """Let no library import it, as a rank does that needs none; with it transformers imports more."""
    if not _HAS_BITSANDBYTES:
        sys.modules["bitsandbytes"] = None  # type: ignore[assignment]


def _is_forked(argv: Sequence[str]) -> bool:
    if list(argv[1:-1]) != ["-m", import_module("tuner.launch.render").WORKER]:
        return False
    needed: bool = json.loads((Path(argv[-1]) / "run.json").read_bytes())["needs_bitsandbytes"]
    return needed == _HAS_BITSANDBYTES


def _become_rank(
    argv: list[str],
    env: Mapping[str, str],
    pass_fds: tuple[int, ...],
    stdout: IO[bytes] | int | None,
    stderr: IO[bytes] | int | None,
    preexec_fn: Callable[[], None],
    **_: object,
) -> None:
    for number, stream in ((1, stdout), (2, stderr)):
        if stream is not None:
            opened = os.open(os.devnull, os.O_WRONLY) if stream == subprocess.DEVNULL else stream
            os.dup2(opened if isinstance(opened, int) else opened.fileno(), number)
    for fd in {int(link.name) for link in Path("/proc/self/fd").iterdir()} - {0, 1, 2, *pass_fds}:
        with contextlib.suppress(OSError):
            os.close(fd)
    _take_over(env)
    preexec_fn()
    _leave_bitsandbytes()
    sys.argv = argv[2:]
    _show(argv)
    if argv[2] == WORKER:
        import_module("tuner.worker.__main__")  # it is the program
    else:
        import_module(argv[2]).main()


def _take_over(env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # TMPDIR is read again
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *sys.path)]


def _show(argv: Sequence[str]) -> None:
    """Make this the command line that others see of this process: the kernel reads it from the process's memory."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    line = "\0".join(argv).encode()[: end - begin - 1]
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


def _command(argv: list[str], env: Mapping[str, str], cwd: str, worker: str, code: str, streams: list[str]) -> None:
    os.chdir(cwd)
    for number, flags in enumerate((os.O_RDONLY, *[os.O_RDWR | os.O_CREAT | os.O_APPEND] * 2)):
        os.dup2(os.open(streams[number], flags), number)  # a terminal becomes that of the session
    # As long as the process; a terminal shows each line when it is written.
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", 1 if os.isatty(1) else -1, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    _take_over(env)
    if not _HAS_BITSANDBYTES:
        sys.modules.pop("bitsandbytes")  # the checks of a run look whether it is installed
    supervise = import_module("tuner.launch.supervise")
    supervise.subprocess = SimpleNamespace(Popen=_Rank, DEVNULL=subprocess.DEVNULL)  # type: ignore[attr-defined]
    for module in ("tuner.launch.render", "tuner.runs.lock"):
        import_module(module).WORKER = worker  # type: ignore[attr-defined]
    if code:
        sys.argv = ["-c", *argv]
        exec(code, {"__name__": "__main__"})  # noqa: S102
        return
    sys.argv = ["tuner", *argv]
    _show([sys.executable, "-m", *sys.argv])
    import_module("tuner.cli").main()


def run_ranks(name: str, ranks: int) -> None:
    """Run a module in so many ranks, which meet where torchrun has them meet; one that fails ends the others."""
    from torch.distributed import TCPStore
    from torch.multiprocessing import start_processes

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {**where, "WORLD_SIZE": str(ranks)}
    start_processes(_rank_of_module, (name,), ranks, start_method="fork")


def _rank_of_module(rank: int, name: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    exec(of_module(name))  # noqa: S102


def _left() -> int:
    """Wait for what a command has left behind; return how many processes do not end, and kill those."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the usual case, told without a look at every process of the machine
        return 0
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=_LAST_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return len(alive)


def _keep(request: dict[str, Any], folder: str) -> None:
    """Fork a command; report its number, and then its exit code and how many processes it has left behind."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
    with Path(folder, "reports").open("w", buffering=1) as reports:
        pid = fork(lambda: _command(**request))
        print(pid, file=reports)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(code, _left(), file=reports)


def _serve() -> NoReturn:
    os.fsync = lambda _: None  # as in tests/conftest.py
    _leave_bitsandbytes()
    import_module("tuner.worker.quiet").quiet_libraries()
    gc.disable()
    import_module("tuner.worker.train")
    OF_A_RANK.update(sys.modules)
    for module in ("tuner.cli.train", "tuner.launch.execute", "tuner.report.end", "tuner.worker.trainers"):
        import_module(module)
    list(import_module("tuner.recipes.schema.objectives").OBJECTIVES.values())
    # What each command and each rank would do again: read what is installed, and compile the templates of the report.
    email.message_from_string = cache(email.message_from_string)
    for distribution in metadata.distributions():
        assert distribution.metadata["Name"]
    for name in ("page.html", "parts.html"):
        import_module("tuner.report.page").template(name)
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        folder = line.rstrip("\n")
        fork(partial(_keep, json.loads(Path(folder, "request").read_bytes()), folder))
    sys.exit()


if __name__ == "__main__":
    _serve()
