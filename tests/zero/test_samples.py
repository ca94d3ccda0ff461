"""DeepSpeed's documented samples: accepted, what has no effect named, and what they become is read by DeepSpeed."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime import config as deepspeed_config

from tests.machine.gpus import A100, CPU, machine
from tests.zero.merged import merged
from tests.zero.samples import SAMPLES
from tuner.errors import TunerError
from tuner.files import dump_json
from tuner.machine.hardware import Hardware
from tuner.recipes import loading
from tuner.recipes.recipe import Overrides
from tuner.zero import presets
from tuner.zero.choice import open_chosen, open_config
from tuner.zero.config import Document, FinalConfig
from tuner.zero.contradictions import DROPPED, INERT, UNRUNNABLE
from tuner.zero.jsonfile import read_json_config
from tuner.zero.lint import check

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)

# What tuner tells of a sample, by the keys that it names; nothing of any other.
TOLD = {
    "getting started": ["zero_optimization"],
    "gradients and communication": ["sparse_gradients", "fp32_allreduce"],
    "zero-infinity on nvme": ["aio.thread_count"],
    "zero-offload of the first guide": ["zero_optimization.cpu_offload"],
    "zenflow": ["zero_optimization.zenflow"],
    "zenflow by steps": ["zero_optimization.zenflow"],
    "expert parallelism without a size": ["expert_parallel.enabled"],
    "asynchronous checkpoints": ["datastates_ckpt"],
    "autocast to fp16": ["torch_autocast.dtype"],
    "sequence parallelism": ["sequence_parallel_size"],
    "activation checkpointing, partitioned": ["activation_checkpointing"],
    "data efficiency": ["data_efficiency"],
    "accumulation by the caller": ["managed_gradient_accumulation"],
    "autotuning": ["autotuning"],
    "cifar": ["zero_optimization.cpu_offload"],
    "features that are gone, switched off": [
        *("amp", "compression_training", "curriculum_learning", "eigenvalue", "elasticity", "nebula"),
        *("progressive_layer_drop", "quantize_training", "sparse_attention"),
    ],
}
NO_RUN = {
    "zenflow": "decides by itself",
    "zenflow by steps": "decides by itself",
    "automatic expert parallelism": "not tested with llama models",
    "expert parallelism without a size": "needs autoep_size",
    "asynchronous checkpoints": "no registry has",
    "accumulation by the caller": "does not work with Hugging Face's accelerate, which",
    "autocast to fp16": "loss scale still in them",
    "sequence parallelism": "splits its sequences",
    "autotuning": "ends the process",
}
WORLDS = (1, 2, 8)


def _sample(name: str) -> Document:
    return Document(copy.deepcopy(SAMPLES[name]), "my.json")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """Let DeepSpeed believe that so many ranks are up."""
    monkeypatch.setattr(deepspeed_config.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(deepspeed_config.dist, "get_world_size", lambda: request.param)
    return int(request.param)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_documented_sample_is_accepted_and_what_does_nothing_is_named(name: str) -> None:
    told = [warning.removeprefix("my.json: ").split()[0] for warning in check(_sample(name)).warnings]

    assert told == TOLD.get(name, [])


@pytest.mark.parametrize("name", [name for name in SAMPLES if name not in NO_RUN])
def test_deepspeed_reads_what_a_sample_becomes(name: str) -> None:
    final = merged(_sample(name), hardware=machine(A100))

    deepspeed_config.DeepSpeedConfig(copy.deepcopy(final.config))


@pytest.mark.parametrize("name", NO_RUN)
def test_a_sample_that_no_run_survives_starts_none(name: str) -> None:
    with pytest.raises(TunerError, match=NO_RUN[name]):
        merged(_sample(name), hardware=machine(A100))


@pytest.mark.parametrize("stage", [True, False])
def test_the_oldest_form_of_zero_is_written_out(stage: bool) -> None:
    checked = check(Document({"zero_optimization": stage}, "my.json"))

    assert checked.value == {"zero_optimization": {"stage": int(stage)}}
    read_by_deepspeed = deepspeed_config.DeepSpeedConfig({"zero_optimization": stage, "train_batch_size": 1})
    assert read_by_deepspeed.zero_optimization_stage == int(stage)


def test_each_table_of_what_does_not_work_has_a_sample() -> None:
    unrunnable = {".".join(rule.keys) for rule in UNRUNNABLE}
    documents = [
        Document({**sample, "dataloader_drop_last": True, "dump_state": True}, "my.json") for sample in SAMPLES.values()
    ]
    warned = {
        warning.removeprefix("my.json: ").split()[0] for document in documents for warning in check(document).warnings
    }

    assert unrunnable <= warned | {"autotuning.enabled"}
    assert {".".join(keys) for keys in (*INERT, *DROPPED)} <= warned | {"pipeline"}


# Presets, in worlds of several sizes


def _world(ranks: int) -> Any:
    return pytest.param(ranks, id=f"{ranks} ranks")


@pytest.mark.parametrize("world", [_world(ranks) for ranks in WORLDS], indirect=True)
@pytest.mark.parametrize("hardware", [CPU, machine(*[A100] * 8)], ids=["CPU", "8 x A100"])
@pytest.mark.parametrize("name", presets.names())
def test_deepspeed_accepts_a_merged_preset_in_a_world_of_any_size(name: str, hardware: Hardware, world: int) -> None:
    document = open_chosen(loading.load("tiny_full_sample_e1", Overrides(nvme="/swap")), name)
    final = merged(document, hardware=hardware, ranks=world)

    seen = deepspeed_config.DeepSpeedConfig(copy.deepcopy(final.config))

    assert seen.world_size == world
    assert seen.train_batch_size == 2 * world
    assert seen.gradient_clipping == 1.0
    assert seen.bfloat16_config.enabled is hardware.has_native_bf16
    assert seen.zero_optimization_stage == presets.find(name).stage


@pytest.mark.parametrize("world", [_world(2)], indirect=True)
def test_a_batch_for_another_world_is_what_deepspeed_refuses(world: int) -> None:
    final = merged(open_config("zero2", "--deepspeed"), ranks=8)

    with pytest.raises(AssertionError, match="train_batch_size"):
        deepspeed_config.DeepSpeedConfig(copy.deepcopy(final.config))


# Hugging Face's "auto"

HUGGING_FACE = Path(__file__).parent / "data" / "hugging_face_auto.json"
RESOLVED = {
    "train_micro_batch_size_per_gpu": (3, "recipe train_dataloader.batch_size"),
    "gradient_accumulation_steps": (4, "recipe optim_wrapper.accumulative_counts"),
    "train_batch_size": (24, "derived"),
    "gradient_clipping": (0.5, "recipe optim_wrapper.clip_grad.max_norm"),
    "bf16.enabled": (True, "detected"),
    "fp16.enabled": (False, "detected"),
    "zero_optimization.reduce_bucket_size": (128 * 128, "derived: h^2"),
    "zero_optimization.stage3_prefetch_bucket_size": (int(0.9 * 128 * 128), "derived: 0.9 h^2"),
    "zero_optimization.stage3_param_persistence_threshold": (10 * 128, "derived: 10 h"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (True, "derived"),
}
SETS = ("train_dataloader.batch_size=3", "accumulative_counts=4", "max_norm=0.5", "lr=0.25", "weight_decay=0.125")


def _hugging_face(*sets: str) -> FinalConfig:
    return merged(read_json_config(HUGGING_FACE), *SETS, *sets, hardware=machine(A100, A100), ranks=2)


@pytest.mark.parametrize("key", RESOLVED)
def test_each_auto_becomes_the_recipes_the_machines_or_the_models_value(key: str) -> None:
    value, source = RESOLVED[key]

    final = _hugging_face()

    found: Any = final.config
    for part in key.split("."):
        found = found[part]
    assert found == value
    assert final.origins[key].text.startswith(source)


def test_a_config_of_autos_alone_gives_no_warning_and_leaves_none() -> None:
    final = _hugging_face("param_scheduler.type=linear")  # as the type beside the autos

    assert final.warnings == ()
    assert '"auto"' not in dump_json(final.config)
    assert not {"optimizer", "scheduler"} & final.config.keys()


def test_the_optimizers_autos_become_the_recipes_where_deepspeed_builds_it() -> None:
    final = _hugging_face("optimizer.type=Lion", "betas=[0.8,0.95]")

    assert final.config["optimizer"]["type"] == "Lion"
    assert final.config["optimizer"]["params"] == {"lr": 0.25, "betas": [0.8, 0.95], "weight_decay": 0.125}
    assert '"auto"' not in dump_json(final.config)
