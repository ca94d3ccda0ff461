"""How a run learns that ranks divide its experts: from `--ds` or a JSON; and what may resume from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launch.plans import NOW, PATH, checkpoint
from tests.machine.gpus import A100, CPU, machine
from tests.refused import refused
from tuner.errors import DeepSpeedConfigError, ModelError, RecipeError, TunerError
from tuner.launch import render
from tuner.launch.announcement import announcement
from tuner.launch.resolve import resolve_run
from tuner.launch.resolved_run import Request, ResolvedRun
from tuner.machine.hardware import Hardware
from tuner.machine.topology import LaunchFlags
from tuner.recipes.names import identify
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema.expert_parallel import DIVIDED_BY
from tuner.runs import creation
from tuner.runs.resume_point import IncompatibleStates

MIXTRAL, LORA = "mixtral_8x7b_full_alpaca_e3", "mixtral_8x7b_lora_alpaca_e3"
DS = "autoep_size=2"
SETS = ("accumulative_counts=auto", "global_batch_size=8")
pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def divided(
    *ds: str, recipe: str = MIXTRAL, sets: tuple[str, ...] = (), ranks: int = 4, hardware: Hardware = CPU, **more: Any
) -> ResolvedRun:
    overrides = Overrides(ds=ds, pairs=[("--set", text) for text in (*SETS, *sets)])
    request = Request(identify(recipe), overrides, flags=LaunchFlags(nproc_per_node=ranks), **more)
    return resolve_run(request, PATH, hardware, NOW)


def test_a_flag_and_a_json_mean_the_same_and_every_rank_has_samples_of_its_own(tmp_path: Path) -> None:
    on = '{"zero_optimization": {"stage": 1}, "expert_parallel": {"enabled": true, "autoep_size": 2}}'
    (tmp_path / "on.json").write_text(on)
    (tmp_path / "off.json").write_text(on.replace("true", "false"))

    for run in (divided(DS), divided(DS, deepspeed="zero1"), divided(deepspeed="on.json")):
        assert run.final.config["expert_parallel"] == {"enabled": True, "autoep_size": 2}
        assert run.batch.ranks == 4 and [line for line in announcement(run, ()) if "2 processes (AutoEP)" in line]
    assert not [line for line in announcement(divided(deepspeed="off.json"), ()) if "AutoEP" in line]


def test_auto_takes_a_level_at_which_experts_can_be_divided() -> None:
    run = divided(DS, ranks=2, hardware=machine(A100, A100))

    assert run.final.config["zero_optimization"]["stage"] in (1, 2)


@pytest.mark.parametrize(
    ("ds", "more", "kind", "where"),
    [
        ((DS,), {"deepspeed": "zero3"}, DeepSpeedConfigError, "preset deepspeed_zero3"),
        ((DS,), {"deepspeed": "none", "sets": ("dtype=bf16",)}, DeepSpeedConfigError, "--ds autoep_size=2"),
        ((DS,), {"deepspeed": "zero2_offload"}, DeepSpeedConfigError, "preset deepspeed_zero2_offload"),
        (("autoep_size=3",), {}, RecipeError, DIVIDED_BY),
        (("autoep_size=0",), {}, DeepSpeedConfigError, "--ds autoep_size=0"),
        ((DS,), {"recipe": "tiny_full_sample_e1"}, ModelError, DIVIDED_BY),
        ((DS,), {"recipe": LORA}, RecipeError, "adapter.target_modules"),
        ((DS,), {"recipe": "mixtral_8x7b_qlora_alpaca_e3"}, RecipeError, "quantization"),
    ],
)
def test_what_is_not_right_or_was_not_tried_is_refused(
    ds: tuple[str, ...], more: dict[str, Any], kind: type[TunerError], where: str
) -> None:
    with refused(kind, where):
        divided(*ds, **more)


def test_lora_on_attention_alone_goes_with_divided_experts() -> None:
    attention = "target_modules=['q_proj', 'v_proj']"

    assert divided(DS, recipe=LORA, sets=(attention, "lora_dropout=0.0")).final.config["expert_parallel"]["enabled"]


@pytest.mark.parametrize("then", [(), ("autoep_size=4",)])
def test_a_run_resumes_with_the_same_division_alone(tmp_path: Path, then: tuple[str, ...]) -> None:
    first = divided(DS, deepspeed="zero1", work_dir=tmp_path / "run")
    run = creation.create(tmp_path / "run", render.files(first), resume=False).path
    saved = checkpoint(run, 2)

    resumed = divided(DS, deepspeed="zero1", resume=str(run))
    assert resumed.resume is not None and resumed.resume.path == saved
    with refused(IncompatibleStates, "--resume", 2):
        divided(*then, deepspeed="zero1", resume=str(run))
    with refused(IncompatibleStates, "--resume", 2):
        divided(*then, deepspeed="zero1", resume=str(run), resume_weights=True)
