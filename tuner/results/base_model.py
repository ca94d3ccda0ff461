"""The base model of an adapter: where it is, which commit, its weights on this disk, its config.

It loads no weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import snapshot_download

import tuner.models  # noqa: F401  registers InternLM with transformers
from tuner import paths
from tuner.errors import ModelError
from tuner.models.load import explained, source
from tuner.progress import shown, tqdm_class
from tuner.recipes.schema import Model, RecipeConfig

_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")


def model_of(path: str, revision: str | None = None, trusted: bool = False) -> Model:
    """Return the `model` block of a model that no recipe names; nothing else is set, and its values are not checked."""
    return Model.model_construct(
        path=path,
        revision=revision,
        chat_template=None,
        attn_implementation=None,
        use_liger_kernel=False,
        trust_remote_code=trusted,
        remote_code=False,
        resize_embeddings=False,
        router_aux_loss_coef=None,
    )


def hub_id(model: Model) -> str | None:
    """Return the id of a model on the hub; None for one in a folder."""
    path = source(model)
    return path if paths.local(path) is None else None


def folder_of(base: Model) -> Path:
    """Return the folder with a base's weights, config and tokenizer; from the hub they are downloaded first.

    Raises:
        ModelError: there is no such model.
        MachineError: the hub cannot be reached.
    """
    path = source(base)
    local = paths.local(path)
    if local is not None:
        if not (local / "config.json").is_file():
            problem = f"no model with a config.json in the base's folder {path!r}"
            raise ModelError(problem, where="the base", fix="Give its current place: --base PATH.")
        return local
    files = [*_FILES, "*.py"] if base.trust_remote_code else [*_FILES]
    # Folders inside hold the weights once more, in the publisher's own format.
    patterns: dict[str, Any] = {"allow_patterns": files, "ignore_patterns": ["*/*"]}
    with explained(path, "the base", "--base"), shown(f"downloading {path}"):
        return Path(snapshot_download(path, revision=base.revision, tqdm_class=tqdm_class(), **patterns))


def base_of(adapter: Any, recipe: RecipeConfig | None, named_base: str | None, flag: str = "--base") -> Model:
    """Return the base of an adapter.

    Args:
        adapter: Its configuration.
        recipe: Of the run that it comes from, if it comes from one.
        asked: Where the user says that the base is.
        flag: What the user says it with.

    Raises:
        ModelError: the user names another model than the one that it was trained on, or nobody names any.
    """
    recorded = source(recipe.model) if recipe else adapter.base_model_name_or_path
    revision = adapter.revision or (recipe.model.revision if recipe else None)
    trusted = recipe.model.trust_remote_code if recipe else False
    if named_base is None:
        if not recorded:
            raise ModelError("the adapter does not name its base", where=flag, fix="Give it with --base.")
        return model_of(recorded, revision, trusted)
    if recorded and named_base != recorded and paths.local(named_base) is None and paths.local(recorded) is None:
        problem = f"the adapter was trained on {recorded!r}, not on {named_base!r}"
        raise ModelError(problem, where=flag, fix="Give its base or a copy of it.")
    return model_of(named_base, revision if named_base == recorded else None, trusted)


def check_facts(base: str, config: Any, recipe: RecipeConfig | None, flag: str = "--base") -> None:
    """Check that a base is of the size of the model that was trained: an adapter may fit the layers of a deeper one.

    Raises:
        ModelError: it is not.
    """
    trained, base_facts = recipe.architecture if recipe else None, config.get_text_config()
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if trained and getattr(base_facts, name) != getattr(trained, name):
            sizes = f"{name} {getattr(base_facts, name)}, and the trained model has {getattr(trained, name)}"
            raise ModelError(f"the base {base!r} has {sizes}", where=flag, fix="Give a copy of its base.")


def read_model_config(folder: Path, *, trust_remote_code: bool, **changes: Any) -> Any:
    """Return the config in a model's folder.

    Raises:
        ModelError: transformers does not know it, or the weights are stored in fewer bits than 16.
    """
    with explained(str(folder)):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **changes)
    stored = getattr(config, "quantization_config", None)
    if stored:
        kind = stored.get("quant_method", "fewer bits")
        problem = f"the weights in {folder} are stored in {kind}, and an adapter cannot be merged into them"
        raise ModelError(problem, where="--merge", fix="Export only the adapter, or give a 16-bit copy with --base.")
    return config
