"""The parts of each family of vision-language models: which weights are trained, adapted and quantized."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models import vision
from tuner.data.image_encoder import ImageEncoder
from tuner.models.load import load_model
from tuner.models.vision import parts_of
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides


@pytest.mark.parametrize("kind", [*vision.KINDS, *vision.FAMILIES])
def test_a_4_bit_adapter_is_on_the_llm_alone_and_the_other_parts_keep_their_bits(kind: str, tmp_path: Path) -> None:
    folder = vision.make(kind, tmp_path / "model")
    config = load(None, Overrides(model=str(folder), data="my.jsonl", method="qlora")).config

    adapted = load_model(config, str(folder), torch.float32, "cpu", shards=False)

    part_of = parts_of(adapted.get_base_model())
    assert {"vision", "projector", "language"} <= set(part_of.values())
    trained = {part_of[name] for name, weight in adapted.get_base_model().named_parameters() if weight.requires_grad}
    small = {
        part_of[name] for name, weight in adapted.get_base_model().named_parameters() if weight.dtype == torch.uint8
    }
    assert trained == small == {"language"}


def test_what_reads_sound_in_a_gemma_4_is_not_trained(tmp_path: Path) -> None:
    folder = vision.make("gemma4", tmp_path / "model")
    config = load(None, Overrides(model=str(folder), data="my.jsonl", method="full")).config

    model = load_model(config, str(folder), torch.float32, "cpu", shards=False)

    part_of = parts_of(model)
    assert "sound" in part_of.values()
    for name, weight in model.named_parameters():
        assert weight.requires_grad == (part_of[name] != "sound"), name


_CASES = {
    "a frozen tower below an adapter": ("lora", ()),
    "a frozen tower": ("full", [("--set", "model.freeze=('vision',)")]),
    "an adapted tower": ("lora", [("--set", "adapter.vision=True")]),
}


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *((kind, "a frozen tower below an adapter") for kind in (*vision.KINDS, *vision.FAMILIES)),
        *((kind, case) for kind in vision.KINDS for case in [*_CASES][1:]),
    ],
)
def test_recomputation_lets_gradients_into_a_tower_only_if_it_is_trained(kind: str, case: str, tmp_path: Path) -> None:
    folder = vision.make(kind, tmp_path / "model")
    method, pairs = _CASES[case]
    config = load(None, Overrides(model=str(folder), data="my.jsonl", method=method, pairs=pairs)).config
    shards = method == "lora"  # TRL takes reentrant checkpoints there
    trained = load_model(config, str(folder), torch.float32, "cpu", shards=shards)
    model = trained.get_base_model() if method == "lora" else trained
    outputs: list[object] = []
    for name in {name.rpartition(".")[0] for name, part in parts_of(model).items() if part == "vision"}:
        model.get_submodule(name).register_forward_hook(lambda _module, _inputs, output: outputs.append(output))

    trained.enable_input_require_grads()  # as TRL does
    trained.activation_checkpointing_enable()  # as transformers does, which does the first again
    model.base_model.get_image_features(**ImageEncoder.of(vision.processor(folder), None).blank())
    embeddings = model.get_input_embeddings()(torch.tensor([[1, 2, 3]]))

    assert embeddings.requires_grad, "reentrant checkpoints need it, and full training has it"
    has_gradient = any(isinstance(output, torch.Tensor) and output.requires_grad for output in outputs)
    assert has_gradient == (case == "an adapted tower")
