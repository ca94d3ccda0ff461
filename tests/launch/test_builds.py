"""What DeepSpeed compiles for a run is compiled before its ranks start, and no lock of a dead build is waited for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.each import each
from tests.launch.plans import PATH, made, task
from tuner import progress
from tuner.errors import MachineError
from tuner.launch import builds, execute, render
from tuner.launch.resolved_run import ResolvedRun
from tuner.zero import config as deepspeed_config

LOCKS = "import sys, time; from pathlib import Path; lock = Path(sys.argv[1]); held = lock.open('x')"
"""What compiles here: the lock is made and kept open, as torch does it."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ResolvedRun:
    """Return a run that needs DeepSpeed's CPU Adam, which is not compiled here."""
    monkeypatch.setattr(builds, "is_compiled", lambda op, environ: False)
    environ = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    found = made("dtype=fp32", deepspeed="zero2_offload", environ=environ, work_dir=tmp_path / "run")
    (tmp_path / "extensions" / "cpu_adam").mkdir(parents=True)
    return found


@pytest.fixture
def compiler(run: ResolvedRun, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return what sets the process that compiles: Python that has made the lock."""

    def compiles(code: str) -> None:
        lock = builds.lock_file("cpu_adam", run.environ)
        monkeypatch.setattr(builds, "_argv", lambda ops: [sys.executable, "-c", f"{LOCKS}\n{code}", str(lock)])

    return compiles


def lock_of(run: ResolvedRun) -> Path:
    return builds.lock_file("cpu_adam", run.environ)


def build(run: ResolvedRun) -> Path:
    log = run.run_path / "ranks" / "build-0.log"
    builds.build(run, os.environ, log)
    return log


def test_what_is_compiled_is_said_before_with_its_time_and_how_far_it_is(
    run: ResolvedRun,
    compiler: Callable[[str], None],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler("print('op cpu_adam\\n[1/3] c++', flush=True); time.sleep(1); lock.unlink()")
    monkeypatch.setattr(progress, "AFTER_S", 0.2)
    monkeypatch.setattr(progress, "EVERY_S", 0.2)
    monkeypatch.setattr(builds, "_LOOK_S", 0.1)

    progress.show_on(sys.stderr)
    build(run)
    progress.show_on(None)

    told = capfd.readouterr().err
    assert "DeepSpeed's CPU Adam is compiled before the ranks start, once on this machine: about 60 s" in told
    assert "compiling DeepSpeed's CPU Adam: 1 of 3 files" in told


def test_the_files_of_one_op_are_not_counted_for_the_next() -> None:
    work = progress.Work("compiling")

    builds._read_step("op cpu_adam\n[3/3] c++ -o a", work)
    assert (work.unit, work.done, work.total) == ("files", 3, 3)

    builds._read_step("op cpu_adam\n[3/3] c++ -o a\nop async_io\n", work)
    assert (work.unit, work.done, work.total) == ("", 0, None)


def test_a_lock_whose_process_is_gone_is_taken_over_at_once(
    run: ResolvedRun, compiler: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    lock_of(run).touch()
    compiler("lock.unlink()")
    began = time.monotonic()

    build(run)

    assert time.monotonic() - began < 60  # not the minutes after which an old lock is none
    assert f"removed {lock_of(run)}, left over from an interrupted build." in capfd.readouterr().err


def test_a_lock_that_a_process_holds_is_waited_for_until_it_dies(
    run: ResolvedRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lock = lock_of(run)
    other = subprocess.Popen([sys.executable, "-c", f"{LOCKS}\ntime.sleep(60)", str(lock)])
    while not lock.exists():
        time.sleep(0.01)
    waits = "import os, sys, time\nwhile os.path.exists(sys.argv[1]): time.sleep(0.1)"
    monkeypatch.setattr(builds, "_argv", lambda ops: [sys.executable, "-c", waits, str(lock)])
    say = builds.say

    def kills_the_other(text: str) -> None:
        say(text)
        if text.startswith(f"waiting for process {other.pid}"):
            assert lock.exists()
            other.kill()
            other.wait()

    monkeypatch.setattr(builds, "say", kills_the_other)

    build(run)

    assert f"waiting for process {other.pid}, which is compiling cpu_adam" in capfd.readouterr().err


@pytest.mark.parametrize("age_s", [0, 700])
def test_a_lock_of_another_machine_is_waited_for_ten_minutes(
    run: ResolvedRun, monkeypatch: pytest.MonkeyPatch, age_s: int
) -> None:
    lock = lock_of(run)
    lock.touch()
    os.utime(lock, (time.time() - age_s,) * 2)
    monkeypatch.setattr(builds, "may_be_held_unseen", lambda file: True)

    assert builds.is_left(lock) is (age_s > 600)


def test_what_does_not_compile_is_one_message_with_the_compilers_line_and_its_log(
    run: ResolvedRun, compiler: Callable[[str], None]
) -> None:
    said = "op cpu_adam\\n[1/3] c++ -o x\\na.cpp:1:10: fatal error: libaio.h: No such file\\ncompilation terminated."
    compiler(f"print('{said}'); lock.unlink(); sys.exit(1)")

    with pytest.raises(MachineError) as caught:
        execute.execute(run)

    assert "CPU Adam (cpu_adam) does not compile here: a.cpp:1:10: fatal error: libaio.h" in caught.value.what
    assert caught.value.where == str(run.run_path / "ranks" / "build-0.log")
    status = json.loads((run.run_path / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 3)


def test_ctrl_c_ends_the_compilers_and_leaves_no_lock(
    run: ResolvedRun, compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As ninja's: each in a process group of its own.
    sleeper = "[sys.executable, '-c', 'import time; time.sleep(600)', str(lock)], process_group=0"
    compiler(f"import subprocess; subprocess.run({sleeper})")

    def interrupted(*_: Any) -> None:
        while not names(lock_of(run), "time.sleep(600)"):
            time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(builds, "_watch", interrupted)

    with pytest.raises(KeyboardInterrupt):
        build(run)

    assert not names(lock_of(run), "")
    assert not lock_of(run).exists()


def names(lock: Path, code: str) -> list[psutil.Process]:
    """Return the living processes with a lock and a piece of code on their command lines, this one apart."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = process.info["cmdline"] or []
        if str(lock) in line and any(code in part and "subprocess" not in part for part in line):
            found.append(process)
    return [process for process in found if process.info["status"] != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(("local", "compiles"), [("0", True), ("1", False)])
def test_under_slurm_one_task_of_a_node_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: str, compiles: bool
) -> None:
    built: list[Path] = []
    monkeypatch.setattr(builds, "build", lambda run, env, log: built.append(log))
    monkeypatch.setattr(os, "execve", lambda *_: (_ for _ in ()).throw(SystemExit))
    monkeypatch.setattr(execute, "_directory", lambda run, _: execute.RunDirectory(run.run_path))
    # Each task sees one GPU of its own: every local rank is 0.
    plan = made(environ={**task(int(local)), "SLURM_LOCALID": local}, flags={"launcher": "slurm"}, work_dir=tmp_path)

    with pytest.raises(SystemExit):
        execute.execute(plan)

    assert bool(built) is compiles


CPU_ADAM = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
NVME = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}}}


