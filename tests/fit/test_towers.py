"""The parameters of towers and projectors, the tokens of images, and which of the weights are trained."""

from __future__ import annotations

import weakref
from pathlib import Path

import PIL.Image
import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from tests.fit.recipes import architecture_of
from tests.models import vision
from tuner.data.image_encoder import ImageEncoder
from tuner.fit import activations, advice, parameters
from tuner.fit.levels import Machines
from tuner.models import adapters
from tuner.models.load import load_model
from tuner.models.vision import freeze, parts_of
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import Adapter, Split, VisionLora, VisionPart
from tuner.recipes.schema.architecture import Tower

COUNTED = (*vision.KINDS, "gemma4")


@pytest.mark.parametrize("kind", COUNTED)
def test_a_model_is_counted_exactly_part_by_part(kind: str, tmp_path: Path) -> None:
    folder = vision.make(kind, tmp_path / "model")
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    part_of = parts_of(model)
    by_part = dict.fromkeys(part_of.values(), 0)
    for name, weight in model.named_parameters():
        by_part[part_of[name]] += weight.numel()
    architecture = load(None, Overrides(model=str(folder), data="my.jsonl")).config.architecture
    assert architecture is not None

    counted = parameters.of_tower(architecture)
    if "sound" in by_part:  # an estimate, which is exact for the published sizes
        by_part["sound"] = counted["sound"]
    assert counted == {key: count for key, count in by_part.items() if key != "language"}
    assert parameters.num_parameters(architecture) == sum(by_part.values())


@pytest.mark.parametrize(
    ("frozen", "left"), [((), "all"), (("vision",), "less"), (("vision", "language"), "projector")]
)
def test_frozen_parts_are_not_counted_as_trained(frozen: tuple[str, ...], left: str) -> None:
    config = load("tiny_vision_full_sample_images_e1").config
    config = config.with_values({"model.freeze": frozen})

    counted = parameters.count(config, architecture_of(config))

    total, parts = parameters.num_parameters(architecture_of(config)), parameters.of_tower(architecture_of(config))
    expected = {"all": total, "less": total - parts["vision"], "projector": parts["projector"]}[left]
    assert (counted.trainable, counted.trainable + counted.frozen) == (expected, total)


def test_a_plan_that_does_not_fit_names_smaller_images_where_their_size_decides_their_tokens(tmp_path: Path) -> None:
    flags = {}
    for kind in vision.KINDS:
        folder = vision.make(kind, tmp_path / kind)
        recipe = load(None, Overrides(model=str(folder), data="my.jsonl", method="full")).config
        recipe = recipe.with_values({"train_dataloader.dataset.max_length": 1 << 20})
        recipe = recipe.with_split(Split(1, 1, recompute=True))
        offers = advice.changes(recipe, architecture_of(recipe), Machines(1, 2 << 30))
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
    alive = [held.storage for reference in packed if (held := reference()) is not None]
    del loss
    return sum(
        {storage.data_ptr(): storage.nbytes() for storage in alive if storage.data_ptr() not in weights}.values()
    )


LORA = VisionLora(r=4, lora_alpha=8)
WITH_DROPOUT = LORA.model_copy(update={"lora_dropout": 0.1})


def on_a_gpu(values: torch.Tensor, p: float, training: bool, inplace: bool) -> torch.Tensor:
    """Drop out as a GPU does, with a mask of one byte a number."""
    return torch.native_dropout(values, p, training)[0]


@pytest.mark.parametrize("recompute", [True, False])
def test_a_tower_keeps_nothing_for_the_backward_pass_unless_it_is_trained(recompute: bool) -> None:
    recipe = load("llava_1_5_7b_lora_sample_images_e1").config.with_split(Split(1, 1, recompute=recompute))

    def kept(values: dict[str, object]) -> float:
        return activations.of_tower(recipe.with_values(values), architecture_of(recipe), 576, 2)

    assert kept({}) == 0 < kept({"adapter.vision": True})
    frozen = {"adapter": None, "model.freeze": ("vision",)}
    assert kept(frozen) == 0 < kept({"adapter": None})


@pytest.mark.parametrize("kind", COUNTED)
@pytest.mark.parametrize(("dtype", "weight_bytes"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_what_a_tower_keeps_is_what_autograd_keeps(
    kind: str, dtype: torch.dtype, weight_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "dropout", on_a_gpu)
    folder = vision.make(kind, tmp_path / "model")
    encoder = ImageEncoder.of(vision.processor(folder), None)
    config = AutoConfig.from_pretrained(folder)
    size = (70, 100) if kind == "gemma4" else (64, 64)  # a Gemma 4 fills an image up to its largest number of patches
    picture = PIL.Image.new("RGB", size)
    ids = torch.tensor([encoder.tokenizer(f"a{encoder.text_of(size)}b")["input_ids"]])
    is_image = ids == encoder.image_id
    pixels = {
        name: values.to(dtype) if values.is_floating_point() else values
        for name, values in encoder.pixels_of([picture]).items()
    }
    types = {encoder.token_types: is_image.long()} if encoder.token_types else {}

    def kept(frozen: tuple[VisionPart, ...] = (), lora: VisionLora | None = None) -> int:
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype).train()
        if lora:
            adapters.add_to_tower(model, lora, seed=0)
        freeze(model, frozen)
        return kept_bytes(model, {"input_ids": ids, **pixels, **types})

    recipe = load(None, Overrides(model=str(folder), data="my.jsonl")).config
    recipe = recipe.with_values({"adapter": None}).with_split(Split(1, 1, recompute=False))
    without = kept(("vision",))
    for lora in (None, LORA, WITH_DROPOUT):
        recipe = recipe.with_values({"model.vision_lora": lora})
        estimate = activations.of_tower(recipe, architecture_of(recipe), int(is_image.sum()), weight_bytes)
        assert estimate == pytest.approx(kept(lora=lora) - without, rel=0.05), lora


@pytest.mark.parametrize("kind", vision.KINDS)
@pytest.mark.parametrize(
    "values",
    [
        {"adapter": None, "model.vision_lora": LORA},
        {"adapter": Adapter(r=4, lora_alpha=8, vision=True)},
        {"adapter": Adapter(r=4, lora_alpha=8, vision=True, vision_r=2, use_dora=True)},
        {"adapter": Adapter(r=4, lora_alpha=8, vision=True, modules_to_save=[parameters.PROJECTOR])},
        {"adapter": Adapter(r=4, lora_alpha=8, vision=True, target_modules=["q_proj", "qkv", "fc1", "gate_proj"])},
    ],
)
def test_lora_on_a_tower_has_as_many_weights_as_peft_trains(
    kind: str, values: dict[str, Adapter | VisionLora | None], tmp_path: Path
) -> None:
    folder = vision.make(kind, tmp_path / "model")
    adapter = values["adapter"]
    if kind != "llava" and isinstance(adapter, Adapter) and adapter.modules_to_save:
        return  # the projector of a LLaVA alone has this name
    recipe = load(None, Overrides(model=str(folder), data="my.jsonl")).config.with_values({**values})

    model = load_model(recipe, str(folder), torch.float32, "cpu", shards=False)

    counted = parameters.count(recipe, architecture_of(recipe))
    by_peft = {True: 0, False: 0}
    for weight in model.parameters():
        by_peft[weight.requires_grad] += weight.numel()
    assert (counted.trainable, counted.frozen) == (by_peft[True], by_peft[False])


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
