"""What 'auto' means for a GPU's kernels; a fake driver and a fake list of packages stand in for GPUs."""

from __future__ import annotations

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

import tuner.models  # noqa: F401 (it registers InternLM2)
from tests.launch.plans import NOW, PATH, TINY, made
from tests.machine.gpus import A100, CPU, H200, T4, machine
from tests.refused import refused
from tuner.errors import RecipeError
from tuner.fit.families import FAMILIES
from tuner.launch import kernels
from tuner.launch.checks import gpus
from tuner.launch.resolve import resolve_run
from tuner.launch.resolved_run import Request
from tuner.machine import libraries
from tuner.machine.hardware import Hardware
from tuner.recipes.names import identify
from tuner.recipes.recipe import Overrides

LLAMA = "llama3_1_8b_lora_alpaca_e3"
GEMMA_WITH_IMAGES = "gemma3_4b_it_vision_lora_sample_images_e1"
FLASH_2 = ("model.attn_implementation=flash_attention_2",)
KINDS_WITH_IMAGES = {"gemma3", "gemma4", "internvl", "llava", "llava_next", "qwen2_5_vl", "qwen3_vl", "smolvlm"}
WITH_FLASH_BEFORE_5_24 = {"gemma3", "gemma4"}
BOTH = ("flash_attn", "flash_attn_interface", "liger_kernel")


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the packages that are there beside the real ones; a test adds to them."""
    there: set[str] = set()
    monkeypatch.setattr(libraries, "is_installed", there.__contains__)
    return there


@pytest.mark.parametrize(
    ("hardware", "installed", "sets", "attention", "why"),
    [
        (machine(H200), BOTH, (), "flash_attention_3", "installed"),
        (machine(H200), ("flash_attn",), (), "flash_attention_2", "installed"),
        (machine(A100), BOTH, (), "flash_attention_2", "installed"),
        (machine(A100, H200), BOTH, (), "flash_attention_2", "installed"),
        (machine(A100), (), (), "varlen", "torch's flash attention"),
        (machine(A100), (), ("torch_compile=True",), "sdpa", "torch.compile"),
        (machine(A100), (), ("model.images=True",), "sdpa", "not tested with this model"),
        (machine(T4), BOTH, (), "sdpa", "compute capability 8.0"),
        (machine(A100, T4), (), (), "sdpa", "compute capability 8.0"),
        (CPU, BOTH, (), "varlen", "one by one"),
        (CPU, BOTH, ("architecture.model_type=gpt2",), "varlen", "one by one"),
        (machine(A100), BOTH, ("dtype=fp32",), "sdpa", "needs bf16 or fp16"),
        (machine(A100), BOTH, ("architecture.head_dim=512",), "sdpa", "up to 256"),
        (machine(A100), (), ("architecture.model_type=gemma2",), "eager", "not tested with this model"),
        (machine(A100), BOTH, ("architecture.model_type=gemma2",), "flash_attention_2", "installed"),
        (machine(A100), BOTH, ("architecture.model_type=mamba",), None, "not tested with this model"),
    ],
)
def test_auto_takes_the_newest_flash_attention_that_gpus_packages_type_and_model_have(
    packages: set[str], hardware: Hardware, installed: tuple[str, ...], sets: tuple[str, ...], attention: str, why: str
) -> None:
    packages |= set(installed)

    found = made(*sets, recipe=LLAMA, hardware=hardware, ignore_fit=True)

    assert found.recipe.config.model.attn_implementation == attention
    assert why in found.recipe.origins["model.attn_implementation"].text
    assert list(gpus.attention(found)) == []


@pytest.mark.parametrize("hardware", [machine(H200, H200), CPU])
def test_attention_with_sinks_is_torchs_where_no_package_has_it(packages: set[str], hardware: Hardware) -> None:
    packages |= set(BOTH)

    for ranks in (1, 2):  # one alone, and two that share samples
        sets = (f"sequence_parallel_size={ranks}", "accumulative_counts=auto", "global_batch_size=16")
        flags = {"nproc_per_node": ranks}
        recipe = "gpt_oss_20b_lora_alpaca_e3"
        found = made(*sets, recipe=recipe, hardware=hardware, flags=flags, ignore_fit=True)

        assert found.recipe.config.model.attn_implementation == "varlen"
        assert found.recipe.config.train_dataloader.dataset.packing
        assert list(gpus.attention(found)) == []


def test_losses_of_whole_samples_and_ranks_that_share_them_keep_sdpa(packages: set[str]) -> None:
    found = [
        made(recipe="llama3_1_8b_dpo_lora_ultrafeedback_binarized_e1", hardware=machine(A100), ignore_fit=True),
        made("sequence_parallel_size=2", recipe=LLAMA, hardware=machine(A100, A100), ignore_fit=True),
    ]

    assert [run.recipe.config.model.attn_implementation for run in found] == ["sdpa", "sdpa"]


@pytest.mark.parametrize(
    ("version", "attention"), [("2.11.0", "sdpa"), ("2.12.0+cu130", "varlen"), ("2.9.1", "sdpa"), ("3.0", "varlen")]
)
def test_torch_brings_this_attention_from_2_12_on(
    packages: set[str], monkeypatch: pytest.MonkeyPatch, version: str, attention: str
) -> None:
    monkeypatch.setattr(libraries, "version_of", lambda _: version)

    assert made(recipe=LLAMA, hardware=machine(A100)).recipe.config.model.attn_implementation == attention


@pytest.mark.parametrize("hardware", [machine(T4), machine(A100)])
def test_this_attention_is_refused_by_name_where_it_would_not_compute_the_model(hardware: Hardware) -> None:
    for sets in (("architecture.model_type=gemma2",), ("dtype=fp32",)):
        found = made("model.attn_implementation=varlen", *sets, recipe=LLAMA, hardware=hardware, ignore_fit=True)
        assert [error.code for error in gpus.attention(found)] == ["bad-recipe"]


@pytest.mark.parametrize(
    ("hardware", "installed", "takes"),
    [(machine(A100), BOTH, True), (machine(A100), (), False), (CPU, BOTH, False)],
)
def test_auto_takes_ligers_kernels_where_there_are_gpus_and_the_package(
    packages: set[str], hardware: Hardware, installed: tuple[str, ...], takes: bool
) -> None:
    packages |= set(installed)

    found = made(recipe=TINY, hardware=hardware)

    assert found.recipe.config.model.use_liger_kernel is takes
    assert found.recipe.origins["model.use_liger_kernel"].text.startswith("derived: ")


@pytest.mark.parametrize(
    ("recipe", "ds"), [(LLAMA, "autotp_size=2"), ("qwen3_30b_a3b_full_alpaca_e3", "autoep_size=2")]
)
def test_ranks_that_share_a_model_have_no_ligers_kernels(packages: set[str], recipe: str, ds: str) -> None:
    packages |= set(BOTH)
    sets = ("lora_dropout=0.0",) * (recipe == LLAMA)

    def run(*more: str) -> bool | str:
        overrides = Overrides(ds=[ds], pairs=[("--set", text) for text in (*sets, *more)])
        request = Request(identify(recipe), overrides, ignore_fit=True)
        return resolve_run(request, PATH, machine(H200, H200), NOW).recipe.config.model.use_liger_kernel

    assert run() is False
    with refused(RecipeError, "model.use_liger_kernel"):
        run("use_liger_kernel=True")


@pytest.mark.parametrize(("hardware", "lacks"), [(CPU, "need a GPU"), (machine(A100), "is not installed")])
def test_ligers_kernels_asked_for_where_they_cannot_be_are_refused(
    packages: set[str], hardware: Hardware, lacks: str
) -> None:
    (error,) = gpus.liger(made("use_liger_kernel=True", recipe=TINY, hardware=hardware))

    assert lacks in str(error) and "use_liger_kernel=False" in str(error)


def test_the_models_without_flash_attention_are_those_that_transformers_names() -> None:
    without = set()
    for kind in {*FAMILIES, *KINDS_WITH_IMAGES}:
        mapping = MODEL_FOR_CAUSAL_LM_MAPPING if kind in FAMILIES else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        model = mapping[type(AutoConfig.for_model(kind))]
        if not model._supports_flash_attn or model._compatible_flash_implementations:
            without.add(kind)

    assert without | WITH_FLASH_BEFORE_5_24 == kernels.WITHOUT_FLASH


@pytest.mark.parametrize(("recipe", "has"), [("gemma3_4b_it_lora_sample_e1", True), (GEMMA_WITH_IMAGES, False)])
def test_flash_attention_is_not_for_images_whose_tokens_see_each_other(
    packages: set[str], recipe: str, has: bool
) -> None:
    packages |= set(BOTH)

    chosen, named = (made(*sets, recipe=recipe, hardware=machine(A100), ignore_fit=True) for sets in ((), FLASH_2))

    assert (chosen.recipe.config.model.attn_implementation == "flash_attention_2") is has
    assert [error.code for error in gpus.attention(named)] == ([] if has else ["bad-recipe"])
