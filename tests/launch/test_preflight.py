from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.launch.plans import PATH, made
from tests.launch.test_preflight_model import folder
from tests.machine.gpus import A100, machine
from tests.refused import refused
from tuner.errors import MachineError, TunerError
from tuner.launch import preflight
from tuner.launch.checks import gpus, inputs, model_files
from tuner.machine import libraries


def test_cuda_and_bitsandbytes_are_asked_for_only_where_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "torch_cuda_version", lambda: None)
    monkeypatch.setitem(libraries.QUANTIZED, "bitsandbytes", "999")

    preflight.check(made())
    with refused(MachineError, None, "torch"):
        preflight.check(made(hardware=machine(A100)))
    with refused(MachineError, None, "bitsandbytes"):
        preflight.check(made(recipe="tiny_qlora_sample_e1"))


@pytest.mark.parametrize("asked", ["tracker", "config"])
def test_a_tracker_without_its_package_is_refused_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    path = tmp_path / "my.json"
    path.write_text('{"wandb": {"enabled": true}}')
    plan = made("log.trackers=['wandb']") if asked == "tracker" else made(deepspeed=str(path))
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else real(name))

    where = "log.trackers = 'wandb'" if asked == "tracker" else "my.json:1:12"
    with refused(MachineError, where, "wandb"):
        preflight.check(plan)


def test_a_dry_run_tells_what_is_compiled_at_the_start(tmp_path: Path) -> None:
    environ = {**PATH, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    compiled = "DeepSpeed's CPU Adam is compiled before the ranks start"

    assert any(compiled in finding for finding in preflight.foresee(made(deepspeed="zero2_offload", environ=environ)))
    assert not any(compiled in finding for finding in preflight.foresee(made(deepspeed="zero2", environ=environ)))


def test_everything_that_is_wrong_is_told_at_once_a_line_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(libraries.MINIMUM, "peft", "999")
    plan = made("model.attn_implementation=flash_attention_2", model=str(folder(tmp_path / "none", weights=False)))

    with pytest.raises(TunerError) as caught:
        preflight.check(plan)

    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        *("bad-model", "bad-environment", "bad-recipe", "bad-environment")
    ]
    assert caught.value.exit_code == 2, "a wrong recipe is wrong on every machine"


def test_a_wrong_machine_alone_is_exit_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(libraries.MINIMUM, "peft", "999")
    monkeypatch.setitem(libraries.MINIMUM, "trl", "999")

    with pytest.raises(TunerError) as caught:
        preflight.check(made())

    assert caught.value.exit_code == 3
    assert len(str(caught.value).splitlines()) == 2


def test_what_stops_one_check_does_not_stop_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"x": 1}\n')
    monkeypatch.setitem(libraries.MINIMUM, "peft", "999")

    with refused(TunerError, "bad.jsonl:1", "peft"):
        preflight.check(made(f"train_dataloader.dataset.path={bad}"))


def test_a_hopeless_run_is_refused_unless_that_is_to_be_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "torch_cuda_version", lambda: "12.8")
    monkeypatch.setattr(preflight, "CHECKS", ())
    asked = {"recipe": "llama2_7b_full_alpaca_e3", "hardware": machine(A100), "deepspeed": "zero2"}

    with refused(MachineError, None):
        preflight.check(made(**asked))
    assert preflight.check(made(**asked, ignore_fit=True)) == ()


@pytest.mark.parametrize("look", [preflight.check, preflight.foresee, preflight.inspect])
def test_a_command_to_notify_by_that_is_not_there_is_found_by_a_start_a_dry_run_and_a_check(look: Any) -> None:
    plan = made("log.notify=no-such-command --done")

    with refused(MachineError, "log.notify", "no-such-command"):
        raise next(finding for finding in look(plan) if isinstance(finding, MachineError))


def test_a_dry_run_is_told_what_would_be_refused(tmp_path: Path) -> None:
    plan = made(model=str(folder(tmp_path / "none", weights=False)))

    (warning,) = preflight.foresee(plan)

    assert warning.startswith("tuner train would refuse this run: model.path: '")
    assert "holds no weights" in warning


def test_a_bug_in_a_check_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(plan: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(preflight, "CHECKS", [preflight.Check(bug), preflight.Check(model_files.weights)])

    with pytest.raises(ZeroDivisionError):
        preflight.check(made())


COMMANDS = {
    "train": (preflight.check, {"here", "run", "start", "rows", "code", "slow", "network"}),
    "submit": (partial(preflight.check_elsewhere, quick=False), {"elsewhere", "run", "rows", "slow", "network"}),
    "submit --dry-run": (partial(preflight.check_elsewhere, quick=True), {"elsewhere", "run"}),
    "train --dry-run": (preflight.foresee, {"here", "run", "dry"}),
    "check": (preflight.inspect, {"here", "dry", "rows", "code", "slow"}),
    "check --gpus": (partial(preflight.inspect, elsewhere=True), {"elsewhere", "rows", "code", "slow"}),
}
"""What a command may touch before anything starts."""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_touches_what_it_may_and_nothing_else(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    look, may = COMMANDS[command]
    asked: list[preflight.Need] = []

    def probe(need: preflight.Need) -> preflight.Check:
        return preflight.Check(lambda _: iter(asked.append(need) or ()), {need})

    monkeypatch.setattr(preflight, "CHECKS", [*map(probe, get_args(preflight.Need))])
    look(made())

    assert {*asked} == may


def test_every_check_needs_what_some_command_has() -> None:
    every = [may for _, may in COMMANDS.values()]

    assert [check for check in preflight.CHECKS if not any(check.needs <= may for may in every)] == []


def test_a_rate_that_destroys_a_model_is_told_before_the_start() -> None:
    def told(*sets: str) -> list[str]:
        return [str(finding) for finding in preflight.inspect(made(*sets)) if str(finding).startswith("lr = ")]

    (warning,) = told("lr=1e-1")
    assert warning.startswith("lr = 0.1 is likely to destroy what the model knows: with AdamW, 2e-4 is usual")
    assert told("lr=3e-3") == told("lr=1e-1", "optimizer.type=SGD") == []


@pytest.mark.parametrize("function", [model_files.kernels, gpus.four_bits, gpus.spread, inputs.vllm])
def test_what_this_machine_lacks_for_a_recipe_is_found_by_check_too(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (check,) = (listed for listed in preflight.CHECKS if listed.function is function)
    monkeypatch.setattr(preflight, "CHECKS", (check._replace(function=lambda _: iter(["found"])),))

    assert preflight.inspect(made()) == ("found",)
    assert preflight.inspect(made(), elsewhere=True) == ()
