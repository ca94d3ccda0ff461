"""The entries of Axolotl's `datasets`, as keys of a recipe's data set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tuner import paths
from tuner.importers.document import Keys
from tuner.importers.rules import one_file, renamed, source
from tuner.importers.translation import Given, Outcome, Translation

_FORMATS = {
    **dict.fromkeys(("alpaca", "alpaca_chat", "gpteacher", "oasst", "reflection"), "alpaca"),
    "sharegpt": "sharegpt",
    **dict.fromkeys(("completion", "pretrain"), "text"),
}
"""The first word of its `type` -> our format; of others it is told from the columns."""
_CHATS = ("chat_template", "sharegpt", "chatml", "llama3")
_KNOWN = (*_FORMATS, *_CHATS, "input_output")
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
_JUDGED = ("prompt", "chosen", "rejected", "completion", "label")
_OF_ENTRY = {
    *("path", "name", "split", "train_on_split", "type", "data_files", "field", "text_column", "field_messages"),
    *("message_property_mappings", *_QUESTIONS),
}
_LEFT_OF_ENTRY = (
    "conversation chat_template chat_template_jinja roles roles_to_train train_on_eos train_on_eot shards shards_idx "
    "preprocess_shards input_transform input_format field_human field_model field_thinking ds_type "
    "template_thinking_key message_field_training message_field_training_detail split_thinking drop_system_message "
    "trust_remote_code revision logprobs_field temperature field_tools skip step_separator max_completion_length "
    "train_on_last_step_only field_prompt field_chosen field_rejected field_system message_field_role "
    "message_field_content eot_tokens"
)
"""Keys of an entry that our formats and the chat template decide."""


def datasets(t: Translation, given: Given) -> None:
    """Take every entry; those of test_datasets validate."""
    found = given.value if isinstance(given.value, list) else [given.value]
    for number, one in enumerate(found):
        entry, keys = one if isinstance(one, dict) else {"path": one}, (*given.keys, str(number))
        if entry.get("type") == "_synthetic":
            t.leave(given, "synthetic rows for a benchmark: tuner smoke makes its own")
            continue
        if not entry.get("path"):
            raise t.document.wrong("the data set has no path", keys, "Set path to a file or a hub id.")
        t.check_block("a data set", entry, keys, _OF_ENTRY, _LEFT_OF_ENTRY)
        made = {
            "path": _path(entry),
            "name": entry.get("name"),
            "split": str(entry.get("split") or entry.get("train_on_split") or "train"),
            **_shape(t, given, keys, entry),
        }
        (t.validation if given.key == "test_datasets" else t.datasets).append(made)
    t.note(given, Outcome.TRANSLATED, f"{len(found)} data sets")


def _path(entry: dict[str, Any]) -> str:
    path, file = str(entry["path"]), one_file(entry.get("data_files"))
    if file is None or source(path, file) == file:
        return file or path
    return f"{path}/{file}" if paths.local(path) else f"hf://datasets/{path}/{file}"


def _shape(t: Translation, given: Given, keys: Keys, entry: dict[str, Any]) -> dict[str, Any]:
    type_ = entry.get("type")
    if isinstance(type_, dict):
        columns = {ours: str(type_[key]) for key, ours in _QUESTIONS.items() if type_.get(key)}
        judged = {key: str(type_[f"field_{key}"]) for key in _JUDGED if type_.get(f"field_{key}")}
        format_ = "preference" if "chosen" in judged else "feedback" if "label" in judged else "alpaca"
        _note_type(t, keys, "format and similar keys", format_, "the chat template renders prompts, not `format`")
        return {"format": format_, "columns": renamed(judged or columns), "system": type_.get("system_prompt") or None}
    return _named_shape(t, given, keys, entry, str(type_ or ""))


def _named_shape(t: Translation, given: Given, keys: Keys, entry: dict[str, Any], type_: str) -> dict[str, Any]:
    word = type_.partition(".")[0].partition(":")[0]
    if (written := _WRITTEN.get(word)) and t.objective != "pretrain":
        why = f"Axolotl renders prompts as {written}, tuner with the model's chat template"
        _note_type(t, keys, type_, _FORMATS.get(word), why)
    if t.objective != "sft" and t.objective != "pretrain":
        columns = {key: str(entry[f"field_{key}"]) for key in ("chosen", "rejected") if entry.get(f"field_{key}")}
        return {"format": None, "columns": renamed(columns)}
    if word in ("completion", "pretrain") or given.key == "pretraining_dataset":
        field = str(entry.get("field") or entry.get("text_column") or "text")
        t.objective = "pretrain"
        return {"format": "text", "columns": renamed({"text": field})}
    if word in _CHATS:
        return _chat(entry)
    if word and word not in _KNOWN:
        why = "tuner detects the format from the columns and renders prompts with the model's chat template"
        _note_type(t, keys, type_, None, why)
    return {"format": _FORMATS.get(word)}


def _note_type(t: Translation, keys: Keys, type_: str, format_: str | None, why: str) -> None:
    shown = replace(t.inner((*keys, "type"), type_), key=f"{keys[0]}[{keys[-1]}].type")
    t.note(shown, Outcome.CHANGED, f"format {format_}", why)


def _chat(entry: dict[str, Any]) -> dict[str, Any]:
    mappings = entry.get("message_property_mappings") or {}
    content = mappings.get("content") or entry.get("message_field_content")
    format_ = "sharegpt" if content == "value" or entry.get("type") == "sharegpt" else "messages" if content else None
    field = entry.get("field_messages")
    if field in (None, "messages", "conversations", "conversation"):
        return {"format": format_}
    return {"format": format_ or "messages", "columns": {"messages": str(field)}}
