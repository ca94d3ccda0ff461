"""A run's result as training leaves it, without the training: random weights of the package's own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from click.testing import CliRunner, Result

from tests.cli.made_runs import make_run
from tuner.cli import tuner
from tuner.models.load import load_model, load_tokenizer, pretrained_path
from tuner.recipes.loading import load
from tuner.recipes.schema import RecipeConfig
from tuner.runs.directory import RunDirectory
from tuner.runs.records import RunStatus


def make_result(path: Path, recipe: str, *sets: str) -> tuple[RunDirectory, Any]:
    """Write a run that is done, and return it with the model that it holds; an adapter's weights are no zeros."""
    run = RunDirectory(make_run(path, recipe, "none", *sets))
    config: RecipeConfig = load(str(run.recipe)).config
    transformers.set_seed(0)
    model = load_model(config, pretrained_path(config.model), torch.float32, "cpu", shards=False)
    for name, weight in model.named_parameters():
        if "lora_" in name or name.endswith("score.weight"):
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(run.final)
    load_tokenizer(config.model, pretrained_path(config.model)).save_pretrained(run.final)
    run.write_status(RunStatus(state="done", exit_code=0, step=1))
    return run, model.eval()


def exported(*arguments: object) -> Result:
    return CliRunner().invoke(tuner, ["export", *map(str, arguments)])
