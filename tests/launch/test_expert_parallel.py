"""How a run learns that ranks divide its experts: from `--ds` or a JSON; and what may resume from it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.lab.test_isolation import UNKNOWN
from tests.launch.plans import NOW, PATH, TINY, checkpoint, made
from tests.machine.gpus import A100, CPU, machine
from tests.refused import refused
from tuner import hooks
from tuner.errors import DeepSpeedConfigError, ModelError, RecipeError, TunerError
from tuner.fit.families import FAMILIES
from tuner.fit.splits import data_parallel_ranks
from tuner.hooks import Trial
from tuner.launch import render
from tuner.launch.announcement import announcement
from tuner.launch.checks import model_files
from tuner.launch.resolve import resolve_run
from tuner.launch.resolved_run import Request, ResolvedRun
from tuner.machine.hardware import Hardware
from tuner.machine.topology import LaunchFlags
from tuner.recipes.loading import load
from tuner.recipes.names import identify
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import expert_parallel
from tuner.recipes.schema.architecture import KEEPS_APART, MIXES
from tuner.recipes.schema.expert_parallel import DIVIDED_BY, DIVIDED_TYPES
from tuner.recipes.schema.long_context import SHARED_BY, SHARED_TYPES
from tuner.recipes.schema.tensor_parallel import SPLIT_BY, SPLIT_TYPES
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


KNOWN = frozenset(model_files.known_types(scores=False) | {*FAMILIES} | KEEPS_APART | MIXES)
"""All types that transformers' classes of language models, or tuner, have a name for."""


@pytest.mark.parametrize(
    ("key", "supported"), [(SHARED_BY, SHARED_TYPES), (SPLIT_BY, SPLIT_TYPES), (DIVIDED_BY, DIVIDED_TYPES)]
)
def test_ranks_that_share_anything_are_refused_before_the_start_for_every_other_family(
    key: str, supported: frozenset[str]
) -> None:
    sets = (f"{key}=2",) * (key != DIVIDED_BY)
    config = load(TINY, Overrides(pairs=[("--set", text) for text in sets])).config
    facts = config.architecture
    assert facts is not None

    def accepts(kind: str) -> bool:
        of_kind = config.with_values({"architecture": facts.model_copy(update={"model_type": kind})})
        problems = [*expert_parallel.refusals(of_kind, 2, 2)] if key == DIVIDED_BY else []
        with suppress(TunerError):
            data_parallel_ranks(of_kind, 2)
            return not [error for error in problems if isinstance(error, ModelError)]
        return False

    assert len(KNOWN) > 150
    assert {kind for kind in KNOWN if accepts(kind)} == supported


@pytest.mark.parametrize("values", [{"sequence_parallel_size": 2}, {"autotp_size": 2}])
def test_code_that_comes_with_a_model_shares_nothing_whatever_type_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, int]
) -> None:
    monkeypatch.setattr(hooks, "trial_of", lambda *_: Trial("sdpa", "tried"))
    model = {**UNKNOWN, "model_type": "llama", "auto_map": {"AutoModelForCausalLM": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(model))
    (tmp_path / "own.py").write_text("")
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path / "cache"))
    (key, size) = values.popitem()
    sets = (f"{key}={size}", "accumulative_counts=auto", "global_batch_size=4")

    def found(*more: str) -> list[str | None]:
        run = made(*sets, *more, model=str(tmp_path), flags={"nproc_per_node": 2})
        return [error.where for error in model_files.shared(run) if isinstance(error, TunerError)]

    assert found() == []
    assert found("model.trust_remote_code=True") == [f"train_cfg.{key}"]


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
