"""What --resume comes to: the checkpoint, the batch, how the state moves, what of a recipe may change."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.launch.plans import NOW, PATH, TINY, checkpoint, made, task, written_run
from tests.machine.gpus import CPU, H200, RTX4090, machine
from tests.refused import refused
from tuner.errors import DiskError, RecipeError, RunDirectoryError, UsageError
from tuner.launch import render
from tuner.launch.resolve import resolve_run, resolve_start
from tuner.launch.resolved_run import Request, ResolvedRun
from tuner.machine.hostfile import RESTARTED_NODE
from tuner.machine.topology import Batch
from tuner.recipes import loading
from tuner.recipes.names import identify
from tuner.runs import checkpoints, creation
from tuner.runs.records import RunStatus

SETS = ("train_dataloader.batch_size=2", "accumulative_counts=4", "val_dataloader=none")
"""A global batch of 16 on two ranks."""
UNSAFE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


# Which checkpoint


def _from(found: ResolvedRun) -> Path | None:
    return found.resume and found.resume.path


def _way(found: ResolvedRun) -> str | None:
    return found.resume and found.resume.load_as


def _resumed(found: ResolvedRun, run: Path, checkpoint_path: Path) -> None:
    assert (found.run_path, _from(found), found.is_known_run) == (run, checkpoint_path, True)
    assert json.loads(render.files(found)["run.json"])["resume"] == str(checkpoint_path)
    assert any(f"Resuming from {checkpoint_path}" in note for note in found.notes)


@pytest.mark.parametrize("way", ["run", "auto"])
def test_a_run_directory_resumes_from_its_newest_valid_checkpoint(tmp_path: Path, way: str) -> None:
    run = written_run(tmp_path / "my run").path
    checkpoint(run, 2)
    newest = checkpoint(run, 10)
    checkpoint(run, 12, valid=False)

    found = made(resume=str(run)) if way == "run" else made(resume="auto", work_dir=run)

    _resumed(found, run, newest)
    assert any("checkpoint-12 is skipped: model.safetensors is missing" in note for note in found.notes)


@pytest.mark.parametrize("resume", ["auto", "run", "checkpoint"])
def test_a_start_takes_the_whole_checkpoint_that_a_kill_left_beside_its_place_and_a_plan_moves_nothing(
    tmp_path: Path, resume: str
) -> None:
    run = written_run(tmp_path / "run").path
    whole, left = checkpoint(run, 4), run / "checkpoints" / "unfinished" / "replaced checkpoint-4"
    left.parent.mkdir()
    whole.rename(left)
    named = {"run": str(run), "checkpoint": str(whole)}.get(resume, resume)
    request = Request(identify(TINY), resume=named, work_dir=run if resume == "auto" else None)

    with suppress(RunDirectoryError):
        resolve_run(request, PATH, CPU, NOW)
    assert left.is_dir()
    (run / "lock").write_text((run / "lock").read_text().replace(os.uname().nodename, "node-7"))
    with suppress(RunDirectoryError):
        resolve_start(request, PATH, CPU, NOW)
    assert left.is_dir(), "the run may be at work"
    (run / "lock").unlink()
    _resumed(resolve_start(request, PATH, CPU, NOW), run, whole)


def test_a_checkpoint_resumes_in_its_own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = written_run(tmp_path / "run").path
    older = checkpoint(run, 2)
    checkpoint(run, 10)

    _resumed(made(resume=str(older)), run, older)
    monkeypatch.chdir(older)
    _resumed(made(resume="."), run, older)


@pytest.mark.parametrize("what", ["run", "checkpoint"])
def test_resuming_into_another_directory_leaves_the_old_one_alone(tmp_path: Path, what: str) -> None:
    run = written_run(tmp_path / "run").path
    saved = checkpoint(run, 2)

    found = made(resume=str(run if what == "run" else saved), work_dir=tmp_path / "other")

    assert (found.run_path, _from(found), found.is_known_run) == (tmp_path / "other", saved, False)


def test_the_date_of_the_first_start_belongs_to_the_run(tmp_path: Path) -> None:
    first, later = str(NOW.astimezone().date()), NOW + timedelta(days=9)
    run = written_run(tmp_path / "run").path
    unsaved = written_run(tmp_path / "unsaved").path
    saved = checkpoint(run, 2)
    moved = shutil.copytree(saved, tmp_path / "elsewhere" / "checkpoints" / saved.name)

    assert json.loads((run / "run.json").read_text(encoding="utf-8"))["state"]["date"] == first
    for found in (
        made(resume=str(run), now=later),
        made(resume=str(saved), work_dir=tmp_path / "other", now=later),
        made(resume=str(moved), work_dir=tmp_path / "other", now=later),
        made(resume="auto", work_dir=unsaved, now=later),
    ):
        assert found.state.date == first
    assert made(now=later).state.date == str(later.astimezone().date())


def test_resuming_into_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    saved = checkpoint(written_run(tmp_path / "run").path, 2)
    written_run(tmp_path / "other")

    with refused(RunDirectoryError, "--work-dir"):
        made(resume=str(saved), work_dir=tmp_path / "other")


def test_a_checkpoint_that_was_moved_away_resumes_in_a_new_run(tmp_path: Path) -> None:
    saved = checkpoint(written_run(tmp_path / "run").path, 2).rename(tmp_path / "checkpoint-2")

    found = made(resume=str(saved))

    assert (found.run_path.parent, _from(found)) == (tmp_path / "work_dirs" / TINY, saved)


def test_auto_without_any_run_starts_new_and_says_so(tmp_path: Path) -> None:
    found = made(resume="auto")

    assert (_from(found), found.is_known_run) == (None, False)
    assert found.run_path == tmp_path / "work_dirs" / TINY / "20260102_030405"
    assert any("no earlier run" in note for note in found.notes)


def test_auto_takes_the_newest_run_of_this_recipe(tmp_path: Path) -> None:
    home = tmp_path / "work_dirs" / TINY
    for at, name in enumerate(("older", "newest")):
        run = written_run(home / name).path
        os.utime(run / "run.json", (at, at))
        checkpoint(run, 3)
    checkpoint(written_run(tmp_path / "work_dirs" / "other recipe" / "x").path, 9)

    _resumed(made(resume="auto"), home / "newest", home / "newest" / "checkpoints" / "checkpoint-3")


def test_auto_starts_a_run_again_that_never_saved(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run").path

    found = made(resume="auto", work_dir=run)

    assert (found.run_path, _from(found), found.is_known_run) == (run, None, True)
    assert any("never saved a checkpoint" in note for note in found.notes)


@pytest.mark.parametrize("owns", ["nothing", "an invalid one"])
def test_auto_goes_on_from_the_checkpoint_that_a_run_began_with_until_it_has_one_of_its_own(
    tmp_path: Path, owns: str
) -> None:
    named, run = checkpoint(written_run(tmp_path / "other").path, 2), tmp_path / "run"
    creation.create(run, render.files(made(resume=str(named), work_dir=run)), resume=False)
    if owns == "an invalid one":
        checkpoint(run, 3, valid=False)

    _resumed(made(resume="auto", work_dir=run), run, named)
    own = checkpoint(run, 4)
    _resumed(made(resume="auto", work_dir=run), run, own)


NODE_0 = {"nnodes": 2, "node_rank": 0, "master_addr": "10.0.0.1", "nproc_per_node": 1}


@pytest.mark.parametrize("typed", ["nothing", "a new folder", "a run", "its checkpoint", "another's checkpoint"])
def test_a_node_0_that_is_started_again_goes_on_in_the_run_that_its_command_began(tmp_path: Path, typed: str) -> None:
    known = written_run(tmp_path / "known").path
    saved = checkpoint(known, 2)
    asked: dict[str, Any] = {
        "nothing": {},
        "a new folder": {"work_dir": tmp_path / "new"},
        "a run": {"resume": str(known)},
        "its checkpoint": {"resume": str(saved)},
        "another's checkpoint": {"resume": str(saved), "work_dir": tmp_path / "new"},
    }[typed]
    asked |= {"flags": NODE_0, "command": ("tuner", "train", typed)}
    first = made(**asked)
    creation.create(first.run_path, render.files(first), resume=first.is_known_run)
    checkpoint(first.run_path, 3)
    newest = checkpoint(first.run_path, 4)

    again = made(**asked, environ={**PATH, RESTARTED_NODE: "1"})

    _resumed(again, first.run_path, newest)
    assert again.is_known_run
    asked |= {"command": ("tuner",), "work_dir": tmp_path / "more"}
    other = made(**asked, environ={**PATH, RESTARTED_NODE: "1"})
    assert other.run_path == tmp_path / "more", "a lost host may not have begun"


@pytest.mark.parametrize("resume", ["auto", "path"])
def test_where_every_checkpoint_is_invalid_nothing_starts_from_zero_in_silence(tmp_path: Path, resume: str) -> None:
    run = written_run(tmp_path / "run").path
    checkpoint(run, 2, valid=False)

    where = "--resume auto" if resume == "auto" else "--resume"
    with refused(RunDirectoryError, where, "checkpoint-2", "model.safetensors is missing"):
        made(resume=resume if resume == "auto" else str(run), work_dir=run)


@pytest.mark.parametrize("name", ["missing", "checkpoint-5", "a file", "empty", ""])
def test_what_is_neither_a_run_nor_a_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "a file").touch()
    (tmp_path / "empty").mkdir()

    with refused(RunDirectoryError, "--resume"):
        made(resume=str(tmp_path / name) if name else "")


@pytest.mark.parametrize("trace", ["done", "stopped", "latest"])
def test_auto_does_not_begin_a_run_anew_whose_checkpoints_were_removed(tmp_path: Path, trace: str) -> None:
    run = written_run(tmp_path / "run")
    if trace == "latest":
        run.checkpoints.mkdir()
        (run.checkpoints / "latest").write_text("checkpoint-4\n")
    else:
        run.write_status(RunStatus(state="done" if trace == "done" else "stopped"))

    with refused(RunDirectoryError, "--resume auto"):
        made(resume="auto", work_dir=run.path)


def test_auto_does_not_begin_a_run_anew_whose_checkpoints_are_out_of_reach(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run")
    run.checkpoints.symlink_to("/a disk/that is not/mounted")

    with refused(DiskError, "--resume auto"):
        made(resume="auto", work_dir=run.path)


def test_auto_tells_of_another_run_that_can_go_on_where_the_newest_never_saved(tmp_path: Path) -> None:
    home = tmp_path / "work_dirs" / TINY
    for at, name in enumerate(("long", "begun by mistake")):
        run = written_run(home / name).path
        os.utime(run / "run.json", (at, at))
    checkpoint(home / "long", 3)

    found = made(resume="auto")

    assert found.run_path == home / "begun by mistake"
    assert any(
        f"{home / 'long'} has a checkpoint: --resume {home / 'long'} resumes from it" in note for note in found.notes
    )


@pytest.mark.parametrize("resume", ["auto", "checkpoint-9"])
def test_a_checkpoint_under_the_name_of_another_step_is_not_taken(tmp_path: Path, resume: str) -> None:
    """It would be set aside as one of a later step than the one that the run goes on from."""
    run = written_run(tmp_path / "run").path
    good = checkpoint(run, 2)
    renamed = checkpoint(run, 4).rename(run / "checkpoints" / "checkpoint-9")

    if resume == "auto":
        found = made(resume=resume, work_dir=run)
        _resumed(found, run, good)
        assert any("checkpoint-9 is skipped: it was saved at step 4" in note for note in found.notes)
    else:
        with refused(RunDirectoryError, "--resume", 4):
            made(resume=str(renamed))


@pytest.mark.parametrize("name", ["checkpoints", "."])
def test_a_folder_near_a_checkpoint_is_told_from_a_save_that_never_finished(tmp_path: Path, name: str) -> None:
    run = written_run(tmp_path / "runs" / "run").path
    checkpoint(run, 2)

    with refused(RunDirectoryError, "--resume", run.parent if name == "." else name):
        made(resume=str(run / name if name != "." else run.parent))


def test_a_requeued_job_goes_on_in_its_own_directory(tmp_path: Path) -> None:
    environ = task(0, tasks=1)
    first = made(environ=environ, flags={"launcher": "slurm"}, resume="auto")
    run = written_run(first.run_path, environ=environ, flags={"launcher": "slurm"}).path
    saved = checkpoint(run, 3)

    again = made(environ=environ | {"SLURM_RESTART_COUNT": "1"}, flags={"launcher": "slurm"}, resume="auto")

    _resumed(again, first.run_path, saved)


# Another number of ranks


def _run(path: Path, *sets: str, ranks: int = 2, deepspeed: str = "zero2", **facts: Any) -> Path:
    """Write a run with one checkpoint, as `ranks` ranks would have."""

    plan = made(*SETS, *sets, work_dir=path, flags={"nproc_per_node": ranks}, deepspeed=deepspeed)
    creation.create(path, render.files(plan), resume=False)
    checkpoint(path, 2, **facts)
    return path


def _resume(run: Path, *sets: str, ranks: int = 2, deepspeed: str | None = "zero2", **request: Any) -> ResolvedRun:
    flags = {"nproc_per_node": ranks}
    return made(*SETS, *sets, work_dir=run, resume="auto", flags=flags, deepspeed=deepspeed, **request)


@pytest.mark.parametrize(("ranks", "micro", "accumulation"), [(1, 2, 8), (2, 2, 4), (4, 2, 2), (8, 2, 1), (16, 1, 1)])
def test_the_global_batch_is_kept_on_other_ranks(tmp_path: Path, ranks: int, micro: int, accumulation: int) -> None:
    found = _resume(_run(tmp_path / "run"), ranks=ranks)

    assert (found.batch.micro_batch, found.batch.accumulation, found.batch.global_batch) == (micro, accumulation, 16)
    assert found.final.config["gradient_accumulation_steps"] == accumulation
    assert found.final.config["train_micro_batch_size_per_gpu"] == micro
    (tmp_path / "recipe.py").write_text(render.files(found)["recipe.py"])
    again = loading.load("./recipe.py").config
    assert (again.train_dataloader.batch_size, again.optim_wrapper.accumulative_counts) == (micro, accumulation)
    assert any("keep the global batch of 16" in note for note in found.notes) is (ranks != 2)


def test_ranks_that_cannot_share_the_global_batch_are_refused_with_the_arithmetic(tmp_path: Path) -> None:
    run = _run(tmp_path / "run")

    with refused(RunDirectoryError, "--resume", "16 / 3 = 5.333", "1, 2, 4, 8 or 16"):
        _resume(run, ranks=3)


SHARED = ("sequence_parallel_size=2", "batch_size=auto", "accumulative_counts=auto", "global_batch_size=auto")


@pytest.mark.parametrize(("ranks", "is_told"), [(4, False), (2, True)])
def test_only_another_number_of_groups_that_share_samples_is_told(tmp_path: Path, ranks: int, is_told: bool) -> None:
    found = _resume(_run(tmp_path / "run", *SHARED, ranks=4), *SHARED, ranks=ranks, resume_weights=True)

    assert any(note.startswith("batch: ") for note in found.notes) is is_told


def test_the_numbers_of_ranks_that_share_samples_are_multiples_of_a_group(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", "sequence_parallel_size=2", ranks=4)

    with refused(RunDirectoryError, "--resume") as caught:
        _resume(run, "sequence_parallel_size=2", ranks=6)

    assert re.findall(r"\d+", caught.value.fix or "") == ["2", "4", "8", "16", "32"]


def test_the_same_command_resumes_again_on_the_ranks_that_it_was_adapted_to(tmp_path: Path) -> None:
    run = _run(tmp_path / "run")
    adapted = _resume(run, ranks=1)
    for name, text in render.files(adapted).items():
        (run / name).write_text(text)
    checkpoint(run, 4)

    again, back = _resume(run, ranks=1), _resume(run, ranks=2)

    assert (again.batch.accumulation, _way(again)) == (8, "saved")
    assert (back.batch.accumulation, _way(back)) == (4, "universal")


def test_another_global_batch_is_refused_with_both_products(tmp_path: Path) -> None:
    run = _run(tmp_path / "run")

    with pytest.raises(RecipeError, match=r"--set accumulative_counts=8.*2 x 8 x 2 ranks = 32 .* with 16\."):
        _resume(run, "accumulative_counts=8")


def test_the_recipe_of_a_run_that_was_made_to_fit_other_ranks_goes_on_on_the_first_ones(tmp_path: Path) -> None:
    """It is what the message of a stopped run says to type."""
    run = _run(tmp_path / "run")
    for name, text in render.files(_resume(run, ranks=1)).items():
        (run / name).write_text(text)
    checkpoint(run, 4)

    found = made(recipe=str(run / "recipe.py"), resume=str(run), flags={"nproc_per_node": 2})

    assert (found.batch.micro_batch, found.batch.accumulation, found.batch.global_batch) == (2, 4, 16)


def test_the_recipe_of_a_run_with_a_global_batch_goes_on_on_other_ranks(tmp_path: Path) -> None:
    """`--batch-size 8` writes a global batch into RUN/recipe.py, beside the split of the ranks that ran."""
    chosen = ("train_dataloader.batch_size=auto", "accumulative_counts=auto", "global_batch_size=16")
    run = _run(tmp_path / "run", *chosen)

    found = made(recipe=str(run / "recipe.py"), resume=str(run), flags={"nproc_per_node": 4})

    assert (found.batch.ranks, found.batch.global_batch) == (4, 16)
    keys = "train_cfg.global_batch_size, train_dataloader.batch_size, optim_wrapper.accumulative_counts"
    with refused(RecipeError, keys, 16, "4 x 4 x 4"):
        sets = ("train_dataloader.batch_size=4", "accumulative_counts=4")
        made(*sets, recipe=str(run / "recipe.py"), resume=str(run), flags={"nproc_per_node": 4})


def test_another_micro_batch_with_the_same_global_batch_is_taken(tmp_path: Path) -> None:
    found = _resume(_run(tmp_path / "run"), "train_dataloader.batch_size=1", "accumulative_counts=8")

    assert (found.batch.micro_batch, found.batch.global_batch, _way(found)) == (1, 16, "saved")


@pytest.mark.parametrize(("level", "way"), [("none", "saved"), ("zero1", "universal"), ("zero3_offload", "universal")])
def test_every_stage_resumes_on_other_ranks(tmp_path: Path, level: str, way: str) -> None:
    run = _run(tmp_path / "run", deepspeed=level)

    found = _resume(run, ranks=1, deepspeed=level)

    assert _way(found) == way
    assert json.loads(render.files(found)["deepspeed.json"]).get("checkpoint") == (
        {"load_universal": True} if way == "universal" else None
    )
    assert json.loads(render.files(found)["run.json"])["resume_as"] == way
    assert any("was saved by 2 ranks, this run has 1" in note for note in found.notes)


def test_a_universal_checkpoint_is_asked_for_in_that_attempt_alone(tmp_path: Path) -> None:
    run = _run(tmp_path / "run")

    (tmp_path / "recipe.py").write_text(render.files(_resume(run, ranks=1))["recipe.py"])

    assert "checkpoint" not in made(recipe="./recipe.py").final.config


def test_states_that_cannot_be_dealt_out_anew_keep_the_number_of_ranks(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", "optimizer.type=SGD")

    with pytest.raises(RunDirectoryError) as caught:
        _resume(run, "optimizer.type=SGD", ranks=1)

    assert "Use 2 ranks, or add --resume-weights" in str(caught.value)
    assert _way(_resume(run, "optimizer.type=SGD", ranks=1, resume_weights=True)) == "weights"


# Another stage


@pytest.mark.parametrize(
    ("old", "new"), [("zero2", "zero3"), ("zero3", "zero2"), ("none", "zero1"), ("zero1", "none"), ("zero3", "none")]
)
def test_another_stage_moves_weights_alone_and_only_when_asked(tmp_path: Path, old: str, new: str) -> None:
    run = _run(tmp_path / "run", deepspeed=old)

    with pytest.raises(RunDirectoryError) as caught:
        _resume(run, deepspeed=new)
    assert "--resume-weights" in str(caught.value) and "Use --deepspeed" in str(caught.value)

    found = _resume(run, deepspeed=new, resume_weights=True)
    assert _way(found) == "weights"
    assert any(
        "the optimizer's states start from zero; steps, data order and learning rate continue" in note
        for note in found.notes
    )


@pytest.mark.parametrize(("old", "new"), [("zero1", "zero2"), ("zero2", "zero2_offload"), ("zero3", "zero3_offload")])
@pytest.mark.parametrize("weights", [False, True])
def test_levels_of_a_family_move_whole_whatever_was_asked(tmp_path: Path, old: str, new: str, weights: bool) -> None:
    """A job that is requeued with --resume-weights must not lose its optimizer's states each time."""
    run = _run(tmp_path / "run", deepspeed=old)

    assert _way(_resume(run, deepspeed=new, resume_weights=weights)) == "saved"


