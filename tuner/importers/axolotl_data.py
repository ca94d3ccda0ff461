"""The entries of Axolotl's `datasets`, as keys of a recipe's data set."""

from __future__ import annotations

from typing import Any

from tuner.errors import did_you_mean
from tuner.importers.translation import Given, Outcome, Translation
from tuner.recipes import paths

_FORMATS = {
    "alpaca": "alpaca",
    "alpaca_chat": "alpaca",
    "gpteacher": "alpaca",
    "oasst": "alpaca",
    "reflection": "alpaca",
    "sharegpt": "sharegpt",
    "completion": "text",
    "pretrain": "text",
    "input_output": None,
    "chat_template": None,
    "chatml": None,
    "llama3": None,
}
"""The first word of its `type` -> our format; None: told from the columns."""
_ALPACA = "Alpaca's text (### Instruction: ... ### Response: ...)"
_WRITTEN = {
    **dict.fromkeys(("alpaca", "gpteacher", "oasst", "reflection"), _ALPACA),
    "alpaca_chat": "USER: ... ASSISTANT: ...",
    "sharegpt": "the template that `conversation` names, else Vicuna's",
    "chatml": "ChatML",
    "llama3": "Llama 3's chat template",
}
"""The first word of its `type` -> how Axolotl writes its prompts, where that is not with `chat_template`."""
_QUESTIONS = {"field_instruction": "instruction", "field_input": "input", "field_output": "output"}
_LEFT = frozenset(
    (
        *("conversation", "chat_template", "chat_template_jinja", "roles", "roles_to_train", "train_on_eos"),
        *("train_on_eot", "shards", "shards_idx", "preprocess_shards", "input_transform", "input_format"),
        *("field_human", "field_model", "field_thinking", "ds_type", "template_thinking_key"),
        *("message_field_training", "message_field_training_detail", "split_thinking", "drop_system_message"),
        *("trust_remote_code", "revision", "logprobs_field", "temperature", "field_tools", "skip"),
        *("step_separator", "max_completion_length", "train_on_last_step_only", "field_prompt", "field_chosen"),
        *("field_rejected", "field_system", "message_field_role", "message_field_content", "eot_tokens"),
    )
)
"""Keys of an entry that our formats and the chat template decide."""


def datasets(t: Translation, given: Given) -> None:
    """Take every entry; those of test_datasets validate."""
    found = given.value if isinstance(given.value, list) else [given.value]
    for number, one in enumerate(found):
        entry = one if isinstance(one, dict) else {"path": one}
        if entry.get("type") == "_synthetic":
            t.note(given, Outcome.LEFT_OUT, why="synthetic rows for a benchmark: tuner smoke makes its own")
            continue
        if not entry.get("path"):
            raise t.document.wrong(
                "the data set has no path", (*given.keys, str(number)), "Set path to a file or a hub id."
            )
        made = _entry(t, given, number, entry)
        (t.validation if given.key == "test_datasets" else t.datasets).append(made)
    t.note(given, Outcome.TRANSLATED, f"{len(found)} data sets")


def system(t: Translation, given: Given) -> None:
    """Take the system turn of conversations that have none."""
    t.note(given, Outcome.TRANSLATED, "train_dataloader.dataset.system")


def settle(t: Translation) -> None:
    """Give every data set the system turn that the config says of all."""
    if said := t.value("default_system_message"):
        for one in (*t.datasets, *t.validation):
            one.setdefault("system", str(said))


def _entry(t: Translation, given: Given, number: int, entry: dict[str, Any]) -> dict[str, Any]:
    keys = (*given.keys, str(number))
    told = {"path", "name", "split", "train_on_split", "type", "data_files", "field", "text_column", "field_messages"}
    known = told | set(_QUESTIONS) | _LEFT | {"message_property_mappings"}
    if unknown := entry.keys() - known:
        key = min(map(str, unknown))
        raise t.document.wrong(f"Axolotl has no key {key!r} in a data set", (*keys, key), did_you_mean(key, known))
    for key in sorted(entry.keys() & _LEFT):
        if entry[key] is not None:
            place = Given(f"datasets[{number}].{key}", entry[key], t.document.where((*keys, key)))
            t.leave(place, "the format and the chat template decide it")
    made: dict[str, Any] = {
        "path": _path(t, entry),
        "name": entry.get("name"),
        "split": str(entry.get("split") or entry.get("train_on_split") or "train"),
    }
    return made | _shape(t, given, number, entry)


