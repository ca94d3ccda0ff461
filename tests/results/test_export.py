"""An export is whole or not there: what is in it, what its card says, and what a failure leaves behind."""

from __future__ import annotations

import json
import re
import resource
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models.published import write_checkpoint
from tests.results.made import exported
from tests.results.models import CHATML, LLAMA, TIED, TOKENS, with_tokenizer, write_adapter, write_base
from tests.results.runs import checkpoint, finish, make_run
from tuner.results import export as module
from tuner.runs import checkpoints
from tuner.runs.directory import RunDirectory


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return with_tokenizer(write_base(tmp_path / "base", LLAMA))


@pytest.fixture
def run(tmp_path: Path, base: Path) -> RunDirectory:
    return make_run(tmp_path / "run", "tiny_lora_sample_e1", base)


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    """An adapter as a checkpoint has it: a template with marks, and no generation config."""
    return with_tokenizer(write_adapter(tmp_path / "adapter", base))


def card_of(folder: Path) -> tuple[dict[str, Any], str]:
    _, head, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(head), text


def test_an_adapter_goes_out_without_its_base(tmp_path: Path, run: RunDirectory, adapter: Path, base: Path) -> None:
    folder = checkpoint(run, 2, adapter)
    base.rename(tmp_path / "moved")

    done = exported(folder, tmp_path / "out")

    assert done.exit_code == 0, done.output
    assert ") that others cannot load: give" in done.output
    base.parent.joinpath("moved").rename(base)
    # PEFT makes the embedding as long as the tokenizer, which is longer here than the small model's.
    says = [
        AutoPeftModelForCausalLM.from_pretrained(saved).eval()(TOKENS).logits[..., : LLAMA.vocab_size]
        for saved in (adapter, tmp_path / "out")
    ]
    assert torch.equal(*says)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert "{%- generation" in CHATML and "{%- generation" not in tokenizer.chat_template
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in (ends if isinstance(ends, list) else [ends])


def test_the_base_on_the_hub_is_recorded_and_told(tmp_path: Path, run: RunDirectory, adapter: Path) -> None:
    finish(run, adapter)

    done = exported(run.path, tmp_path / "out", "--base", "org/model")

    assert done.exit_code == 0 and "that others cannot load" not in done.output
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/model"
    head, text = card_of(tmp_path / "out")
    assert (head["base_model"], head["base_model_relation"], head["library_name"]) == ("org/model", "adapter", "peft")
    assert "AutoPeftModelForCausalLM" in text


