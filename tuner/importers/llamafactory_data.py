"""Data sets that LLaMA-Factory's `dataset_info.json` registers, as keys of a recipe's data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tuner import paths
from tuner.errors import RecipeError, did_you_mean
from tuner.importers.document import Document
from tuner.importers.rules import renamed
from tuner.importers.translation import Given, Outcome, Translation

_INFO = "dataset_info.json"
_COLUMNS = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "system": "system"},
    "sharegpt": {"messages": "conversations", "system": "system", "tools": "tools"},
    "openai": {"messages": "messages", "system": "system", "tools": "tools"},
    "preference": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected", "system": "system"},
}
"""Formatting -> their word of a column -> ours of the format."""
_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "openai": "messages"}
_MEDIA = ("images", "videos", "audios")
_PARENTS = 4
"""How many folders above the config its `data` folder is looked for, as in examples/train_lora."""


def datasets(t: Translation, given: Given) -> None:
    """Take the data sets that are named, each as it is registered."""
    registry = _registry(t)
    found = [one for name in given.words() if (one := _one(t, given, name, registry))]
    if not given.words():
        raise given.wrong("has no data set")
    if not found:
        return
    (t.datasets if given.key == "dataset" else t.validation).extend(found)
    shown = ", ".join(str(one.get("path")) for one in found)
    t.note(given, Outcome.TRANSLATED, f"data {shown}")
    if given.key == "eval_dataset" and len(found) > 1:
        t.note(given, Outcome.CHANGED, why=f"validation uses only the first: {found[0].get('path')}")


def max_samples(t: Translation, given: Given) -> None:
    """Take how many rows of each data set there are, counted together in a mixture."""
    named = t.given.get("dataset")
    if named and len(named.words()) > 1:
        t.note(given, Outcome.CHANGED, "max_rows", "in the source for each data set, in tuner for all rows together")
    else:
        t.note(given, Outcome.TRANSLATED, "train_dataloader.dataset.max_rows")


def settle(t: Translation) -> None:
    """Give every data set the number of rows that the config says of all."""
    if most := t.whole("max_samples", 0):
        for one in (*t.datasets, *t.validation):
            one["max_rows"] = min(most, one.get("max_rows") or most)


def _registry(t: Translation) -> Document | None:
    """Return the registration beside the data, which is looked for here and above the config."""
    folder = Path(str(t.value("dataset_dir", "data")))
    above = [t.document.folder, *t.document.folder.absolute().parents][:_PARENTS]
    for one in (folder, *(parent / folder for parent in above)):
        if paths.is_file(one / _INFO):
            return Document.of_yaml(one / _INFO)
    return None


def _one(t: Translation, given: Given, name: str, registry: Document | None) -> dict[str, Any] | None:
    if registry is None:
        if Path(name).suffix or "/" in name:
            return {"path": name}
        why = f"{_INFO} is missing, so {name!r} is unknown: give it with --data FILE"
        t.note(given, Outcome.CHANGED, f"data {name}", why)
        return {"path": f"{t.value('dataset_dir', 'data')}/{name}.json"}
    info = registry.values.get(name)
    if not isinstance(info, dict):
        what = f"{name!r} is not registered in {registry.name}"
        raise RecipeError(what, where=given.where, fix=did_you_mean(name, registry.values) or "Register it there.")
    if any((info.get("columns") or {}).get(key) for key in _MEDIA):
        t.obstacle = f"its data {name!r} has images, sound or video, and tuner trains text models"
        t.note(given, Outcome.LEFT_OUT, why=t.obstacle)
        return None
    return _registered(name, info, registry)


def _registered(name: str, info: dict[str, Any], registry: Document) -> dict[str, Any]:
    one: dict[str, Any] = {"path": _path(name, info, registry), "name": info.get("subset")}
    one["split"] = info.get("split") or "train"
    if info.get("num_samples"):
        one["max_rows"] = int(info["num_samples"])
    return one | _shape(name, info, registry)


def _path(name: str, info: dict[str, Any], registry: Document) -> str:
    for key in ("hf_hub_url", "ms_hub_url", "om_hub_url"):
        if info.get(key) and not info.get("file_name"):
            return str(info[key])
    file = info.get("file_name")
    if not file:
        what = f"the data set {name!r} has neither a file nor a hub id"
        raise registry.wrong(what, (name,), "Set file_name or hf_hub_url there.")
    whole = registry.folder / str(info.get("folder") or "") / str(file)
    if not whole.resolve().is_relative_to(registry.folder.resolve()):
        what = f"the file {str(file)!r} of {name!r} is outside of {registry.folder}"
        raise registry.wrong(what, (name, "file_name"), "Move it there, or give it with --data.")
    return str(whole)


def _shape(name: str, info: dict[str, Any], registry: Document) -> dict[str, Any]:
    """Return format and columns, where they are not what the format has by itself."""
    formatting = str(info.get("formatting") or "alpaca")
    if formatting not in _FORMATS:
        what = f"the data set {name!r} has the formatting {formatting!r}"
        raise registry.wrong(what, (name, "formatting"), "Known: alpaca, sharegpt, openai.")
    columns, tags = info.get("columns") or {}, info.get("tags") or {}
    if info.get("ranking") or columns.get("chosen"):
        return _preference(columns, formatting)
    if columns.get("kto_tag"):
        return _feedback(columns, formatting)
    if set(columns) == {"prompt"}:
        return {"format": "text", "columns": renamed({"text": columns["prompt"]})}
    is_chat = formatting == "sharegpt" and (tags.get("content_tag", "value") == "content")
    ours = "messages" if is_chat else _FORMATS[formatting]
    known = _COLUMNS["openai" if is_chat else formatting]
    theirs = {known[key]: value for key, value in columns.items() if key in known and value}
    return {"format": ours, "columns": renamed(theirs)}


def _preference(columns: dict[str, Any], formatting: str) -> dict[str, Any]:
    prompt = columns.get("prompt") or columns.get("messages")
    if formatting == "alpaca" and columns.get("query"):
        prompt = f"{{{columns.get('prompt', 'instruction')}}}\n{{{columns['query']}}}"
    theirs = {key: str(columns.get(key, key)) for key in ("chosen", "rejected")}
    if prompt and prompt not in ("prompt", "instruction", "conversations", "messages"):  # found by themselves
        theirs["prompt"] = prompt
    return {"format": "preference", "columns": renamed(theirs)}


def _feedback(columns: dict[str, Any], formatting: str) -> dict[str, Any]:
    if formatting == "alpaca":
        theirs = {"prompt": columns.get("prompt", "instruction"), "completion": columns.get("response", "output")}
        return {"format": "feedback", "columns": renamed({**theirs, "label": columns["kto_tag"]})}
    theirs = {"messages": columns.get("messages", "messages"), "label": columns["kto_tag"]}
    return {"format": "feedback", "columns": renamed(theirs)}