def test_another_compute_type_moves_weights_alone(tmp_path: Path) -> None:
    run = _run(tmp_path / "run")

    with refused(RunDirectoryError, "--resume", "fp32", "bf16"):
        _resume(run, hardware=machine(H200, H200))
    assert _way(_resume(run, hardware=machine(H200, H200), resume_weights=True)) == "weights"


# What of a recipe may change


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("randomness.seed", 7),
        ("train_dataloader.dataset.max_length", 64),
        ("train_dataloader.dataset.packing", False),
        ("train_dataloader.dataset.max_rows", 9),
        ("train_cfg.trainable_layers", 1),
        ("model.chat_template", "chatml"),
        ("architecture.num_hidden_layers", 7),
    ],
)
def test_what_the_state_depends_on_is_refused_with_both_values(tmp_path: Path, key: str, value: Any) -> None:
    run = _run(tmp_path / "run")

    with refused(RecipeError, f"{key} (--set {key}={value})", repr(value), f"{key} (--set {key}={value})"):
        _resume(run, f"{key}={value}")


@pytest.mark.parametrize("place", ["moved away", "put into another run"])
def test_a_checkpoint_tells_wherever_it_lies_what_it_is_one_of(tmp_path: Path, place: str) -> None:
    run, other = _run(tmp_path / "run", "randomness.seed=7"), _run(tmp_path / "other")
    checkpoint(run, 4).rename(other / "checkpoints" / "checkpoint-4")
    if place == "moved away":
        (other / "checkpoints" / "checkpoint-4").rename(tmp_path / "kept")

    with pytest.raises(RecipeError) as caught:
        _resume(other) if place != "moved away" else made(
            *SETS, resume=str(tmp_path / "kept"), flags={"nproc_per_node": 2}, deepspeed="zero2"
        )
    assert (caught.value.where or "").startswith("randomness.seed ")
    assert "7 -> 42" in caught.value.what


