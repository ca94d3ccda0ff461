"""`tuner train` takes the steps of a plain PyTorch loop on rows with images, rows of text, and both in one batch."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.e2e.runs import Finished, ok, train
from tests.models import vision
from tests.reference import loop

pytestmark = pytest.mark.e2e

COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "black": (0, 0, 0)}
RECIPE = """
model = dict(path="{model}", images=True)
train_dataloader = dict(
    batch_size=2, dataset=dict(path="{rows}", max_length=200, packing={packing}, pack_length=None)
)
optim_wrapper = dict(
    optimizer=dict(lr=3e-3, betas=(0.9, 0.999), weight_decay=0.1),
    clip_grad=dict(max_norm=100.0),
    accumulative_counts={accumulation},
    dtype="fp32",
)
param_scheduler = dict(type="cosine", warmup_ratio=0.3)
train_cfg = dict(max_epochs=1)
checkpoint = dict(interval=2)
log = dict(interval=1, num_samples=0)
{more}
"""
LORA = "adapter = dict(r=8, lora_alpha=16, lora_dropout=0.0)"
SETTINGS = loop.Settings(
    lr=3e-3, weight_decay=0.1, warmup_ratio=0.3, max_norm=100.0, global_batch=8, num_epochs=1, seed=42
)


def rows(folder: Path) -> list[dict[str, Any]]:
    """Write images, and return rows: the answer is the color of the first of two images, or there is no image.

    Rows of text come together, so that a rank has batches without an image.
    """
    draw = random.Random(0)  # noqa: S311
    for name, color in COLORS.items():
        PIL.Image.new("RGB", (draw.randint(30, 60), draw.randint(30, 60)), color).save(folder / f"{name}.png")
    made: list[dict[str, Any]] = []
    for number in range(24):
        first, second = draw.sample([*COLORS], 2)
        text = [{"role": "user", "content": f"Say {first}."}, {"role": "assistant", "content": f"It is {first}."}]
        asked = f"<image>{number}: Which color comes first?<image>"  # so that no two rows have the same tokens
        with_images = [{"role": "user", "content": asked}, {"role": "assistant", "content": f"It is {first}."}]
        paths = [f"{first}.png", f"{second}.png"]
        made.append({"messages": text} if number % 8 > 3 else {"messages": with_images, "images": paths})
    return made


def written(folder: Path, kind: str, *, accumulation: int, more: str = "", packing: bool = False) -> Path:
    """Write the model, the rows and the recipe."""
    model = vision.make(kind, folder / "model")
    lines = [json.dumps({"images": [], **row}) + "\n" for row in rows(folder)]
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    values = {"model": model, "rows": folder / "rows.jsonl", "accumulation": accumulation, "packing": packing}
    (folder / "recipe.py").write_text(RECIPE.format(**values, more=more), encoding="utf-8")
    return folder / "recipe.py"


class WithPixels(nn.Module):
    """A model that gets the pixels of a sample by its ids."""

    def __init__(self, model: nn.Module, pixels: Mapping[tuple[int, ...], dict[str, Tensor]]) -> None:
        super().__init__()
        self.model, self.pixels = model, pixels

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        return self.model(input_ids=input_ids, **self.pixels[tuple(input_ids[0].tolist())], **options)


def by_hand(folder: Path, kind: str) -> tuple[WithPixels, list[loop.Row]]:
    """Return the model and the samples as transformers' own processor makes them."""
    processor = vision.processor(folder / "model")
    samples, pixels = [], {}
    for row in rows(folder):
        question, answer = (turn["content"] for turn in row["messages"])
        question = question.replace("<image>", vision.image_text(kind))
        before = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        opened = [PIL.Image.open(folder / name) for name in row.get("images", ())]
        images = {"images": opened} if opened else {}
        start = processor(text=[before], **images)["input_ids"][0]
        made = processor(text=[f"{before}{answer}<|im_end|>\n"], **images, return_tensors="pt")
        ids = made["input_ids"][0].tolist()
        assert ids[: len(start)] == start
        trained = [len(start) <= at < len(ids) - 1 for at in range(len(ids))]  # not the line break at the end
        samples.append([(ids, trained)])
        others = ("input_ids", "attention_mask")
        pixels[tuple(ids)] = {name: value for name, value in made.items() if name not in others}
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    return WithPixels(model, pixels), samples


