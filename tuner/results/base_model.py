"""Finds the base model of an adapter: its place, revision, local folder and config.

It loads no weights.
"""

from __future__ import annotations

from pathlib import Path

import transformers
from huggingface_hub import snapshot_download
from peft import PeftConfig
from transformers import PreTrainedConfig

import tuner.models  # noqa: F401  registers InternLM with transformers
from tuner import paths
from tuner.errors import ModelError, Option
from tuner.models.arguments import load_options
from tuner.models.load import pretrained_path
from tuner.pretrained import explained
from tuner.progress import shown, tqdm_class
from tuner.recipes.recipe import read_base
from tuner.recipes.schema import Model, RecipeConfig

_BASE = Option("base")
_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")


def model_of(path: str, revision: str | None = None, trusted: bool = False, *, images: bool = False) -> Model:
    """Return the `model` block for a model without a recipe. Its values are not checked."""
    model_values = {"path": path, "revision": revision, "trust_remote_code": trusted, "images": images}
    plain = {"attn_implementation": None, "use_liger_kernel": False}
    return Model.model_construct(**{**read_base().values["model"], **model_values, **plain})


def hub_id(model: Model) -> str | None:
    """Return the hub id of a model, or of the LLM that a tower is joined to; None if it is in a folder."""
    path = pretrained_path(model.model_copy(update={"vision": None}))
    return path if paths.local(path) is None else None


def folder_of(base: Model) -> Path:
    """Return the folder with a base's weights, config and tokenizer; download them first if the base is on the hub.

    Raises:
        ModelError: there is no such model.
        MachineError: the hub cannot be reached.
    """
    path = pretrained_path(base)
    local = paths.local(path)
    if local is not None:
        if not (local / "config.json").is_file():
            problem = f"no model with a config.json in the base's folder {path!r}"
            raise ModelError(problem, where="the base", fix=f"Give its current place: {Option('base', 'PATH')}.")
        return local
    files = [*_FILES, "*.py"] if base.trust_remote_code else [*_FILES]
    # Subfolders hold a second copy of the weights in the publisher's own format.
    with explained(path, "the base", _BASE), shown(f"downloading {path}"):
        return Path(
            snapshot_download(
                path, revision=base.revision, tqdm_class=tqdm_class(), allow_patterns=files, ignore_patterns=["*/*"]
            )
        )


def base_of(
    adapter: PeftConfig, recipe: RecipeConfig | None, named_base: str | None, *, trusted: bool, flag: str = _BASE
) -> Model:
    """Return the base of an adapter.

    Args:
        trusted: This command may run the base's own code.

    Raises:
        ModelError: the user names a base that the adapter was not trained on, or the base is unknown.
    """
    recorded = pretrained_path(recipe.model) if recipe else adapter.base_model_name_or_path
    revision = adapter.revision or (recipe.model.revision if recipe else None)
    if named_base is None:
        if not recorded:
            raise ModelError("the adapter does not name its base", where=flag, fix=f"Give it with {_BASE}.")
        return model_of(recorded, revision, trusted)
    if recorded and named_base != recorded and paths.local(named_base) is None and paths.local(recorded) is None:
        problem = f"the adapter was trained on {recorded!r}, not on {named_base!r}"
        raise ModelError(problem, where=flag, fix="Give its base or a copy of it.")
    return model_of(named_base, revision if named_base == recorded else None, trusted)


def check_facts(base: str, config: PreTrainedConfig, recipe: RecipeConfig | None, flag: str = _BASE) -> None:
    """Check that a base has the size of the trained model: an adapter may also fit the layers of a deeper model.

    Raises:
        ModelError: the sizes differ.
    """
    trained, base_facts = recipe.architecture if recipe else None, config.get_text_config()
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if name == "vocab_size" and recipe and recipe.model.vision:
            continue  # a row for the token of an image was added to those of the LLM
        if trained and getattr(base_facts, name) != getattr(trained, name):
            sizes = f"{name} {getattr(base_facts, name)}, and the trained model has {getattr(trained, name)}"
            raise ModelError(f"the base {base!r} has {sizes}", where=flag, fix="Give a copy of its base.")


def read_model_config(folder: Path, model: Model, **changes: int) -> PreTrainedConfig:
    """Return the config in a model's folder; `model` says whether its own code may run.

    Raises:
        ModelError: transformers does not know the model, or the weights have fewer than 16 bits.
    """
    with explained(str(folder)):
        config = transformers.AutoConfig.from_pretrained(folder, **load_options(model), **changes)
    stored = getattr(config, "quantization_config", None)
    if stored:
        kind = stored.get("quant_method", "fewer bits")
        problem = f"its weights are stored in {kind}: they are not exported again, and no adapter is merged into them"
        fix = f"Take a 16-bit copy, of an adapter's base with {_BASE}; or export only the adapter."
        raise ModelError(problem, where=folder, fix=fix)
    return config
