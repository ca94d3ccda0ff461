"""What is measured of a model on meta tensors: its parts, what its layers keep, and how a plan gets it."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.initialization import no_init_weights

from tests.fit.built import built as built_by_transformers
from tests.fit.recipes import lightest
from tests.fit.small import SMALL, name_of, small
from tests.fit.test_parameters import NATIVE
from tests.launch.plans import TINY, made
from tests.machine.gpus import A100, machine
from tests.models.brought import BROUGHT, brought
from tuner.fit.activations import layer_bytes, of_recipe
from tuner.fit.families import FAMILIES
from tuner.fit.parameters import active_parameters, built, count, num_parameters
from tuner.hooks import Measurement
from tuner.lab import measured, measuring
from tuner.lab.compat_meta_tensors import NO_CODE, Memory
from tuner.recipes.schema.architecture import Architecture
from tuner.recipes.schema.measured import Measured, at

pytestmark = pytest.mark.filterwarnings(
    "ignore:The following .*_pattern keys did not match"
)  # PEFT's, of fused experts
WIDE = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 2}
LLAMA = {**WIDE, "model_type": "llama", "num_hidden_layers": 3, "vocab_size": 128, "max_position_embeddings": 64}
LLAMA |= {"tie_word_embeddings": False}


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure, as the plan does, but short rows."""
    monkeypatch.setattr(measuring, "_LENGTHS", (32, 64))


@cache
def answer(facts: str) -> dict[str, Any]:
    """Return what the process that measures writes."""
    found = measuring.measure({"facts": json.loads(facts)})
    return {"architecture": found["architecture"], "measured": found["measured"].model_dump(mode="json")}


def measure(facts: dict[str, Any]) -> Architecture:
    """Return the facts of a model with what was measured of it."""
    found = answer(json.dumps(facts))
    return Architecture.model_validate(found["architecture"]).with_measured(Measured.model_validate(found["measured"]))


def test_a_curve_is_linear_between_and_beyond_its_points() -> None:
    curve = ((100, 10.0), (200, 20.0), (400, 80.0))

    assert [at(curve, row) for row in (50, 100, 150, 300, 500)] == [5.0, 10.0, 15.0, 50.0, 110.0]
    assert at(((100, 7.0),), 5000) == 7.0


HYBRID = {**LLAMA, "model_type": "qwen3_5_text", "head_dim": 32, "full_attention_interval": 3}
HYBRID |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
HYBRID |= {"linear_key_head_dim": 16, "linear_value_head_dim": 32}


@pytest.mark.parametrize("facts", [LLAMA, pytest.param(HYBRID, marks=pytest.mark.long)], ids=["llama", "qwen3_5_text"])
def test_layers_of_a_known_family_keep_what_its_formula_says(
    facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_LENGTHS", (128, 256))  # chunks of linear attention have 64 tokens
    known = Architecture.model_validate(facts)
    found = known.with_measured(Measured.model_validate(answer(json.dumps(facts))["measured"]))
    alone = ("train_dataloader.batch_size=1", "train_dataloader.dataset.packing=False")
    recipe = lightest("tiny_full_sample_e1", *alone)
    adapted = lightest("tiny_lora_sample_e1", *alone, "lora_dropout=0.0")
    assert adapted.adapter is not None
    for of_formula, measured_too in zip(built(known).layers, built(found).layers, strict=True):
        kind = measured_too.measured
        assert kind is not None
        whole, adapter = (layer_bytes(config, known, of_formula, plain_mixers=True) for config in (recipe, adapted))
        low_rank = 2 * adapted.adapter.r * len(of_formula.linears)
        assert at(kind.whole, 128) == pytest.approx(whole, abs=8)
        assert at(kind.adapter, 128) == pytest.approx(adapter - low_rank, abs=8)
    assert num_parameters(found) == num_parameters(known)


LONG = [pytest.param(kind, marks=pytest.mark.long) for kind in ("afmoe", "kimi_linear", "lfm2", "nemotron_h")]


@pytest.mark.parametrize("kind", ["minimax", *LONG])
def test_a_model_without_a_formula_has_as_many_parameters_as_transformers_builds(kind: str) -> None:
    config = brought(kind)

    found = measure(config.to_dict())

    assert num_parameters(found) == built_by_config(config)
    assert active_parameters(found) <= num_parameters(found)
    assert of_recipe(lightest("tiny_full_sample_e1"), found).kept > 0


def built_by_config(config: Any) -> int:
    """Return the parameters of the model that transformers builds."""
    return sum(parameter.numel() for parameter in on_meta_by(config).parameters())


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jobs of the processes that would have measured, with a cache of the test's own."""
    jobs: list[Any] = []

    def run(job: Any) -> Any:
        jobs.append(job)
        return answer(json.dumps(LLAMA))

    monkeypatch.setenv("TUNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measured, "_run", run)
    return jobs


def test_it_is_measured_once_for_a_config(tmp_path: Path, runs: list[Any]) -> None:
    folder = folder_of(tmp_path, LLAMA)
    model = lightest("tiny_full_sample_e1").model.model_copy(update={"path": str(folder)})
    first, second = (measured.measurement_of(model, None) for _ in range(2))
    assert (len(runs), first) == (1, second)
    assert first.architecture is not None and first.architecture.measured is not None

    folder_of(tmp_path, {**LLAMA, "hidden_size": 512})
    measured.measurement_of(model, None)
    assert len(runs) == 2, "another config"


def folder_of(folder: Path, facts: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    return folder


def test_what_cannot_be_measured_is_told_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path / "cache"))
    folder = folder_of(tmp_path, {**LLAMA, "model_type": "of_tomorrow"})
    monkeypatch.setattr(measured, "_run", lambda job: {"why": "ValueError: of_tomorrow"})

    found = made(recipe=TINY, hardware=machine(A100), model=str(folder))

    assert found.fit is None and found.level == "deepspeed_zero3"
    assert any("of_tomorrow" in warning for warning in found.warnings)
    assert not (tmp_path / "cache" / "measured").exists()


def test_a_process_that_ends_without_an_answer_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured.sys, "executable", "/bin/false")

    assert "exit code 1" in measured._run({"facts": {}})["why"]


