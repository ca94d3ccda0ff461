"""Translates the parts of XTuner's configs of a LLaVA: an LLM, a vision tower, a projector, and rows with images.

`xtuner` reads the other keys of these files. The recipe that results is that of XTuner's name (llava_names.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.errors import Key
from tuner.files import JsonObject
from tuner.fit.parameters import tokens_of_image
from tuner.importers import shared_rules
from tuner.importers.aliases import Alias
from tuner.importers.document import Keys, Value, last_name
from tuner.importers.translation import Outcome, Rule, Setting, Translation, noted
from tuner.recipes import model_facts
from tuner.recipes.schema.architecture import Tower

OF_DATASET = {
    *("type", "data_path", "image_folder", "image_processor", "dataset_map_fn", "template_map_fn", "max_length"),
    *("max_dataset_length", "pad_image_to_square", "offline_processed_text_folder"),
}

_MODEL, _TOWER, _PATH = "LLaVAModel", "CLIPVisionModel", "pretrained_model_name_or_path"
_PROJECTOR = "multi_modal_projector"
_ROWS = "train_dataloader.dataset"
_TEXT_TOKENS = 2048
_PEFT = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""PEFT's defaults."""
_FORMATS = {"LLaVADataset": None, "RefCOCOJsonDataset": "refcoco", "InvRefCOCOJsonDataset": "inv_refcoco"}
"""XTuner's classes of rows with images -> the format of such rows; None: dataset_map_fn names it."""
_OF_REFCOCO = 321_327
"""Descriptions in the training splits of RefCOCO, RefCOCO+ and RefCOCOg (120,624, 120,191 and 80,512)."""
_NO_PTH = (
    f"tuner reads no .pth of mmengine: the projector starts new, unless you name a run of tuner, or the folder "
    f"that `xtuner convert pth_to_hf` writes: {Key('model.vision.projector', 'FOLDER')}"
)
_OF_TOWER = {"r": "adapter.vision_r", "lora_alpha": "adapter.vision_lora_alpha"}


def is_llava(model: object) -> bool:
    """Return whether a config's `model` is a LLaVA."""
    return isinstance(model, dict) and last_name(model.get("type")) == _MODEL


def has_images(dataset: Mapping[str, Value]) -> bool:
    """Return whether a data set of a config has rows with images: those of LLaVA's JSON, or of RefCOCO."""
    return last_name(dataset.get("type")) in _FORMATS


def defaults(model: JsonObject) -> Mapping[str, Value]:
    """Return XTuner's and PEFT's defaults for the keys of a LLaVA."""
    loras = [block for block in ("llm_lora", "visual_encoder_lora") if model.get(block)]
    of_loras = {f"model.{block}.{key}": value for block in loras for key, value in _PEFT.items()}
    return {"model.use_activation_checkpointing": True, **of_loras}


def prepare(t: Translation, model: JsonObject) -> None:
    """Find the method of a LLaVA.

    Raises:
        RecipeError: the model has no tower.
    """
    keys = ("model", "llm_lora")
    if not isinstance(model.get("visual_encoder"), dict):
        raise t.document.wrong(f"{_MODEL} has no visual_encoder", ("model",), "Give it one, such as a CLIP.")
    if not model.get("llm_lora"):
        t.method = "full"
        return
    t.method = "qlora" if (model.get("llm") or {}).get("quantization_config") else "lora"
    t.set(Setting(".".join(keys), None, t.document.where(keys)), "adapter.modules_to_save", [_PROJECTOR])
    if not _keeps_tower(model):
        t.obstacle = "XTuner trains the whole tower beside an adapter on the LLM, and tuner keeps it or adapts it"


def _keeps_tower(model: JsonObject) -> bool:
    return bool(model.get("freeze_visual_encoder") or model.get("visual_encoder_lora"))


def _model_of(t: Translation) -> JsonObject:
    model = t.document.values.get("model")
    return model if isinstance(model, dict) else {}


def frozen(t: Translation, setting: Setting) -> None:
    """Set the parts of the model that keep their weights; an adapter keeps those below it."""
    model = _model_of(t)
    setting.truth()
    if t.method == "full":
        parts = ["vision"] if model.get("freeze_visual_encoder") and not model.get("visual_encoder_lora") else []
        parts += ["language"] if model.get("freeze_llm") else []
        t.set(setting, "model.freeze", tuple(parts), None if parts else "every part is trained")
    elif setting.keys[-1] == "freeze_visual_encoder" and not _keeps_tower(model):
        t.note(setting, Outcome.CHANGED, why=t.obstacle)
    else:
        t.note(setting, Outcome.TAKEN, why="the adapter keeps the weights below it")


def tower_type(t: Translation, setting: Setting) -> None:
    """Record the class of the tower.

    Raises:
        RecipeError: it is not a CLIP.
    """
    if last_name(setting.value) != _TOWER:
        raise setting.wrong("tuner joins a CLIP to an LLM, and no other tower", f"Use {_TOWER}.")
    t.note(setting, Outcome.TAKEN, why="tuner joins a CLIP to the LLM")


def tower_lora(t: Translation, setting: Setting) -> None:
    """Adapt the tower: beside an adapter on the LLM, or while the other parts are trained whole."""
    name = setting.keys[-1]
    if t.method == "full":
        t.set(setting, f"model.vision_lora.{name}", setting.value)
    elif our_key := _OF_TOWER.get(name):
        if name == "r":
            t.set(setting, "adapter.vision", True)
        t.set(setting, our_key, setting.value)
    elif setting.number() != t.number("model.llm_lora.lora_dropout", 0.0):
        t.note(setting, Outcome.CHANGED, why="the tower's adapter has the dropout of the LLM's")
    else:
        t.note(setting, Outcome.TAKEN, why="with model.llm_lora.lora_dropout")


