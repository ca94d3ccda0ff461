"""The known traps of DeepSpeed's JSON, one by one: what is given, and what tuner says where others are silent or crash.

Each row is the whole way of a user's file: read, checked, and merged with a recipe. Rows of one table behave alike.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from deepspeed.runtime import config as deepspeed_config

from tests.machine.gpus import A100, CPU, machine
from tests.refused import refused
from tests.zero.merged import merged
from tuner.errors import DeepSpeedConfigError, MachineError
from tuner.files import dump_json
from tuner.machine.hardware import Hardware
from tuner.zero.config import FinalConfig

# Refused, each with its line and column: what is given -> where, and a part of what is said.
REFUSED: list[tuple[str, str, str]] = [
    # A typo at the top is ignored by DeepSpeed: no ZeRO, no accumulation, and no message.
    (
        '{"zero_optimzation": {"stage": 2}}',
        "1:2",
        "silently ignore it. Did you mean 'zero_optimization'?",
    ),
    ('{"gradient_acumulation_steps": 8}', "1:2", "Did you mean 'gradient_accumulation_steps'?"),
    # Inside the older blocks as well.
    ('{"activation_checkpointing": {"cpu_checkpoint": true}}', "1:31", "Did you mean 'cpu_checkpointing'?"),
    ('{"flops_profiler": {"enable": true}}', "1:21", "Did you mean 'enabled'?"),
    ('{"checkpoint": {"tag_validate": "WARN"}}', "1:17", "Did you mean 'tag_validation'?"),
    ('{"data_types": {"grad_acum_dtype": "fp32"}}', "1:17", "Did you mean 'grad_accum_dtype'?"),
    ('{"aio": {"queue_dept": 8}}', "1:10", "Did you mean 'queue_depth'?"),
    ('{"pipeline": {"stage": 2}}', "1:15", "Did you mean 'stages'?"),
    ('{"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}', "1:44", "no key 'learning_rate'"),
    ('{"zero_optimization": {"stage": 2, "overlap_com": true}}', "1:36", "Did you mean 'overlap_comm'?"),
    # An "auto" that nobody resolves becomes a default in silence.
    ('{"zero_optimization": {"stage": "auto"}}', "1:24", "read by DeepSpeed as 0, which means no ZeRO at all"),
    ('{"zero_optimization": {"stage": 2, "allgather_bucket_size": "auto"}}', "1:36", "its default, 500000000"),
    ('{"zero_optimization": {"stage": 2, "round_robin_gradients": "auto"}}', "1:36", "its default, false"),
    ('{"steps_per_print": "auto"}', "1:2", "a plain string, which fails later"),
    # Types: DeepSpeed crashes with a TypeError, or takes what is not meant.
    ('{"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}', "1:46", "Did you mean 'device'?"),
    ('{"reduce_bucket_size": 5}', "1:2", "It belongs into zero_optimization."),
    (
        '{"zero_optimization": {"stage3_prefetch_bucket_size": 1, "prefetch_bucket_size": 1}}',
        "1:58",
        "another spelling",
    ),
    ('{"zero_optimization": {"reduce_bucket_size": true}}', "1:24", "is not an integer"),
    ('{"train_micro_batch_size_per_gpu": 0}', "1:2", "is not at least 1"),
    ('{"zero_optimization": 2}', "1:2", 'Write "zero_optimization": {"stage": 2}.'),
    ('{"optimizer": []}', "1:2", "optimizer = [] is not an object"),
    ('{"zero_optimization": {"allgather_bucket_size": 0}}', "1:24", "is not greater than 0"),
    ('{"gradient_clipping": -1}', "1:2", "is not at least 0"),
    ('{"optimizer": {"params": {"lr": 1e-4}}}', "1:2", "optimizer has no type"),
    ('{"optimizer": {"type": "Adam", "params": {"betas": 0.9}}}', "1:43", "is not a list"),
    ('{"scheduler": {"type": "WarmupDecay"}}', "1:16", "Did you mean 'WarmupDecayLR'?"),
    ('{"gradient_accumulation_steps": "8"}', "1:2", "is not an integer"),
    ('{"zero_optimization": {"stage": "2"}}', "1:24", "is not 0, 1, 2 or 3"),
    ('{"zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}}', "1:54", '"none", "cpu" or "nvme"'),
    ('{"bf16": true}', "1:2", 'Write "bf16": {"enabled": true}.'),
    ('{"bf16": {"enabled": "true"}}', "1:11", "is not true or false"),
    # Contradictions.
    ('{"fp16": {"enabled": true}, "bf16": {"enabled": true}}', "1:38", "are both true"),
    ('{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}', "1:54", "without nvme_path"),
    ('{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}', "1:58", "without nvme_path"),
    ('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}', "1:75", "stage 3"),
    (
        '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": true}}}',
        "1:75",
        "super_offload needs ZeRO stage 3",
    ),
    ('{"bf16": {"bf16_optimizer_states": true}}', "1:11", "needs bf16.bf16_master_weights_and_grads"),
    # What only fails when the engine is built, or at the first checkpoint.
    ('{"optimizer": {"type": "AdamWW"}}', "1:16", "Did you mean 'AdamW'?"),
    ('{"optimizer": {"type": "OneBitAdam"}}', "1:16", "1-bit optimizers were removed"),
    ('{"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}', "1:44", "Use gradient_clipping."),
    ('{"scheduler": {"type": "ReduceLROnPlateau"}}', "1:16", "the recipe's param_scheduler has more"),
    ('{"scheduler": {"type": "CosineAnnealingLR"}}', "1:16", "DeepSpeed has no scheduler"),
    ('{"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}', "1:47", "is not at least 1"),
    ('{"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 9}}}', "1:41", "total_num_steps"),
    ('{"checkpoint": {"writer": {"type": "fast"}}}', "1:17", "crashes at the first checkpoint"),
    (
        '{"zero_optimization": {"stage": 1, "legacy_stage1": true}}',
        "1:36",
        "was removed from DeepSpeed, which fails at",
    ),
    (
        '{"zero_optimization": {"stage": 2}, "bf16": {"bf16_master_weights_and_grads": true}}',
        "1:46",
        "needs the optimizer on the CPU",
    ),
    (
        '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},'
        ' "zero_force_ds_cpu_optimizer": false, "fp16": {"fp16_master_weights_and_grads": true}}',
        "1:124",
        "DeepSpeed's own CPU Adam",
    ),
    ('{"torch_autocast": {"enabled": true, "dtype": "int8"}}', "1:38", "as whole numbers"),
    (
        '{"torch_autocast": {"enabled": true, "lower_precision_safe_modules": ["torch.nn.Conv1d", "Linear"]}}',
        "1:38",
        "names a class without its module",
    ),
    (
        '{"torch_autocast": {"enabled": true, "lower_precision_safe_modules": ["torch.nn.Conv1d", "evil.Linear"]}}',
        "1:38",
        "outside torch and transformers",
    ),
    ('{"data_types": {"grad_accum_dtype": "torch.int8"}}', "1:17", "as whole numbers"),
    (
        '{"zero_optimization": {"stage": 3, "zero_quantized_weights": true}, "torch_autocast": {"enabled": true}}',
        "1:88",
        "torch_autocast does not work with zero_quantized_weights",
    ),
    ('{"prescale_gradients": true, "zero_optimization": {"stage": 2}}', "1:2", "does not work with reduce_scatter"),
    ('{"gradient_predivide_factor": 2, "zero_optimization": {"stage": 3}}', "1:2", "does not work with reduce_scatter"),
    ('{"log_level": "reports"}', "1:2", 'is not "debug", "info", "warning", "error" or "critical"'),
    # What contradicts the compute type, which the machine and the recipe choose: fp32 here.
    ('{"data_types": {"grad_accum_dtype": "bf16"}}', "1:17", "or to be what the run computes in"),
    ('{"checkpoint": {"load_universal": true}}', "1:17", "no run could resume"),
    # Kernels of NVIDIA GPUs, on a CPU.
    ('{"zero_optimization": {"stage": 3, "zero_quantized_weights": true}}', "1:36", "needs an NVIDIA GPU"),
    # Removed, and on; each of the others in `test_check`.
    ('{"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": true}}}}', "1:2", "Quantize"),
    ('{"sparse_attention": {"mode": "fixed"}}', "1:2", "model.attn_implementation"),
    ('{"zero_optimization": {"stage": 3, "mics_shard_size": 4}}', "1:36", "Use zero_hpz_partition_size"),
    ('{"zero_optimization": {"stage": 2, "cpu_offload": true}}', "1:36", '"offload_optimizer": {"device": "cpu"}'),
]


@pytest.mark.parametrize(("text", "place", "told"), REFUSED, ids=[text for text, *_ in REFUSED])
def test_a_trap_is_refused_at_its_line_and_column(text: str, place: str, told: str) -> None:
    with refused(DeepSpeedConfigError, f"my.json:{place}", told):
        merged(text)


# Accepted with one warning: what is given -> a part of it, and what the final config holds then.
WARNED: list[tuple[str, str, dict[str, Any]]] = [
    ('{"sparse_attention": false}', "sparse_attention was removed from DeepSpeed", {"sparse_attention": None}),
    ('{"seed": 1234}', "randomness.seed decides", {"seed": None}),
    (
        '{"activation_checkpointing": {"partition_activations": true}}',
        "activation_checkpointing has no effect here",
        {"activation_checkpointing.partition_activations": True},
    ),
    (
        '{"data_efficiency": {"enabled": true, "data_sampling": {"enabled": true}}}',
        "samples are drawn by Hugging Face's loader",
        {"data_efficiency": None},
    ),
    (
        '{"data_efficiency": {"enabled": true, "data_routing": {"enabled": true, "random_ltd": {"enabled": true}}}}',
        "random-LTD needs layers that a model's own code makes",
        {"data_efficiency": None},
    ),
    ('{"compile": {"deepcompile": true}}', "--set train_cfg.torch_compile=deepcompile", {"compile.deepcompile": False}),
    ('{"comms_config": {"verbose": false}}', "was never read by DeepSpeed", {"comms_config": None}),
    ('{"monitor_config": {"enabled": false}}', "was never read by DeepSpeed", {"monitor_config": None}),
    ('{"zero_optimization": true}', "reads it as stage 1", {"zero_optimization.stage": 1}),
    (
        '{"data_types": {"param_dtype": "torch.bfloat16"}}',
        "overrides 'torch.bfloat16' in my.json:1:17",
        {"data_types.param_dtype": "fp32"},
    ),
]


def _at(final: FinalConfig, key: str) -> Any:
    found: Any = final.config
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


@pytest.mark.parametrize(("text", "told", "held"), WARNED, ids=[text for text, *_ in WARNED])
def test_a_trap_that_harms_nobody_is_told_and_taken_out(text: str, told: str, held: dict[str, Any]) -> None:
    final = merged(text)

    (warning,) = final.warnings
    assert told in warning
    assert "my.json:1:" in warning
    assert {key: _at(final, key) for key in held} == held
    deepspeed_config.DeepSpeedConfig(json.loads(dump_json(final.config)))


# Accepted without a word: what is given -> what the final config holds.
SILENT: list[tuple[str, dict[str, Any]]] = [
    ('{"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1e9}}', {"zero_optimization.stage": 2}),
    ('{"zero_optimization": {"stage": 1, "overlap_comm": true}}', {"zero_optimization.overlap_comm": True}),
    ("{}", {"gradient_clipping": 1.0, "zero_optimization.stage": 0, "zero_allow_untested_optimizer": True}),
    ('{"checkpoint": {"tag_validation": "Ignore"}}', {"checkpoint.tag_validation": "Ignore"}),
]


@pytest.mark.parametrize(("text", "held"), SILENT, ids=[text for text, _ in SILENT])
def test_what_others_trip_over_is_accepted_as_it_is_meant(text: str, held: dict[str, Any]) -> None:
    final = merged(text)

    assert final.warnings == ()
    assert {key: _at(final, key) for key in held} == held
    deepspeed_config.DeepSpeedConfig(json.loads(dump_json(final.config)))


def test_all_warnings_of_one_file_are_told() -> None:
    final = merged('{"seed": 1, "train_batch_size": 7, "zero_optimization": true}', hardware=machine(A100), ranks=2)

    names = [re.sub(r"^my\.json:1:\d+: ", "", warning).split()[0] for warning in final.warnings]
    assert names == ["seed", "zero_optimization", "train_batch_size"]
    assert final.warnings[0].startswith("my.json:1:2: ")


@pytest.mark.parametrize(("ranks", "refused"), [(1, False), (2, False), (4, True), (6, False), (8, True)])
def test_weights_kept_twice_are_kept_by_groups_of_equal_size(ranks: int, refused: bool) -> None:
    text = '{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}'

    if not refused:
        assert merged(text, ranks=ranks).config["zero_optimization"]["zero_hpz_partition_size"] == 3
        return
    with pytest.raises(DeepSpeedConfigError) as caught:
        merged(text, ranks=ranks)
    assert "bad-deepspeed-config: my.json:1:36: " in str(caught.value)
    assert f"= 3 does not divide the number of ranks, {ranks}." in str(caught.value)


def test_torch_autocast_in_fp16_is_right_without_zero_and_in_bf16() -> None:
    for stage, dtype in ((0, "fp16"), (2, "bfloat16")):
        value = {"zero_optimization": {"stage": stage}, "torch_autocast": {"enabled": True, "dtype": dtype}}
        assert merged(json.dumps(value)).config["torch_autocast"]["dtype"] == dtype


def test_a_type_of_the_weights_that_is_the_runs_own_stays_as_it_is_written() -> None:
    final = merged('{"data_types": {"param_dtype": "float32", "grad_accum_dtype": "torch.float32"}}')

    assert final.config["data_types"] == {"param_dtype": "float32", "grad_accum_dtype": "torch.float32"}
    assert not [warning for warning in final.warnings if "data_types" in warning]


_SUMS = ', "data_types": {"grad_accum_dtype": "fp32"}'
_NO_NORM = '{"zero_optimization": {"stage": %d, "compute_grad_norm": false}%s}'
_MASTERS = '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},' + (
    ' "bf16": {"bf16_master_weights_and_grads": true}}'
)


@pytest.mark.parametrize(
    ("text", "taken", "asked", "hardware", "kind", "place"),
    [
        (_MASTERS, (), (), CPU._replace(has_compiler=False), MachineError, "1:86"),
        (_NO_NORM % (2, ""), ("clip_grad=None",), (), CPU, DeepSpeedConfigError, "1:36"),
        (_NO_NORM % (1, _SUMS), ("clip_grad=None",), ("clip_grad=None",), machine(A100), DeepSpeedConfigError, "1:36"),
    ],
    ids=["masters in 16 bits without a compiler", "clipping without a norm", "no norm in bf16 with sums in fp32"],
)
def test_what_another_recipe_or_machine_takes_is_refused(
    text: str,
    taken: tuple[str, ...],
    asked: tuple[str, ...],
    hardware: Hardware,
    kind: type[DeepSpeedConfigError | MachineError],
    place: str,
) -> None:
    assert merged(text, *taken).config["zero_optimization"]["stage"]
    with refused(kind, f"my.json:{place}"):
        merged(text, *asked, hardware=hardware)


def test_gradients_are_scaled_before_a_reduction_that_takes_it() -> None:
    for stage, scatters in ((1, True), (2, False), (3, False)):
        zero = {"stage": stage, "reduce_scatter": scatters}
        value = {"prescale_gradients": True, "gradient_predivide_factor": 2.0, "zero_optimization": zero}
        assert merged(json.dumps(value)).config["prescale_gradients"] is True