@cache
def losses_by_hand(folder: Path, kind: str) -> list[float]:
    """Return the losses of the plain loop with all weights."""
    model, samples = by_hand(folder, kind)
    return [step.loss for step in loop.train(model, samples, SETTINGS)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each kind, with the model and rows for two ranks."""
    made = {kind: tmp_path_factory.mktemp(kind) for kind in (*vision.KINDS, *vision.FAMILIES)}
    for kind, folder in made.items():
        written(folder, kind, accumulation=2)
    return made


def trained(folder: Path, run: Path, level: str, ranks: int, *more: str) -> Finished:
    sets = ("--set", f"optim_wrapper.accumulative_counts={4 // ranks}", "--deepspeed", level)
    return ok(train(folder / "recipe.py", run, *sets, *more, ranks=ranks))


@cache
def whole_run(folder: Path, level: str, ranks: int) -> Finished:
    return trained(folder, folder / f"{level} on {ranks}", level, ranks)


@pytest.mark.parametrize(
    ("kind", "level", "ranks"),
    [
        ("llava", "zero2", 2),
        *(
            pytest.param(kind, level, ranks, marks=pytest.mark.long)
            for kind, level, ranks in (
                ("llava", "none", 1),
                ("llava", "zero3", 2),
                ("qwen2_5_vl", "zero1", 1),
                ("qwen2_5_vl", "zero2", 2),
                ("qwen2_5_vl", "zero3_offload", 2),
                *((family, "zero2", 2) for family in vision.FAMILIES),
                ("gemma4", "zero3", 2),
            )
        ),
    ],
)
def test_rows_with_and_without_images_train_as_in_a_plain_loop(
    folders: dict[str, Path], kind: str, level: str, ranks: int
) -> None:
    run = whole_run(folders[kind], level, ranks)

    assert run.losses == pytest.approx(losses_by_hand(folders[kind], kind), rel=1e-5)


TOWER_LORA = "dict(r=4, lora_alpha=16)"


def tower_lora_by_hand(folder: Path, kind: str) -> list[float]:
    """Return the losses of the plain loop: PEFT's LoRA on the tower, and all weights of the projector and the LLM."""
    model, samples = by_hand(folder, kind)
    within = r".*vision_tower\..*" if kind == "llava" else r".*visual\.blocks\..*"
    linear = "q_proj|k_proj|v_proj|out_proj|fc1|fc2|qkv|proj|gate_proj|up_proj|down_proj"
    torch.manual_seed(SETTINGS.seed)
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=rf"{within}\.(?:{linear})")
    adapted = get_peft_model(model.model, lora)
    for name, weight in adapted.named_parameters():
        if not re.search(r"vision_tower|visual\.(?!merger)", name):
            weight.requires_grad_(True)
    return [step.loss for step in loop.train(WithPixels(adapted, model.pixels), samples, SETTINGS)]


@pytest.mark.long
@pytest.mark.parametrize("kind", vision.KINDS)
def test_lora_on_the_tower_beside_whole_other_parts_trains_as_peft_does(
    folders: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    lora = ("--set", f"model.vision_lora={TOWER_LORA}")
    alone = trained(folders[kind], tmp_path / "one", "none", 1, *lora, "--set", "max_steps=3")
    # Two ranks that hold parts of the weights are stopped, and go on from their checkpoint.
    recompute = ("--set", "train_cfg.gradient_checkpointing=True")
    sharded = trained(folders[kind], tmp_path / "two", "zero3", 2, *lora, *recompute)
    first = trained(folders[kind], tmp_path / "part", "zero3", 2, *lora, *recompute, "--set", "max_steps=2")
    resumed = trained(folders[kind], tmp_path / "rest", "zero3", 2, *lora, *recompute, "--resume", str(first.path))

    assert alone.losses == pytest.approx(tower_lora_by_hand(folders[kind], kind), rel=1e-5)
    assert sharded.losses == pytest.approx(alone.losses, rel=1e-5)
    assert resumed.losses[-1] == sharded.losses[-1]
    before, of_one_rank, of_two_ranks, rest = (
        dict(AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).named_parameters())
        for path in (folders[kind] / "model", *(run.path / "final" for run in (alone, sharded, resumed)))
    )
    unchanged = {name for name in before if torch.equal(before[name], of_one_rank[name])}
    assert unchanged == {name for name in before if is_own_of_tower(name)}
    for name in before:
        # AdamW makes a step of any gradient, and so of one that is nothing but rounding.
        assert float((of_two_ranks[name] - of_one_rank[name]).detach().abs().mean()) < 1e-5
        assert torch.equal(rest[name], of_two_ranks[name])


def is_own_of_tower(name: str) -> bool:
    """Return whether a weight is the tower's and not of a linear layer, to which LoRA is added."""
    return bool(re.search(r"vision_tower|visual\.(?!merger)", name)) and not re.search(
        r"(?<!embed\.)(proj|fc\d|qkv)\.weight", name
    )


