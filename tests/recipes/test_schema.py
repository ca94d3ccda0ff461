"""The schema holds every key once, and takes no value of another type, range or sort."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from pydantic import ValidationError

from tests.each import each
from tests.recipes.loaded import loaded
from tuner.errors import RecipeError
from tuner.recipes import loading
from tuner.recipes.schema import Adapter, Block, Quantization, RecipeConfig, Vision, VisionLora, schema_keys
from tuner.recipes.schema.architecture import Architecture
from tuner.recipes.schema.block import CONTRADICTION
from tuner.recipes.schema.objective import Generation, Objective
from tuner.recipes.schema.objectives import OBJECTIVES
from tuner.recipes.schema.rewards import RewardBlock
from tuner.recipes.schema.sampling import Sampling
from tuner.recipes.schema.tools import Tools

QLORA = loading.load("tiny_qlora_sample_e3")

REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("optim_wrapper.optimizer.lr", -1e-5, "greater than 0"),
    ("optim_wrapper.optimizer.lr", float("nan"), "finite"),
    ("optim_wrapper.optimizer.lr", "1e-5", "valid number"),
    ("optim_wrapper.optimizer.lr", True, "valid number"),
    ("optim_wrapper.optimizer.betas", (0.9,), "required"),
    ("optim_wrapper.optimizer.betas", (0.9, 1.0), "less than 1"),
    ("optim_wrapper.optimizer.weight_decay", -0.1, "greater than or equal to 0"),
    ("optim_wrapper.optimizer.type", "Adamw", "'AdamW'"),
    ("optim_wrapper.optimizer.type", "OneBitAdam", "removed from DeepSpeed; use AdamW"),
    *(
        ("optim_wrapper.optimizer.type", name, "use AdamW")
        for name in ("Adafactor", "adagrad", "galore_adamw_8bit", "GaLoreAdamW", "apollo_adamw", "LOMO", "AdaLomo")
    ),
    ("optim_wrapper.optimizer.type", "stable_adamw", "use AdamW"),
    ("optim_wrapper.optimizer.type", "Adam-mini", "use AdamW"),
    ("optim_wrapper.optimizer.type", "schedule_free_adamw", "use AdamW"),
    ("optim_wrapper.optimizer.muon_lr", 0.02, "use Muon, or muon_lr=None"),
    ("optim_wrapper.optimizer.loraplus_lr_ratio", 0.5, "greater than or equal to 1"),
    ("optim_wrapper.accumulative_counts", 0, "greater than 0"),
    ("optim_wrapper.accumulative_counts", True, "valid integer"),
    ("optim_wrapper.dtype", "bf61", "'bf16'"),
    ("optim_wrapper.clip_grad", {"max_norm": 0}, "greater than 0"),
    ("optim_wrapper.clip_grad", {}, "required"),
    ("param_scheduler.type", "cosin", "'cosine'"),
    ("param_scheduler.warmup_ratio", 1.0, "less than 1"),
    ("train_cfg.max_epochs", 0, "greater than 0"),
    ("train_cfg.max_steps", 0, "greater than 0"),
    ("train_cfg.gradient_checkpointing", 1, "valid boolean"),
    ("train_dataloader.batch_size", 0, "greater than 0"),
    ("train_dataloader.num_workers", -1, "greater than or equal to 0"),
    ("train_dataloader.dataset.path", 3, "valid string"),
    ("train_dataloader.dataset.max_length", "2048", "valid integer"),
    ("train_dataloader.dataset.streaming", 0, "valid boolean"),
    ("checkpoint.interval", -1, "greater than 0"),
    ("checkpoint.max_keep_ckpts", 0, "greater than 0"),
    ("checkpoint.save_best", "eval_los", "'eval_loss'"),
    ("train_cfg.val_interval", 0, "greater than 0"),
    ("log.trackers", ("wandb", 3), "'tensorboard'"),
    ("randomness.seed", -1, "greater than or equal to 0"),
    ("randomness.seed", 2**32, "less than 4294967296"),
    ("quantization.bits", 3, "4 or 8"),
    ("quantization.quant_type", "int4", "'nf4'"),
    ("adapter.r", 0, "greater than 0"),
    ("adapter.lora_dropout", 1.0, "less than 1"),
    ("adapter.target_modules", 3, "valid string"),
    ("adapter.target_modules", "*.q_proj", "no regular expression"),
    ("adapter.unknown", 3, "not permitted"),
    ("adapter.init_lora_weights", False, "must be one of True, 'gaussian'"),
    ("adapter.init_lora_weights", "eva", "a pass before training; use 'pissa'"),
    ("adapter.init_lora_weights", "loftq", "instead of bitsandbytes; use True"),
    ("adapter.init_lora_weights", "mica", "which checkpoints do not save; use"),
    ("adapter.init_lora_weights", "olora", "splits the weights, which are quantized; use True"),
    ("adapter.init_lora_weights", "orthogonal", "type of the weights, which are quantized; use True"),
    ("objective.type", "dpo_", "'sft'"),
    ("deepspeed", 2, "valid string"),
    ("unknown", 1, "not permitted"),
)


def changed(key: str, value: Any) -> dict[str, Any]:
    values = QLORA.values
    block = values
    *outer, last = key.split(".")
    for name in outer:
        block = block[name]
    block[last] = value
    return values


@pytest.mark.parametrize(("key", "value", "reason"), REFUSED, ids=lambda item: str(item)[:30])
def test_a_value_that_does_not_fit_is_refused(key: str, value: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        RecipeConfig.model_validate(changed(key, value))


def refused_keys(values: dict[str, Any]) -> set[str]:
    """Return the keys of values that do not fit the others."""
    with pytest.raises(ValidationError) as caught:
        RecipeConfig.model_validate(values)
    assert {error["type"] for error in caught.value.errors()} == {CONTRADICTION}
    return {".".join(map(str, error["loc"])) for error in caught.value.errors()}


def _refused(name: str, *sets: str) -> str:
    """Return the key that a recipe is refused for."""
    with pytest.raises(RecipeError) as caught:
        loaded(name, *sets)
    return caught.value.what.partition(" = ")[0]


LORA, DPO, LORA_PLUS = "tiny_lora_sample_e1", "tiny_dpo_lora_sample_preferences_e1", "loraplus_lr_ratio=16"
TURNS, RATIO = "train_dataloader.dataset.trained_turns", "optim_wrapper.optimizer.loraplus_lr_ratio"


@pytest.mark.parametrize(
    ("name", "sets", "key"),
    [
        *((f"tiny_{name}_sample_e1", [f"{TURNS}=last"], TURNS) for name in ("dpo_lora", "pretrain_full", "grpo_lora")),
        ("tiny_dora_sample_e1", ["init_lora_weights=pissa"], "adapter.init_lora_weights"),
        (DPO, ["init_lora_weights=olora"], "adapter.init_lora_weights"),
        ("tiny_full_sample_e1", [LORA_PLUS], RATIO),
        (LORA, [LORA_PLUS, "optimizer.type=Muon"], RATIO),
        ("tiny_full_sample_e1", ["model.freeze=('vision',)"], "model.freeze"),
        ("tiny_vision_lora_sample_images_e1", ["model.freeze=('vision',)"], "adapter"),
    ],
)
def test_values_that_do_not_go_together_are_refused_at_one_of_their_keys(name: str, sets: list[str], key: str) -> None:
    assert _refused(name, *sets).partition(":")[0] == key


STREAM = ("train_dataloader.dataset.streaming=True", "max_steps=3")
STREAMING = "train_dataloader.dataset.streaming"


@pytest.mark.parametrize(
    ("name", "sets", "key"),
    [
        ("tiny_lora_sample_e1", STREAM[:1], "train_cfg.max_steps"),
        ("tiny_lora_sample_e1", (*STREAM, "val_dataloader.dataset.streaming=True"), "val_dataloader.dataset.streaming"),
        ("tiny_lora_sample_e1", (*STREAM, "val_split=0.1"), STREAMING),
        ("tiny_lora_sample_e1", (*STREAM, "train_dataloader.dataset.mixture=[dict(path='a.jsonl')]"), STREAMING),
        ("tiny_dpo_lora_sample_preferences_e1", (*STREAM, "precompute_ref_log_probs=True"), STREAMING),
    ],
)
def test_what_a_stream_cannot_do_is_refused(name: str, sets: tuple[str, ...], key: str) -> None:
    assert _refused(name, *sets) == key
    loaded(name, *STREAM)


def test_the_validation_of_a_stream_on_another_file_is_none() -> None:
    config = loaded("tiny_full_custom_e1", *STREAM, val="val.jsonl").config

    assert config.train_dataloader.dataset.streaming is True
    assert config.val_dataloader and config.val_dataloader.dataset.streaming is False


@pytest.mark.parametrize(
    ("key", "value"),
    [("checkpoint.save_best", "auto"), ("train_cfg.early_stopping_patience", 3), ("train_cfg.val_interval", 100)],
)
def test_what_a_validation_decides_needs_one(key: str, value: Any) -> None:
    assert RecipeConfig.model_validate(changed(key, value)).val_dataloader
    assert refused_keys({**changed(key, value), "val_dataloader": None}) == {key}


def test_answers_at_validations_need_prompts_and_whole_samples() -> None:
    assert RecipeConfig.model_validate(changed("log.generate", 3)).val_dataloader
    assert refused_keys({**changed("log.generate", 3), "val_dataloader": None}) == {"log.generate"}
    values = changed("train_cfg.sequence_parallel_size", 2)
    assert refused_keys({**values, "log": {**values["log"], "generate": 3}}) == {"log.generate"}


def test_all_values_that_do_not_fit_the_others_are_named_at_once() -> None:
    values = {**changed("log.generate", 3), "val_dataloader": None, "adapter": None}
    values["checkpoint"]["save_best"] = "auto"

    assert refused_keys(values) == {"log.generate", "checkpoint.save_best", "adapter"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optim_wrapper.clip_grad", None),
        ("optim_wrapper.optimizer.betas", [0.9, 0.95]),
        ("optim_wrapper.optimizer.weight_decay", 0),
        ("train_cfg.max_steps", 10),
        ("val_dataloader", None),
        ("architecture", None),
        ("adapter.target_modules", ["q_proj"]),
        ("adapter.target_modules", ("q_proj",)),
        ("adapter.modules_to_save", ["lm_head"]),
        ("adapter.init_lora_weights", "gaussian"),
        ("optim_wrapper.optimizer.loraplus_lr_ratio", 16),
        ("log.trackers", ["wandb"]),
        ("deepspeed", {"zero_optimization": {"stage": 2}}),
        ("randomness.seed", 2**32 - 1),
    ],
)
def test_every_other_sort_of_value_is_taken(key: str, value: Any) -> None:
    RecipeConfig.model_validate(changed(key, value))


def test_a_recipe_cannot_be_changed_after_it_was_checked() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        QLORA.config.train_cfg.max_epochs = 5  # type: ignore[misc]


def blocks(base: type[Block] = Block) -> list[type[Block]]:
    children = [child for child in base.__subclasses__() if child.__module__.startswith("tuner.")]
    return [*children, *(below for child in children for below in blocks(child))]


@each(blocks())
def test_every_block_is_strict_and_says_what_it_is(block: type[Block]) -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        block.model_validate({"model_type": "llama", "no_such_key": 1})
    assert block.__doc__


def test_every_block_is_a_key_of_the_recipe() -> None:
    bases = {block.__name__ for block in blocks() if block.__subclasses__()}
    text = str(list(schema_keys().values()))

    reached = {block.__name__ for block in blocks() if re.search(rf"\.{block.__name__}\b", text)}
    of_rewards = {block.__name__ for block in blocks() if issubclass(block, RewardBlock)}  # inside `rewards`
    of_objectives = {block.__name__ for block in OBJECTIVES.values()}  # of the key `objective`
    assert {block.__name__ for block in blocks()} - reached - of_rewards - of_objectives - bases == {"RecipeConfig"}


def test_defaults_stand_in_the_schema_only_inside_blocks_that_may_be_none() -> None:
    optional = (Adapter, Quantization, Vision, VisionLora, Architecture, Objective, Sampling, Tools, Generation)
    with_default = {
        (block.__name__, name)
        for block in blocks()
        for name, field in block.model_fields.items()
        if not field.is_required() and not issubclass(block, (*optional, RewardBlock))
    }

    # val_dataloader and mixture may be None, and a data set's ordinary keys need not be written in them.
    rows = {"name", "split", "format", "columns", "system", "image_folder"}
    assert with_default == {
        ("Dataloader", "num_workers"),
        ("Dataset", "mixture"),
        ("Dataset", "max_rows"),
        ("Dataset", "bad_rows"),
        ("Dataset", "pack_length"),
        ("Dataset", "num_proc"),
        ("Dataset", "tokenizer_backend"),
        ("Dataset", "thinking"),
        ("Dataset", "streaming"),
        ("Dataset", "special_tokens"),
        ("Dataset", "trained_turns"),
        ("Dataset", "val_copies"),
        ("MixtureEntry", "max_rows"),
        *(("Dataset", key) for key in ("val_split", "val_seed", "held_out", "image_max_pixels", "image_min_pixels")),
        ("MixtureEntry", "weight"),
        *itertools.product(("Rows", "Dataset", "MixtureEntry"), rows),
    }


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("float16", "fp16"), ("bfloat16", "bf16"), ("float32", "fp32"), ("torch.bfloat16", "bf16"), ("bf16", "bf16")],
)
def test_torchs_and_xtuners_words_for_a_number_type_are_taken(name: str, dtype: str) -> None:
    config = loaded("tiny_full_sample_e1", f"optim_wrapper.dtype={name}").config

    assert config.optim_wrapper.dtype == dtype


@pytest.mark.parametrize(("written", "names"), [("q_proj", ["q_proj"]), ("q_proj, v_proj", ["q_proj", "v_proj"])])
def test_names_of_layers_in_one_text_are_a_list_and_not_a_regular_expression(written: str, names: list[str]) -> None:
    def targets(value: str) -> Any:
        return Adapter(r=4, lora_alpha=8, target_modules=value).target_modules

    assert targets(written) == names
    assert targets("all-linear") == "all-linear"
    assert targets(r".*\.q_proj") == r".*\.q_proj"


@pytest.mark.parametrize("key", ["quant_type=fp4", "double_quant=False"])
def test_what_belongs_to_4_bits_is_refused_with_8(key: str) -> None:
    assert _refused("tiny_qlora_sample_e1", "quantization.bits=8", key) == f"quantization.{key.partition('=')[0]}"
    loaded("tiny_qlora_sample_e1", "quantization.bits=8")
    loaded("tiny_qlora_sample_e1", key)
