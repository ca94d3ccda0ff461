"""The facts of a model, from its config.json or its part of the catalog, and the settings that it does not support.

It reads small files and asks no hub.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from tuner import assets, paths
from tuner.errors import RecipeError
from tuner.files import JsonObject
from tuner.model_folder import config_of
from tuner.recipes import catalog, starting_weights
from tuner.recipes.merging import Keys, Kind, Layer, Merged, Place, lookup, nested
from tuner.recipes.recipe_file import read_part
from tuner.recipes.schema import LOADERS
from tuner.recipes.schema.architecture import LACKS, NOT_ON_IMAGES, UNTRIED, Architecture, is_untried, may_share_row
from tuner.recipes.schema.objectives import OBJECTIVES, takes_images

_MODEL, _IMAGES, _VISION = ("model", "path"), ("model", "images"), ("model", "vision")
_PACKS_WITH = ("model", "packs_with")
_TOWER_FACTS = ("architecture", "vision_config")
_SERVED = ("internlm", "internlm2", "internlm3")
"""model_types of `models.internlm`, which transformers takes before the code that comes with them."""
_DECODERS = 2
"""Workers of a rank that decode images: one alone would let a fast model wait."""
_NAMES = {
    "n_embed": "hidden_size",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "seq_length": "max_position_embeddings",
}
"""transformers' attribute_map of its oldest families, and the context of BLOOM (its tokenizer has no limit)."""
_DEFAULTS: dict[str, JsonObject] = {
    "bloom": {"max_position_embeddings": 2048},
    "falcon": {"max_position_embeddings": 2048},
    # Published Gemma 3 configs hold only the values of the text half that differ from transformers' class.
    "gemma3_text": {
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
    },
}
"""Values that published configs leave out because they are the class's defaults."""
_DEFAULTS_OF_HALVES: dict[str, JsonObject] = {
    "llama": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "tie_word_embeddings": False,
    }
}
"""The same for the LLM inside a vision-language model: LLaVA 1.5 is published without the sizes of its Llama."""
_LLMS_OF_VL = {
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), "qwen2"),
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""The LLM in a vision-language model has a name of its own, and the layers of a known one."""
_OF_LLAVAS_CODE = "mm_vision_tower"
"""A key that config.json has in the layout of LLaVA's own code: its LLM is a Llama."""
_NAMES_OF_TOWERS = {
    "num_hidden_layers": ("num_hidden_layers", "depth"),
    "hidden_size": ("hidden_size", "embed_dim"),
    "intermediate_size": ("intermediate_size",),
    "num_attention_heads": ("num_attention_heads", "num_heads"),
    "patch_size": ("patch_size",),
    "image_size": ("image_size",),
    "merge_size": ("spatial_merge_size", "merge_size", "pooling_kernel_size"),
}
"""The keys of `Tower` -> the keys of config.json's vision_config."""
_CLIP_L = {"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
_TOWERS: dict[str, JsonObject] = {
    "gemma3": {"num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16},
    "gemma4": {
        "num_hidden_layers": 16,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "patch_size": 16,
        "merge_size": 3,
        "num_tokens": 280,
    },
    "internvl": {**_CLIP_L, "patch_size": 14, "image_size": 448},
    "llava": {**_CLIP_L, "patch_size": 14, "image_size": 336},
    "llava_next": {**_CLIP_L, "patch_size": 14, "image_size": 336},
    "qwen2_5_vl": {
        "num_hidden_layers": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_attention_heads": 16,
        "patch_size": 14,
        "merge_size": 2,
    },
}
"""Values that published configs leave out because they are the class's defaults."""
_PUBLISHED_TOWERS: dict[str, JsonObject] = {
    "openai/clip-vit-large-patch14": {**_CLIP_L, "patch_size": 14, "image_size": 224},
    "openai/clip-vit-large-patch14-336": {**_CLIP_L, "patch_size": 14, "image_size": 336},
}
"""config.json of the towers of LLaVA 1 and 1.5."""
_READS_ANY_SIZE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
_NUMBERS_OF_TOKENS = ("mm_tokens_per_image", "image_seq_length", "vision_soft_tokens_per_image")
_SOUND_OF_GEMMA_4 = {"hidden_size": 1024, "num_hidden_layers": 12, "output_proj_dims": 1536}
"""The defaults of its audio_config in transformers 5.24."""
_PARAMETERS_OF_SOUND = 304_824_608
"""Of Gemma 4's audio tower with these sizes; in another they grow with the layers and the square of the width."""
_LAYERS_OF_TWO_KINDS = ("gemma4_text", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""In other types, layer_types separate windows from full attention, and both have the same size."""


def derive_architecture(merged: Merged) -> None:
    """Read the architecture again if a later layer than that of the facts has set the model's path."""
    path, is_newer = merged.get(_MODEL), merged.order_of(_MODEL) > merged.order_of(("architecture",))
    if not isinstance(path, str) or not (is_newer or merged.values["architecture"] is None):
        return
    architecture, place = facts_of(path, merged.get(("model", "revision")))
    merged.lay(Layer.at(place, {"architecture": {"_delete_": True, **architecture} if architecture else None}))


def facts_of(path: str, revision: str | None) -> tuple[JsonObject | None, Place]:
    """Return the architecture of a model, None if it is not known, and the place that says so.

    Args:
        path: A folder or an id on the hub.
        revision: The commit on the hub.
    """
    architecture = read_architecture(paths.expanded(assets.asset(path)))
    if architecture is None and (part := catalog.part_named(path)):
        model_part = read_part("models", part)
        return model_part.values.get("architecture"), model_part.place(())
    if architecture is None and paths.local(path) is None and (folder := folder_of(path, revision)):
        architecture = read_architecture(folder)
    # Facts from the hub's cache name the hub id, because the folder is named by a commit.
    return architecture, Place(Kind.DERIVED, f"{path}/config.json" if architecture else "unknown model")


def folder_of(path: str, revision: str | None) -> Path | None:
    """Return the folder with a model's config.json, local or in the hub's cache; None where it is not here."""
    if (local := paths.local(path)) is not None:
        return local if paths.is_file(local / "config.json") else None
    return _cached_folder(path, revision) if paths.is_hub_id(path) else None


def _cached_folder(hub_id: str, revision: str | None) -> Path | None:
    """Return the folder of a model in the hub's cache if its config.json is there, or None."""
    from huggingface_hub import try_to_load_from_cache  # 0.01 s, only for models that the catalog does not have

    file = try_to_load_from_cache(hub_id, "config.json", revision=revision)
    return Path(file).parent if isinstance(file, str) else None


def kind_of(merged: Merged) -> str | None:
    """Return the model_type in the facts, or in the model's folder if its config.json lacks some facts."""
    kind, path = merged.get(("architecture", "model_type")), merged.get(_MODEL)
    if isinstance(merged.get(("architecture",)), dict):
        return kind if isinstance(kind, str) else None
    return read_type(paths.expanded(assets.asset(path))) if isinstance(path, str) else None


def read_architecture(folder: Path) -> JsonObject | None:
    """Return the architecture block for a model's folder or config.json; None if facts are missing there."""
    architecture = _known(folder)
    return None if _lacking(architecture) else architecture


def why_unknown(folder: Path) -> str:
    """Return what config.json lacks if `read_architecture` returns None."""
    return f"without {', '.join(_lacking(_known(folder)))}"


def _lacking(architecture: JsonObject) -> list[str]:
    """Return the facts that are missing, each once; a wrong value is refused when the recipe is validated."""
    try:
        Architecture.model_validate(architecture)
    except ValidationError as error:
        details = [detail for detail in error.errors(include_url=False) if detail["type"] in ("missing", LACKS)]
        return list(dict.fromkeys(".".join(map(str, detail["loc"])) or str(detail["msg"]) for detail in details))
    return []


def _known(folder: Path) -> JsonObject:
    """Return the keys of `Architecture` in config.json, with its family's defaults."""
    config = _read(folder)
    kind = config.get("model_type")
    # transformers 4 left tie_word_embeddings out if it was True (Gemma), and wrote every False.
    config = {"tie_word_embeddings": True} | _DEFAULTS.get(str(kind), {}) | config
    if kind not in _LAYERS_OF_TWO_KINDS:
        config.pop("layer_types", None)
    if kind == "gemma4_text":
        config |= _of_full_attention(config)
    if isinstance(inner := config.get("intermediate_size"), list):  # Gemma 3n names each layer's
        config["intermediate_size"] = inner[0] if inner and inner.count(inner[0]) == len(inner) else None
    architecture: JsonObject = {key: config[key] for key in Architecture.model_fields if config.get(key) is not None}
    if architecture.get("kv_lora_rank") and "q_lora_rank" in config:  # None says that queries are not compressed
        architecture["q_lora_rank"] = config["q_lora_rank"]
    if vision := _vision(folder):
        architecture["vision_config"] = vision
    return architecture


def reads_images(folder: Path) -> bool:
    """Return whether the config.json of a model folder has a vision tower."""
    return _vision(folder) is not None


def _vision(folder: Path) -> JsonObject | None:
    """Return the keys of `Tower` for a model that reads images, from its config.json; None for another model."""
    return _tower(config_of(folder))


def _tower(config: JsonObject) -> JsonObject | None:
    tower = config.get("vision_config")
    if not isinstance(tower, dict):
        return None
    keys_of_tower: JsonObject = {"model_type": config.get("model_type")}
    for key, names in _NAMES_OF_TOWERS.items():
        value = next((tower[name] for name in names if tower.get(name) is not None), None)
        keys_of_tower[key] = max(value) if isinstance(value, list) and value else value
    kind = str(keys_of_tower["model_type"])
    keys_of_tower = _TOWERS.get(kind, {}) | {key: value for key, value in keys_of_tower.items() if value is not None}
    if kind in _READS_ANY_SIZE:
        keys_of_tower.pop("image_size", None)
    if tokens := next((config[key] for key in _NUMBERS_OF_TOKENS if config.get(key)), None):
        keys_of_tower["num_tokens"] = tokens
    if kind == "gemma4" and isinstance(sound := config.get("audio_config"), dict):
        keys_of_tower["num_parameters_of_sound"] = _of_sound(_SOUND_OF_GEMMA_4 | sound, config.get("text_config"))
    return keys_of_tower


def _of_sound(sound: JsonObject, llm: JsonObject | None) -> int:
    """Return about how many parameters read sound in a Gemma 4: a tower, and a projection into the LLM."""
    size: int = sound["num_hidden_layers"] * sound["hidden_size"] ** 2
    default: int = _SOUND_OF_GEMMA_4["num_hidden_layers"] * _SOUND_OF_GEMMA_4["hidden_size"] ** 2
    projection: int = sound["output_proj_dims"] * ((llm or {}).get("hidden_size") or 0)
    return round(_PARAMETERS_OF_SOUND * size / default) + projection


def num_layers(folder: Path) -> int:
    """Return the number of layers in a model folder's config.json, or 0 if it has no such number."""
    count = _read(folder).get("num_hidden_layers")
    return count if isinstance(count, int) else 0


def read_type(folder: Path) -> str | None:
    """Return the model_type of a model folder (of its text half if it has one), or None."""
    kind = _read(folder).get("model_type")
    return kind if isinstance(kind, str) else None


def _read(folder: Path) -> JsonObject:
    """Return config.json with the text half's values laid over it; an empty dict if it is not a JSON object."""
    config = config_of(folder)
    if isinstance(half := config.get("text_config"), dict):
        config |= _DEFAULTS_OF_HALVES.get(str(half.get("model_type")), {}) | half
    if _OF_LLAVAS_CODE in config:
        config["model_type"] = "llama"
    if (kind := config.get("model_type")) in _LLMS_OF_VL:
        config["model_type"] = _LLMS_OF_VL[kind]
    return {_NAMES[key]: config[key] for key in _NAMES if config.get(key) is not None} | config


def _of_full_attention(config: JsonObject) -> JsonObject:
    """Return Gemma 4's two keys of its full-attention layers, which transformers 5 writes layer by layer."""
    layers = config.get("per_layer_config")
    if not isinstance(layers, dict) or not layers:
        return {}
    layer = next(iter(layers.values()))
    return {"global_head_dim": layer.get("head_dim"), "num_global_key_value_heads": layer.get("num_key_value_heads")}


_GROUPED = ("q_proj", "k_proj", "v_proj", "o_proj")
_LATENT = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
FUSED_EXPERTS = {
    **dict.fromkeys(("glm4_moe", "mixtral", "olmoe", "qwen3_moe"), _GROUPED),
    **dict.fromkeys(("afmoe", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "minimax_m2"), _GROUPED),
    "minimax": (*_GROUPED, "qkv_proj", "out_proj"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), _LATENT),
    "qwen3_next": (*_GROUPED, "in_proj_qkvz", "in_proj_ba", "out_proj"),
}
"""model_types with experts that PEFT 0.21 adapts as one tensor -> their other layers.

One tensor has no dropout, no DoRA, and no beginning for linear layers, such as PiSSA.
"""
ODD_LINEARS = {
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2"), ("in_proj",)),
    **dict.fromkeys(("bamba", "falcon_h1", "jamba", "nemotron_h"), (*_GROUPED, "in_proj", *_MLP)),
    "deepseek_v4": ("q_a_proj", "q_b_proj", "kv_proj", "o_b_proj", *_MLP),  # o_a_proj multiplies groups apart
    "granitemoehybrid": (*_GROUPED, "in_proj", "input_linear", "output_linear"),
    "llama4_text": (*_GROUPED, *_MLP),
    "phimoe": _GROUPED,
    "zamba2": (*_GROUPED, "in_proj", "gate_up_proj", "down_proj"),
}
"""model_types with linear layers that an adapter does not fit -> their other layers.

A router that returns more than one tensor ends the run. Kernels of a state space read the weights of its layers
directly and ignore the adapter: PEFT 0.21 refuses some of them.
"""
_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def lay_constraints(merged: Merged, kind: str | None) -> None:
    """Replace values of the catalog that the model does not support, with a note; refuse those that the user chose.

    Args:
        merged: The recipe's values.
        kind: The model_type; None if it is not known before the model is loaded.

    Raises:
        RecipeError: the user chose such a value.
    """
    _lay_tower(merged)
    _lay_images(merged)
    _lay_trial(merged, kind)
    for keys, value, why in (*_adapter(merged, kind), *_packing(merged, kind), *_router(merged)):
        _replace_value(merged, keys, value, why)


def _lay_tower(merged: Merged) -> None:
    """Add the facts of a joined vision tower to those of the LLM, unless that has a tower of its own already."""
    tower, path = merged.get((*_VISION, "path")), merged.get(_MODEL)
    if not isinstance(tower, str) or not isinstance(path, str):
        return
    old_tower, keys = merged.get(_TOWER_FACTS), (*_VISION, "path")
    is_newer = merged.order_of(_MODEL) > merged.order_of(keys)
    if _vision(paths.expanded(assets.asset(path))) or (old_tower and is_newer):
        note = f"model.vision: {path} has a vision tower already, so {tower} is not joined to it."
        merged.lay(Layer.at(merged.place_of(_MODEL), nested(_VISION, None), note=note))
        return
    is_read = old_tower and merged.order_of(keys) <= merged.order_of((*_TOWER_FACTS, "model_type"))
    if isinstance(merged.get(("architecture",)), dict) and not is_read:
        new_tower = read_tower(tower, merged.get((*_VISION, "revision")))
        place = Place(Kind.DERIVED, f"{tower}/config.json" if new_tower else "unknown tower")
        block = {"_delete_": True, **(new_tower or {"model_type": "llava"})}
        merged.lay(Layer.at(place, nested(_TOWER_FACTS, block)))


def read_tower(path: str, revision: str | None = None) -> JsonObject | None:
    """Return the keys of `Tower` for a LLaVA with this CLIP: a folder, or an id on the hub; None if it is not known."""
    folder = paths.local(path) or _cached_folder(path, revision)
    config = config_of(folder) if folder else _PUBLISHED_TOWERS.get(path)
    if not config:
        return None
    half = config.get("vision_config")
    return _tower({"model_type": "llava", "vision_config": half if isinstance(half, dict) else config})


def _lay_images(merged: Merged) -> None:
    """Decide whether the model reads images, and give a run with images workers that decode them."""
    vision, path = merged.get(("architecture", "vision_config")), merged.get(_MODEL)
    if merged.get(("architecture",)) is None and isinstance(path, str):  # some other fact is missing
        vision = merged.get(_VISION) or _vision(paths.expanded(assets.asset(path)))
    if merged.get(_IMAGES) == "auto":
        refused = NOT_ON_IMAGES.get(str(vision.get("model_type"))) if isinstance(vision, dict) else None
        if not takes_images(merged.get(("objective", "type"))):
            refused = refused or "only conversations may hold images"
        why = refused or f"{'its config.json has a' if vision else 'the model has no'} vision tower"
        reads = vision is not None and not refused
        merged.lay(Layer.at(Place(Kind.DERIVED, f"derived: {why}"), nested(_IMAGES, reads)))
    if merged.get(_IMAGES) is not True:
        return
    place = Place(Kind.DERIVED, "derived: the workers decode and resize the images")
    for loader in LOADERS:
        keys = (loader, "num_workers")
        if merged.get(keys) == 0 and merged.place_of(keys).kind is Kind.PACKAGE:
            merged.lay(Layer.at(place, nested(keys, _DECODERS)))


def _lay_trial(merged: Merged, kind: str | None) -> None:
    """Note where a trial decides whether rows are packed: of text, for a model that no test knows."""
    objective = merged.get(("objective", "type"))
    wants = objective in OBJECTIVES and OBJECTIVES[objective].facts.packs
    wants = wants and any(merged.get((loader, "dataset", "packing")) is True for loader in LOADERS)
    is_unknown = kind is not None and (is_untried(kind) or runs_own_code(merged.get(("model",)), kind))
    packs_with = UNTRIED if wants and is_unknown and merged.get(_IMAGES) is not True else None
    if merged.get(_PACKS_WITH) != packs_with:
        place = Place(Kind.DERIVED, f"derived: no test of tuner knows {kind} models, or code that comes with one")
        merged.lay(Layer.at(place, nested(_PACKS_WITH, packs_with)))


def runs_own_code(model: object, kind: str) -> bool:
    """Return whether code that comes with a model computes it, and not transformers' of the type that it names.

    What is not trusted does not run, and what is not here is not known to have any.

    Args:
        model: The block `model`.
        kind: The model_type.
    """
    path, is_trusted = lookup(model, ["path"]), lookup(model, ["trust_remote_code"]) is True
    if not isinstance(path, str) or not is_trusted or kind in _SERVED:
        return False
    folder = folder_of(path, lookup(model, ["revision"]))
    auto_map = config_of(folder).get("auto_map") if folder else None
    return isinstance(auto_map, dict) and any(name.startswith("AutoModel") for name in auto_map)


def _adapter(merged: Merged, kind: str | None) -> Iterator[tuple[Keys, object, str]]:
    adapter = merged.values.get("adapter")
    if kind is None or not isinstance(adapter, dict) or adapter.get("target_modules") != "all-linear":
        return
    if kind in ODD_LINEARS:
        why = f"an adapter does not fit every linear layer of a {kind} model, so the others are adapted"
        yield ("adapter", "target_modules"), ODD_LINEARS[kind], why
    setting = next((key for key in ("lora_dropout", "use_dora") if adapter.get(key)), None)
    if (begins := adapter.get("init_lora_weights", True)) not in (True, "gaussian"):
        setting = setting or f"init_lora_weights={begins!r}"
    if setting and kind in FUSED_EXPERTS:
        why = f"PEFT adapts the fused experts of {kind} only without {setting}, so only attention is adapted"
        yield ("adapter", "target_modules"), FUSED_EXPERTS[kind], why


def _packing(merged: Merged, kind: str | None) -> Iterator[tuple[Keys, object, str]]:
    reads_images, image_type = merged.get(_IMAGES) is True, merged.get((*_TOWER_FACTS, "model_type"))
    if kind is None or (reads_images and image_type is None):  # the ranks decide, once the model is loaded
        return
    if may_share_row(kind, image_type if reads_images else None) or merged.get(_PACKS_WITH):
        return
    model = f"{image_type} model with a {kind} LLM" if reads_images else f"{kind} model"
    why = f"packed samples may attend to each other in a {model}, so each sample is a row of its own"
    for loader in LOADERS:
        keys = (loader, "dataset", "packing")
        if merged.get(keys) is True:
            yield keys, False, why


def _router(merged: Merged) -> Iterator[tuple[Keys, object, str]]:
    keys, architecture = ("model", "router_aux_loss_coef"), merged.values.get("architecture")
    if not merged.get(keys):
        return
    if isinstance(architecture, dict) and not any(architecture.get(key) for key in _NUMBERS_OF_EXPERTS):
        yield keys, None, "the model has no experts, so it has no router loss"
    name = merged.get(("objective", "type"))
    if name in OBJECTIVES and not OBJECTIVES[name].facts.balances_router:
        yield keys, None, f"the objective {name} is trained without router loss"


def _replace_value(merged: Merged, keys: Keys, value: object, why: str) -> None:
    dotted, place, old = ".".join(keys), merged.place_of(keys), merged.get(keys)
    if place.is_users:
        raise RecipeError(f"{dotted} = {old!r}: {why}", where=place, fix=f"Set {dotted}={value!r}, or remove it.")
    merged.lay(Layer.at(Place(Kind.DERIVED, f"derived: {why}"), nested(keys, value), note=f"{dotted}={value!r}: {why}"))


# --- A teacher and reward models ---

_TEACHER, _REWARDS = ("objective", "teacher"), ("objective", "rewards")


def lay_other_models(merged: Merged) -> None:
    """Set runs to their results, and the architectures of the other models to what their config.json say."""
    _lay_teacher(merged)
    _lay_rewards(merged)


def _lay_teacher(merged: Merged) -> None:
    path = merged.get(_TEACHER)
    if not isinstance(path, str):
        return
    if (result := starting_weights.result_of(path)) and result != path:
        merged.lay(Layer.at(merged.place_of(_TEACHER), {"objective": {"teacher": result}}))
        path = result
    architecture, place = facts_of(path, merged.get(("objective", "teacher_revision")))
    written = {"_delete_": True, **architecture} if architecture else None
    merged.lay(Layer.at(place, {"objective": {"teacher_architecture": written}}))


def _lay_rewards(merged: Merged) -> None:
    rewards = merged.get(_REWARDS)
    rewards = [rewards] if isinstance(rewards, dict) else rewards
    if not isinstance(rewards, list | tuple):
        return
    with_results = [*rewards]
    for number, reward in enumerate(rewards):
        path = lookup(reward, ["path"])
        if lookup(reward, ["type"]) == "model" and isinstance(path, str):
            result = starting_weights.result_of(path) or path
            architecture, _ = facts_of(starting_weights.find(result, ".".join(_REWARDS)).path, None)
            with_results[number] = {**reward, "path": result, "architecture": architecture}
    if with_results != [*rewards]:
        merged.lay(Layer.at(merged.place_of(_REWARDS), {"objective": {"rewards": tuple(with_results)}}))
