"""The parameters of towers and projectors, the tokens of images, and which of the weights are trained."""

from __future__ import annotations

import weakref
from pathlib import Path

import PIL.Image
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from tests.models import vision
from tuner.data.image_encoder import ImageEncoder
from tuner.fit import activations, advice, parameters
from tuner.fit.levels import Machines
from tuner.models.vision import freeze, parts_of
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import Split
from tuner.recipes.schema.architecture import Tower


def test_a_llava_is_counted_exactly_part_by_part(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(vision.make("llava", tmp_path / "model"))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    by_part = dict.fromkeys(("vision", "projector", "language"), 0)
    part_of = parts_of(model)
    for name, weight in model.named_parameters():
        by_part[part_of[name]] += weight.numel()
    architecture = load("tiny_vision_full_sample_images_e1").config.architecture
    assert architecture is not None

    assert parameters.of_tower(architecture) == {key: by_part[key] for key in ("vision", "projector")}
    assert parameters.num_parameters(architecture) == sum(by_part.values())


@pytest.mark.parametrize(
    ("frozen", "left"), [((), "all"), (("vision",), "less"), (("vision", "language"), "projector")]
)
def test_frozen_parts_are_not_counted_as_trained(frozen: tuple[str, ...], left: str) -> None:
    config = load("tiny_vision_full_sample_images_e1").config
    config = config.with_values({"model.freeze": frozen})
    assert config.architecture is not None

    counted = parameters.count(config, config.architecture)

    total, parts = parameters.num_parameters(config.architecture), parameters.of_tower(config.architecture)
    expected = {"all": total, "less": total - parts["vision"], "projector": parts["projector"]}[left]
    assert (counted.trainable, counted.trainable + counted.frozen) == (expected, total)


def test_a_plan_that_does_not_fit_names_smaller_images_where_their_size_decides_their_tokens(tmp_path: Path) -> None:
    flags = {}
    for kind in vision.KINDS:
        folder = vision.make(kind, tmp_path / kind)
        recipe = load(None, Overrides(model=str(folder), data="my.jsonl", method="full")).config
        recipe = recipe.with_values({"train_dataloader.dataset.max_length": 1 << 20})
        recipe = recipe.with_split(Split(1, 1, recompute=True))
        assert recipe.architecture is not None
        offers = advice.changes(recipe, recipe.architecture, Machines(1, 2 << 30))
        flags[kind] = next(change.flags for change in offers if "max_length" in change.flags)

    length = int(flags["qwen2_5_vl"].partition("dataset.max_length=")[2].partition(" ")[0])
    assert flags["qwen2_5_vl"].endswith(f"dataset.image_max_pixels={length // 2 * (8 * 2) ** 2}")
    assert "image_max_pixels" not in flags["llava"], "each of its images has the same number of tokens"


class Held:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.storage = tensor.detach().untyped_storage()


def kept_bytes(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> int:
    """Return the bytes that autograd keeps after a forward pass, without weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    packed: list[weakref.ref[Held]] = []

    def pack(tensor: torch.Tensor) -> Held:
        held = Held(tensor)
        packed.append(weakref.ref(held))
        return held

    with saved_tensors_hooks(pack, lambda held: pytest.fail("there is no backward pass")):
        loss = model(**inputs).logits.sum()
    alive = [held.storage for one in packed if (held := one()) is not None]
    del loss
    return sum({one.data_ptr(): one.nbytes() for one in alive if one.data_ptr() not in weights}.values())


@pytest.mark.parametrize("kind", vision.KINDS)
@pytest.mark.parametrize(("dtype", "weight_bytes"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_what_a_tower_keeps_is_what_autograd_keeps(
    kind: str, dtype: torch.dtype, weight_bytes: int, tmp_path: Path
) -> None:
    folder = vision.make(kind, tmp_path / "model")
    encoder = ImageEncoder.of(vision.processor(folder), None)
    config = AutoConfig.from_pretrained(folder)
    picture = PIL.Image.new("RGB", (64, 64))
    ids = torch.tensor([encoder.tokenizer(f"a{encoder.text_of((64, 64))}b")["input_ids"]])
    is_image = ids == encoder.image_id
    pixels = {
        name: values.to(dtype) if values.is_floating_point() else values
        for name, values in encoder.pixels_of([picture]).items()
    }
    types = {encoder.token_types: is_image.long()} if encoder.token_types else {}
    bytes_of = []
    for frozen in ((), ("vision",)):
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype).train()
        freeze(model, frozen)
        bytes_of.append(kept_bytes(model, {"input_ids": ids, **pixels, **types}))
    recipe = load(None, Overrides(model=str(folder), data="my.jsonl")).config
    recipe = recipe.with_values({"adapter": None}).with_split(Split(1, 1, recompute=False))
    assert recipe.architecture is not None

    estimate = activations.of_tower(recipe, recipe.architecture, int(is_image.sum()), weight_bytes)

    assert estimate == pytest.approx(bytes_of[0] - bytes_of[1], rel=0.05)


@pytest.mark.parametrize(
    ("tower", "size", "tokens"),
    [
        (Tower(model_type="llava", patch_size=14, image_size=336), (640, 480), 576),
        (Tower(model_type="gemma3", num_tokens=256), (640, 480), 256),
        (Tower(model_type="qwen2_5_vl", patch_size=14, merge_size=2), (560, 280), 200),
    ],
)
def test_the_tokens_of_an_image_follow_from_the_tower(tower: Tower, size: tuple[int, int], tokens: int) -> None:
    assert parameters.tokens_of_image(tower, size) == tokens
