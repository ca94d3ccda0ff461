"""What a smoke test makes of a recipe, what stands in for what is not here, and how a failed stage is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.launch.plans import PATH, checkpoint
from tests.models import vision
from tuner import assets
from tuner.data.image_encoder import ImageEncoder
from tuner.data.templates import answers_end
from tuner.data.text_encoder import TextEncoder
from tuner.errors import ModelError
from tuner.lab import stand_ins
from tuner.lab.smoke import SmokeResult, Stage, smaller, smoke
from tuner.launch.resolved_run import Request
from tuner.recipes import catalog, loading
from tuner.recipes.model_facts import read_architecture
from tuner.recipes.names import identify
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import Model, RecipeConfig, Rows
from tuner.recipes.schema.architecture import Architecture
from tuner.recipes.schema.objectives import OBJECTIVES
from tuner.runs.directory import RunDirectory

TINY = "tiny_full_sample_e1"


def config_of(name: str, *sets: str) -> RecipeConfig:
    return loading.load(name, Overrides(pairs=[("--set", text) for text in sets])).config


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only place that a smoke test may use."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def model_block(path: str) -> Model:
    block = config_of("tiny_vision_full_sample_images_e1").model
    return block.model_copy(update={"path": path})


def tried(name: str, **overrides: str) -> tuple[SmokeResult, list[Stage]]:
    told: list[Stage] = []
    asked = Request(identify(name), Overrides(**overrides))  # type: ignore[arg-type]
    return smoke(asked, PATH, told.append), told


def test_everything_but_the_size_stays_as_the_recipe_says() -> None:
    split = ("train_dataloader.batch_size=1", "accumulative_counts=16", "gradient_checkpointing=True")
    config = config_of("llama2_7b_dpo_qlora_ultrafeedback_e3", "lr=3e-5", "loss_type=hinge", *split)

    values, notes = smaller(config)

    small = RecipeConfig.model_validate(values)
    assert notes == []
    assert (small.adapter, small.quantization, small.objective) == (
        config.adapter,
        config.quantization,
        config.objective,
    )
    assert small.optim_wrapper.optimizer == config.optim_wrapper.optimizer
    assert small.train_dataloader.dataset.format == config.train_dataloader.dataset.format
    assert (small.train_cfg.max_steps, small.checkpoint.interval) == (2, 1)


def test_two_ranks_share_samples_where_more_do_and_no_activations_leave_a_gpu() -> None:
    values, notes = smaller(config_of(TINY, "sequence_parallel_size=8", "activation_offloading=True", "tiled_mlp=True"))

    cfg = values["train_cfg"]
    assert (cfg["sequence_parallel_size"], cfg["activation_offloading"], cfg["tiled_mlp"]) == (2, False, True)
    assert notes == ["activations stay where they are"]


def test_what_a_cpu_cannot_do_is_replaced_and_said() -> None:
    config = config_of(TINY, "optimizer.type=Lion", "dtype=fp16", "attn_implementation=flash_attention_2")

    values, notes = smaller(config)

    assert values["optim_wrapper"]["optimizer"]["type"] == "AdamW"
    assert values["optim_wrapper"]["dtype"] == "bf16"
    assert values["model"]["attn_implementation"] is None
    assert notes == ["bf16 for fp16", "AdamW for Lion", "sdpa for flash_attention_2"]


@pytest.mark.parametrize(("asked", "got"), [("auto", "bf16"), ("bf16", "bf16"), ("fp32", "fp32")])
def test_the_precision_is_that_of_the_gpus_to_come(asked: str, got: str) -> None:
    values, _ = smaller(config_of(TINY, f"dtype={asked}"))

    assert values["optim_wrapper"]["dtype"] == got


def test_nothing_is_reported_and_only_first_rows_are_read() -> None:
    values, _ = smaller(config_of(TINY, "trackers=['wandb']", "train_dataloader.dataset.max_rows=5"))

    assert values["log"]["trackers"] == ()
    assert values["train_dataloader"]["dataset"]["max_rows"] == 5
    assert values["val_dataloader"]["dataset"]["max_rows"] == 16


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_stand_in_for_rows_on_the_hub_is_what_the_objective_learns_from(objective: str) -> None:
    config = config_of(TINY)
    rows = Rows(path="nobody/nothing", format="alpaca")

    other = stand_ins.stand_in(rows, objective)

    assert other is not None
    dataset = config.train_dataloader.dataset.model_copy(update={**other, "max_rows": 8})
    tokenizer, _ = stand_ins.tokenizer_of(config.model)
    _, told = stand_ins.prepared(dataset, TextEncoder(tokenizer), objective)
    assert "train: 8 rows" in told


def test_rows_that_are_here_are_trained_on_themselves(tmp_path: Path) -> None:
    assert stand_ins.stand_in(Rows(path=str(tmp_path / "mine.jsonl")), "sft") is None


def test_a_tokenizer_that_is_not_here_leaves_the_recipes_template() -> None:
    model = config_of("gemma_2b_full_alpaca_e1").model

    tokenizer, is_own = stand_ins.tokenizer_of(model)

    assert not is_own
    assert tokenizer.chat_template == catalog.chat_template("gemma")
    (end,) = tokenizer("<end_of_turn>", add_special_tokens=False)["input_ids"]
    assert answers_end(tokenizer) == end, "one token, as in Gemma's own"


def test_a_local_model_without_a_tokenizer_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    with pytest.raises(ModelError):
        stand_ins.tokenizer_of(config_of(TINY).model.model_copy(update={"path": str(tmp_path)}))


def test_prompts_longer_than_usual_get_the_recipes_own_length(tmp_path: Path) -> None:
    rows = tmp_path / "long.jsonl"
    rows.write_text('{"instruction": "' + "why " * 400 + '", "input": "", "output": "Because."}\n')
    config = config_of(TINY)
    other = {"path": str(rows), "format": "alpaca", "max_length": 2048, "packing": False}
    block = config.train_dataloader.dataset.model_copy(update=other)

    dataset, told = stand_ins.prepared(block, TextEncoder(stand_ins.tokenizer_of(config.model)[0]), "sft")

    assert dataset.max_length == 2048
    assert "0 dropped" in told


@pytest.mark.parametrize("kind", [*vision.KINDS, "gemma4"])
def test_a_small_model_that_reads_images_is_of_the_same_kind(kind: str, tmp_path: Path) -> None:
    large = vision.make(kind, tmp_path / "large")
    facts = Architecture.model_validate(read_architecture(large))

    for seed in (1, 2):
        small = stand_ins.make_vision_model(model_block(str(large)), facts, tmp_path / str(seed), seed)

    assert small.is_own
    assert small.architecture.vision_config and facts.vision_config
    assert small.architecture.vision_config.model_type == facts.vision_config.model_type == kind
    encoder = ImageEncoder.of(small.processor, None)
    assert stand_ins.difference(tmp_path / "1", tmp_path / "1", encoder=encoder) == 0
    assert stand_ins.difference(tmp_path / "1", tmp_path / "2", encoder=encoder) > 0.1


def test_a_small_llava_stands_in_for_a_model_with_images_that_is_not_here(tmp_path: Path) -> None:
    facts = config_of("tiny_vision_full_sample_images_e1").architecture
    assert facts is not None

    small = stand_ins.make_vision_model(model_block("nobody/not-in-the-cache"), facts, tmp_path, 0)

    assert not small.is_own
    assert small.architecture.vision_config and small.architecture.vision_config.model_type == "llava"
    rows = stand_ins.stand_in(Rows(path="nobody/not-there"), "sft", has_images=True)
    assert rows and "images" in rows["path"]


def test_results_that_differ_are_told_apart(tmp_path: Path) -> None:
    config = config_of(TINY)
    assert config.architecture is not None
    tokenizer, _ = stand_ins.tokenizer_of(config.model)
    for seed in (1, 2):
        stand_ins.make_model(config.architecture, tokenizer, tmp_path / str(seed), seed)

    assert stand_ins.difference(tmp_path / "1", tmp_path / "1", scores=False) == 0
    assert stand_ins.difference(tmp_path / "1", tmp_path / "2", scores=False) > 0.1


def test_a_bad_row_ends_it_at_the_data_with_everything_kept(scratch: Path) -> None:
    rows = scratch / "bad.jsonl"
    rows.write_text('{"messages": "none"}\n')

    result, told = tried(TINY, data=str(rows))

    assert [(stage.name, stage.exit_code) for stage in told] == [("model", 0), ("data", 2)]
    assert f"{rows}:1" in told[-1].told
    assert result.exit_code == 2
    assert result.kept is not None
    assert (result.kept / "model" / "config.json").is_file()


@pytest.mark.parametrize("second_loss", [1.25, float("nan")])
def test_a_resumed_run_that_meets_another_loss_fails(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, second_loss: float
) -> None:
    def ranks(argv: Any, env: Any, run: RunDirectory, **_: Any) -> int:
        """Leave what two steps leave; no fault of the libraries makes a real run resume wrongly."""
        loss = second_loss if run.path.name == "resumed" else 1.0
        run.metrics.write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n" + json.dumps({"step": 2, "loss": loss}))
        checkpoint(run.path, 1, world_size=2)
        return 0

    monkeypatch.setattr("tuner.launch.supervise.run", ranks)

    result, told = tried(TINY)

    assert [stage.name for stage in told] == ["model", "data", "train", "resume"]
    assert f"the loss of step 2 is {second_loss}, not 1.0" in told[-1].told
    assert result.exit_code == 1


def test_code_of_a_model_is_not_run_unasked(scratch: Path) -> None:
    with pytest.raises(ModelError, match="it needs remote code"):
        tried("qwen_7b_chat_qlora_alpaca_e3")

    assert list(scratch.iterdir()) == []


def test_a_model_without_known_architecture_is_refused_before_anything_is_made(scratch: Path) -> None:
    model = scratch / "model"
    shutil.copytree(assets.asset("package:tiny"), model)
    (model / "config.json").write_text('{"model_type": "llama"}')

    with pytest.raises(ModelError, match="cannot build a small model of "):
        tried(TINY, model=str(model))

    assert [path.name for path in scratch.iterdir()] == ["model"]


def test_a_stage_in_json_has_the_keys_that_programs_read() -> None:
    assert vars(Stage("data", 1.5, "2 rows")) == {"name": "data", "seconds": 1.5, "told": "2 rows", "exit_code": 0}
