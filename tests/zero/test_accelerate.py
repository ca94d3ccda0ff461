"""`--deepspeed FILE` with accelerate's config: every key is used or named, and what it says of the launch counts."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from tests.machine.gpus import CPU, H200, machine
from tests.refused import refused
from tuner.errors import DeepSpeedConfigError, MachineError, Text
from tuner.launch.machines import RunMachines
from tuner.launch.resolve import decide
from tuner.launch.resolved_run import ResolvedRecipe
from tuner.machine.hardware import Hardware
from tuner.machine.launchers import filled, resolve
from tuner.machine.topology import LaunchFlags
from tuner.recipes import loading
from tuner.recipes.recipe import Overrides
from tuner.zero import choice, yaml_configs
from tuner.zero.config import Document
from tuner.zero.lint import check

TINY = "tiny_full_sample_e1"
_BODY = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
downcast_bf16: 'no'
main_training_function: main
rdzv_backend: static
same_network: true
tpu_env: []
use_cpu: false
"""


def _opened(folder: Path, text: str, body: str = _BODY) -> Document:
    path = folder / "accelerate.yaml"
    path.write_text(body + text)
    return choice.open_config(str(path), "--deepspeed")


def _resolved(folder: Path, text: str, *sets: str, hardware: Hardware = CPU, **flags: int) -> ResolvedRecipe:
    document = _opened(folder, text)
    loaded = loading.load(TINY, Overrides(pairs=[("--set", change) for change in sets]))
    topology = resolve(filled(LaunchFlags(**flags), document.launch, {}), {}, len(hardware.gpus))  # type: ignore[arg-type]
    return decide(loaded, document.name, RunMachines.of(hardware, topology))


def _source(module: str) -> str:
    spec = importlib.util.find_spec("accelerate")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0], module).read_text(encoding="utf-8")


def _fields(module: str, *classes: str) -> set[str]:
    found = [node for node in ast.parse(_source(module)).body if isinstance(node, ast.ClassDef)]
    bodies = [statement for node in found if node.name in classes for statement in node.body]
    return {node.target.id for node in bodies if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}


def test_every_key_of_the_installed_accelerate_is_read_or_named_as_without_counterpart() -> None:
    top = _fields("commands/config/config_args.py", "BaseConfig", "ClusterConfig")
    asked = set(re.findall(r'deepspeed_config\["(\w+)"\]', _source("commands/config/cluster.py")))
    plugin = _fields("utils/dataclasses.py", "DeepSpeedPlugin") - {"hf_ds_config"}  # deepspeed_config_file

    assert top <= {*yaml_configs.USED, *yaml_configs.LEFT_OUT}
    assert asked | plugin <= {*yaml_configs.MAPPED, yaml_configs.FILE, *yaml_configs.LEFT_OUT_OF_DEEPSPEED}


def test_a_key_without_counterpart_is_told_with_its_line_and_its_reason(tmp_path: Path) -> None:
    for table, indent in ((yaml_configs.LEFT_OUT, ""), (yaml_configs.LEFT_OUT_OF_DEEPSPEED, "  ")):
        for key, left_out in table.items():
            block = "deepspeed_config:\n  zero_stage: 2\n"
            body = "\n".join(line for line in _BODY.splitlines() if not line.startswith(f"{key}:"))
            document = _opened(tmp_path, f"\n{block}{indent}{key}: something\n", body)

            (warning,) = check(document).warnings
            assert key in warning and Text(left_out.reason) in warning
            assert f"accelerate.yaml:{body.count(chr(10)) + 4}: " in warning


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("zero_stage: 0", {"stage": 0}),
        ("zero_stage: 1", {"stage": 1}),
        ("gradient_clipping: 1.0", {"stage": 2}),
        ("zero_stage: 2\n  offload_optimizer_device: cpu", {"stage": 2, "offload_optimizer.device": "cpu"}),
        (
            "zero_stage: 3\n  offload_optimizer_device: nvme\n  offload_optimizer_nvme_path: /nvme",
            {"stage": 3, "offload_optimizer.nvme_path": "/nvme", "offload_param.device": "none"},
        ),
        (
            "zero_stage: 3\n  offload_optimizer_device: none\n  offload_param_device: cpu\n  zero3_init_flag: true",
            {"stage": 3, "offload_optimizer.device": "none", "offload_param.device": "cpu"},
        ),
    ],
)
def test_the_stage_and_the_devices_are_those_that_it_names(
    tmp_path: Path, text: str, expected: dict[str, object]
) -> None:
    document = _opened(tmp_path, f"deepspeed_config:\n  {text}\n")

    zero = check(document).value["zero_optimization"]
    for key, value in expected.items():
        block, _, inner = key.rpartition(".")
        assert (zero[block] if block else zero)[inner] == value, key
    assert document.preset is None, "the file is the user's"


def test_a_value_of_the_file_says_its_line_and_what_it_beats(tmp_path: Path) -> None:
    final = _resolved(tmp_path, "deepspeed_config:\n  zero_stage: 2\n  offload_optimizer_device: cpu\n").final

    assert final.origins["zero_optimization.offload_optimizer.device"].text.endswith("accelerate.yaml:12")
    assert "preset deepspeed_zero2_offload" in final.origins["zero_optimization.stage"].text
    assert final.config["zero_optimization"]["offload_optimizer"]["pin_memory"] is False, "no GPU is here"


