"""Run `tuner` in processes forked from one that has imported the libraries: the imports are over half of a short run.

Use it where a test asks what a run computes or leaves. The launcher and each rank are processes with the environment,
the output, the signals and the exit codes of a user's run. Tests of how processes start and end start the command
itself (`runs.start`). A rank that needs bitsandbytes starts as a user's does: the libraries here are imported without.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn, cast

import psutil

ROOT = Path(__file__).parents[2]
WORKER = "tuner.worker"
_READ_AT_IMPORT = ("HF_", "TRANSFORMERS_", "TUNER_CACHE")
"""How the names of variables begin that libraries and the package read when they are imported."""
_LAST_S = 5.0
"""How long what a command leaves behind may take to end."""


@dataclass(frozen=True)
class Ended:
    """A command that has ended; `returncode` is negative for a signal, as `subprocess` has it."""

    returncode: int
    stdout: str
    stderr: str


class Warm:
    """The process that commands are forked from; one command runs at a time."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": path}
        command = [sys.executable, "-P", "-m", "tests.e2e.warm"]
        self._environ = env
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lock = threading.Lock()
        atexit.register(self._end)

    def _end(self) -> None:
        cast(IO[str], self._process.stdin).close()
        self._process.wait()

    def suits(self, env: Mapping[str, str]) -> bool:
        """Return whether a command with these variables would import the libraries as they were imported here."""
        names = {name for name in (*env, *self._environ) if name.startswith(_READ_AT_IMPORT)}
        return all(env.get(name) == self._environ.get(name) for name in names)

    def run(
        self,
        argv: Sequence[object],
        *,
        env: Mapping[str, str],
        cwd: object = None,
        input: str = "",
        worker: str = WORKER,
        timeout_s: float = 900,
    ) -> Ended:
        """Run `tuner ARGV...` to its end; a process that outlives it is an error.

        Args:
            worker: The module that ranks are, with a function `main`: the package's, or one that wraps it.
        """
        stdin, stdout = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        with self._lock, tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            (folder / "0").write_text(input, encoding="utf-8")
            request = {"argv": [*map(str, argv)], "env": dict(env), "cwd": str(cwd or tempfile.gettempdir())}
            print(json.dumps({**request, "worker": worker, "folder": scratch}), file=stdin, flush=True)
            launcher = int(stdout.readline())
            killer = threading.Timer(timeout_s, os.kill, (launcher, signal.SIGKILL))
            killer.start()
            code, num_left = map(int, stdout.readline().split())
            killer.cancel()
            texts = [(folder / name).read_text(encoding="utf-8", errors="replace") for name in ("1", "2")]
        assert num_left == 0, f"{num_left} processes outlived the command\n{''.join(texts)}"
        return Ended(code, *texts)


@cache
def warm() -> Warm:
    """Return the one such process of this test process."""
    return Warm()


# In the process that commands are forked from, and in its children


class _Rank(subprocess.Popen[bytes]):
    """A rank that is forked if it can be; every other process is started."""

    def __init__(self, argv: list[str], **options: Any) -> None:
        if not _is_forked(argv):
            super().__init__(argv, **options)
            return
        self.args, self.returncode = argv, cast(int, None)
        self.stdin, self.stdout, self.stderr = None, None, None
        self._child_created, self._waitpid_lock = True, threading.Lock()  # what Popen.poll and Popen.wait use
        self.pid = _fork(lambda: _become_rank(argv, **options))


def _is_forked(argv: Sequence[str]) -> bool:
    if list(argv[1:-1]) != ["-m", import_module("tuner.launch.render").WORKER]:
        return False
    return not json.loads((Path(argv[-1]) / "run.json").read_bytes())["needs_bitsandbytes"]


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
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # as a rank does that needs none
    sys.argv = argv[2:]
    if argv[2] == WORKER:
        import_module("tuner.worker.__main__")  # it is the program
    else:
        import_module(argv[2]).main()


def _take_over(env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # TMPDIR is read again


def _fork(work: Callable[[], None]) -> int:
    """Do the work in a child, with a session and signals of its own, and return the child's number."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _command(argv: list[str], env: Mapping[str, str], cwd: str, worker: str, folder: str) -> None:
    os.chdir(cwd)
    for number, flags in enumerate((os.O_RDONLY, *[os.O_WRONLY | os.O_CREAT | os.O_APPEND] * 2)):
        os.dup2(os.open(f"{folder}/{number}", flags), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (as long as the process)
    _take_over(env)
    sys.modules.pop("bitsandbytes")  # the checks of a run look whether it is installed
    sys.argv = ["tuner", *argv]
    supervise = import_module("tuner.launch.supervise")
    supervise.subprocess = SimpleNamespace(Popen=_Rank, DEVNULL=subprocess.DEVNULL)  # type: ignore[attr-defined]
    for module in ("tuner.launch.render", "tuner.runs.lock"):
        import_module(module).WORKER = worker  # type: ignore[attr-defined]
    import_module("tuner.cli").main()


def _left() -> int:
    """Wait for what a command has left behind; return how many processes do not end, and kill those."""
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=_LAST_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return len(alive)


def _serve() -> NoReturn:
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # as a rank does that needs none
    import_module("tuner.worker.quiet").quiet_libraries()
    gc.disable()
    for name in ("tuner.worker.train", "tuner.cli.train"):
        import_module(name)
    gc.freeze()
    gc.enable()
    libc = import_module("ctypes").CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
    for line in sys.stdin:
        request = json.loads(line)
        pid = _fork(lambda request=request: _command(**request))  # type: ignore[misc]
        print(pid, flush=True)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(code, _left(), flush=True)
    sys.exit()


if __name__ == "__main__":
    _serve()
