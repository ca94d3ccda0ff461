"""LLaVA's two stages: a tower and an LLM are joined, the projector learns alone, then adapters learn beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.e2e.runs import Finished, ok, train
from tests.models.test_llava import write_clip
from tuner import assets
from tuner.cli import tuner
from tuner.models import llava, projectors

pytestmark = [pytest.mark.e2e, pytest.mark.long]

RECIPE = "tiny_{method}_sample_images_e1"
TRIAL = ("--max-steps", "3", "--set", "log.num_samples=0", "--set", "val_dataloader=None", "--set", "packing=False")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tower, a first stage on two ranks at ZeRO-3, and a second stage with adapters on one."""
    root = tmp_path_factory.mktemp("llava")
    write_clip(root / "clip")
    first = f"model.vision=dict(path={str(root / 'clip')!r})"
    frozen = ("--set", "model.freeze=('vision', 'language')", "--set", "lr=1e-3")
    stage(root / "first", "full", first, "--deepspeed", "zero3", *frozen, ranks=2, cache=root / "cache")
    second = f"model.vision=dict(path={str(root / 'clip')!r}, projector={str(root / 'first')!r}, pad_to_square=True)"
    adapter = (
        *("--set", "adapter.vision=True", "--set", "adapter.vision_r=2", "--set", "adapter.vision_lora_alpha=8"),
        *("--set", "adapter.modules_to_save=['multi_modal_projector']"),
    )
    stage(root / "second", "lora", second, *adapter, ranks=1, cache=root / "cache")
    of_tower = ("--set", "model.vision_lora=dict(r=2, lora_alpha=8)")
    stage(root / "tower", "full", second, *of_tower, ranks=1, cache=root / "cache")
    return root


def stage(run: Path, method: str, vision: str, *more: str, ranks: int, cache: Path) -> Finished:
    """Train a stage; the ranks of a node share a cache that is empty before the first one."""
    recipe = RECIPE.format(method=method)
    return ok(train(recipe, run, "--set", vision, *TRIAL, *more, ranks=ranks, TUNER_CACHE=str(cache)))


def joined(folder: Path, number: int) -> dict[str, torch.Tensor]:
    """Return the weights of the joined model of the first or the second stage."""
    made = sorted((folder / "cache").glob("llava-v*"), key=lambda joined_folder: joined_folder.stat().st_mtime_ns)
    assert len(made) == 2
    return load_file(made[number] / "model-00001.safetensors")


def test_the_first_stage_trains_the_projector_alone(folder: Path) -> None:
    before, after = joined(folder, 0), load_file(folder / "first/final/model.safetensors")

    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert changed == {f"{llava.PROJECTOR}{name}" for name in projectors.NAMES}


def test_the_second_stage_begins_with_the_projector_of_the_first(folder: Path) -> None:
    trained, begun = load_file(folder / "first/final/model.safetensors"), joined(folder, 1)

    assert all(torch.equal(trained[name], begun[name]) for name in begun)


def test_an_adapter_has_a_rank_for_the_tower_and_the_whole_projector(folder: Path) -> None:
    saved = load_file(folder / "second/final/adapter_model.safetensors")

    ranks = {part: {len(w) for name, w in saved.items() if part in name and "lora_A" in name} for part in PARTS}
    assert ranks == {"vision_tower": {2}, "language_model": {16}, "multi_modal_projector": set()}
    assert sum("multi_modal_projector" in name for name in saved) == len(projectors.NAMES)


PARTS = ("vision_tower", "language_model", "multi_modal_projector")


def test_plain_transformers_answers_a_question_with_an_image(folder: Path, tmp_path: Path) -> None:
    merged = tmp_path / "merged"
    done = CliRunner(env={"TUNER_CACHE": str(folder / "cache")}).invoke(
        tuner, ["export", str(folder / "second"), str(merged), "--merge"], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output

    for place in (folder / "first/final", folder / "tower/final", merged):
        model, report = AutoModelForImageTextToText.from_pretrained(place, output_loading_info=True)
        processor = AutoProcessor.from_pretrained(place)
        assert not any(report.values())
        question: list[dict[str, Any]] = [{"role": "user", "content": content()}]
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
        inputs = processor.apply_chat_template(question, **options)
        assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == 16
        with torch.no_grad():
            assert torch.isfinite(model(**inputs).logits).all()


@pytest.mark.parametrize("layout", ["xtuner", "llava"])
def test_lora_on_the_tower_is_a_part_of_the_result_in_every_layout(layout: str, folder: Path, tmp_path: Path) -> None:
    arguments = ["export", str(folder / "tower"), str(tmp_path / "out"), "--as", layout]
    done = CliRunner(env={"TUNER_CACHE": str(folder / "cache")}).invoke(tuner, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output

    name = "vision_model.encoder.layers.0.mlp.fc1.weight"
    files = sorted((tmp_path / "out").rglob("*.safetensors"))
    written = {key: weight for file in files for key, weight in load_file(file).items() if key.endswith(name)}
    trained, begun = (
        weights[f"{llava.TOWER}{name.partition('.')[2]}"] for weights in (final(folder), joined(folder, 1))
    )
    assert [torch.equal(weight, trained) for weight in written.values()] == [True]
    assert not torch.equal(trained, begun)


def final(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the run with LoRA on the tower alone."""
    return load_file(folder / "tower/final/model.safetensors")


def content() -> list[dict[str, Any]]:
    """Return the first question of the package's rows, in transformers' words."""
    rows = Path(assets.asset("package:sample_images/train.jsonl")).read_text(encoding="utf-8")
    image, text = json.loads(rows.splitlines()[0])["messages"][0]["content"]
    return [{"type": "image", "url": image["image_url"]["url"]}, text]