def test_gradient_accumulation_and_clipping_yield_to_a_recipe_aloud(tmp_path: Path) -> None:
    text = "deepspeed_config:\n  zero_stage: 2\n  gradient_accumulation_steps: 3\n  gradient_clipping: 0.5\n"

    made = _resolved(tmp_path, text, "accumulative_counts=auto", "train_dataloader.batch_size=2")

    assert made.final.config["gradient_accumulation_steps"] == 3, "the recipe leaves it open"
    assert any("overrides 0.5" in warning and "accelerate.yaml:13" in warning for warning in made.warnings)


@pytest.mark.parametrize(("word", "dtype"), [("bf16", "bf16"), ("no", "fp32"), ("'no'", "fp32")])
def test_mixed_precision_is_the_compute_type_where_the_recipe_leaves_it_open(
    tmp_path: Path, word: str, dtype: str
) -> None:
    made = _resolved(tmp_path, f"mixed_precision: {word}\n", hardware=machine(H200))

    assert made.precision.dtype == dtype
    assert made.recipe.origins["optim_wrapper.dtype"].text.endswith("accelerate.yaml:10")


def test_a_recipe_that_names_its_compute_type_wins_over_the_file_aloud(tmp_path: Path) -> None:
    made = _resolved(tmp_path, "mixed_precision: bf16\n", "dtype=fp32")

    assert made.precision.dtype == "fp32"
    assert any("--set dtype=fp32" in warning and "accelerate.yaml:10" in warning for warning in made.warnings)


def test_its_processes_are_started_and_a_flag_wins_over_them_aloud(tmp_path: Path) -> None:
    text = "num_machines: 1\nnum_processes: 2\nmachine_rank: 0\n"

    taken, beaten = _resolved(tmp_path, text), _resolved(tmp_path, text, nproc_per_node=3)

    assert taken.topology.world_size == 2
    assert not [warning for warning in taken.warnings if "processes" in warning]
    assert beaten.topology.world_size == 3
    (told,) = [warning for warning in beaten.warnings if "processes on a machine = 3, not 2" in warning]
    assert "accelerate.yaml" in told


def test_more_processes_than_gpus_is_an_error_of_the_file(tmp_path: Path) -> None:
    with refused(MachineError, "accelerate.yaml", "--nproc-per-node 1"):
        _resolved(tmp_path, "num_processes: 8\n", hardware=machine(H200))


def test_several_machines_are_those_of_the_file(tmp_path: Path) -> None:
    text = "num_machines: 2\nnum_processes: 4\nmachine_rank: 1\nmain_process_ip: 10.0.0.1\nmain_process_port: 29400\n"

    topology = _resolved(tmp_path, text).topology

    assert (topology.num_nodes, topology.node_rank, topology.nproc_per_node, topology.world_size) == (2, 1, 2, 4)
    assert (topology.master_addr, topology.master_port) == ("10.0.0.1", 29400)


def test_ranks_without_zero_share_data_alone(tmp_path: Path) -> None:
    body = _BODY.replace("DEEPSPEED", "MULTI_GPU")

    assert check(_opened(tmp_path, "num_processes: 2\n", body)).value["zero_optimization"] == {"stage": 0}


def test_the_json_that_it_names_is_taken_and_must_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "my.json").write_text('{"zero_optimization": {"stage": 3}, "steps_per_print": 7}')
    text = "deepspeed_config:\n  deepspeed_config_file: my.json\n  zero3_init_flag: true\n"

    assert _opened(tmp_path, text).value == {"zero_optimization": {"stage": 3}, "steps_per_print": 7}
    with refused(DeepSpeedConfigError, "accelerate.yaml:13", "my.json:1", "accelerate.yaml:13"):
        _opened(tmp_path, f"{text}  zero_stage: 2\n")


WRONG = [
    ("deepspeed_config:\n  zero_stages: 2\n", "zero_stage'", 11),
    ("num_proceses: 2\n", "num_processes", 10),
    ("deepspeed_config:\n  zero_stage: 4\n", "zero_stage = 4", 11),
    ("deepspeed_config: 3\n", "is not a block", 10),
    ("mixed_precision: half\n", "mixed_precision = 'half'", 10),
    ("num_processes: 3\nnum_machines: 2\n", "cannot be divided", 10),
    ("num_processes: many\n", "not a valid number", 10),
    ("num_processes: !!python/object/apply:os.system [ls]\n", "builds an object", 10),
]


@pytest.mark.parametrize(("text", "said", "line"), WRONG)
def test_what_is_wrong_is_one_error_with_its_line(tmp_path: Path, text: str, said: str, line: int) -> None:
    with refused(DeepSpeedConfigError, f"accelerate.yaml:{line}", said):
        _opened(tmp_path, text)


@pytest.mark.parametrize("kind", ["FSDP", "MEGATRON_LM", "XLA"])
def test_another_way_to_train_is_refused_with_the_preset_to_take(tmp_path: Path, kind: str) -> None:
    with refused(DeepSpeedConfigError, "accelerate.yaml:3", kind, "--deepspeed zero3"):
        _opened(tmp_path, "", _BODY.replace("DEEPSPEED", kind))