def _path(t: Translation, entry: dict[str, Any]) -> str:
    path, files = str(entry["path"]), entry.get("data_files")
    file = files[0] if isinstance(files, list) and len(files) == 1 else files
    if path in ("json", "csv", "parquet", "text", "arrow") and isinstance(file, str):
        return file
    if isinstance(file, str):
        return f"{path}/{file}" if paths.local(path) else f"hf://datasets/{path}/{file}"
    return path


def _shape(t: Translation, given: Given, number: int, entry: dict[str, Any]) -> dict[str, Any]:
    type_ = entry.get("type")
    if isinstance(type_, dict):
        columns = {ours: str(type_[key]) for key, ours in _QUESTIONS.items() if type_.get(key)}
        judged = {
            key: str(type_[f"field_{key}"])
            for key in ("prompt", "chosen", "rejected", "completion", "label")
            if type_.get(f"field_{key}")
        }
        format_ = "preference" if "chosen" in judged else "feedback" if "label" in judged else "alpaca"
        place = Given(
            f"datasets[{number}].type", "format and similar keys", t.document.where((*given.keys, str(number)))
        )
        t.note(place, Outcome.CHANGED, f"format {format_}", "the chat template renders prompts, not `format`")
        return {"format": format_, "columns": _renamed(judged or columns), "system": type_.get("system_prompt") or None}
    return _named_shape(t, given, number, entry, str(type_ or ""))


def _named_shape(t: Translation, given: Given, number: int, entry: dict[str, Any], type_: str) -> dict[str, Any]:
    word = type_.partition(".")[0].partition(":")[0]
    if (written := _WRITTEN.get(word)) and t.objective != "pretrain":
        why = f"Axolotl renders prompts as {written}, tuner with the model's chat template"
        _note_type(t, given, number, type_, _FORMATS[word], why)
    if t.objective != "sft" and t.objective != "pretrain":
        columns = {key: str(entry[f"field_{key}"]) for key in ("chosen", "rejected") if entry.get(f"field_{key}")}
        return {"format": None, "columns": _renamed(columns)}
    if word in ("completion", "pretrain") or given.key == "pretraining_dataset":
        field = str(entry.get("field") or entry.get("text_column") or "text")
        t.objective = "pretrain"
        return {"format": "text", "columns": _renamed({"text": field})}
    format_ = _FORMATS.get(word)
    if word in ("chat_template", "sharegpt", "chatml", "llama3"):
        return _chat(entry)
    if word not in _FORMATS and word:
        why = "tuner detects the format from the columns and renders prompts with the model's chat template"
        _note_type(t, given, number, type_, None, why)
    return {"format": format_}


def _note_type(t: Translation, given: Given, number: int, type_: str, format_: str | None, why: str) -> None:
    keys = (*given.keys, str(number), "type")
    t.note(
        Given(f"{given.key}[{number}].type", type_, t.document.where(keys), keys),
        Outcome.CHANGED,
        f"format {format_}",
        why,
    )


def _chat(entry: dict[str, Any]) -> dict[str, Any]:
    mappings = entry.get("message_property_mappings") or {}
    content = mappings.get("content") or entry.get("message_field_content")
    format_ = "sharegpt" if content == "value" or entry.get("type") == "sharegpt" else "messages" if content else None
    field = entry.get("field_messages")
    if field in (None, "messages", "conversations", "conversation"):
        return {"format": format_}
    return {"format": format_ or "messages", "columns": {"messages": str(field)}}


def _renamed(columns: dict[str, str]) -> dict[str, str] | None:
    return {ours: theirs for ours, theirs in columns.items() if ours != theirs} or None
