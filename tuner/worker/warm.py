"""`python -m tuner.worker.warm WORKER RUN FD`: it has imported the libraries, and forks the ranks of a restart.

The imports are most of what a restart takes. This process makes them while the run trains, does nothing else, and never
touches a GPU: a fork of a process that has would find none. Each rank is a child with the environment, the streams, the
session and the signals that its supervisor would have given it; its exit code goes back over the socket FD.

When the supervisor ends, its ranks get SIGTERM, and it ends after them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import multiprocessing  # effect: the trial of what it forks
import os
import runpy
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, NoReturn

from tuner.machine.kernel import die_with_parent
from tuner.machine.topology import STORE_FD
from tuner.runs.directory import RunDirectory
from tuner.worker.quiet import quiet_libraries

MAX_BYTES = 1 << 20
"""Of a message: the environment of a rank."""
_TRIAL_S = 30.0
_LOOK_S, _IDLE_S = 0.02, 0.5
_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""torch then asks NVML whether there are GPUs, where CUDA would have to be initialized."""


class Word(NamedTuple):
    """What this process tells its supervisor: it can fork ranks (no pid), has forked a rank, or a rank has ended.

    Args:
        code: The exit code of a rank that has ended; negative for a signal.
    """

    pid: int | None = None
    code: int | None = None


def main() -> None:
    worker, run_path, fd = sys.argv[1:]
    control = socket.socket(fileno=int(fd))
    die_with_parent()
    _import(RunDirectory(Path(run_path)))
    if not _works():
        sys.exit("forked ranks would not work: they start as before")
    print("ready", flush=True)  # in RUN/ranks/warm-NODE.log
    _send(control, Word())
    _serve(control, worker, run_path)


def _import(run_dir: RunDirectory) -> None:
    """Import what a rank imports, in its order; see `tuner.worker.__main__`."""
    asks_cuda = os.environ.get(_NVML)
    os.environ[_NVML] = "1"
    quiet_libraries()
    training(needs_bitsandbytes=run_dir.read_run().needs_bitsandbytes)
    if asks_cuda is None:
        del os.environ[_NVML]


def training(*, needs_bitsandbytes: bool) -> ModuleType:
    """Return `worker.train`, imported with the libraries that it needs."""
    if not needs_bitsandbytes:
        # PEFT imports bitsandbytes if it is installed, and that imports torch's compiler: 0.6 s of a rank's start.
        sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
    gc.disable()  # imported objects stay: searching them for garbage took a fifth of the import time
    from tuner.worker import train  # heavy: signals are handled before torch is imported

    gc.freeze()
    gc.enable()
    return train


def _works() -> bool:
    """Return whether a child computes: not if a thread of this process holds a lock, or CUDA was initialized here."""
    trial = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(not _computes()))
    trial.start()
    trial.join(_TRIAL_S)
    trial.kill()  # if it has not ended
    trial.join()
    return trial.exitcode == 0


def _computes() -> bool:
    """Return whether this child computes on all cores, and can initialize CUDA; it makes no context there."""
    import torch  # imported already

    from tuner.worker.compat import may_use_cuda

    ones = torch.ones(1 << 20)
    has_summed = float((ones + ones).sum()) == 1 << 21
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return has_summed
    return has_summed and may_use_cuda() and ctypes.CDLL("libcuda.so.1").cuInit(0) == 0


def _serve(control: socket.socket, worker: str, run_path: str) -> NoReturn:
    """Fork ranks as they are asked for, and tell how they end, until the supervisor has ended; then end them."""
    signals: list[int] = []
    # Ranks whose parent dies get a signal for each of its threads that outlives another, and a second one kills at
    # once. So they are told once, and this process ends after them.
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    ranks, own_pid = set[int](), os.getpid()
    while not signals:
        if select.select([control], [], [], _LOOK_S if ranks else _IDLE_S)[0]:
            data, fds, _, _ = socket.recv_fds(control, MAX_BYTES, 3)
            if not data:
                break
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until the rank has no handler of this process
            pid = fork(partial(_be_rank, control, json.loads(data), fds, worker, run_path, own_pid))
            for fd in fds:
                os.close(fd)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            ranks.add(pid)
            _send(control, Word(pid))
        _reap(ranks, control)
    for pid in ranks:
        os.kill(pid, signal.SIGTERM)
    while ranks:
        time.sleep(_LOOK_S)
        _reap(ranks, control)
    sys.exit(0)


def _reap(ranks: set[int], control: socket.socket) -> None:
    """Take the exit codes of ranks that have ended, and tell them if anybody listens."""
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        ranks.remove(pid)
        _send(control, Word(pid, os.waitstatus_to_exitcode(status)))


def fork(work: Callable[[], object]) -> int:
    """Do the work in a child as a program of its own would: with its session, signals and exit code; return its number.

    As after an exec, signals have no handlers, and those that are ignored stay ignored.
    """
    pid = os.fork()  # effect: a rank
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        work()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _be_rank(
    control: socket.socket, env: dict[str, str], fds: list[int], worker: str, run_path: str, parent: int
) -> None:
    """Be what `python -m WORKER RUN` is with this environment and these streams, and the store's socket of rank 0."""
    control.close()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    die_with_parent()
    if os.getppid() != parent:  # it has died before
        os._exit(1)
    for number, fd in enumerate(fds[:2], start=1):
        os.dup2(fd, number)
        os.close(fd)
    if len(fds) > 2:
        env[STORE_FD] = str(fds[2])
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [worker, run_path]
    runpy.run_module(worker, run_name="__main__", alter_sys=True)


def _send(control: socket.socket, word: Word) -> None:
    with contextlib.suppress(OSError):  # nobody listens
        control.send(json.dumps(word).encode())


if __name__ == "__main__":
    main()