def test_everything_refused_is_told_at_once_and_where_it_stands(tmp_path: Path) -> None:
    run = _run(tmp_path / "run")
    mine = tmp_path / "mine.py"
    mine.write_text(f'_base_ = "{TINY}"\nrandomness = dict(seed=8)\n')

    with refused(
        RecipeError,
        "train_dataloader.dataset.max_rows (--set max_rows=9)",
        "randomness.seed 42 -> 8",
        "max_rows None -> 9",
    ):
        _resume(run, "max_rows=9", recipe=str(mine))


@pytest.mark.parametrize(
    ("sets", "where"),
    [
        ("adapter.r=8", "adapter.r (--set adapter.r=8)"),
        ("adapter.use_dora=True", "adapter.use_dora (--set adapter.use_dora=True)"),
        ("adapter=None", "adapter.path"),
        ("lora_dropout=0.2", None),
    ],
)
def test_of_an_adapter_only_the_dropout_may_change(tmp_path: Path, sets: str, where: str | None) -> None:
    lora = {"recipe": "tiny_lora_sample_e1"}
    run = tmp_path / "run"
    written_run(run, **lora)
    checkpoint(run, 2)

    if where:
        with refused(RecipeError, where):
            made(sets, work_dir=run, resume="auto", **lora)
    else:
        assert made(sets, work_dir=run, resume="auto", **lora).resume is not None