def whole_modules(t: Translation, setting: Setting) -> None:
    """Set the modules that are trained whole beside the adapter: the projector is one."""
    t.set(setting, "adapter.modules_to_save", [*setting.words(), _PROJECTOR], "XTuner trains the projector whole")


def depth(t: Translation, setting: Setting) -> None:
    """Record the number of layers of the projector.

    Raises:
        RecipeError: it is not 2.
    """
    if setting.whole() != 2:
        raise setting.wrong("the projector of a LLaVA of transformers has two linear layers", "Remove it.")
    t.note(setting, Outcome.TAKEN, why="the projector has two linear layers")


def bits(t: Translation, setting: Setting) -> None:
    """Set 4 or 8 bits below an adapter; a frozen LLM without one stays in 16 bits."""
    if t.method == "full" and is_llava(_model_of(t)) and shared_rules.truth(setting.value):
        t.note(setting, Outcome.CHANGED, why="without an adapter, tuner keeps the frozen LLM in 16 bits")
    else:
        shared_rules.bits(t, setting)


def rows_of_images(t: Translation, dataset: Mapping[str, Value], keys: Keys) -> JsonObject:
    """Set how the rows of a data set with images become samples; return the values of its rows beside the path.

    Raises:
        RecipeError: the data set has no file.
    """
    written = {key: t.inner((*keys, key), dataset.get(key)) for key in OF_DATASET}
    offline = written["offline_processed_text_folder"]
    if not dataset.get("data_path"):
        why = "tuner does not read rows that XTuner has tokenized" if offline.value else "the data set has no data_path"
        raise t.document.wrong(why, (*keys, "data_path"), "Name LLaVA's JSON as data_path.")
    if offline.value:
        t.note(offline, Outcome.CHANGED, why="tuner reads data_path and tokenizes it")
    t.set(written["type"], f"{_ROWS}.packing", False, "XTuner does not pack rows with images")
    _set_length(t, written["max_length"])
    _set_padding(t, written["pad_image_to_square"])
    _check_processor(t, written["image_processor"])
    folder, limit = written["image_folder"], written["max_dataset_length"]
    rows: JsonObject = {"image_folder": str(folder.value)} if folder.value else {}
    rows |= {"format": format_} if (format_ := _FORMATS[last_name(dataset.get("type"))]) else {}
    if limit.value and not format_:
        rows["max_rows"] = limit.whole()
    elif limit.value:  # of RefCOCO's rows, spread over all images
        rows["weight"] = weight = round(limit.whole() / _OF_REFCOCO, 2) or 0.01
        why = f"{limit.value} of about {_OF_REFCOCO:,} rows; in a mixture weight = {weight}"
        t.note(limit, Outcome.CHANGED, why=why)
    return rows


def _set_length(t: Translation, setting: Setting) -> None:
    """Set max_length: XTuner counts tokens of text, and tuner those of an image too."""
    text = setting.whole() if setting.value else _TEXT_TOKENS
    path = str((_model_of(t).get("visual_encoder") or {}).get(_PATH))
    tower = model_facts.read_tower(path) or {}
    if tower.get("image_size") and tower.get("patch_size"):
        image = tokens_of_image(Tower.model_validate(tower))
        t.set(setting, f"{_ROWS}.max_length", text + image, f"{text} of text and {image} of an image")
    else:
        why = f"tuner counts the tokens of an image too, and does not know how many {path} makes"
        t.set(setting, f"{_ROWS}.max_length", text, why, changed=True)


def _set_padding(t: Translation, setting: Setting) -> None:
    pads = setting.truth() if setting.value is not None else False
    before = t.ours(("model", "vision", "pad_to_square"))
    if before not in (None, pads):
        t.note(setting, Outcome.CHANGED, why=f"all data sets pad alike: model.vision.pad_to_square = {before}")
    else:
        t.set(setting, "model.vision.pad_to_square", pads)


def _check_processor(t: Translation, setting: Setting) -> None:
    """Record whether the image processor is that of the tower, which tuner uses."""
    block = setting.value if isinstance(setting.value, dict) else {}
    path = (_model_of(t).get("visual_encoder") or {}).get(_PATH)
    if block.get(_PATH) in (None, path):
        t.note(setting, Outcome.TAKEN, why="with model.visual_encoder")
    else:
        t.note(setting, Outcome.CHANGED, why=f"tuner uses the image processor of {path}")


RULES: Mapping[str, Rule] = {
    "model.freeze_llm": frozen,
    "model.freeze_visual_encoder": frozen,
    "model.llm_lora.modules_to_save": whole_modules,
    "model.pretrained_pth": noted(Outcome.CHANGED, _NO_PTH),
    "model.projector_depth": depth,
    "model.use_activation_checkpointing": "tuner sets it",
    f"model.visual_encoder.{_PATH}": Alias("model.vision.path"),
    "model.visual_encoder.type": tower_type,
    **{f"model.visual_encoder_lora.{key}": tower_lora for key in _PEFT},
    "model.visual_encoder_lora.target_modules": noted(Outcome.CHANGED, "tuner adapts every linear layer of the tower"),
}
