"""A whole LLaVA in the layouts of XTuner and of LLaVA's own code. The weights are the same; only their names differ.

    xtuner   the LLM in the folder itself, and the folders visual_encoder and projector
    llava    one model, LlavaLlamaForCausalLM

`models.llava` reads both again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from transformers import CLIPVisionConfig, LlavaConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tuner import assets
from tuner.errors import Option, UsageError
from tuner.files import JsonObject, copy, read_json_object, read_text, write_json, write_text
from tuner.importers.llava_names import TOWER
from tuner.models import llava, projectors
from tuner.results.tensors import Piece, Stored, Tensors, write

Name = Literal["xtuner", "llava"]
NAMES: tuple[Name, ...] = ("xtuner", "llava")
_LLM = {r"^model\.language_model\.": "model."}
_TEMPLATE = "chat_template.jinja"


def convert(llava_folder: Path, dest: Path, name: Name, tower: str | None, max_shard_bytes: int) -> JsonObject:
    """Write the LLaVA in the folder `llava_folder`, as transformers has it, in another layout to the new folder `dest`.

    `tower` is where the tower came from, which LLaVA's code loads first.

    Returns:
        The file, type, shape and hash of each tensor.

    Raises:
        UsageError: the model is no LLaVA, or the layout has no name for its LLM.
        DiskError: `dest` cannot be written.
    """
    config = _config(llava_folder)
    stored = Stored(llava_folder)
    dest.mkdir()
    _copy_tokenizer(llava_folder, dest)
    if name == "llava":
        config_json = _of_llava(config, tower or TOWER)
        write_json(dest / "config.json", config_json)
        renamed = _LLM | {rf"^{re.escape(llava.TOWER)}": f"{llava.TOWER_OF_LLAVA}vision_model."}
        return _write(stored, dest, renamed | _numbered("model.mm_projector"), max_shard_bytes)
    text, vision = config.text_config, config.vision_config
    text.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[text.model_type]]
    vision.architectures = ["CLIPVisionModel"]
    llm, encoder, projector = dest, dest / "visual_encoder", dest / "projector"
    written: JsonObject = {}
    parts: tuple[tuple[Path, PreTrainedConfig | JsonObject, dict[str, str]], ...] = (
        (llm, text, {**_LLM, r"^lm_head\.": "lm_head."}),
        (encoder, vision, {rf"^{re.escape(llava.TOWER)}": "vision_model."}),
        (projector, _of_projector(config), _numbered("model")),
    )
    for folder, config_json, names in parts:
        folder.mkdir(exist_ok=True)
        if isinstance(config_json, dict):
            write_json(folder / "config.json", config_json)
        else:
            config_json.save_pretrained(folder)
        tensors = _write(stored, folder, names, max_shard_bytes, all_of_them=False)
        inside = "" if folder == dest else f"{folder.name}/"
        written |= {
            f"{inside}{key}": {**tensor, "file": f"{inside}{tensor['file']}"} for key, tensor in tensors.items()
        }
    processor = read_json_object(llava_folder / "processor_config.json").get("image_processor", {})
    images = {key: value for key, value in processor.items() if key != "do_pad"}
    write_json(encoder / "preprocessor_config.json", images | {"image_processor_type": "CLIPImageProcessor"})
    return written


def _config(llava_folder: Path) -> LlavaConfig:
    kind = read_json_object(llava_folder / "config.json").get("model_type")
    if kind != LlavaConfig.model_type:
        message = f"a model of model_type {kind!r} is no LLaVA"
        raise UsageError(message, where=Option("format"), fix=f"Remove {Option('format')}.")
    return LlavaConfig.from_pretrained(llava_folder)


def _of_llava(config: LlavaConfig, tower: str) -> JsonObject:
    """Return config.json of LLaVA's own code."""
    text: PreTrainedConfig = config.text_config
    if text.model_type != "llama" or not isinstance(config.vision_config, CLIPVisionConfig):
        message = f"LLaVA's layout is for a Llama with a CLIP, and this LLM is of model_type {text.model_type!r}"
        raise UsageError(
            message, where=Option("format"), fix=f"Use {Option('format', 'xtuner')}, or remove {Option('format')}."
        )
    return {
        **text.to_dict(),
        "model_type": llava.MODEL_TYPE,
        "architectures": ["LlavaLlamaForCausalLM"],
        "image_aspect_ratio": "pad",
        "mm_hidden_size": config.vision_config.hidden_size,
        "mm_projector_type": "mlp2x_gelu",
        "mm_use_im_patch_token": False,
        "mm_use_im_start_end": False,
        "mm_vision_select_feature": "patch",
        "mm_vision_select_layer": config.vision_feature_layer,
        "mm_vision_tower": tower,
        "unfreeze_mm_vision_tower": True,
        "use_mm_proj": True,
    }


def _of_projector(config: LlavaConfig) -> JsonObject:
    """Return config.json of XTuner's ProjectorModel."""
    return {
        "model_type": "projector",
        "architectures": ["ProjectorModel"],
        "visual_hidden_size": config.vision_config.hidden_size,
        "llm_hidden_size": config.text_config.hidden_size,
        "depth": 2,
        "hidden_act": config.projector_hidden_act,
        "bias": config.multimodal_projector_bias,
    }


def _numbered(prefix: str) -> dict[str, str]:
    projector_pattern = re.escape(llava.PROJECTOR)
    return {rf"^{projector_pattern}{name}\.": f"{prefix}.{number}." for number, name in projectors.LAYERS.items()}


def _write(
    stored: Stored, folder: Path, renamed: Mapping[str, str], max_shard_bytes: int, *, all_of_them: bool = True
) -> dict[str, JsonObject]:
    """Write the tensors with a name that one of the patterns matches, under their new names; or all of them."""
    pieces = []
    for name in stored.shapes:
        matches = [(pattern, new) for pattern, new in renamed.items() if re.match(pattern, name)]
        if matches or all_of_them:
            new = re.sub(*matches[0], name) if matches else name
            pieces.append(Piece({new: stored.shapes[name]}, partial(_loaded, stored, name, new)))
    return write(pieces, folder, "model", max_shard_bytes, None, "converting")


def _loaded(stored: Stored, name: str, new: str) -> Tensors:
    return {new: stored.load(name)}


def _copy_tokenizer(llava_folder: Path, dest: Path) -> None:
    """Copy the tokenizer, with the chat template of the LLM."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json"):
        if (llava_folder / name).is_file():
            copy(llava_folder / name, dest / name)
    if (llava_folder / _TEMPLATE).is_file():
        text = read_text(llava_folder / _TEMPLATE)
        write_text(dest / _TEMPLATE, assets.without_image_parts(text))
