"""A model that no test knows packs only if a small one of its kind keeps the samples of a row apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto import auto_factory
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.each import each
from tests.launch.plans import TINY, checkpoint, made, written_run
from tests.models.brought import brought
from tests.refused import refused
from tuner import hooks
from tuner.data.batches import lays_end_to_end
from tuner.errors import RecipeError
from tuner.hooks import Trial
from tuner.lab import isolation, measured, measuring
from tuner.lab.isolation import Doubtful, attention_that_packs
from tuner.recipes.schema.architecture import KEEPS_APART, MIXES, VARLEN

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
UNKNOWN = {
    "model_type": "of_tomorrow",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}
PACKING = "train_dataloader.dataset.packing"


def packs(kind: str) -> bool:
    try:
        attention_that_packs(brought(kind), None)
    except Doubtful:
        return False
    return True


@each(["dots1", "mpt"])
def test_a_trial_finds_what_tests_know(kind: str) -> None:
    assert packs(kind) == (kind in KEEPS_APART)


@pytest.mark.long
@each(["afmoe", "granitemoehybrid", "kimi_linear", "lfm2", "minimax", "nemotron_h", "recurrent_gemma"])
def test_a_trial_finds_what_tests_know_of_other_mixers_and_masks(kind: str) -> None:
    assert packs(kind) == (kind in KEEPS_APART)


def test_a_large_model_is_tried_as_a_small_one_with_every_kind_of_its_layers() -> None:
    kinds = ["conv"] * 3 + ["full_attention"] * 5
    config = AutoConfig.for_model("lfm2", num_hidden_layers=8, layer_types=kinds)
    tried: list[Any] = []

    def mixes(model: Any) -> None:
        tried.append(model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolation, "mixes", mixes)
        found = attention_that_packs(config, "eager")

    (model,) = tried
    assert found == "eager" == model.config._attn_implementation
    assert model.config.layer_types == ["conv"] * 3 + ["full_attention"]
    assert model.num_parameters() < 5_000_000 < 32 * config.hidden_size**2


@pytest.mark.parametrize("attention", ["flash_attention_2", "varlen"])
def test_attention_that_a_cpu_cannot_compute_is_in_doubt(attention: str) -> None:
    with pytest.raises(Doubtful, match=attention):
        attention_that_packs(brought("lfm2"), attention)


def test_a_model_that_chooses_its_tokens_is_in_doubt_whatever_short_rows_show() -> None:
    with pytest.raises(Doubtful, match="chooses"):
        attention_that_packs(brought("deepseek_v32"), None)


def test_no_weight_of_a_trial_is_at_0_where_it_would_hide_what_it_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("llama", hidden_size=32, num_hidden_layers=2, vocab_size=64, intermediate_size=32)
    init = LlamaRMSNorm.__init__

    def gated(norm: Any, *args: Any, **options: Any) -> None:
        init(norm, *args, **options)
        norm.gate = torch.nn.Parameter(torch.zeros(32))
        norm.scale = torch.nn.Parameter(torch.zeros(()))

    monkeypatch.setattr(LlamaRMSNorm, "__init__", gated)
    model = isolation._built(config, None, torch.float64)

    assert [name for name, weight in model.named_parameters() if not weight.all()] == []


def test_a_trial_that_sees_no_mix_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_SEEN", 1e6)

    with pytest.raises(Doubtful, match="shows nothing"):
        attention_that_packs(brought("dots1"), None)


def noted_jobs(folder: Path, monkeypatch: pytest.MonkeyPatch, answer: Any = None) -> list[Any]:
    """Let every trial find this, or that rows pack; return the list that gets what each was asked."""
    monkeypatch.setenv("TUNER_CACHE", str(folder / "cache"))
    jobs: list[Any] = []

    def run(job: Any) -> Any:
        jobs.append(job)
        return answer or {"apart": "sdpa", "seconds": 1.0}

    monkeypatch.setattr(measured, "_run", run)
    return jobs


def test_what_a_trial_found_is_kept_by_config_and_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = noted_jobs(tmp_path, monkeypatch)
    run = made(recipe=TINY, model=str(folder_of(tmp_path))).recipe.config.model

    both = [measured.trial_of(run) for _ in range(2)]
    measured.trial_of(run.model_copy(update={"attn_implementation": "eager"}))

    assert [found.attention for found in both] == ["sdpa", "sdpa"]
    assert [job["attention"] for job in jobs] == [None, "eager"]


def test_a_trial_is_taken_again_with_other_code_of_the_model_or_another_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = noted_jobs(tmp_path, monkeypatch)
    monkeypatch.setattr(measured, "_trusted", lambda model: {})
    here = made(recipe=TINY, model=str(folder_of(tmp_path))).recipe.config.model
    jobs.clear()
    trusted = [here.model_copy(update={"trust_remote_code": True, "revision": digit * 40}) for digit in "aba"]

    for model in trusted:
        measured.trial_of(model)
    assert len(jobs) == 2
    monkeypatch.setattr(measured, "version_of", lambda name: "0" if name == "trl" else "1")
    measured.trial_of(trusted[0])
    monkeypatch.setattr(measured, "version_of", lambda name: "1")
    measured.trial_of(trusted[0])
    assert len(jobs) == 4


@pytest.mark.parametrize(
    "answer", [{"seconds": 1.0}, {"apart": "sdpa", "doubt": "both", "seconds": 1.0}, {"why": "time"}]
)
def test_an_answer_that_is_no_yes_is_a_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    jobs = noted_jobs(tmp_path, monkeypatch, answer)
    model = made(recipe=TINY, model=str(folder_of(tmp_path))).recipe.config.model
    jobs.clear()

    found, again = (measured.trial_of(model) for _ in range(2))

    assert found == again and len(jobs) == 1, "one command waits for it once"
    assert found.attention is None and found.text
    assert not (tmp_path / "cache" / "measured").exists()


def folder_of(folder: Path, **more: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**UNKNOWN, **more}), encoding="utf-8")
    return folder


def test_rows_are_packed_where_a_trial_shows_that_samples_stay_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "trial_of", lambda *_: Trial("eager", "tried today"))

    found = made(recipe=TINY, model=str(folder_of(tmp_path)))

    model = found.recipe.config.model
    assert found.recipe.config.train_dataloader.dataset.packing
    assert (model.packs_with, model.attn_implementation) == ("eager", "eager")
    assert any("tried today" in note for note in found.notes)
    assert "tried today" in str(found.recipe.origins["model.packs_with"].place)


def test_rows_are_padded_where_a_trial_shows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "trial_of", lambda *_: Trial(None, "it took longer than 120 s"))
    folder = str(folder_of(tmp_path))

    found = made(recipe=TINY, model=folder)

    assert not found.recipe.config.train_dataloader.dataset.packing
    assert found.recipe.config.model.packs_with is None
    assert any("longer than 120 s" in note for note in found.notes)
    with refused(RecipeError, f"--set {PACKING}=True", PACKING):
        made(f"{PACKING}=True", recipe=TINY, model=folder)


def test_a_run_whose_rows_were_padded_goes_on_so_though_another_trial_would_pack_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "trial_of", lambda *_: Trial(None, "it took longer than 120 s"))
    (tmp_path / "model").mkdir()
    model = str(folder_of(tmp_path / "model"))
    run = written_run(tmp_path / "run", model=model).path
    checkpoint(run, 2)
    monkeypatch.setattr(hooks, "trial_of", lambda *_: pytest.fail("tried"))

    resumed = made(model=model, work_dir=run, resume="auto").recipe.config

    assert not resumed.train_dataloader.dataset.packing and resumed.model.packs_with is None
    monkeypatch.setattr(hooks, "trial_of", lambda *_: Trial("sdpa", "tried"))
    with refused(RecipeError, f"{PACKING} (--set {PACKING}=True)"):
        made(f"{PACKING}=True", model=model, work_dir=run, resume="auto")


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_what_tests_know_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(hooks, "trial_of", lambda *_: pytest.fail("tried"))
    folder = folder_of(tmp_path, model_type=kind, ffn_dim=64)

    found = made("model.packs_with=eager", recipe=TINY, model=str(folder))

    assert found.recipe.config.train_dataloader.dataset.packing == (kind in KEEPS_APART)
    assert found.recipe.config.model.packs_with is None, "a user's word is no trial"


@pytest.mark.parametrize(("trusts", "padded"), [(True, True), (False, False)])
def test_code_that_comes_with_a_model_is_tried_whatever_type_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusts: bool, padded: bool
) -> None:
    monkeypatch.setattr(hooks, "trial_of", lambda *_: Trial(None, "samples see each other"))
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    folder = folder_of(tmp_path / "model", model_type="llama", auto_map={"AutoModelForCausalLM": "own.Own"})
    (folder / "own.py").write_text("")

    found = made(*(["model.trust_remote_code=True"] if trusts else []), model=str(folder))

    assert found.recipe.config.train_dataloader.dataset.packing is not padded
    assert (found.recipe.config.model.attn_implementation == VARLEN) is not padded


def test_code_of_another_repository_is_that_of_the_commit_which_the_user_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"AutoModelForCausalLM": "someone/else--own.Own"}
    config = AutoConfig.for_model("llama", auto_map=named)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: config)
    asked: list[Any] = []

    def found(*where: str, code_revision: str | None = None, **_: Any) -> Any:
        asked.append((*where, code_revision))
        raise OSError

    monkeypatch.setattr(auto_factory, "get_class_from_dynamic_module", found)
    job = {"path": str(tmp_path), "options": {"trust_remote_code": True, "code_revision": "a" * 40}}

    for find in (measuring.measure, measuring.tried):
        with pytest.raises(OSError):
            find({**job, "attention": None})

    assert {*asked} == {("own.Own", "someone/else", "a" * 40)}


def test_what_is_tried_is_what_ranks_load_and_not_the_facts_of_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = noted_jobs(tmp_path, monkeypatch, {"why": "asked"})
    folder = str(folder_of(tmp_path))

    monkeypatch.setattr(hooks, "trial_of", measured.trial_of)
    made("architecture.num_hidden_layers=3", model=folder)

    assert [job.get("path") for job in jobs] == [folder]


def test_batches_of_a_model_that_its_own_code_computes_are_padded() -> None:
    model = AutoModelForCausalLM.from_config(brought("helium"))
    model.config.model_type = "llama"
    assert lays_end_to_end(model)

    model.model.__class__ = type("Own", (type(model.model),), {"__module__": "transformers_modules.folder.own"})

    assert not lays_end_to_end(model) and lays_end_to_end(model, is_tried=True)


def test_an_objective_whose_samples_share_no_row_tries_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "trial_of", lambda *_: pytest.fail("tried"))

    found = made(recipe="tiny_dpo_full_sample_preferences_e1", model=str(folder_of(tmp_path)))

    assert found.recipe.config.model.packs_with is None


def test_no_type_is_in_both_tables() -> None:
    assert not KEEPS_APART & MIXES
