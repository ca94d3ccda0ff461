"""Errors in Python's words: an argument's name where the command line has a flag."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tuner
from tests.each import each
from tuner.cli import COMMANDS as LISTED
from tuner.recipes.python_calls import _FLAGS as OVERRIDES
from tuner.recipes.python_calls import ARGUMENTS, COMMANDS, SWITCHES, in_python, place_in_python

ROOT = Path(tuner.__file__).parent
FUNCTIONS = ("chat", "check", "evaluate", "export", "load_recipe", "plan", "preview_data", "serve", "train")
SHELL = {
    *("--all", "--array", "--bad", "--bind-cores-to-rank", "--catalog", "--chat-template", "--dry-run"),
    "--datasets",
    *("--exclude", "--from", "--hostfile", "--include", "--launcher", "--master-addr", "--master-port", "--module"),
    *("--name", "--nnodes", "--node-rank", "--output", "--sbatch", "--ssh", "--stop-before", "--time", "--watch"),
    *("--max-requeues", "--set", "--ds", "--cfg-options", "--json", "--debug"),
}
"""Flags of ours that have no argument: what they do is done by the command line alone, or by `--set`'s own rule."""
OTHERS = {
    *("--bind-to", "--cpu-bind", "--cpus-per-task", "--ctime", "--enable-lora", "--force-reinstall", "--ipc"),
    *("--generation-config", "--kill-on-bad-exit", "--local-dir", "--long", "--lora-modules", "--max-lora-rank"),
    *("--no-build-isolation", "--ntasks-per-node", "--oneliner", "--outfile", "--outtype", "--parsable", "--repo-type"),
    *("--requeue", "--revision", "--served-model-name", "--shm-size", "--signal", "--trust-remote-code", "--upgrade"),
    *("--version", "--weight-transfer-config", "--logprobs-mode", "--max-logprobs"),
}
"""Flags of other programs."""


def texts() -> Iterator[str]:
    """Yield every text in the code below the command line, without docstrings."""
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] in ("cli", "importers", "configs", "api"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n\n" not in node.value:
                yield node.value


@each(
    [
        ("both --val and --val-split set the rows", "both val= and val_split= set the rows"),
        ("Set it: --model BASE --adapter ./x.", 'Set it: model=BASE, adapter="./x".'),
        ("Use --set dtype=fp16, fp32 or auto.", 'Use dtype="fp16", fp32 or auto.'),
        ("Use --set train_cfg.loss=whole, or --deepspeed zero2.", 'Use loss="whole", or deepspeed="zero2".'),
        ("Use --set quantization.bits=8.", "Use bits=8."),
        ("--set train_dataloader.dataset.max_length=512", "max_length=512"),
        ("--set train_dataloader.dataset.packing=true.", 'train_dataloader={"dataset": {"packing": True}}.'),
        (
            '--set "adapter=dict(r=64, lora_alpha=16)" --ignore-fit',
            "adapter=dict(r=64, lora_alpha=16), ignore_fit=True",
        ),
        ("--ds zero_optimization.sub_group_size=1000", 'ds={"zero_optimization.sub_group_size": 1000}'),
        ("no recipe: method lora; --method sets another.", "no recipe: method lora; method= sets another."),
        ("--set optim_wrapper.optimizer.betas=0.9,0.999.", "betas=(0.9,0.999)."),
        ("Serve it: tuner export SOURCE DEST --as llama (--merge).",) * 2,
        ("Next: `tuner train x.py --resume auto --set lr=1`",) * 2,
        ("docker run --shm-size=8g, or --ipc=host",) * 2,
    ]
)
def test_a_flag_that_has_an_argument_becomes_it_and_a_whole_command_stays(text: str, spoken: str) -> None:
    assert in_python(text) == spoken


@each(
    [
        ("--model ./my model", 'model="./my model"'),
        ("--val", "val="),
        ("--gpu and --gpu-memory", "gpu= and gpu_memory="),
        ("SOURCE", "source"),
        ("my.py:14", "my.py:14"),
    ]
)
def test_a_place_is_named_as_the_caller_wrote_it(where: str, spoken: str) -> None:
    assert place_in_python(where) == spoken


def test_every_argument_that_stands_for_a_flag_is_one() -> None:
    parameters = {name for function in FUNCTIONS for name in inspect.signature(getattr(tuner, function)).parameters}
    daily = {"lr", "batch_size", "max_steps", "max_length", "lora_rank", "save_every", "eval_every", "report_to"}

    assert set(ARGUMENTS.values()) - parameters - set(OVERRIDES) - daily == {"rewards"}
    assert {
        name
        for function in FUNCTIONS
        for name, one in inspect.signature(getattr(tuner, function)).parameters.items()
        if isinstance(one.default, bool)
    } - {"every"} == set(SWITCHES)


def test_every_flag_in_a_message_has_an_argument_or_is_known_to_have_none() -> None:
    flags = {flag for text in texts() for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text)}

    assert len(flags) > 60
    assert flags - ARGUMENTS.keys() - SHELL - OTHERS == set()


def test_every_command_is_known_to_stay_one() -> None:
    assert set(COMMANDS) == set(LISTED)


def test_an_error_of_a_call_names_arguments() -> None:
    with pytest.raises(tuner.TunerError) as caught:
        tuner.load_recipe("tiny_lora_sample_e1", model="./x", method="qlora")

    assert "--" not in str(caught.value)
    assert caught.value.where == "method="


def test_findings_name_arguments() -> None:
    (finding,) = tuner.check(adapter="package:tiny", model="package:tiny").findings[:1]

    assert "--" not in str(finding)
