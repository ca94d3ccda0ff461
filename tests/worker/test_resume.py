"""Going on from a checkpoint: what is read, converted and drawn; whole runs are in tests/faults."""

from __future__ import annotations

import json
import pickle
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import TrainerControl, TrainerState

from tests.canary import Canary
from tests.refused import refused
from tests.runs.made_records import RECORD, STATE
from tuner.errors import DataError, RunDirectoryError, TunerError
from tuner.machine.topology import Rank
from tuner.runs import checkpoints
from tuner.runs.directory import RunDirectory
from tuner.runs.records import LoadAs, ManifestFacts, RankReport
from tuner.runs.resume_point import ResumePoint
from tuner.worker import resume
from tuner.worker.trainers import TunerTrainer

ALONE = Rank(0, 0, 1, supervised=True)
TWO_RANKS = STATE.model_copy(update={"world_size": 2})


class Counted(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows that count how often one is read."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.reads += 1
        return {"x": torch.tensor([float(index)])}


class Line(torch.nn.Module):
    """The smallest model that a trainer trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


def _trained(folder: Path, resumed: str | None = None) -> int:
    """Train 14 of 16 steps of an epoch, four rows each, and return how many rows were read."""
    rows = Counted()
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=14,
        save_steps=12,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    transformers.Trainer(Line(), arguments, train_dataset=rows).train(resume_from_checkpoint=resumed)
    return rows.reads


def test_skipping_ahead_reads_no_row_of_the_steps_before(tmp_path: Path) -> None:
    assert _trained(tmp_path) >= 14 * 4

    read = _trained(tmp_path, str(tmp_path / "checkpoint-12"))

    assert 2 * 4 <= read <= 3 * 4, "the loader may look one micro-batch ahead"


def _stage_0(run: Path, **more: Any) -> Path:
    """Write what DeepSpeed's stage 0 saves of two weights, one of them under two names."""
    folder = run / "checkpoints" / "checkpoint-2"
    (folder / "global_step2").mkdir(parents=True)
    (folder / "latest").write_text("global_step2")
    (folder / "trainer_state.json").write_text("{}")
    tied = torch.ones(3, dtype=torch.bfloat16)
    module = {"embed": tied, "head": tied, "norm": torch.zeros(2), **more}
    torch.save({"module": module}, folder / "global_step2" / "mp_rank_00_model_states.pt")
    checkpoints.seal(folder, ManifestFacts(step=2, state=TWO_RANKS))
    return folder


def _point(checkpoint: Path, load_as: str = "saved") -> ResumePoint:
    point = ResumePoint.of(RECORD.model_copy(update={"resume": str(checkpoint), "resume_as": LoadAs(load_as)}))
    assert point is not None
    return point


def _converted(run: Path, checkpoint: Path) -> Path:
    folder = resume.converted(RunDirectory(run), _point(checkpoint, "weights"), ALONE)
    assert folder is not None
    return folder


def test_weights_are_converted_once_each_in_fp32(tmp_path: Path) -> None:
    folder = _converted(tmp_path, _stage_0(tmp_path))

    (file,) = folder.rglob("*.safetensors")
    assert {name: (weight.dtype, weight.numel()) for name, weight in load_file(file).items()} == {
        "embed": (torch.float32, 3),
        "norm": (torch.float32, 2),
    }
    assert (checkpoints.facts(folder).step, checkpoints.facts(folder).state) == (2, TWO_RANKS)
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint-2-weights"], "nothing is left of the making"


def test_a_conversion_is_used_again_and_a_damaged_one_is_made_again(tmp_path: Path) -> None:
    checkpoint = _stage_0(tmp_path)
    (file,) = _converted(tmp_path, checkpoint).rglob("*.safetensors")
    first = file.stat().st_ino
    assert next(_converted(tmp_path, checkpoint).rglob("*.safetensors")).stat().st_ino == first

    content = file.read_bytes()
    file.write_bytes(content[:-1])

    assert next(_converted(tmp_path, checkpoint).rglob("*.safetensors")).read_bytes() == content


def test_a_conversion_of_another_checkpoint_of_the_same_step_is_not_used(tmp_path: Path) -> None:
    """As where a run began anew after its checkpoints were removed."""
    checkpoint = _stage_0(tmp_path)
    _converted(tmp_path, checkpoint)
    shutil.rmtree(checkpoint)
    _stage_0(tmp_path, bias=torch.ones(5))

    (file,) = _converted(tmp_path, checkpoint).rglob("*.safetensors")

    assert "bias" in load_file(file)


def test_what_a_killed_save_has_left_makes_room_for_a_conversion(tmp_path: Path) -> None:
    checkpoint = _stage_0(tmp_path)
    left = checkpoints.unfinished(checkpoint.parent) / "checkpoint-4"
    left.mkdir(parents=True)

    _converted(tmp_path, checkpoint)

    assert not left.exists()


def _prepared(rows: int, tokens: int, sha256: str) -> Any:
    return SimpleNamespace(dataset=range(rows), counts=SimpleNamespace(tokens=tokens), sha256=sha256)


@pytest.mark.parametrize(
    ("now", "counts"), [((99, 5000, "a"), [99]), ((100, 5001, "a"), [100]), ((100, 5000, "another order"), [])]
)
def test_data_that_are_others_than_the_checkpoints_are_refused_with_counts_that_differ(
    tmp_path: Path, now: tuple[int, int, str], counts: list[int]
) -> None:
    checkpoint = _stage_0(tmp_path)
    checkpoints.seal(checkpoint, ManifestFacts(step=2, data=resume.data_of(_prepared(100, 5000, "a"))))

    resume.check_data(None, _prepared(1, 1, "b"))
    resume.check_data(_point(checkpoint), _prepared(100, 5000, "a"))
    with refused(DataError, "train_dataloader.dataset", *counts):
        resume.check_data(_point(checkpoint), _prepared(*now))


def test_code_in_a_file_is_refused_and_not_run(tmp_path: Path) -> None:
    checkpoint = _stage_0(tmp_path, more=Canary(tmp_path / "canary"))

    with refused(RunDirectoryError, "--resume"):
        _converted(tmp_path, checkpoint)

    assert not (tmp_path / "canary").exists()
    with pytest.raises(pickle.UnpicklingError):
        torch.load(checkpoint / "global_step2" / "mp_rank_00_model_states.pt", weights_only=True)


def _continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int = 0, world_size: int = 4) -> Any:
    """Return what goes on from a checkpoint of two ranks; the trainer and the group of ranks are stand-ins."""
    monkeypatch.setattr(resume.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(resume.dist, "get_world_size", lambda: world_size)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([{"params": [weight]}], lr=0.5, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    state = SimpleNamespace(global_step=2, max_steps=4)

    def loads(folder: str) -> None:
        """As transformers and DeepSpeed do."""
        saved = {**schedule.state_dict(), "base_lrs": [9.0], "last_epoch": 2}
        schedule.load_state_dict(saved)
        optimizer.param_groups[0] |= {"lr": 3.0, "weight_decay": 0.7, "betas": (0.1, 0.2)}
        optimizer.clip_grad = 9.0  # type: ignore
        step = torch.tensor(2.0)
        optimizer.state |= {group: {"step": step} for group in (torch.ones(2), torch.ones(2))}

    class Trainer:
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            return schedule

        def _load_optimizer_and_scheduler(self, folder: str) -> None:
            loads(folder)

        def _load_rng_state(self, folder: str) -> None:
            torch.manual_seed(0)

    class Resumed(TunerTrainer, Trainer):
        model_wrapped = SimpleNamespace(optimizer=optimizer, gradient_clipping=lambda: 1.0)

    trainer: Any = Resumed()
    trainer.optimizer, trainer.lr_scheduler, trainer.state = optimizer, schedule, state
    point = _point(_stage_0(tmp_path), "universal")
    return resume.LoadCheckpoint(trainer, point, 42).trainer


def test_settings_are_the_recipes_and_not_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _continued(tmp_path, monkeypatch)

    trainer.create_scheduler(4)
    trainer._load_optimizer_and_scheduler("")

    (group,) = trainer.optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.5 / 3, 0.1, (0.9, 0.999))
    trainer.optimizer._opt_called = True  # as after a step
    trainer.lr_scheduler.step()
    assert trainer.lr_scheduler.get_last_lr() == [0.5 / 4]
    assert trainer.optimizer.clip_grad == 1.0


def test_each_group_counts_its_own_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _continued(tmp_path, monkeypatch)
    trainer.create_scheduler(4)
    trainer._load_optimizer_and_scheduler("")

    first, second = trainer.optimizer.state.values()
    first["step"] += 1

    assert (first["step"], second["step"]) == (3, 2)


@pytest.mark.parametrize(("step", "stops_early", "is_left"), [(3, False, True), (4, False, False), (3, True, False)])
def test_a_run_at_its_last_step_or_stopped_early_trains_no_further(step: int, stops_early: bool, is_left: bool) -> None:
    state, control = TrainerState(global_step=step, max_steps=4), TrainerControl(should_training_stop=stops_early)

    with nullcontext() if is_left else pytest.raises(resume.NothingLeft):
        resume.EndIfNothingIsLeft().on_train_begin(None, state, control)


def test_ranks_that_saved_no_random_state_draw_numbers_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    for place, rank in enumerate((0, 1, 2, 2)):
        _continued(tmp_path / str(place), monkeypatch, rank)._load_rng_state("")
        drawn.append(torch.rand(1).item())

    assert len(set(drawn)) == 3
    assert drawn[2] == drawn[3], "the same when it is resumed once more"


def test_the_same_number_of_ranks_takes_up_its_random_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _continued(tmp_path, monkeypatch, world_size=2)._load_rng_state("")

    assert torch.rand(1).item() == torch.rand(1, generator=torch.Generator().manual_seed(0)).item()


def test_a_failure_of_rank_0_ends_the_wait_of_the_others(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.report_failure(RankReport(rank=0, exit_code=74, message="disk full"))
    point = _point(_stage_0(tmp_path), "weights")

    with refused(TunerError, "ranks/0.log"):
        resume.converted(run, point, Rank(1, 1, 2, supervised=True))

    assert json.loads((run.ranks / "0.json").read_text())["exit_code"] == 74


@pytest.mark.parametrize("is_valid", [True, False])
def test_every_rank_loads_the_best_checkpoint_if_rank_0_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_valid: bool
) -> None:
    run, loaded = RunDirectory(tmp_path), list[str]()
    seen = checkpoints.Checkpoint(
        run.checkpoints / "checkpoint-1", 1, ManifestFacts(state=RECORD.state), None if is_valid else "it is cut"
    )
    told = SimpleNamespace(get_rank=lambda: 1, broadcast_object_list=lambda values: values.__setitem__(0, seen))
    monkeypatch.setattr(resume, "dist", told)
    monkeypatch.setattr(resume, "deepspeed_load_checkpoint", lambda _, folder, **__: loaded.append(folder))
    state = TrainerState(global_step=2, log_history=[{"eval_loss": 1.0, "step": 1}, {"eval_loss": 2.0, "step": 2}])

    step = resume.load_best(
        SimpleNamespace(state=state, model_wrapped=None),  # type: ignore[arg-type]
        run,
        RECORD,
        is_adapter=False,
    )

    assert (step, len(loaded)) == ((1, 1) if is_valid else (None, 0))
