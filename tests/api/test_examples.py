"""The scripts and the notebook in examples/, run as they stand: real training, on the CPU."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch

import tuner
from tests.e2e.runs import environment
from tests.e2e.warm import warm

EXAMPLES = Path(tuner.__file__).parents[1] / "examples"
SCRIPTS = {
    "train_on_rows": "done: the loss went from",
    "plan_a_cluster": 'recommended: deepspeed="deepspeed_zero1"',
    "sft_then_dpo": "dpo: done",
    "use_a_result": "runs/my-model: 29 tensors",
    "mix_data_sets": "text: ",
}
QUICK = ("plan_a_cluster",)

pytestmark = pytest.mark.e2e


def state_of_the_process() -> tuple[object, ...]:
    # torch names the folder of its compiler in the environment, and DeepSpeed how torch looks for GPUs, when imported.
    of_libraries = ("TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK")
    environ = {name: value for name, value in os.environ.items() if name not in of_libraries}
    torch_state = torch.get_rng_state().tolist(), torch.get_default_dtype(), torch.is_grad_enabled()
    return environ, Path.cwd(), *torch_state


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in SCRIPTS]
)
def test_a_script_runs_and_leaves_the_process_as_it_was(name: str, tmp_path: Path) -> None:
    assert SCRIPTS[name] in _told(tmp_path, f"run_script({name!r})")


def _told(folder: Path, call: str) -> str:
    """Call a function of this module in a process that has the libraries, from which the ranks are forked too."""
    code = f"from tests.api import test_examples; test_examples.{call}"
    done = warm().run([], code=code, cwd=folder, env=environment(CUDA_VISIBLE_DEVICES=""))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_script(name: str) -> None:
    before = state_of_the_process()

    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")

    assert state_of_the_process() == before
    if name == "train_on_rows":
        run = tuner.Run("runs/rows")
        assert [line["step"] for line in run.metrics if "loss" in line][-1] == run.checkpoints[-1].step
        assert run.model().num_parameters() > 0
        assert run.tokenizer().chat_template


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == SCRIPTS.keys()


@pytest.mark.long
def test_every_cell_of_the_notebook_runs(tmp_path: Path) -> None:
    assert "step 4/4  loss" in _told(tmp_path, "run_notebook()")


def run_notebook() -> None:
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}

    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "committed without outputs"
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)  # noqa: S102  our own notebook

    assert names["run"].state == "done"
    assert len(names["losses"]) == 4
    assert len(pandas.DataFrame(names["run"].metrics)) >= 4