@pytest.mark.parametrize("answer", ["[1]", "no JSON", '{"x": NaN}'])
def test_an_answer_that_is_no_object_is_a_reason(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, stdout=f"a library's line\n{answer}\n", stderr="")

    monkeypatch.setattr(subprocess, "run", run)

    assert measured._run({"facts": {}}).keys() == {"why"}
    assert "-P" in commands[0], "else Python imports the code of the current folder"


def test_without_a_library_nothing_is_measured_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "version_of", lambda name: None if name == "torch" else "1.0")

    found = measured.measurement_of(lightest("tiny_full_sample_e1").model, Architecture.model_validate(LLAMA))

    assert found.architecture is None and "torch" in found.text


@pytest.mark.parametrize("broken", ["half", "layer without a kind", "curve without a point", "another user's"])
def test_a_kept_file_that_is_broken_or_of_another_user_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[Any], broken: str
) -> None:
    model = lightest("tiny_full_sample_e1").model.model_copy(update={"path": str(folder_of(tmp_path, LLAMA))})
    first = measured.measurement_of(model, None)
    (kept,) = (tmp_path / "cache" / "measured").iterdir()
    text = kept.read_text()
    if broken == "half":
        kept.write_text(text[: len(text) // 2])
    elif broken == "another user's":
        monkeypatch.setattr(os, "getuid", lambda: kept.stat().st_uid + 1)
        monkeypatch.setattr(Path, "stat", stat_of_another(Path.stat))
    else:
        value = json.loads(text)
        value["measured"] |= {"layers": [7]} if broken == "layer without a kind" else {"shared": []}
        kept.write_text(json.dumps(value))

    assert measured.measurement_of(model, None) == first and len(runs) == 2


def stat_of_another(stat: Any) -> Any:
    """Return `Path.stat` where no file is root's."""

    def found(path: Path, **options: Any) -> Any:
        facts = [*stat(path, **options)]
        facts[4] = facts[4] or 1000
        return os.stat_result(facts)

    return found


def test_a_folder_whose_config_names_attention_of_the_hub_is_not_measured(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {**LLAMA, "attn_implementation": "someone/kernels"})

    with pytest.raises(measuring.Unmeasurable, match="someone/kernels"):
        measuring.measure({"path": str(folder)})


def test_a_run_on_gpus_is_planned_with_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("minimax", **BROUGHT["minimax"])
    folder = folder_of(tmp_path, config.to_dict())
    monkeypatch.setattr(
        "tuner.hooks.measurement_of", lambda model, known: Measurement(measure(config.to_dict()), "measured")
    )

    found = made(recipe=TINY, hardware=machine(A100), model=str(folder))

    assert found.fit is not None and found.fit.fits
    assert any(note.endswith("measured") for note in found.notes)
    assert "measured" not in found.recipe.values["architecture"], "a recipe holds the facts alone"


MEASURED = {facts.model_type: facts for facts in NATIVE.values() if facts.model_type not in FAMILIES}
"""The parts of the catalog that no formula counts, one of each type: transformers' defaults complete their facts."""


@pytest.mark.long
@pytest.mark.parametrize("facts", MEASURED.values(), ids=list(MEASURED))
def test_a_part_without_a_formula_is_measured_by_its_facts(facts: Architecture) -> None:
    found = measure(facts.model_dump())

    config = AutoConfig.for_model(**facts.model_dump())
    assert num_parameters(found) == sum(parameter.numel() for parameter in on_meta_by(config).parameters())


def on_meta_by(config: Any) -> Any:
    """Return the model of a config without memory for its weights."""
    with torch.device("meta"), no_init_weights():
        return measuring._build(config, dict(NO_CODE))


WITH_KEYS_OF_THEIR_OWN = {"falcon", "gemma3n_text", "gemma4_text", "gpt2", "minicpm3", "qwen3_5_text"}
"""A measurement returns only the keys that all families have; it is for families without a formula."""
OF_FAMILIES = [
    facts
    for facts in SMALL
    if not (facts.tie_word_embeddings or facts.is_mixture or facts.kv_lora_rank)
    and facts.model_type not in WITH_KEYS_OF_THEIR_OWN
]
"""Experts, and latent heads, have odd sizes here, which torch's grouped product refuses."""


@pytest.mark.long
@pytest.mark.parametrize("facts", OF_FAMILIES, ids=name_of)
def test_a_family_with_a_formula_has_as_many_parameters_when_it_is_measured(facts: Architecture) -> None:
    found = measure(facts.model_dump() | {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0})

    assert num_parameters(found) == num_parameters(facts) == built_by_transformers(facts)


def test_small_models_cover_untied_heads() -> None:
    assert small("llama") in OF_FAMILIES


@pytest.mark.parametrize(("layers", "by_facts"), [(3, False), (5, True)])
def test_a_fact_that_the_recipe_has_otherwise_than_config_json_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int, by_facts: bool
) -> None:
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path / "cache"))
    jobs: list[dict[str, Any]] = []
    monkeypatch.setattr(measured, "_run", lambda job: (jobs.append(job), {"why": "asked"})[1])
    model = lightest("tiny_full_sample_e1").model.model_copy(update={"path": str(folder_of(tmp_path, LLAMA))})

    measured.measurement_of(model, Architecture.model_validate({**LLAMA, "num_hidden_layers": layers}))

    (job,) = jobs
    assert ("facts" in job) is by_facts


