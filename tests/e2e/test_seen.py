"""What a run shows and keeps: validation, the best weights, samples, a tracker that is down, the report."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.runs import distance, ok, quick, train

pytestmark = pytest.mark.e2e

# Steps so large that the first one alone helps: each validation after it is worse.
WORSE = ("optim_wrapper.optimizer.lr=0.1", "train_cfg.max_steps=12", "checkpoint.interval=100", "num_samples=2")
VALIDATED = (
    "val_dataloader=dict(batch_size=4, dataset=dict(path='package:sample/validation.jsonl', format='messages', "
    "max_rows=24, max_length=128, packing=True))",
    *("train_cfg.val_interval=1", "early_stopping_patience=2", "save_best=auto", "max_keep_ckpts=1"),
)


@pytest.mark.long  # tests/worker/test_validation.py, tests/runs/test_verdict.py
def test_a_run_that_gets_worse_ends_early_with_its_best_weights_and_tells_it_all(tmp_path: Path) -> None:
    sets = [word for text in (*WORSE, *VALIDATED, "trackers=tensorboard") for word in ("--set", text)]
    nowhere = "/dev/null/tensorboard"
    run = ok(train(quick(tmp_path, "full"), tmp_path / "run", *sets, TENSORBOARD_LOGGING_DIR=nowhere))

    before, *later = [line for line in run.metrics if "eval_loss" in line]
    validated = {line["step"]: line["eval_loss"] for line in later}
    best = min(validated, key=lambda step: validated[step])
    assert max(validated) == best + 2 < 12, "two validations without a lower loss"
    assert run.json("status.json")["result_step"] == best
    kept = tmp_path / "run" / "checkpoints" / f"checkpoint-{best}"
    result, checkpoint = (load_file(folder / "model.safetensors") for folder in (run.path / "final", kept))
    assert result.keys() == checkpoint.keys() and "lm_head.weight" not in checkpoint, "a tied weight is stored once"
    assert distance(result, checkpoint) == 0

    assert (
        run.text.count("WARNING: the tracker tensorboard is disabled for the rest of the run: NotADirectoryError") == 1
    )
    line = next(line for line in run.metrics if "loss" in line)
    assert {"grad_norm", "learning_rate", "tokens_per_second", "memory_bytes", "epoch", "num_tokens"} <= line.keys()
    assert line["memory_bytes"] > 100 * 1024**2 and "mfu" not in line, "nobody knows the peak of this CPU"
    report = (run.path / "report.html").read_text()
    assert "the tracker tensorboard is disabled" in report and "before training" in report
    assert (
        "Early stopping ended the run before step 12" in run.text
        and f"Early stopping: training ended at step {best + 2} of 12" in report
    )
    verdict = run.json("status.json")["verdict"]
    assert (verdict["outcome"], verdict["before"], verdict["after"]) == (
        "overfit",
        before["eval_loss"],
        validated[best],
    )
    assert verdict["line"] in run.text and verdict["advice"] in report
    assert "overfit: held-out loss " in report
    assert f"(weights of step {best}, the lowest validation loss)" in report and "chart-loss" in report
