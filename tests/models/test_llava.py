"""A LLaVA made of an LLM and a CLIP: the same weights in plain transformers, and errors where they do not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, CLIPConfig, CLIPModel

from tests.models import published
from tests.refused import refused
from tests.tiny_model import tiny
from tuner import remote_code
from tuner.cli import tuner
from tuner.errors import ModelError
from tuner.files import sha256
from tuner.models import llava, projectors
from tuner.models.load import pretrained_path
from tuner.recipes.schema import Model, Vision
from tuner.results import llava_layouts
from tuner.results.base_model import model_of
from tuner.runs import checkpoints

SIDE, PATCH = 32, 8
TEXT = "The capital of a country"
IDS = {"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 3}


def write_clip(folder: Path, *, vision_only: bool = False, pickled: bool = False) -> Path:
    """Write a small CLIP with random weights: whole, its vision half alone, or as a pickle of tensors."""
    torch.manual_seed(1)
    of_text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    of_vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**of_text, "vocab_size": 50, "projection_dim": 16},
        vision_config={**of_vision, "image_size": SIDE, "patch_size": PATCH, "projection_dim": 16},
        projection_dim=16,
    )
    whole = CLIPModel(config)
    (whole.vision_model if vision_only else whole).save_pretrained(folder)
    if pickled:
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    sizes = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    transformers.models.clip.image_processing_pil_clip.CLIPImageProcessorPil(**sizes).save_pretrained(folder)
    return folder


def write_llm(kind: str, folder: Path) -> Path:
    """Write a small LLM with random weights: one that ties its embeddings, one that does not, one of InternLM."""
    if kind == "internlm2":
        published.write_checkpoint(folder)
        return folder
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny())
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, **IDS}
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=len(tokenizer), num_key_value_heads=2, tie_word_embeddings=kind == "qwen3", **sizes
    )
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="100kB")
    tokenizer.save_pretrained(folder)
    return folder


def joined(llm: Path, tower: Path, *, trusts: bool = False, **vision: Any) -> Model:
    """Return the block `model` of a recipe that joins the two."""
    block = Vision(path=str(tower), **vision)
    return model_of(str(llm), images=True).model_copy(update={"vision": block, "trust_remote_code": trusts})


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small CLIP."""
    return write_clip(tmp_path_factory.mktemp("tower") / "clip")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama."""
    return write_llm("llama", tmp_path_factory.mktemp("llm") / "llama")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "phi3", "internlm2"])
def test_plain_transformers_loads_the_joined_model_with_the_weights_of_both(
    kind: str, clip: Path, tmp_path: Path
) -> None:
    llm = write_llm(kind, tmp_path / "llm")

    folder = pretrained_path(joined(llm, clip))

    model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    processor = AutoProcessor.from_pretrained(folder)
    assert not type(processor.tokenizer).__module__.startswith("tuner")
    own = transformers.AutoTokenizer.from_pretrained(llm)
    ids = processor.tokenizer(TEXT, return_tensors="pt")["input_ids"]
    assert ids.tolist() == own(TEXT, return_tensors="pt")["input_ids"].tolist()
    rows = AutoModelForCausalLM.from_pretrained(llm).eval()
    with torch.no_grad():
        expected, logits = rows(ids).logits, model.eval()(ids).logits
    assert torch.equal(logits[..., : expected.shape[-1]], expected)
    pixels = torch.rand(1, 3, SIDE, SIDE)
    tower = CLIPModel.from_pretrained(clip).eval().vision_model
    with torch.no_grad():
        seen, wanted = (seeing(pixels).last_hidden_state for seeing in (model.model.vision_tower, tower))
    assert torch.equal(seen, wanted)


def test_an_image_has_a_token_with_a_row_and_as_many_places_as_features(clip: Path, llama: Path) -> None:
    folder = pretrained_path(joined(llama, clip))

    processor, model = AutoProcessor.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder)
    inputs = processor(images=PIL.Image.new("RGB", (40, 50)), text="<image>\nWhy?", return_tensors="pt")
    assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == (SIDE // PATCH) ** 2
    assert model.config.image_token_id < model.get_input_embeddings().weight.shape[0]
    assert model.get_input_embeddings().weight.shape[0] % 64 == 0
    with torch.no_grad():
        assert torch.isfinite(model(**inputs).logits).all()


def test_a_tower_is_a_whole_clip_its_vision_half_or_a_pickle_of_tensors(
    clip: Path, llama: Path, tmp_path: Path
) -> None:
    half = write_clip(tmp_path / "half", vision_only=True)
    pickled = write_clip(tmp_path / "pickled", pickled=True)

    made = [
        AutoModelForImageTextToText.from_pretrained(pretrained_path(joined(llama, folder_of_tower, trusts=True)))
        for folder_of_tower in (clip, half, pickled)
    ]

    first, *others = (model.state_dict() for model in made)
    assert all(torch.equal(weights[name], first[name]) for weights in others for name in first)


def test_a_new_projector_depends_on_its_seed_alone(clip: Path, llama: Path) -> None:
    torch.manual_seed(3)
    first = projectors.read_projector(Path(pretrained_path(joined(llama, clip, seed=5))), trusts_pickles=False)
    again = projectors.read_projector(
        Path(pretrained_path(joined(llama, clip, seed=5, pad_to_square=True))), trusts_pickles=False
    )
    other = projectors.read_projector(Path(pretrained_path(joined(llama, clip, seed=6))), trusts_pickles=False)

    assert all(torch.equal(first[name], again[name]) for name in projectors.NAMES)
    assert not torch.equal(first["linear_1.weight"], other["linear_1.weight"])


def test_nothing_is_made_twice_or_without_need(clip: Path, llama: Path) -> None:
    block = joined(llama, clip)

    assert pretrained_path(block) == pretrained_path(block) != pretrained_path(joined(llama, clip, pad_to_square=True))
    assert not list(Path(pretrained_path(joined(llama, clip, seed=9), weights=False)).glob("*.safetensors"))
    whole = Path(pretrained_path(block))
    assert pretrained_path(block.model_copy(update={"path": str(whole)})) == str(whole)


def test_padding_keeps_the_whole_image_where_a_crop_does_not(clip: Path, llama: Path) -> None:
    image = PIL.Image.new("RGB", (64, 32))
    image.paste((255, 0, 0), (0, 0, 8, 32))

    seen = {
        pads: AutoProcessor.from_pretrained(pretrained_path(joined(llama, clip, pad_to_square=pads))).image_processor(
            image, return_tensors="pt"
        )["pixel_values"][0, 0]
        for pads in (False, True)
    }

    assert seen[False].std() < 1e-3
    assert seen[True].std() > 0


NAMES = {"linear_1.weight": (64, 32), "linear_1.bias": (64,), "linear_2.weight": (64, 64), "linear_2.bias": (64,)}
LAYOUTS = {
    "transformers": "multi_modal_projector.linear_{number}.{key}",
    "a run": "model.multi_modal_projector.linear_{number}.{key}",
    "an adapter": "base_model.model.model.multi_modal_projector.linear_{number}.{key}",
    "LLaVA": "model.mm_projector.{index}.{key}",
    "XTuner's folder": "model.{index}.{key}",
    "XTuner's checkpoint": "projector.model.{index}.{key}",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_projector_is_taken_from_every_layout(layout: str, clip: Path, llama: Path, tmp_path: Path) -> None:
    weights = {name: torch.rand(shape) for name, shape in NAMES.items()}
    written = {}
    for name, weight in weights.items():
        number, key = int(name[len("linear_")]), name.partition(".")[2]
        written[LAYOUTS[layout].format(number=number, index=2 * number - 2, key=key)] = weight
    file = tmp_path / ("mm_projector.bin" if layout == "LLaVA" else "model.safetensors")
    torch.save(written, file) if layout == "LLaVA" else save_file(written, file)

    model = AutoModelForImageTextToText.from_pretrained(
        pretrained_path(joined(llama, clip, trusts=True, projector=str(file)))
    )

    got = model.model.multi_modal_projector.state_dict()
    assert all(torch.equal(got[name], weights[name]) for name in NAMES)


@pytest.mark.parametrize("of", ["LLM", "tower", "projector"])
def test_pickled_weights_need_the_users_word(of: str, clip: Path, llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree({"LLM": llama, "tower": clip, "projector": clip}[of], tmp_path / "copy")
    weights = {key: weight for file in folder.glob("*.safetensors") for key, weight in load_file(file).items()}
    torch.save(weights, folder / "pytorch_model.bin")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    llm, tower = (folder if of == name else whole for name, whole in (("LLM", llama), ("tower", clip)))
    projector = {"projector": str(folder / "pytorch_model.bin")} if of == "projector" else {}

    with pytest.raises(ModelError, match="--trust-remote-code"):
        pretrained_path(joined(llm, tower, **projector))


def test_a_pickle_that_is_known_to_the_byte_needs_no_word(
    clip: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pickled = write_clip(tmp_path / "pickled", pickled=True) / "pytorch_model.bin"
    monkeypatch.setitem(remote_code.PUBLISHED_PICKLES, "a/b", (pickled.stat().st_size, sha256(pickled)))

    assert Path(pretrained_path(joined(llama, pickled.parent))).is_dir()
    content = bytearray(pickled.read_bytes())
    content[-1] ^= 1
    pickled.write_bytes(bytes(content))
    with pytest.raises(ModelError, match="--trust-remote-code"):
        pretrained_path(joined(llama, pickled.parent))


def test_a_projector_of_another_llm_or_none_is_refused(clip: Path, llama: Path, tmp_path: Path) -> None:
    save_file(
        {f"model.{index}.{key}": torch.zeros(3) for index in (0, 2) for key in ("weight", "bias")},
        tmp_path / "a.safetensors",
    )
    save_file({"other": torch.zeros(3)}, tmp_path / "b.safetensors")
    (tmp_path / "c.safetensors").write_bytes(b"damaged")

    with pytest.raises(ModelError, match=r"multi_modal_projector.linear_1.bias has the shape \[3\]"):
        pretrained_path(joined(llama, clip, projector=str(tmp_path / "a.safetensors")))
    with pytest.raises(ModelError, match=r"holds no linear_1.weight of a projector"):
        pretrained_path(joined(llama, clip, projector=str(tmp_path / "b.safetensors")))
    with pytest.raises(ModelError, match="is damaged"):
        pretrained_path(joined(llama, clip, projector=str(tmp_path / "c.safetensors")))
    with pytest.raises(ModelError, match="there is no projector"):
        pretrained_path(joined(llama, clip, projector=str(tmp_path / "absent")))


def test_what_is_no_clip_and_what_lacks_weights_is_refused(clip: Path, llama: Path, tmp_path: Path) -> None:
    with refused(ModelError, "model.vision.path"):
        pretrained_path(joined(llama, llama))
    llm = write_llm("llama", tmp_path / "llm")
    next(llm.glob("model-*.safetensors")).unlink()
    with refused(ModelError, "model.vision"):
        pretrained_path(joined(llm, clip))


def test_the_cache_holds_no_part_of_a_model_after_an_error(clip: Path, llama: Path, tmp_path: Path) -> None:
    save_file({"other": torch.zeros(3)}, tmp_path / "b.safetensors")
    block = joined(llama, clip, projector=str(tmp_path / "b.safetensors"))

    with pytest.raises(ModelError):
        llava.materialize(block, str(llama), tmp_path / "cache", weights=True)

    assert [file.name for file in (tmp_path / "cache").iterdir() if not file.name.endswith(".lock")] == []


@pytest.mark.parametrize("layout", llava_layouts.NAMES)
def test_a_llava_is_the_same_after_it_was_in_another_layout(
    layout: llava_layouts.Name, clip: Path, llama: Path, tmp_path: Path
) -> None:
    first = pretrained_path(joined(llama, clip, seed=4))
    dest = tmp_path / "dest"

    done = CliRunner().invoke(tuner, ["export", first, str(dest), "--as", layout, "--max-shard-size", "200KB"])

    assert done.exit_code == 0, done.output
    assert checkpoints.inspect(dest) is None
    towers = {"xtuner": dest / "visual_encoder", "llava": clip}
    parts = {"projector": str(dest / "projector")} if layout == "xtuner" else {}
    again = pretrained_path(joined(dest, towers[layout], **parts))
    before, after = (AutoModelForImageTextToText.from_pretrained(folder).state_dict() for folder in (first, again))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    tokenizers = [AutoProcessor.from_pretrained(folder).tokenizer for folder in (first, again)]
    assert tokenizers[0](TEXT)["input_ids"] == tokenizers[1](TEXT)["input_ids"]


def test_the_names_in_other_layouts_are_those_of_xtuner_and_of_llava(clip: Path, llama: Path, tmp_path: Path) -> None:
    first = pretrained_path(joined(llama, clip))
    for layout in llava_layouts.NAMES:
        assert CliRunner().invoke(tuner, ["export", first, str(tmp_path / layout), "--as", layout]).exit_code == 0

    files = ("xtuner/projector", "xtuner/visual_encoder", "xtuner", "llava")
    projector, tower, llm, whole = (load_file(tmp_path / file / "model.safetensors") for file in files)
    assert sorted(projector) == ["model.0.bias", "model.0.weight", "model.2.bias", "model.2.weight"]
    assert {name.split(".")[0] for name in tower} == {"vision_model"}
    assert {name.split(".")[0] for name in llm} == {"model", "lm_head"}
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "xtuner", output_loading_info=True)[1]["missing_keys"] == set()
    )
    assert "model.mm_projector.0.weight" in whole and "model.layers.0.self_attn.q_proj.weight" in whole
    assert "model.vision_tower.vision_tower.vision_model.embeddings.class_embedding" in whole
    facts = json.loads((tmp_path / "llava/config.json").read_text(encoding="utf-8"))
    assert (facts["model_type"], facts["mm_hidden_size"], facts["mm_vision_select_layer"]) == ("llava_llama", 32, -2)


def test_a_layout_without_a_name_for_the_llm_is_refused(clip: Path, llama: Path, tmp_path: Path) -> None:
    qwen = pretrained_path(joined(write_llm("qwen2", tmp_path / "llm"), clip))

    for folder, reason in ((qwen, "this LLM is of model_type 'qwen2'"), (llama, "is no LLaVA")):
        done = CliRunner().invoke(tuner, ["export", str(folder), str(tmp_path / "dest"), "--as", "llava"])
        assert reason in str(done.exception)
        assert not (tmp_path / "dest").exists()