def test_measured_experts_in_4_bits_are_counted_as_such() -> None:
    found = measure(AutoConfig.for_model("minimax", **BROUGHT["minimax"]).to_dict())
    packed = lightest("tiny_qlora_sample_e1", "quantization.experts=True").with_values({"architecture": found})
    whole = packed.with_values({"quantization.experts": False})

    assert not found.num_experts and packed.packs_experts and not whole.packs_experts
    assert count(packed, found).quantized > count(whole, found).quantized


META_PAIRS = (((2, 3), (2, 3)), ((2, 1, 3), (4, 1)), ((3,), (2, 3)), ((), (2, 3)), ((5, 1), (1, 7)))


@pytest.mark.parametrize("compute", [torch.add, torch.sub, torch.mul, torch.div])
def test_arithmetic_that_is_worked_out_once_has_its_shape_and_strides(compute: Any) -> None:
    def empty(shape: Any, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    pairs = [(empty(left), empty(other)) for left, other in META_PAIRS]
    pairs += [(empty((4, 3)).mT, empty((3, 4))), (empty((2, 3)), empty((2, 3), torch.float32))]
    memory = Memory()
    for left, other in (*pairs, *pairs):
        with memory:
            found = compute(left, other)
        known = compute(left, other)
        assert (found.shape, found.stride(), found.dtype) == (known.shape, known.stride(), known.dtype)


@pytest.mark.parametrize(
    "compute",
    [
        *(torch.exp, torch.neg, torch.rsqrt),
        *(lambda values: values / 3, lambda values: values + 1e-6, lambda values: 2 * values),
        *(lambda values: values + values, torch.sum, lambda values: values.sum(-1), lambda values: values.sum((0, -2))),
        lambda values: values.sum(1, keepdim=True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_what_is_worked_out_of_one_tensor_has_its_shape_and_strides(compute: Any, dtype: torch.dtype) -> None:
    whole = torch.empty((4, 6, 8), dtype=dtype, device="meta")
    layouts = (whole, whole.mT, whole.permute(2, 0, 1), whole[:, ::2], whole[:1].expand(4, 6, 8), whole[0:0])
    memory = Memory()
    for values in (*layouts, *layouts):
        with memory:
            found = compute(values)
        known = compute(values)
        assert (found.shape, found.stride(), found.dtype) == (known.shape, known.stride(), known.dtype)


def test_a_result_that_is_not_worked_out_again_has_its_type_and_is_counted() -> None:
    memory = Memory()
    with memory:
        values = torch.empty((4, 6), dtype=torch.int64, device="meta")
        results = [values * factor for factor in (2, 2.0, 2, 2.0)]
        same = [torch.ops.aten._unsafe_view(values, (24,)) for _ in range(2)]

    assert [result.dtype for result in results] == [torch.int64, torch.float32] * 2
    assert memory.now == (3 * 8 + 2 * 4) * 24, "a view has no storage of its own"
    assert {view.untyped_storage()._cdata for view in same} == {values.untyped_storage()._cdata}


def test_the_longest_row_is_measured_only_where_python_does_not_loop_over_chunks_of_it() -> None:
    lengths = (128, 1024, 2048)
    found = {}
    for kind, facts in (("attention", LLAMA), ("chunks", HYBRID | {"num_hidden_layers": 1})):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measuring, "_LENGTHS", lengths)
            (layer, *_) = Measured.model_validate(measuring.measure({"facts": facts})["measured"].model_dump()).kinds
        found[kind] = tuple(row for row, _ in layer.whole)

    assert found == {"attention": lengths, "chunks": lengths[:2]}