@each(
    [
        ({}, "AdamW", ()),
        (CPU_ADAM, "AdamW", ("cpu_adam",)),
        ({**CPU_ADAM, "zero_force_ds_cpu_optimizer": False}, "AdamW", ()),
        (CPU_ADAM, "Adagrad", ("cpu_adagrad",)),
        ({**CPU_ADAM, "optimizer": {"type": "Lion"}}, "Lion", ("cpu_lion",)),
        ({"optimizer": {"type": "Lamb"}}, "Lamb", ("fused_lamb",)),
        ({"optimizer": {"type": "Muon", "params": {"torch_adam": True}}}, "Muon", ()),
        ({**CPU_ADAM, "optimizer": {"type": "Muon", "params": {"torch_adam": True}}}, "Muon", ()),
        (NVME, "AdamW", ("pin_memory", "async_io")),
        ({**NVME, "aio": {"use_gds": True}}, "AdamW", ("pin_memory", "gds")),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "AdamW", ("quantizer",)),
    ]
)
def test_a_config_and_an_optimizer_say_what_is_compiled(
    config: dict[str, Any], optimizer: str, expected: tuple[str, ...]
) -> None:
    assert deepspeed_config.ops(config, optimizer) == expected


SMALL = """
import sys
from deepspeed.ops.op_builder.all_ops import ALL_OPS
from tuner.worker.compile_ops import main
source = sys.argv.pop()
type(ALL_OPS["pin_memory"]).sources = lambda self: [source]
main()
"""
"""Compile the op from another source, which takes a second; its own take half a minute of both cores."""
MODULE = """
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "pin_memory"};
PyMODINIT_FUNC PyInit_pin_memory(void) { return PyModule_Create(&module); }
"""


@pytest.mark.long
def test_an_op_is_compiled_once_and_again_where_that_was_interrupted(tmp_path: Path) -> None:
    (tmp_path / "module.cpp").write_text(MODULE)
    environ = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    environ |= {"PATH": render.tool_path(environ)}
    op = "pin_memory"
    killed = subprocess.Popen(
        [sys.executable, "-m", "tuner.worker.compile_ops", op],
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    lock = builds.lock_file(op, environ)
    while not lock.exists():
        time.sleep(0.1)
    assert builds.holder(lock) == killed.pid
    assert not builds.is_left(lock)
    compilers = psutil.Process(killed.pid).children(recursive=True)
    killed.terminate()  # as the kernel does when the launcher dies
    killed.wait()
    for compiler in compilers:  # one that went on would write behind the second build
        with suppress(psutil.NoSuchProcess):
            compiler.kill()
    psutil.wait_procs(compilers)
    assert builds.is_left(lock)
    assert not builds.is_compiled(op, environ)
    lock.unlink()

    again = [sys.executable, "-c", SMALL, op, str(tmp_path / "module.cpp")]
    subprocess.run(again, env=environ, check=True, capture_output=True)

    assert builds.is_compiled(op, environ)


def test_a_machine_without_torchs_folder_has_compiled_nothing() -> None:
    assert not builds.is_compiled("cpu_adam", {**PATH, "TORCH_EXTENSIONS_DIR": "/proc/no"})
