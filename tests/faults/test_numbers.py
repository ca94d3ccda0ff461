"""A loss or a gradient that is no number, on two real ranks."""

from __future__ import annotations

import ast
import json
import math
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.e2e.runs import Finished, ok, quick, train
from tests.faults.conftest import Faulty
from tuner import assets

pytestmark = [pytest.mark.e2e, pytest.mark.long]  # in one process: tests/worker/test_consensus.py


@pytest.mark.parametrize(
    ("fault", "level", "dtype", "told"),
    [
        ("nan-loss@1:2", "none", "fp32", "loss is nan in step 2 on rank 1"),
        ("inf-grad@0:3", "zero2", "fp32", "the gradient's norm is inf in step 3 on rank 0"),
        ("nan-grad@1:3", "zero3", "bf16", "the gradient's norm is nan in step 3 on rank 1"),
    ],
)
def test_a_number_that_is_none_ends_the_run_before_the_update_and_names_step_rank_and_rows(
    tmp_path: Path, faulty: Faulty, fault: str, level: str, dtype: str, told: str
) -> None:
    sets = ("--set", f"dtype={dtype}", "--set", "packing=False")  # a row is a sample, as `spoilt` says it
    run = faulty(fault, quick(tmp_path, "full"), tmp_path / "run", "--deepspeed", level, *sets)

    assert run.code == 1, run.text
    rank, step = fault[-3], int(fault[-1])
    *_, what, where, following = run.text.splitlines()
    assert re.match(
        rf"error\[not-a-number\]: {told}, from row \d+ of the prepared data, which begins .*<\|im_start\|>", what
    ), run.text
    assert where == f"On rank {rank}, in step {step}. More: tuner explain not-a-number. Logs: {run.path / 'ranks'}"
    assert following.endswith("--set optim_wrapper.optimizer.lr=0.0003")
    assert [line["step"] for line in run.metrics] == list(range(1, step))
    saved = {folder.name for folder in (run.path / "checkpoints").glob("checkpoint-*")}
    assert saved == ({"checkpoint-2"} if step == 3 else set())
    assert not (run.path / "final").exists()
    assert _spoilt(run, rank).startswith(_named(what))


def test_the_row_of_a_stream_is_named_by_its_text(tmp_path: Path, faulty: Faulty) -> None:
    sets = ("--set", "dataset.streaming=6", "--set", "packing=False", "--deepspeed", "zero3")
    run = faulty("nan-loss@0:2", quick(tmp_path, "full"), tmp_path / "run", *sets)

    assert run.code == 1 and "loss is nan in step 2 on rank 0, from row" in run.text, run.text
    [what] = [line for line in run.text.splitlines() if line.startswith("error[not-a-number]")]
    assert _spoilt(run, "0").startswith(_named(what))


def _spoilt(run: Finished, rank: str) -> str:
    [spoilt] = re.findall(r"^spoilt: \[(.*)\]$", (run.path / "ranks" / f"{rank}.log").read_text(), re.MULTILINE)
    ids = [int(number) for number in spoilt.split(",")]
    return str(AutoTokenizer.from_pretrained(assets.asset("package:tiny")).decode(ids))


def _named(what: str) -> str:
    """Return the text of the row that an error names."""
    return str(ast.literal_eval(re.findall(r"begins ('.*?'|\".*?\"); no weight", what)[0])).strip()


def test_batches_without_a_trained_token_have_no_loss_and_do_no_harm(tmp_path: Path) -> None:
    # Split into rows of 128 tokens, most rows of such a sample are a part of its question alone.
    chat = [{"role": "user", "content": "word " * 900}, {"role": "assistant", "content": "yes"}]
    data = tmp_path / "long.jsonl"
    data.write_text(f"{json.dumps({'messages': chat})}\n" * 4)
    row_by_row = ("--set", "train_dataloader.batch_size=1", "--set", "accumulative_counts=1", "--set", "max_steps=6")

    run = ok(train(quick(tmp_path, "full"), tmp_path / "run", "--data", data, "--deepspeed", "zero2", *row_by_row))

    assert len(run.losses) == 6 and 0.0 in run.losses
    assert all(math.isfinite(loss) for loss in run.losses)
