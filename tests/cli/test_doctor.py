"""`tuner doctor` on this machine, with libraries that crash or hang, and with secrets that it must not tell."""

from __future__ import annotations

import json
import locale
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.command import Tuner
from tests.launch.processes import wait_until
from tests.machine.gpus import A100, CPU, GIB, V100, machine
from tuner.lab import doctor, probes
from tuner.lab.probes import Probe, Row
from tuner.machine import hardware, libraries
from tuner.machine.hardware import GpuUse

CANARY = "canary-of-the-doctor"
SECRETS = {
    "HF_TOKEN": f"hf_{CANARY}",
    "WANDB_API_KEY": CANARY,
    "MY_SETTING": f"{CANARY}-too",
    "HTTP_PROXY": f"http://user:{CANARY}@proxy:1",
}


Run = Callable[..., Row]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a function that runs a probe whose process runs some Python."""

    def of(script: str, deadline_s: float = probes.DEADLINE_S) -> Row:
        (tmp_path / "script.py").write_text(script)
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return probes.run(Probe("a library", ["script"], "Install it again.", "runpy"), env, deadline_s)

    return of


@pytest.fixture
def no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "run_all", lambda *args: [])


def told(found: doctor.DoctorReport, name: str) -> Row:
    return next(row for row in found.rows if row.name == name)


@pytest.mark.long
def test_this_machine_can_train_and_the_report_tells_no_secret(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)

    result = tuner("doctor", "--json")
    report: dict[str, Any] = json.loads(result.out)

    rows = {row["name"]: row for row in report["checks"]}
    assert result.code == 0, report["verdict"]
    assert report["verdict"].startswith("Ready to train")
    for name in ("torch", "training libraries", "DeepSpeed", "bitsandbytes", "all-reduce"):
        assert rows[name]["status"] == "ok", rows[name]
    assert "gloo all-reduce over 2 processes works" in rows["all-reduce"]["text"]
    assert rows["linear attention"]["fix"] == "pip install 'tuner-deepspeed[gpu]'"
    assert rows["state spaces"]["fix"] == "pip install causal-conv1d mamba-ssm"
    assert report["versions"] == libraries.versions()
    assert CANARY not in result.out + result.err


# Libraries that misbehave


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "the process was killed by SIGSEGV"),
        ("raise ImportError('undefined symbol: x')", "ImportError: undefined symbol: x"),
    ],
)
def test_a_crash_is_a_failed_line_with_its_signal_and_an_exception_one_with_its_last_words(
    run: Run, script: str, text: str
) -> None:
    assert run(script) == Row("a library", "failed", text, "Install it again.")


def test_a_hang_is_a_failed_line_at_the_deadline(run: Run) -> None:
    started = time.monotonic()

    row = run("import time; time.sleep(600)", deadline_s=0.5)

    assert (row.status, row.text) == ("failed", "no answer within 0.5 s")
    assert time.monotonic() - started < 30


def test_a_rank_that_fails_speaks_for_those_that_wait_for_it(run: Run) -> None:
    started = time.monotonic()

    row = run(
        "import time\nfrom torch.multiprocessing import start_processes\n"
        "def rank(number):\n    if number:\n        raise OSError('no network')\n    time.sleep(600)\n"
        "if __name__ == '__main__':\n    start_processes(rank, (), 2, start_method='fork')\n"
    )

    assert row.text == "OSError: no network"
    assert time.monotonic() - started < 60


def test_an_answer_among_chatter_is_found_and_much_chatter_blocks_nobody(run: Run) -> None:
    chatter = 'print(\'x\' * 1_000_000); print(\'{"status": "ok", "text": "fine"}\'); print(\'bye\')'

    assert run(chatter) == Row("a library", "ok", "fine")


def test_no_process_is_left_behind(run: Run, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    sleeper = "subprocess.Popen(['sleep', '600']).pid"
    row = run(f"import pathlib, subprocess; pathlib.Path({str(pid)!r}).write_text(str({sleeper})); raise OSError('no')")

    assert row.text == "OSError: no"
    wait_until(lambda: not psutil.pid_exists(int(pid.read_text())))


# The machine


def test_a_failure_is_exit_code_3_with_its_fix(tuner: Tuner, monkeypatch: pytest.MonkeyPatch, no_probes: None) -> None:
    monkeypatch.setitem(libraries.MINIMUM, "peft", "999")

    result = tuner("doctor")

    assert result.code == 3
    assert "is older than 999" in result.out
    assert "-> pip install 'peft>=999'" in result.out
    assert "Not ready to train: libraries." in result.out


def test_a_version_that_is_not_the_tested_one_is_a_warning(monkeypatch: pytest.MonkeyPatch, no_probes: None) -> None:
    monkeypatch.setitem(libraries.TESTED, "peft", "0.0.1")

    found = doctor.examine({})

    assert told(found, "versions").status == "warning"
    assert "(tested: 0.0.1)" in told(found, "versions").text
    assert found.conclusion.startswith("Ready to train, with warnings:")


@pytest.mark.parametrize(
    ("encoding", "status"),
    [("UTF-8", "ok"), ("utf8", "ok"), ("ANSI_X3.4-1968", "warning"), ("ISO-8859-1", "warning"), ("GB18030", "warning")],
)
def test_a_locale_whose_encoding_is_not_utf_8_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, no_probes: None, encoding: str, status: str
) -> None:
    monkeypatch.setattr(locale, "getpreferredencoding", lambda do_setlocale=True: encoding)

    assert told(doctor.examine({}), "locale").status == status


def test_gpus_are_told_with_their_driver_and_who_uses_them(monkeypatch: pytest.MonkeyPatch, no_probes: None) -> None:
    monkeypatch.setattr(hardware, "detect", lambda environ: machine(A100, V100))
    monkeypatch.setattr(hardware, "cuda_driver_version", lambda: (12, 8))
    monkeypatch.setattr(hardware, "gpu_use", lambda: {V100.uuid: GpuUse(GIB, ((4711, 30 * GIB),))})
    monkeypatch.setattr(libraries, "torch_cuda_version", lambda: "13.0")

    found = doctor.examine({})

    assert "1 x NVIDIA A100" in told(found, "GPUs").text
    assert told(found, "driver").status == "failed"
    assert "Tesla V100" in told(found, "kernels").text
    assert "pid 4711 has 30.0 GiB; 1.0 GiB free" in told(found, "GPU 1").text
    assert {row.name for row in found.failed} == {"driver", "kernels"}


def test_a_missing_compiler_is_a_warning_that_names_it(monkeypatch: pytest.MonkeyPatch, no_probes: None) -> None:
    monkeypatch.setattr(hardware, "detect", lambda environ: machine(A100, has_compiler=False))
    monkeypatch.setattr(hardware, "has_compiler", lambda path: True)

    row = told(doctor.examine({}), "compiler")

    assert row.status == "warning"
    assert "no nvcc" in row.text


def test_every_gpu_takes_part_in_the_all_reduce() -> None:
    *_, gpus = probes.heavy(8, has_flash=True, has_varlen=True)
    *_, cpu = probes.heavy(0, has_flash=True, has_varlen=False)

    assert (gpus.arguments, cpu.arguments) == (["all-reduce", "8"], ["all-reduce", "2"])
    assert "flash attention" in [probe.name for probe in probes.heavy(1, has_flash=True, has_varlen=False)]


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (f"no module in {Path.home()}/x", "no module in ~/x"),
        ("cannot reach http://me:secret@host/", "cannot reach http://***@host/"),
        ("token hf_abcdefghijklmnop is bad", "token *** is bad"),
        (f"value {CANARY} is bad", "value *** is bad"),
    ],
)
def test_what_a_library_says_is_told_without_secrets(monkeypatch: pytest.MonkeyPatch, text: str, clean: str) -> None:
    monkeypatch.setattr(hardware, "detect", lambda environ: CPU)
    monkeypatch.setattr(probes, "run_all", lambda *args: [Row("x", "failed", text, f"Look: {text}")])

    row = told(doctor.examine({"ANYTHING": CANARY}), "x")

    assert (row.text, row.fix) == (clean, f"Look: {clean}")
