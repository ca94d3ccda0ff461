"""What three short runs trained goes out of each ZeRO level's checkpoint as their results, and says what they say."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.runs import ok, quick, train
from tuner.cli import tuner

pytestmark = [pytest.mark.e2e, pytest.mark.long]  # in seconds: tests/results/test_export.py


def exported(*arguments: object) -> str:
    # In this process, which has loaded torch already: tests/results starts the command.
    done = CliRunner().invoke(tuner, ["export", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def said(folder: Path) -> torch.Tensor:
    """Return what a folder's model says, loaded with plain transformers and PEFT."""
    auto = AutoPeftModelForCausalLM if (folder / "adapter_config.json").is_file() else AutoModelForCausalLM
    words = AutoTokenizer.from_pretrained(folder)("What is the capital of Denmark?", return_tensors="pt")
    with torch.no_grad():
        found: torch.Tensor = auto.from_pretrained(folder, dtype=torch.float32).eval()(**words).logits
    return found


@pytest.mark.parametrize(("method", "level"), [("lora", "zero3"), ("full", "zero3"), ("qlora", "zero2")])
def test_a_checkpoint_goes_out_as_the_result_does(method: str, level: str, tmp_path: Path) -> None:
    short = ("--set", "max_steps=2", "--set", "optim_wrapper.dtype=bf16")
    run = ok(train(quick(tmp_path, method), tmp_path / "run", "--deepspeed", level, *short))

    told = exported(run.path / "checkpoints" / "checkpoint-2", tmp_path / "of_checkpoint")
    assert "verified by reading them back," in told
    trained = said(run.path / "final")
    name = "model.safetensors" if method == "full" else "adapter_model.safetensors"

    left, right = load_file(tmp_path / "of_checkpoint" / name), load_file(run.path / "final" / name)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)
    assert torch.equal(said(tmp_path / "of_checkpoint"), trained)
    if method == "full":
        # A run that did not come to its end: what is exported is its newest checkpoint.
        shutil.rmtree(run.path / "final")
        (run.path / "status.json").write_text('{"state": "stopped"}')
        assert "checkpoint 2 of" in exported(run.path, tmp_path / "of_run")
        assert torch.equal(said(tmp_path / "of_run"), trained)
    else:
        exported(run.path, tmp_path / "merged", "--merge")
        torch.testing.assert_close(said(tmp_path / "merged"), trained, rtol=1e-4, atol=1e-4)
