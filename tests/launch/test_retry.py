"""`--on-oom retry`: a process of a few lines stands in for all ranks and runs out of memory until it fits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.plans import PATH, checkpoint, made, task
from tests.launch.rank import process
from tests.machine.gpus import H200, machine
from tuner.errors import MachineError, Stopped, UsageError
from tuner.launch import execute, preflight, render, resolve
from tuner.runs import checkpoints, lock

FITS = """
facts = json.loads(open(sys.argv[1] + '/run.json').read())
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
if not (%s):
    report(1, 1, OOM, step=3)
    sys.exit(1)
"""
TWO_GPUS = machine(H200, H200)
SMALLEST = ("train_dataloader.batch_size=1", "gradient_checkpointing=True")
"""After this come the levels."""


def _run(
    monkeypatch: pytest.MonkeyPatch, path: Path, fits: str, *sets: str, check: Any = lambda _: None, **request: Any
) -> int:
    """Start a run that fits once `fits` is true of its facts; 2 ranks, micro-batch 2, accumulation 4."""
    code = f"import json\n{FITS % fits}"
    monkeypatch.setattr(render, "argv", lambda resolved: process(resolved.run_path, code))
    monkeypatch.setattr(render, "of_ranks", lambda topology: [{"RANK": "1"}])  # the one that reports
    monkeypatch.setattr(preflight, "check", check)
    # CPU Adam of the offloaded levels: a minute
    monkeypatch.setattr(execute.supervise.builds, "build", lambda *_: None)
    batch = ("train_dataloader.batch_size=2", "accumulative_counts=4", "val_dataloader=none")
    asked = {"on_oom": "retry", "deepspeed": "zero2", "command": ("tuner", "train", "mine.py"), **request}
    return execute.execute(made(*batch, *sets, work_dir=path, hardware=TWO_GPUS, environ=os.environ, **asked))


def _tried(run: Path) -> list[tuple[str, int, int]]:
    """Return level, micro-batch and accumulation of every attempt."""
    facts = _json(run / "run.json")
    tried = [*facts["attempts"], {"deepspeed": facts["deepspeed"], **facts["batch"]}]
    return [(attempt["deepspeed"], attempt["micro_batch"], attempt["accumulation"]) for attempt in tried]


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_a_smaller_micro_batch_is_tried_with_the_same_global_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"

    code = _run(monkeypatch, run, "facts['batch']['micro_batch'] < 2")

    assert code == 0
    facts, first = _json(run / "run.json"), _json(run / "attempts" / "1" / "run.json")
    assert facts["batch"]["global_batch"] == first["batch"]["global_batch"] == 16
    assert (facts["batch"]["micro_batch"], facts["batch"]["accumulation"]) == (1, 8)
    assert _json(run / "deepspeed.json")["train_micro_batch_size_per_gpu"] == 1
    assert (facts["state"]["asked_batch"]["micro_batch"], facts["state"]["batch"]["micro_batch"]) == (2, 1)
    said = "--on-oom retry after gpu-out-of-memory: attempt 2 with micro-batch 1 x accumulation 8 (global batch 16) at "
    assert f"{said}deepspeed_zero2, from the start.\n" in capfd.readouterr().err


def test_a_standard_error_that_nobody_reads_any_more_ends_no_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as unread:
        monkeypatch.setattr(sys, "stderr", unread)
        code = _run(monkeypatch, tmp_path / "run", "facts['batch']['micro_batch'] < 2")
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            unread.close()

    assert code == 0


def test_every_attempt_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"

    _run(monkeypatch, run, "facts['batch']['micro_batch'] < 2")

    (attempt,) = _json(run / "run.json")["attempts"]
    assert attempt.pop("what").endswith("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert attempt == {
        "cause": "gpu-out-of-memory",
        "rank": 1,
        "step": 3,
        "deepspeed": "deepspeed_zero2",
        "micro_batch": 2,
        "accumulation": 4,
        "began": 0,
    }
    assert _json(run / "attempts" / "1" / "status.json")["diagnosis"]["cause"] == "gpu-out-of-memory"
    flags = ["--set", "train_dataloader.batch_size=1", "--set", "optim_wrapper.accumulative_counts=8"]
    assert _json(run / "run.json")["command"] == ["tuner", "train", "mine.py", *flags]


def test_after_the_smallest_batch_come_the_levels_and_then_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"

    code = _run(monkeypatch, run, "False")

    assert code == 1
    levels = ["deepspeed_zero2", "deepspeed_zero3", "deepspeed_zero3_offload"]
    kept = [("deepspeed_zero2", 2, 4), ("deepspeed_zero2", 1, 8)]  # activations are then computed again
    assert _tried(run) == [*kept, *((level, 1, 8) for level in levels)]
    assert _json(run / "status.json")["state"] == "failed"
    said = capfd.readouterr().err
    assert said.count("at deepspeed_zero2, recomputing activations, from the start.\n") == 1
    assert said.endswith(f"Next: tuner plan {run}/recipe.py\n")


def test_it_goes_on_from_the_last_valid_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    _saves(monkeypatch, run, {2: True, 4: False})

    assert _run(monkeypatch, run, "facts['batch']['micro_batch'] < 2") == 0
    assert _json(run / "run.json")["resume"] == str(run / "checkpoints" / "checkpoint-2")


def _saves(monkeypatch: pytest.MonkeyPatch, run: Path, is_valid: dict[int, bool]) -> None:
    """Let the first attempt save checkpoints of these steps."""
    real = execute.supervise.run

    def saved(*arguments: Any, **options: Any) -> int:
        code = real(*arguments, **options)
        if not list(run.glob("checkpoints*")):
            for step, valid in is_valid.items():
                checkpoint(run, step, world_size=2, valid=valid)
        return code

    monkeypatch.setattr(execute.supervise, "run", saved)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("has_saved", [True, False])
def test_a_signal_between_two_attempts_ends_the_run_as_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, has_saved: bool
) -> None:
    run = tmp_path / "run"
    if has_saved:
        _saves(monkeypatch, run, {2: True})
    monkeypatch.setattr(execute.retry, "next_attempt", lambda *_: signal.raise_signal(number))
    handlers = [signal.getsignal(number), signal.signal(signal.SIGHUP, signal.SIG_DFL)]
    try:
        code = _run(monkeypatch, run, "False")
    finally:
        signal.signal(signal.SIGHUP, handlers[1])

    status = _json(run / "status.json")
    assert (status["state"], status["signal"]) == ("stopped" if has_saved else "failed", number)
    assert code == status["exit_code"] == (75 if has_saved else 128 + number)
    assert ("--resume" in status["message"]) is has_saved
    assert lock.holder(run) is None
    assert signal.getsignal(number) == handlers[0]


def test_a_signal_before_the_run_began_reaches_the_callers_handler_and_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[int] = []
    monkeypatch.setattr(execute, "_directory", lambda *_: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with pytest.raises(Stopped) as caught:
            _run(monkeypatch, tmp_path / "run", "True")
    finally:
        signal.signal(signal.SIGTERM, before)

    assert (received, caught.value.exit_code) == ([signal.SIGTERM], 128 + signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_run_directory_is_written_ends_the_run_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(execute.creation, "RunStatus", lambda **_: signal.raise_signal(number))
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # else a SIGTERM that is raised again ends the tests
    try:
        code = _run(monkeypatch, tmp_path / "run", "True")
    finally:
        signal.signal(signal.SIGTERM, before)

    status = _json(tmp_path / "run" / "status.json")
    assert (status["state"], status["signal"]) == ("failed", number)
    assert code == status["exit_code"] == 128 + number


def test_checkpoints_whose_state_cannot_move_to_the_next_level_are_kept_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    _saves(monkeypatch, run, {2: True})
    fits = "facts['deepspeed'] == 'deepspeed_zero1'"

    assert _run(monkeypatch, run, fits, *SMALLEST, deepspeed="none") == 0
    assert _json(run / "run.json")["resume"] is None
    assert (run / "checkpoints of attempt 1" / "checkpoint-2").is_dir()
    assert not (run / "checkpoints").exists()


def test_between_two_attempts_a_checkpoint_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Path] = []
    real = checkpoints.read_checkpoint
    looks = lambda path, *, hashes=True: (hashed.append(path) if hashes else None, real(path, hashes=hashes))[1]  # noqa: E731
    monkeypatch.setattr(checkpoints, "read_checkpoint", looks)

    _saves(monkeypatch, tmp_path / "oom", {2: True})
    fits = "facts['deepspeed'] == 'deepspeed_zero1'"
    assert _run(monkeypatch, tmp_path / "oom", fits, *SMALLEST, deepspeed="none") == 0
    assert [path.name for path in hashed] == ["checkpoint-2"]

    hashed.clear()
    assert _dies(monkeypatch, tmp_path / "crash", saves=[2, 4], max_restarts=2) == 0
    assert [path.name for path in hashed] == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.parametrize(
    "request_", [{"on_oom": "retry"}, {"on_oom": "stop", "max_restarts": 3}], ids=lambda flags: flags["on_oom"]
)
def test_where_every_checkpoint_is_damaged_no_attempt_begins_anew_unasked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    request_: dict[str, Any],
) -> None:
    run = tmp_path / "run"
    _saves(monkeypatch, run, {2: False})
    dies = "False" if request_["on_oom"] == "retry" else DIES.format(code=1, message=KILLED)

    assert _run(monkeypatch, run, dies, **request_) == 1
    assert "has no valid checkpoint" in capfd.readouterr().err
    assert (run / "checkpoints" / "checkpoint-2").is_dir()
    assert not (run / "attempts").exists()


def test_auto_is_decided_once_for_all_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[str] = []
    real = resolve.choose_level_and_split

    def choose(recipe: Any, named: Any, *more: Any, **options: Any) -> Any:
        decided.extend([""] if named is None else [])
        return real(recipe, named, *more, **options)

    monkeypatch.setattr(resolve, "choose_level_and_split", choose)
    run = tmp_path / "run"

    _run(monkeypatch, run, "facts['batch']['micro_batch'] < 2", deepspeed=None)

    assert len(_tried(run)) == 2
    assert len(decided) == 1


def test_a_users_json_is_kept_and_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "my.json"
    mine.write_text('{"zero_optimization": {"stage": 1}, "steps_per_print": 7}')
    run = tmp_path / "run"

    assert _run(monkeypatch, run, "False", deepspeed=str(mine)) == 1
    assert _json(run / "deepspeed.json")["steps_per_print"] == 7
    assert _tried(run) == [(str(mine), 2, 4), *[(str(mine), 1, 8)] * 2]  # the last one computes activations again


@pytest.mark.parametrize(
    ("request_", "code"),
    [({"on_oom": "stop"}, "report(1, 1, OOM)"), ({}, "report(1, 2, 'bad-data: torn.', cause='bad-data')")],
)
def test_nobody_retries_unasked_or_after_another_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_: dict[str, str], code: str
) -> None:
    run = tmp_path / "run"

    assert _run(monkeypatch, run, f"{code} or sys.exit(1)", **request_) != 0
    assert not (run / "attempts").exists()


# --max-restarts

DIES = "report(1, {code}, {message!r}) or sys.exit(1)"
KILLED = "RuntimeError: CUDA error: an illegal memory access was encountered"


def _dies(monkeypatch: pytest.MonkeyPatch, path: Path, saves: list[int], message: str = KILLED, **request: Any) -> int:
    """Start a run whose every attempt saves the next of some steps, if there is one, and dies; the last one lives."""
    steps, code = iter(saves), request.pop("code", 1)
    real = execute.supervise.run

    def attempt(*arguments: Any, **options: Any) -> int:
        step = next(steps, None)
        if step is not None and not (path / "checkpoints" / f"checkpoint-{step}").exists():
            checkpoint(path, step, world_size=2)
        return real(*arguments, **options)

    monkeypatch.setattr(execute.supervise, "run", attempt)
    last = f"len(facts['attempts']) == {len(saves)} or {DIES.format(code=code, message=message)}"
    return _run(monkeypatch, path, last, **{"on_oom": "stop", **request})


def test_a_run_that_gets_further_each_time_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"

    assert _dies(monkeypatch, run, [2, 4, 6], max_restarts=3) == 0

    facts = _json(run / "run.json")
    assert [attempt["cause"] for attempt in facts["attempts"]] == ["cuda-error"] * 3
    assert facts["resume"] == str(run / "checkpoints" / "checkpoint-6")
    assert facts["batch"]["micro_batch"] == 2, "the same recipe"
    assert "--max-restarts after cuda-error: attempt 2, from checkpoint-2.\n" in capfd.readouterr().err


def test_restarts_end_without_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"

    assert _dies(monkeypatch, run, [2, 2, 2], max_restarts=9) == 1

    assert [attempt["began"] for attempt in _json(run / "run.json")["attempts"]] == [0]
    assert "--max-restarts: not possible: it ended twice" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("code", "message", "most"),
    [
        (1, KILLED, 0),
        (2, "bad-data: torn.", 5),
        (3, "bad-environment: no GPU.", 5),
        (74, "disk: full.", 5),
        (1, "FloatingPointError: loss is nan", 5),
        (1, "torch.OutOfMemoryError: CUDA out of memory.", 5),
    ],
)
def test_what_would_come_again_or_nobody_asked_for_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, message: str, most: int
) -> None:
    run = tmp_path / "run"

    assert _dies(monkeypatch, run, [2, 4], message, code=code, max_restarts=most) == code
    assert not (run / "attempts").exists()


@pytest.mark.parametrize("launcher", ["slurm", "none"])
def test_ranks_that_nobody_watches_are_not_started_again(launcher: str) -> None:
    with pytest.raises(UsageError) as caught:
        made(environ=task(0) if launcher == "slurm" else PATH, flags={"launcher": launcher}, max_restarts=1)
    assert caught.value.where == "--max-restarts"


def test_a_run_that_was_asked_to_stop_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    asks = f"os.kill({os.getpid()}, signal.SIGTERM) or time.sleep(0.4) or report(1, 1, OOM) or sys.exit(1)"
    handles = f"signal.signal(signal.SIGTERM, lambda *_: None) and False or {asks}"

    assert _run(monkeypatch, run, handles) == 1
    assert _json(run / "status.json")["signal"] == 15
    assert not (run / "attempts").exists()


def test_a_next_attempt_that_cannot_start_keeps_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"

    def refuses(*_: Any) -> None:
        raise MachineError("no compiler", fix="Install one.")

    assert _run(monkeypatch, run, "False", check=refuses) == 1
    assert "--on-oom retry: not possible: bad-environment: no compiler." in capfd.readouterr().err
    assert _json(run / "status.json")["diagnosis"]["cause"] == "gpu-out-of-memory"