@pytest.mark.parametrize(
    "sets", ["lr=1e-5", "weight_decay=0.3", "max_epochs=9", "checkpoint.interval=7", "log.interval=3"]
)
def test_what_may_change_is_said_aloud(tmp_path: Path, sets: str) -> None:
    found = _resume(_run(tmp_path / "run"), sets)

    (note,) = [note for note in found.notes if note.startswith("changed since the checkpoint")]
    assert sets.partition("=")[0] in note and " -> " in note


def test_an_unchanged_recipe_is_told_of_nothing(tmp_path: Path) -> None:
    found = _resume(_run(tmp_path / "run"))

    assert [note for note in found.notes if "Resuming from" not in note] == []


# The environment


def test_whatever_loads_a_checkpoint_takes_it_for_data_alone() -> None:
    plain, unsafe = (render.environment(made(environ={**PATH, **more})) for more in ({}, {UNSAFE: "1"}))

    assert plain["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"
    assert unsafe[UNSAFE] == "0"


# Who reads every byte of a checkpoint


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files of checkpoints that were hashed."""
    names: list[str] = []
    real = checkpoints.xxh3_128
    monkeypatch.setattr(checkpoints, "xxh3_128", lambda path: (names.append(path.name), real(path))[1])
    return names


@pytest.mark.parametrize("way", ["auto", "run", "checkpoint"])
def test_of_a_job_of_slurm_the_leader_alone_reads_every_byte_of_a_checkpoint(
    tmp_path: Path, way: str, hashed: list[str]
) -> None:
    run = written_run(tmp_path / "run").path
    newest = checkpoint(run, 10)
    resume = {"auto": "auto", "run": str(run), "checkpoint": str(newest)}[way]
    hashed.clear()

    def looked(rank: int) -> ResolvedRun:
        return made(environ=task(rank), flags={"launcher": "slurm"}, work_dir=run, resume=resume)

    assert _from(looked(1)) == newest
    assert hashed == []
    assert _from(looked(0)) == newest
    assert sorted(hashed) == ["model.safetensors", "recipe.py"]


# The split of the rows


@pytest.mark.parametrize("share", ["auto", "0.05"])
def test_a_resumed_run_keeps_its_split_and_its_copies_together(tmp_path: Path, share: str) -> None:
    text = '{"messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "A"}]}\n'
    Path("rows.jsonl").write_text("".join(text % (number % 50) for number in range(200)))
    sets = ("train_dataloader.dataset.path=rows.jsonl", f"val_split={share}")
    own: dict[str, Any] = {"recipe": None, "model": "package:tiny"}
    run = written_run(tmp_path / "run", **own, sets=sets).path
    checkpoint(run, 2)

    for found in (made(*sets, **own, resume=str(run)), made(recipe=str(run / "recipe.py"), resume=str(run))):
        rows = [loader.dataset for loader in found.recipe.config.loaders.values()]
        assert {row.val_split for row in rows} == {0.16 if share == "auto" else 0.05}, "8 of 50 different rows"
        assert [(row.val_copies, row.held_out) for row in rows] == [("together", False), ("together", True)]


def test_a_resumed_run_keeps_its_share_of_validation_rows_where_its_settings_need_none_any_more(tmp_path: Path) -> None:
    text = '{"messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "A"}]}\n'
    Path("rows.jsonl").write_text("".join(text % number for number in range(30)))
    sets = ("train_dataloader.dataset.path=rows.jsonl", "val_split=auto", "train_cfg.val_interval=None")
    own: dict[str, Any] = {"recipe": None, "model": "package:tiny"}
    run = written_run(tmp_path / "run", **own, sets=(*sets, "save_best=eval_loss")).path
    checkpoint(run, 2)

    found = made(*sets, "save_best=None", **own, resume=str(run)).recipe.config

    assert made(*sets, "save_best=None", **own).recipe.config.val_dataloader is None
    assert {loader.dataset.val_split for loader in found.loaders.values()} == {0.2}


# Fewer nodes than the run could have: --nnodes MIN:MAX

THREE = {"nnodes": "1:3", "node_rank": 0, "master_addr": "h0", "nproc_per_node": 2}


def _on(count: int, whole: ResolvedRun, *sets: str, **request: Any) -> ResolvedRun:
    asked = whole.request._replace(state_on_all_nodes=whole.state, **request)
    return resolve_run(asked, PATH, CPU, NOW, whole.topology.among(range(count)))


def test_fewer_nodes_keep_the_global_batch_of_all(tmp_path: Path) -> None:
    whole = made("train_dataloader.batch_size=2", "accumulative_counts=1", flags=THREE, work_dir=tmp_path / "run")

    on_one_rank = _on(1, whole)

    assert (whole.batch.global_batch, on_one_rank.batch) == (12, Batch(2, 3, 2))
    assert any("can be kept with 1, 2 of 3 nodes" in note for note in whole.notes)


FOUR = {"nnodes": "1:4", "node_rank": 0, "master_addr": "h0"}


def _on_four(folder: Path, level: str, **more: Any) -> ResolvedRun:
    two = machine(RTX4090, RTX4090)
    sets = ("train_dataloader.batch_size=1", "train_cfg.global_batch_size=48")
    flags = {**FOUR, **more.pop("flags", {})}
    more |= {"flags": flags, "work_dir": folder / "run", "deepspeed": level}
    return made(*sets, recipe="internlm2_chat_7b_full_sample_e1", hardware=two, **more)


@pytest.mark.parametrize("node_rank", [0, 3])
def test_numbers_of_nodes_without_the_memory_are_told_before_the_start(tmp_path: Path, node_rank: int) -> None:
    notes = " ".join(_on_four(tmp_path, "zero3", flags={"node_rank": node_rank}).notes)

    assert "deepspeed_zero3 can be kept with 3 of 4 nodes; memory does not suffice on 1, 2" in notes


def test_a_run_that_fewer_nodes_have_no_memory_for_is_refused_unless_the_fit_is_ignored(tmp_path: Path) -> None:
    flags = {"nnodes": "1:3"}

    with refused(UsageError, "--nnodes 1:3", "2 of 3 nodes"):
        _on_four(tmp_path, "zero3", flags=flags)

    assert _on_four(tmp_path, "zero3", flags=flags, ignore_fit=True)


@pytest.mark.parametrize(
    ("sets", "reason"),
    [
        (["train_cfg.global_batch_size=6", "train_dataloader.batch_size=1"], None),
        (["optimizer.type=SGD"], "redistributed"),
    ],
)
def test_what_no_smaller_number_of_nodes_could_go_on_with_is_refused_before_the_start(
    tmp_path: Path, sets: list[str], reason: str | None
) -> None:
    flags = {**THREE, "nnodes": "2:3" if reason is None else "1:3"}

    with pytest.raises(UsageError, match=reason or "6 cannot be kept on fewer than 3 nodes") as caught:
        made(*sets, flags=flags, work_dir=tmp_path / "run", deepspeed="zero2")

    assert str(caught.value.where).startswith("--nnodes")
    assert reason or "--batch-size 12" in str(caught.value), "which 2 and 3 nodes of 2 ranks divide"
