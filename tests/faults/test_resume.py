"""Runs that go on: after a kill, on other ranks, at another stage, and not from a file with code in it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.canary import Canary
from tests.e2e.runs import Finished, Once, distance, fork, ok, processes_of, quick, train
from tests.faults.conftest import Faulty
from tuner.runs import checkpoints

pytestmark = pytest.mark.e2e

# Two steps an epoch, so that six cross its end twice; dropout, so that the state of the random numbers matters.
EPOCHS = ("max_rows=40", "max_steps=6", "checkpoint.interval=3", "lora_dropout=0.1", "packing=True")
VALIDATED = (
    "val_dataloader=dict(batch_size=4, dataset=dict(path='package:sample/validation.jsonl', format='messages', "
    "max_rows=8, max_length=128, packing=True))",
    "train_cfg.val_interval=2",
)


def _sets(*texts: str) -> list[str]:
    return [word for text in texts for word in ("--set", text)]


def _steps(run: Finished, key: str) -> list[int]:
    return [line["step"] for line in run.metrics if key in line]


def _copy(run: Finished, path: Path, step: int) -> Path:
    """Copy a run as it was when it was killed after a checkpoint."""
    shutil.copytree(run.path, path)
    for folder in (path / "checkpoints").glob("checkpoint-*"):
        if folder.name != f"checkpoint-{step}":
            shutil.rmtree(folder)
    return path


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path, once: Once, faulty: Faulty) -> None:
    recipe, asked = quick(tmp_path, "lora"), ["--deepspeed", "zero2", *_sets(*EPOCHS)]
    undisturbed = once(quick, "lora", *asked)
    validated = [*asked, *_sets(*VALIDATED)]
    killed = faulty("kill@1:5", recipe, tmp_path / "killed", *validated)
    assert killed.code == 137 and _steps(killed, "loss") == [1, 2, 3, 4]

    resumed = ok(train(recipe, killed.path, *validated, "--resume", "auto"))

    assert resumed.json("run.json")["resume_step"] == 3
    assert _steps(resumed, "loss") == [1, 2, 3, 4, 5, 6] and _steps(resumed, "eval_loss") == [0, 2, 4, 6]
    verdict, first = resumed.json("status.json")["verdict"], killed.metrics[0]
    assert (verdict["before"], verdict["steps"]) == (first["eval_loss"], 6), "measured by the attempt that was killed"
    assert [loss.hex() for loss in resumed.losses] == [loss.hex() for loss in undisturbed.losses]
    results = [run.path / "final" / "adapter_model.safetensors" for run in (resumed, undisturbed)]
    assert results[0].read_bytes() == results[1].read_bytes()
    cut = (killed.path / "attempts" / "1" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in cut] == [4, 4]


@pytest.mark.long  # what it decides: tests/launch/test_resuming.py
def test_a_run_of_two_ranks_goes_on_on_one_within_its_dropout(tmp_path: Path, once: Once) -> None:
    recipe, asked = quick(tmp_path, "lora"), ["--deepspeed", "zero2", *_sets(*EPOCHS)]
    undisturbed = once(quick, "lora", *asked)

    alone = ok(train(recipe, _copy(undisturbed, tmp_path / "alone", 3), *asked, "--resume", "auto", ranks=1))

    batch = alone.json("run.json")["batch"]
    assert [batch[key] for key in ("micro_batch", "accumulation", "ranks", "global_batch")] == [2, 4, 1, 8]
    assert (batch["steps_done"], batch["steps_left"]) == (3, 3)
    assert alone.losses[3] == pytest.approx(undisturbed.losses[3], rel=2e-3)
    assert alone.losses == pytest.approx(undisturbed.losses, rel=2e-2)


@pytest.mark.long
def test_a_sharded_run_goes_on_on_more_ranks_and_its_weights_at_another_stage(tmp_path: Path) -> None:
    recipe = quick(tmp_path, "full")
    two = ok(train(recipe, tmp_path / "two", "--deepspeed", "zero3"))

    path = _copy(two, tmp_path / "four", 2)
    _claim_the_lowest_loss(path / "checkpoints" / "checkpoint-2")
    four = ok(
        train(recipe, path, "--deepspeed", "zero3", "--resume", "auto", *_sets(*VALIDATED, "save_best=auto"), ranks=4)
    )

    assert four.json("run.json")["batch"]["accumulation"] == 1
    assert four.json("deepspeed.json")["checkpoint"] == {"load_universal": True}
    assert four.losses == pytest.approx(two.losses, rel=1e-5)
    assert checkpoints.inspect(path / "checkpoints" / "checkpoint-4") is None
    assert four.json("status.json")["result_step"] == 2, "the best one, which other ranks have saved"
    best, result = (
        load_file(folder / "model.safetensors") for folder in (path / "checkpoints" / "checkpoint-2", path / "final")
    )
    common = best.keys() & result.keys()
    assert len(common) >= len(result) - 1, "the tied weight has one name or the other"
    assert distance(*({name: weights[name] for name in common} for weights in (result, best))) == 0
    assert not checkpoints.unfinished(path / "checkpoints").exists()
    assert not (path / "universal").exists(), "of no use beside a newer checkpoint"

    path = _copy(two, tmp_path / "moved", 2)
    refused = train(recipe, path, "--deepspeed", "zero2", "--resume", "auto", ranks=1)
    assert (refused.code, "or add --resume-weights" in refused.text) == (2, True), refused.text
    asked = ("--deepspeed", "zero2", "--resume", "auto", "--resume-weights", *_sets("lr=1e-3"))
    moved = ok(train(recipe, path, *asked, ranks=1))

    assert moved.losses[:3] == pytest.approx(two.losses[:3], rel=1e-6)
    assert moved.losses[3] < two.losses[2], "the weights are trained on"
    assert [line["learning_rate"] for line in moved.metrics] == [3e-3, 3e-3, 1e-3, 1e-3]

    _hide_code_in(path / "checkpoints" / "checkpoint-2", tmp_path / "canary")
    shutil.rmtree(path / "checkpoints" / "checkpoint-4")
    poisoned = train(recipe, path, "--deepspeed", "zero3", "--resume", "auto", ranks=1)

    assert poisoned.code == 2, poisoned.text
    assert "holds code" in poisoned.text and "Traceback" not in poisoned.text, poisoned.text
    assert not (tmp_path / "canary").exists()


@pytest.mark.long
def test_of_two_resumes_at_once_one_goes_on_and_the_other_is_told_who_has_the_run(
    tmp_path: Path, faulty: Faulty
) -> None:
    recipe = quick(tmp_path, "lora")
    killed = faulty("kill@0:3", recipe, tmp_path / "run", ranks=1)
    assert killed.code == 137

    both = [fork(recipe, "--work-dir", killed.path, "--resume", "auto", ranks=1) for _ in range(2)]
    said = [process.communicate(timeout=600)[0] for process in both]  # and not `finish`, which ends what is left
    ended = [Finished(process.returncode, text, killed.path) for process, text in zip(both, said, strict=True)]

    (winner,) = (process for process, run in zip(both, ended, strict=True) if run.code == 0)
    (refused,) = (run for run in ended if run.code)
    assert refused.code == 2, refused.text
    assert f"is in use by process {winner.pid} on" in refused.text, refused.text
    assert refused.text.count("error[bad-run-directory]: ") == 1 and "Traceback" not in refused.text
    assert [line["step"] for line in refused.metrics] == [1, 2, 3, 4]
    attempts = [attempt.name for attempt in (killed.path / "attempts").iterdir()]
    assert attempts == ["1"], "the one that was killed; what was refused left nothing"
    assert processes_of(killed.path) == []


# What a resume without ranks of other numbers does not open may hold anything: it is not run either.
UNREAD = {"training_args.bin"}


@pytest.mark.long
def test_code_in_any_pickle_of_a_checkpoint_ends_the_resume_and_is_not_run(tmp_path: Path) -> None:
    recipe, canary = quick(tmp_path, "lora"), tmp_path / "canary"
    first = ok(train(recipe, tmp_path / "first", "--deepspeed", "zero2", "--set", "max_steps=2", ranks=1))
    whole = first.path / "checkpoints" / "checkpoint-2"
    pickles = [file.relative_to(whole) for file in whole.rglob("*") if file.suffix in (".pt", ".pth", ".bin")]
    assert {file.name for file in pickles} > {"rng_state.pth", "scheduler.pt", *UNREAD} and len(pickles) == 5

    for file in pickles:
        checkpoint = tmp_path / file.stem / "checkpoint-2"
        shutil.copytree(whole, checkpoint)
        _poison(checkpoint / file, canary)
        checkpoints.seal(checkpoint, checkpoints.facts(checkpoint))
        asked = ("--deepspeed", "zero2", "--resume", checkpoint)

        run = train(recipe, tmp_path / f"from-{file.stem}", *asked, ranks=1)

        assert not canary.exists(), file
        assert run.code == (0 if file.name in UNREAD else 2), (file, run.text)
        assert ("holds code" in run.text) == (file.name not in UNREAD), (file, run.text)
        assert "Traceback" not in run.text, (file, run.text)


def _claim_the_lowest_loss(checkpoint: Path) -> None:
    file = checkpoint / "trainer_state.json"
    state = json.loads(file.read_text())
    state["log_history"].append({"eval_loss": 0.0, "step": state["global_step"]})
    file.write_text(json.dumps(state))
    checkpoints.seal(checkpoint, checkpoints.facts(checkpoint))


def _poison(file: Path, canary: Path) -> None:
    """Add an object whose loading makes the canary to what a pickle holds."""
    content = torch.load(file, weights_only=False)
    torch.save({**(content if isinstance(content, dict) else {}), "more": Canary(canary)}, file)


def _hide_code_in(checkpoint: Path, canary: Path) -> None:
    """Put a pickle that runs code into each file of rank 1, under a manifest that is right."""
    for file in checkpoint.rglob("*rank_1_*_states.pt"):
        _poison(file, canary)
    checkpoints.seal(checkpoint, checkpoints.facts(checkpoint))