def test_a_base_named_from_here_is_found_from_everywhere(here: Path, adapter: Path) -> None:
    exported(adapter, "out", "--base", "./base")

    recorded = json.loads((here / "out" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert recorded == str(here / "base")


def test_every_tensor_is_counted_and_hashed_in_the_manifest(tmp_path: Path, run: RunDirectory, adapter: Path) -> None:
    finish(run, adapter)

    exported(run.path, tmp_path / "out", "--merge", "--max-shard-size", "20KB")

    assert checkpoints.inspect(tmp_path / "out") is None
    facts = checkpoints.facts(tmp_path / "out")
    found = {name: file for file in (tmp_path / "out").glob("*.safetensors") for name in load_file(file)}
    assert facts.num_tensors == len(found) == 21
    assert {name: entry["file"] for name, entry in (facts.tensors or {}).items()} == {
        n: f.name for n, f in found.items()
    }
    weights = next((tmp_path / "out").glob("model-00002*"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    assert "has changed" in str(checkpoints.inspect(tmp_path / "out"))


def test_the_card_tells_the_runs_facts_and_no_folder_of_this_machine(
    tmp_path: Path, run: RunDirectory, adapter: Path
) -> None:
    folder = checkpoint(run, 2, adapter)

    exported(folder, tmp_path / "my-model", "--merge")

    head, text = card_of(tmp_path / "my-model")
    assert head["tags"] == ["tuner", "trl", "deepspeed", "sft"] and "license" not in head and "base_model" not in head
    for told in ("LoRA, r = 16", "| base model | base |", "16 = 2 x 4 accumulated x 2 ranks", "| GPUs | H100 |"):
        assert told in text
    assert "| training loss | 1.5000 at step 2 |" in text, "not of the steps after it"
    assert "| torch | 2.13.0 |" in text and "# my-model" in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("dtype", "stored"), [(None, torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_whole_model_goes_out_in_its_own_type_or_in_another(
    dtype: str | None, stored: torch.dtype, tmp_path: Path
) -> None:
    model = write_base(tmp_path / "model", TIED)
    run = make_run(tmp_path / "run", "tiny_full_sample_e1", "org/model")
    finish(run, model)

    done = exported(run.path, tmp_path / "out", *(("--dtype", dtype) if dtype else ()))

    assert done.exit_code == 0, done.output
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == stored and loaded.config.use_cache
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=stored)
    assert torch.equal(loaded.eval()(TOKENS).logits, expected.eval()(TOKENS).logits)
    assert card_of(tmp_path / "out")[0]["base_model"] == "org/model"


def test_settings_without_effect_of_a_published_generation_config_go_out_too(
    tmp_path: Path, run: RunDirectory, adapter: Path, base: Path
) -> None:
    published = {"do_sample": False, "temperature": 0.6, "eos_token_id": 1}
    (base / "generation_config.json").write_text(json.dumps(published))
    finish(run, adapter)

    done = exported(run.path, tmp_path / "out", "--merge")

    assert done.exit_code == 0, done.output
    out = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert out["temperature"] == 0.6 and out["do_sample"] is False and out["eos_token_id"] != 1


def test_a_whole_internlm2_goes_out_as_llama(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    run = make_run(tmp_path / "run", "internlm2_chat_7b_full_oasst1_e1", tmp_path / "model")
    finish(run, tmp_path / "model")

    done = exported(run.path, tmp_path / "out", "--as", "llama")

    assert done.exit_code == 0, done.output
    says = [AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "model", tmp_path / "out")]
    assert says[1].config.model_type == "llama"
    torch.testing.assert_close(*(model.eval()(TOKENS).logits for model in says))


def test_a_model_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    model = write_base(tmp_path / "model", LLAMA)
    index = json.loads((model / "model.safetensors.index.json").read_text())
    lost = index["weight_map"]["model.norm.weight"]
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != lost}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))

    done = exported(model, tmp_path / "out")

    assert getattr(done.exception, "exit_code", None) == 2
    assert "of the model's tensors are missing" in str(done.exception)


@pytest.mark.parametrize(
    ("method", "options", "told"),
    [
        ("full", ("--merge",), "nothing to merge"),
        ("full", ("--as", "llama", "--max-shard-size", "much"), "'much' is not a size"),
        ("lora", ("--as", "llama"), "no layout of its own"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    method: str, options: tuple[str, ...], told: str, tmp_path: Path, adapter: Path, base: Path
) -> None:
    done = exported(base if method == "full" else adapter, tmp_path / "out", *options)

    assert getattr(done.exception, "exit_code", None) == 2
    assert told in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_nothing_and_exits_74(tmp_path: Path, adapter: Path) -> None:
    before, limit = sorted(tmp_path.iterdir()), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limit[1]))
    try:
        done = exported(adapter, tmp_path / "new" / "out", "--merge")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    assert getattr(done.exception, "exit_code", None) == 74
    assert re.fullmatch(r"disk: cannot write .*out: File too large\. .*DEST\.", str(done.exception))
    assert sorted(tmp_path.iterdir()) == [*before, tmp_path / "new"]
    assert list((tmp_path / "new").iterdir()) == []


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Stands for a disk that is nearly full.
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(2**20))

    done = exported(adapter, tmp_path / "out")

    assert getattr(done.exception, "exit_code", None) == 74
    assert re.search(r"1.0 MiB are free, and the export needs 64.0 MiB", str(done.exception))
    assert not (tmp_path / "out").exists()


def test_what_came_to_the_destination_meanwhile_is_not_overwritten(
    tmp_path: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = module.write

    def slow(*arguments: Any) -> Any:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("mine")
        return written(*arguments)

    monkeypatch.setattr(module, "write", slow)

    done = exported(adapter, tmp_path / "out")

    assert "nothing was overwritten" in str(done.exception)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    assert not list(tmp_path.glob(".out*"))


def use_of(card: Path) -> str:
    """Return the code that a card shows."""
    return (card / "README.md").read_text().split("```python\n")[1].split("```")[0]


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("merge", [False, True])
def test_the_code_of_the_card_loads_what_was_exported(scores: bool, merge: bool, here: Path, base: Path) -> None:
    adapter = with_tokenizer(write_adapter(here / "adapter", base, scores=scores))

    done = exported(adapter, here / "my-model", *(("--merge",) if merge else ()))

    assert done.exit_code == 0, done.output
    names: dict[str, Any] = {}
    exec(use_of(here / "my-model"), names)  # noqa: S102 (it is what is tested)
    said = names["model"].eval()(TOKENS).logits
    assert said.shape[1:] == ((1,) if scores else (TOKENS.shape[1], said.shape[-1]))


def test_an_internlm2_that_only_tuner_reads_is_told_and_its_card_says_how_to_load_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "base")
    run = make_run(tmp_path / "run", "internlm2_chat_7b_lora_oasst1_e1", tmp_path / "base")
    finish(run, write_adapter(tmp_path / "adapter", tmp_path / "base"))

    alone = exported(run.path, tmp_path / "alone")
    merged = exported(run.path, tmp_path / "merged", "--merge")
    llama = exported(run.path, tmp_path / "llama", "--merge", "--as", "llama")

    assert (
        "cannot load its base as it is. The adapter uses Llama's layer names and" in alone.output
        and "--merge --as llama" in alone.output
    )
    assert "so transformers and vLLM cannot load it" in merged.output and "--as llama" in merged.output
    assert "vLLM cannot load it" not in llama.output
    assert "vLLM cannot load it" not in exported(run.path, tmp_path / "moved", "--base", tmp_path / "llama").output
    taught = "import tuner.models"
    assert [taught in use_of(tmp_path / name) for name in ("alone", "merged", "llama")] == [True, True, False]


def test_a_torn_line_of_metrics_takes_no_result_away(tmp_path: Path, run: RunDirectory, adapter: Path) -> None:
    finish(run, adapter)
    with run.metrics.open("a") as stream:
        stream.write('{"step": 4, "lo')

    done = exported(run.path, tmp_path / "out")

    assert done.exit_code == 0, done.exception
    assert "| training loss | 1.0000 at step 3 |" in card_of(tmp_path / "out")[1]