@pytest.mark.long
def test_lora_on_a_gemma_4_trains_as_peft_does_and_leaves_what_reads_sound(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    adapter = ("--set", f"adapter={LORA.partition(' = ')[2]}", "--set", "adapter.vision=True")
    run = trained(folders["gemma4"], tmp_path / "run", "none", 1, *adapter)

    model, samples = by_hand(folders["gemma4"], "gemma4")
    linear = r"language_model\..*(?:_proj|gate|projection)|vision_tower\..*(?:linear|input_proj)|embed_vision\..*tion"
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=rf".*(?:{linear})")
    torch.manual_seed(SETTINGS.seed)
    adapted = get_peft_model(model.model, lora)
    expected = [step.loss for step in loop.train(WithPixels(adapted, model.pixels), samples, SETTINGS)]
    assert run.losses == pytest.approx(expected, rel=1e-5)
    with safe_open(run.path / "final/adapter_model.safetensors", "pt") as file:
        names = list(file.keys())
    assert any("vision_tower" in name for name in names) and not any("audio" in name for name in names)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "bits"), [("llava", "None"), ("qwen2_5_vl", "None"), ("llava", "dict(bits=4)")])
def test_an_adapter_is_on_the_llm_alone_and_trains_alike_on_any_ranks(
    folders: dict[str, Path], kind: str, bits: str, tmp_path: Path
) -> None:
    recompute = ("--set", "train_cfg.gradient_checkpointing=True", "--set", f"adapter={LORA.partition(' = ')[2]}")
    recompute += ("--set", f"quantization={bits}")
    alone = trained(folders[kind], tmp_path / "one", "none", 1, *recompute)
    sharded = trained(folders[kind], tmp_path / "two", "zero3", 2, *recompute)

    assert sharded.losses == pytest.approx(alone.losses, rel=1e-5)
    assert alone.losses[-1] < alone.losses[0]
    with safe_open(alone.path / "final/adapter_model.safetensors", "pt") as file:
        names = list(file.keys())
    assert names and all("language_model" in name for name in names)


@pytest.mark.long
def test_packed_rows_with_images_learn_what_padded_rows_learn(tmp_path: Path) -> None:
    folder = tmp_path / "padded"
    folder.mkdir()
    written(folder, "llava", accumulation=12)  # one step takes all rows
    padded = ok(train(folder / "recipe.py", tmp_path / "one", "--deepspeed", "none", ranks=1))
    more = ("--set", "train_dataloader.dataset.packing=True")
    packed = ok(train(folder / "recipe.py", tmp_path / "two", "--deepspeed", "none", *more, ranks=1))

    assert len(padded.losses) == len(packed.losses) == 1
    assert packed.losses == pytest.approx(padded.losses, rel=1e-5)


def test_frozen_parts_keep_their_weights_and_the_result_loads_in_plain_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    recipe = written(folder, "llava", accumulation=4)
    frozen = ("--set", "model.freeze=('vision', 'language')", "--set", "max_steps=2")
    run = ok(train(recipe, tmp_path / "run", "--deepspeed", "none", *frozen, ranks=1))

    before, after = (
        dict(AutoModelForImageTextToText.from_pretrained(path).named_parameters())
        for path in (folder / "model", run.path / "final")
    )
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert changed and all("multi_modal_projector" in name for name in changed)
    processor = AutoProcessor.from_pretrained(run.path / "final")
    image = PIL.Image.new("RGB", (50, 20))
    assert processor(images=[image], text=["<image>"])["input_ids"][0].count(processor.image_token_id) == 16


@pytest.mark.long
def test_a_run_with_images_goes_on_from_its_checkpoint_bit_for_bit(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["llava"]
    whole = whole_run(folder, "zero2", 2)
    stopped = trained(folder, tmp_path / "part", "zero2", 2, "--set", "max_steps=2")
    resumed = trained(folder, tmp_path / "rest", "zero2", 2, "--resume", str(stopped.path))

    assert resumed.losses[-1] == whole.losses[-1]


def test_the_projector_has_a_learning_rate_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    recipe = written(folder, "llava", accumulation=4)
    rates = ("--set", "lr=1e-12", "--set", "optim_wrapper.optimizer.projector_lr=1e-2", "--set", "max_steps=1")
    run = ok(train(recipe, tmp_path / "run", "--deepspeed", "none", *rates, ranks=1))

    before, after = (
        dict(AutoModelForImageTextToText.from_pretrained(path).named_parameters())
        for path in (folder / "model", run.path / "final")
    )
    apart = {name: float((after[name] - before[name]).detach().abs().max()) for name in after}
    assert all((move > 1e-3) == ("multi_modal_projector" in name) for name, move in apart.items())
