"""The Python API: the same as the commands, in the caller's process, which stays as it was."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import tuner
from tests.cli.command import Tuner, runner
from tests.each import each
from tests.launch.processes import wait_until
from tests.launch.rank import process
from tests.refused import refused
from tuner.errors import Option, RecipeError, RunDirectoryError, Text, UsageError
from tuner.launch import render
from tuner.recipes import loading
from tuner.recipes.recipe import Overrides
from tuner.runs.directory import RunDirectory
from tuner.runs.records import RunStatus
from tuner.runs.verdict import Outcome, Verdict

TINY = "tiny_lora_sample_e1"
DONE = (
    "from tuner.runs.directory import *\n"
    "RunDirectory(Path(sys.argv[1])).write_status(RunStatus(state='done', exit_code=0))\n"
)
SAVES = (
    "signal.signal(signal.SIGTERM, lambda *_: (report(0, 75, 'saved'), sys.exit(1)))\nsaid('ready')\ntime.sleep(60)\n"
)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Tuner:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return runner(monkeypatch, capsys)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return what puts a few lines of Python in the place of the ranks of runs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def run(code: str) -> None:
        monkeypatch.setattr(render, "argv", lambda resolved: process(resolved.run_path, code))

    return run


# import


def test_importing_it_loads_nothing() -> None:
    looks = "import sys; before = {*sys.modules}; import tuner; print(*{*sys.modules} - before)"
    root = str(Path(tuner.__file__).parents[1])

    done = subprocess.run([sys.executable, "-c", looks], env={"PYTHONPATH": root}, capture_output=True, text=True)

    loaded = done.stdout.split()
    assert {name for name in loaded if name.split(".")[0] not in sys.stdlib_module_names} == {"tuner"}
    assert len(loaded) < 30


def test_every_public_name_is_there_and_no_other() -> None:
    assert all(hasattr(tuner, name) for name in dir(tuner))
    assert not hasattr(tuner, "resolve_run")


# Recipes


@each(
    [
        ({"lr": 1e-5, "max_steps": 3}, ["lr=1e-5", "max_steps=3"]),
        ({"train_cfg.max_steps": 3}, ["train_cfg.max_steps=3"]),
        ({"train_cfg": {"max_steps": 3, "max_epochs": 2}}, ["train_cfg.max_steps=3", "train_cfg.max_epochs=2"]),
        ({"learning_rate": 1e-5, "lora_target": ["q_proj"]}, ["learning_rate=1e-5", "lora_target=[q_proj]"]),
        ({"betas": (0.9, 0.95), "clip_grad": None}, ["betas=(0.9,0.95)", "clip_grad=None"]),
        ({"val_dataloader": None}, ["val_dataloader=None"]),
    ]
)
def test_overrides_are_values_that_mean_what_their_texts_mean(given: dict[str, Any], sets: list[str]) -> None:
    as_text = loading.load(TINY, Overrides(pairs=[("--set", text) for text in sets]))

    assert tuner.load_recipe(TINY, **given).values == as_text.values


def test_a_flags_word_is_the_flag_and_a_block_of_that_name_the_block() -> None:
    by_flag = tuner.load_recipe("tiny_full_sample_e1", model=Path("my-model"), epochs=2, seed=7, data="my.jsonl")
    by_block = tuner.load_recipe("tiny_full_sample_e1", model={"path": "my-model"})

    assert by_flag.config.model.path == by_block.config.model.path == "my-model"
    assert (by_flag.config.train_cfg.max_epochs, by_flag.config.randomness.seed) == (2, 7)


def test_numbers_of_numpy_become_plain_ones() -> None:
    import numpy as np

    recipe = tuner.load_recipe(TINY, lr=np.float64(1e-5), max_steps=np.int64(3))

    assert "np." not in recipe.standalone()
    assert (type(recipe.config.optim_wrapper.optimizer.lr), type(recipe.config.train_cfg.max_steps)) == (float, int)


def test_overrides_of_a_loaded_recipe_go_over_its_own() -> None:
    recipe = tuner.load_recipe(TINY, lr=1e-5, max_steps=3)

    again = tuner.load_recipe(recipe, max_steps=5)

    assert (again.config.optim_wrapper.optimizer.lr, again.config.train_cfg.max_steps) == (1e-5, 5)


@each(
    [
        ({"lr": -1}, "optim_wrapper.optimizer.lr = -1: input should be greater than 0", "override lr=-1"),
        ({"train_cfg": {"max_stesp": 3}}, "no key 'train_cfg.max_stesp'", "override train_cfg={'max_stesp': 3}"),
        ({"lr": float("nan")}, "lr = nan is not a finite number", None),
        ({"data": {"text": "a"}}, "data = {'text': 'a'} is not a path or a name", None),
        ({"lr": {1, 2}}, "lr = {1, 2} is of type set, which a recipe cannot hold", None),
        ({"quantization.bits": 4}, "quantization is None in this recipe, so quantization.bits has no effect", ...),
    ]
)
def test_a_wrong_override_is_told_as_the_command_line_tells_it(given: dict[str, Any], what: str, where: Any) -> None:
    with pytest.raises(RecipeError) as caught:
        tuner.load_recipe(TINY, **given)

    assert caught.value.what == what
    assert where is ... or caught.value.where == where


# Plans and checks


def test_plan_and_check_return_what_their_commands_print(command: Tuner) -> None:
    planned = command(
        "plan", TINY, "--gpus", 2, "--gpu", "h100", "--deepspeed", "zero2", "--set", "max_steps=30", "--json"
    )
    checked = command("check", TINY, "--set", "lr=-1", "--json")

    plan = tuner.plan(TINY, gpus=2, gpu="h100", deepspeed="zero2", max_steps=30)
    found = tuner.check(TINY, lr=-1)

    assert json.loads(json.dumps(plan.to_json())) == json.loads(planned.out)
    assert (plan.recommended, plan.chosen is None) == (json.loads(planned.out)["recommended"], False)
    assert (found.ok, checked.code) == (False, 2)
    assert [finding.what for finding in found.findings] == [
        finding["what"] for finding in json.loads(checked.out)["findings"]
    ]


def test_check_takes_a_deepspeed_config_as_a_dict() -> None:
    assert tuner.check(TINY, deepspeed={"zero_optimization": {"stage": 2}}).ok
    assert "stag" in tuner.check(TINY, deepspeed={"zero_optimization": {"stag": 2}}).findings[0].what


@each(
    [
        (lambda: tuner.train(TINY, on_oom="Retry"), "on_oom = 'Retry' is not one of 'stop', 'retry'"),
        (lambda: tuner.train(TINY, grace_s=float("nan")), "grace_s = nan is out of range"),
        (lambda: tuner.plan(TINY, gpus=0), "gpus = 0 is out of range"),
        (lambda: tuner.check(TINY, nodes=-1), "nodes = -1 is out of range"),
        (
            lambda: tuner.export("run", "out", format="onnx"),
            "format = 'onnx' is not one of 'published', 'llama', 'gguf'",
        ),
        (lambda: tuner.chat("run", max_new_tokens=0), "max_new_tokens = 0 is out of range"),
        (lambda: tuner.chat("run", bits=3), "bits = 3 is not one of 4, 8, 16"),
        (lambda: tuner.evaluate("run", max_rows=0), "max_rows = 0 is out of range"),
        (lambda: tuner.serve("run", engine="tgi"), "engine = 'tgi' is not one of 'transformers', 'vllm'"),
    ]
)
def test_what_click_refuses_of_a_flag_is_refused_of_its_argument(call: Callable[[], object], what: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()

    assert caught.value.what == what


# Training, with a few lines of Python for the ranks


def test_what_rank_0_prints_appears_where_the_caller_looks(ranks: Any, tmp_path: Path) -> None:
    ranks(f"{DONE}open(sys.argv[1] + '/ranks/0.log', 'w').write('step 1/1  loss 2.0 ü\\n')")
    cell = io.StringIO()
    before = dict(os.environ), Path.cwd(), [signal.getsignal(number) for number in (2, 15, 1, 12)]

    with redirect_stdout(cell):
        run = tuner.train(TINY, work_dir=tmp_path / "run", max_steps=1)

    assert cell.getvalue() == "step 1/1  loss 2.0 ü\n"
    assert run.state == "done"
    assert before == (dict(os.environ), Path.cwd(), [signal.getsignal(number) for number in (2, 15, 1, 12)])


def test_a_run_that_fails_raises_what_went_wrong(ranks: Any, tmp_path: Path) -> None:
    ranks("report(0, 1, 'not-a-number: the loss is nan. Lower it.', cause='not-a-number', step=3); sys.exit(1)")

    with pytest.raises(tuner.RunFailed) as caught:
        tuner.train(TINY, work_dir=tmp_path / "run", lr=1e-2)

    failure = pickle.loads(pickle.dumps(caught.value))  # noqa: S301  a process pool hands it on
    assert (failure.exit_code, failure.run.path, failure.run.state) == (1, tmp_path / "run", "failed")
    assert (failure.diagnosis["cause"], failure.diagnosis["step"]) == ("not-a-number", 3)
    assert f"tuner train {tmp_path / 'run/recipe.py'} " in failure.fix  # which has the overrides, as no flags do


def test_an_interrupt_lets_the_ranks_save_and_is_raised_when_they_have(ranks: Any, tmp_path: Path) -> None:
    ranks(SAVES)

    def stop() -> None:
        wait_until((tmp_path / "run/ready").exists)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=stop).start()
    with pytest.raises(KeyboardInterrupt) as caught:
        tuner.train(TINY, work_dir=tmp_path / "run")

    assert isinstance(caught.value.__cause__, tuner.RunFailed)
    assert (caught.value.__cause__.exit_code, tuner.Run(tmp_path / "run").state) == (75, "stopped")


def test_another_signal_stops_the_run_and_reaches_the_callers_own_handler(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks(SAVES)
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: heard.append(number))

    def stop() -> None:
        wait_until((tmp_path / "run/ready").exists)
        os.kill(os.getpid(), signal.SIGUSR2)

    threading.Thread(target=stop).start()
    try:
        with pytest.raises(tuner.RunFailed, match=r"^stopped: .*: the run was stopped"):
            tuner.train(TINY, work_dir=tmp_path / "run")
    finally:
        signal.signal(signal.SIGUSR2, before)

    assert heard == [signal.SIGUSR2]


def test_it_trains_outside_the_main_thread(ranks: Any, tmp_path: Path) -> None:
    ranks(DONE)
    done: list[tuner.Run] = []
    thread = threading.Thread(target=lambda: done.append(tuner.train(TINY, work_dir=tmp_path / "run")))

    thread.start()
    thread.join(60)

    assert [run.state for run in done] == ["done"]


def test_a_run_that_cannot_start_raises_the_commands_error(ranks: Any, tmp_path: Path) -> None:
    ranks(DONE)
    run = tuner.train(TINY, work_dir=tmp_path / "run")

    with refused(RunDirectoryError, "work_dir="):
        tuner.train(TINY, work_dir=run)
    with refused(UsageError, "val=", "val_split="):
        tuner.train(TINY, val="my.jsonl", val_split=0.1)


# Runs


def test_a_run_is_read_while_it_is_written(tmp_path: Path, ranks: Any) -> None:
    ranks(DONE)
    run = tuner.train(TINY, work_dir=tmp_path / "run")
    (run.path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 1, "eval_loss": 2.0}\n{"step": 2, "lo')

    assert run.metrics == [{"step": 1, "loss": 2.5}, {"step": 1, "eval_loss": 2.0}]
    assert (run.checkpoints, os.fspath(run), run.report.name) == ([], str(tmp_path / "run"), "report.html")


def test_a_run_tells_its_verdict(tmp_path: Path, ranks: Any) -> None:
    ranks(DONE)
    run = tuner.train(TINY, work_dir=tmp_path / "run")
    assert run.verdict is None

    advice = Text(f"train with {Option('epochs', 2)}")
    verdict = Verdict(Outcome.LEARNED, "validation", 4.5, 3.5, 7, advice, advice_in_python=advice.in_python)
    RunDirectory(run.path).write_status(RunStatus(state="done", verdict=verdict))
    assert run.verdict and (run.verdict["outcome"], run.verdict["before"]) == ("learned", 4.5)
    assert (run.verdict["advice"], run.verdict["brief"]) == ("train with epochs=2", verdict.brief)
    assert run.verdict["line"] == f"{verdict}".replace("--epochs 2", "epochs=2")
    assert "advice_in_python" not in run.verdict


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with refused(RunDirectoryError, "RUN"):
        tuner.Run(tmp_path)


# The page about it


def python_blocks() -> list[str]:
    page = (Path(tuner.__file__).parents[1] / "docs/python.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def test_the_pages_code_runs(ranks: Any, here: Path) -> None:
    ranks(DONE)
    blocks = [block for block in python_blocks() if "chat(" not in block and "evaluate(" not in block]

    for block in blocks:
        exec(block, {})  # noqa: S102  our own page

    assert (len(blocks), len(python_blocks())) == (4, 6)


@pytest.mark.e2e
@pytest.mark.long
def test_the_pages_first_example_trains_and_prints_what_it_shows(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    for block in python_blocks():
        if "chat(" in block or "evaluate(" in block:
            exec(block, {})  # noqa: S102  our own page

    out = capsys.readouterr().out
    for line in (
        "train: 2 rows of format 'messages' (detected) -> ",
        "step 3/3  loss ",
        "Trained 3 steps in ",
        "done 7.",
    ):
        assert line in out
