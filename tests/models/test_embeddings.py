"""A tokenizer with more tokens than the embeddings have rows: refused with both numbers, or given the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.made_runs import make_run
from tests.machine.gpus import CPU
from tests.tiny_model import tiny
from tuner.data.text_encoder import TextEncoder
from tuner.errors import ModelError
from tuner.models.integrity import num_rows_of
from tuner.models.load import load_model, load_reference
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides
from tuner.results import loaded_model as results_model
from tuner.results.export import Options, export
from tuner.results.saved import find
from tuner.runs.directory import RunDirectory
from tuner.runs.records import RunStatus

ROWS, NEW = 1664, 3
RESIZED = "model.resize_embeddings=true"
BOTH = "adapter.modules_to_save=['embed_tokens', 'lm_head']"
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def larger() -> Any:
    """Return the tiny model's tokenizer with three tokens more than its embeddings have rows."""
    tokenizer = AutoTokenizer.from_pretrained(tiny())
    tokenizer.add_tokens([f"<new{number}>" for number in range(ROWS + NEW - len(tokenizer))])
    assert len(tokenizer) == ROWS + NEW
    return tokenizer


def made(recipe: str, *pairs: str, tokenizer: Any = None, reference: bool = False) -> Any:
    config = load(recipe, Overrides(pairs=[("--set", pair) for pair in pairs])).config
    how = load_reference if reference else load_model
    vocabulary = TextEncoder(tokenizer or larger()).vocabulary
    return how(config, str(tiny()), torch.float32, "cpu", shards=False, vocabulary=vocabulary)


def test_tokens_without_a_row_are_refused_with_both_numbers() -> None:
    with pytest.raises(ModelError, match=f"ids up to {ROWS + NEW - 1} .*'<new.*has {ROWS} rows"):
        made("tiny_full_sample_e1")


def test_a_special_token_that_nothing_uses_needs_no_row() -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny())
    tokenizer.add_tokens([f"<image{number}>" for number in range(ROWS)], special_tokens=True)

    assert num_rows_of(made("tiny_full_sample_e1", tokenizer=tokenizer)) == ROWS


def test_rows_are_added_to_both_embeddings_and_the_old_ones_stay() -> None:
    model, base = made("tiny_full_sample_e1", RESIZED), AutoModelForCausalLM.from_pretrained(tiny())

    for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        assert weight.shape[0] == ROWS + NEW and weight.requires_grad
        assert torch.equal(weight[:ROWS], base.get_input_embeddings().weight)
    assert model.config.vocab_size == ROWS + NEW


def test_a_tokenizer_that_fits_changes_nothing() -> None:
    assert num_rows_of(made("tiny_full_sample_e1", RESIZED, tokenizer=AutoTokenizer.from_pretrained(tiny()))) == ROWS


def test_a_reference_and_a_second_loading_get_the_same_new_rows() -> None:
    torch.manual_seed(7)
    models = [made("tiny_dpo_full_sample_preferences_e1", RESIZED, reference=kind) for kind in (False, True, False)]

    first, *others = (model.get_input_embeddings().weight for model in models)
    assert all(torch.equal(first, row) for row in others)


@pytest.mark.parametrize(
    ("recipe", "sets", "told"),
    [
        ("tiny_lora_sample_e1", (), "embed_tokens and lm_head would not be trained.*modules_to_save: embed_tokens"),
        ("tiny_lora_sample_e1", ("adapter.modules_to_save=['embed_tokens']",), "new rows of lm_head would not"),
        ("tiny_freeze_sample_e1", (), "would not be trained.*trainable_layers=None"),
    ],
)
def test_new_rows_that_would_stay_as_they_are_drawn_are_refused_by_name(
    recipe: str, sets: tuple[str, ...], told: str
) -> None:
    with pytest.raises(ModelError, match=told):
        made(recipe, RESIZED, *sets)


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.tensor([[5, 6, ROWS + NEW - 1, 7]])).logits
    return found


def result(path: Path, recipe: str, *sets: str) -> tuple[RunDirectory, Any]:
    run, tokenizer = RunDirectory(make_run(path, recipe, "none", RESIZED, *sets)), larger()
    model = made(recipe, RESIZED, *sets, tokenizer=tokenizer)
    for name, weight in model.named_parameters():
        if weight.requires_grad and ("lora_" in name or "modules_to_save" in name):
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(run.final)
    tokenizer.save_pretrained(run.final)
    run.write_status(RunStatus(state="done", exit_code=0, step=1))
    return run, model


def test_a_whole_result_says_the_same_reloaded_and_exported(tmp_path: Path) -> None:
    run, model = result(tmp_path / "run", "tiny_full_sample_e1")

    export(find(run.path), tmp_path / "out", Options())

    torch.testing.assert_close(
        outputs(results_model.load(results_model.spec_of(str(run.path), None), CPU).model), outputs(model)
    )
    torch.testing.assert_close(outputs(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), outputs(model))


def test_an_adapter_with_new_rows_says_the_same_reloaded_merged_and_in_peft(tmp_path: Path) -> None:
    run, model = result(tmp_path / "run", "tiny_lora_sample_e1", BOTH)

    export(find(run.path), tmp_path / "out", Options(merge=True))

    torch.testing.assert_close(
        outputs(results_model.load(results_model.spec_of(str(run.path), None), CPU).model), outputs(model)
    )
    torch.testing.assert_close(outputs(AutoPeftModelForCausalLM.from_pretrained(run.final)), outputs(model))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(outputs(merged), outputs(model), rtol=1e-4, atol=1e-4)
    assert merged.config.vocab_size == ROWS + NEW
