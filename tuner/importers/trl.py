"""TRL's YAML and its command lines: `trl sft|dpo|kto|reward`, the recipes of the alignment handbook and open-r1.

What is learned stands in the command; a file alone tells it by the keys that one objective has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.importers import key_tables, shared_rules, training_arguments
from tuner.importers.document import Document, Keys
from tuner.importers.shared_rules import truth
from tuner.importers.translation import Given, Outcome, Rule, Tool, Translation, told_with
from tuner.recipes.aliases import Alias, by_word

_COMMANDS = ("sft", "dpo", "kto", "reward", "orpo")
"""Those that are called as what they learn."""
_ONLINE = {"num_generations", "reward_funcs", "reward_weights", "max_completion_length", "use_vllm"}
_TELL = (
    ("kto", {"desirable_weight", "undesirable_weight"}),
    ("reward", {"center_rewards_coefficient"}),
    ("dpo", {"beta", "precompute_ref_log_probs", "max_prompt_length", "ref_model_init_kwargs", "f_divergence_type"}),
)
"""Objective -> keys that it has and sft has not."""
_OF_ENTRY = {"id", "path", "config", "name", "split", "weight", "columns", "data_files", "fraction"}
"""Keys of a mixture's entry."""
_WHOLE_CONVERSATION = "TRL computes the loss on every token of a conversation, tuner only on the assistant's turns"
_LEARNS_ONLINE = "it learns from rewards of its own answers, and tuner trains on rows"


def objective_of(document: Document) -> tuple[str, str | None]:
    """Return what is learned, and why it is another thing than in the source where it is."""
    command = document.command[1] if document.command[:1] == ("trl",) else None
    if command in _COMMANDS:
        return str(command), None
    if command or _ONLINE & document.values.keys():
        return "sft", _LEARNS_ONLINE
    told = next((name for name, keys in _TELL if keys & document.values.keys()), None)
    splits = [str(one.get("split")) for one in _mixture(document) if isinstance(one, dict)]
    return told or ("dpo" if any("prefs" in split for split in splits) else "sft"), None


def _mixture(document: Document) -> list[Any]:
    mixture = document.values.get("dataset_mixture")
    found = mixture.get("datasets") if isinstance(mixture, dict) else document.values.get("datasets")
    return found if isinstance(found, list) else []


def dataset_name(t: Translation, given: Given) -> None:
    """Take the one data set."""
    name, split = t.value("dataset_config"), str(t.value("dataset_train_split", "train"))
    field = t.value("dataset_text_field")
    columns = {"text": field} if field not in (None, "text") and t.objective == "pretrain" else None
    t.datasets.append({"path": str(given.value), "name": name, "split": split, "columns": columns})
    t.note(given, Outcome.TRANSLATED, f"data {given.value}")
    if t.value("eval_strategy", "no") not in ("no", False) and "dataset_test_split" in t.given:
        t.validation.append({"path": str(given.value), "name": name, "split": str(t.value("dataset_test_split"))})


def mixture(t: Translation, given: Given) -> None:
    """Take every data set of a mixture, whatever its split: TRL joins them all."""
    found = given.value.get("datasets") if isinstance(given.value, dict) else given.value
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise given.wrong("not a list of data sets", "Use a list of path, name, split, columns.")
    if isinstance(given.value, dict):
        t.check_block("a mixture", given.value, given.keys, {"datasets", "test_split_size"}, "seed")
    lists = (*given.keys, "datasets") if isinstance(given.value, dict) else given.keys
    for number, one in enumerate(found):
        keys = (*lists, str(number))
        t.check_block("an entry of a mixture", one, keys, _OF_ENTRY, "data_dir")
        _one_of_mixture(t, one, keys)
    held_out = isinstance(given.value, dict) and given.value.get("test_split_size")
    if held_out:
        t.note(given, Outcome.CHANGED, why=f"test_split_size {held_out}: tuner holds out a share, --val-split 0.05")
    t.note(given, Outcome.TRANSLATED, f"{len(found)} data sets")


def _one_of_mixture(t: Translation, one: Mapping[str, Any], keys: Keys) -> None:
    path = one.get("id") or one.get("path")
    name = one.get("config") or one.get("name")
    weight = one.get("weight") or one.get("fraction")
    share = t.inner((*keys, "weight"), weight)
    made = {
        "path": shared_rules.source(path, one.get("data_files")),
        "name": None if name == "default" else name,
        "split": str(one.get("split") or "train"),
        "weight": share.number() if weight not in (None, 1, 1.0) else None,
    }
    t.datasets.append(made)
    if one.get("columns"):
        given = t.inner((*keys, "columns"), one["columns"])
        t.note(given, Outcome.CHANGED, "format None", "the columns to keep: tuner uses those of the row format")


def assistant_only_loss(t: Translation, given: Given) -> None:
    """The loss is taken on answers alone here."""
    if truth(given.value):
        t.leave(given, "tuner always computes the loss only on the assistant's turns")
    else:
        t.note(given, Outcome.CHANGED, why=_WHOLE_CONVERSATION)


def _settle(t: Translation) -> None:
    """Take the objective's name, after the keys have looked at it."""
    if t.objective == "sft" and not t.obstacle and t.value("assistant_only_loss") is None:
        shown = Given("assistant_only_loss", False, "TRL's default")
        t.note(shown, Outcome.CHANGED, why=_WHOLE_CONVERSATION)
    if t.obstacle:
        shown = Given("objective", " ".join(t.document.command) or "online", t.document.name)
        t.note(shown, Outcome.CHANGED, "objective.type = 'sft'", t.obstacle)


def _begin(document: Document) -> Mapping[str, Any]:
    """Return TRL's own defaults, which are not all of transformers'."""
    said = document.values
    objective, _ = objective_of(document)
    rates = {"sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "reward": 1e-4, "orpo": 1e-6}
    # TRL names no layers, and PEFT then adapts these two of Llama's like.
    adapter = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"]}
    return {
        **training_arguments.defaults(document),
        "learning_rate": rates[objective],
        "logging_steps": 10,
        "gradient_checkpointing": True,
        "max_length": said.get("max_seq_length") or 1024,
        "packing": False,
        **(adapter if truth(said.get("use_peft")) or said.get("load_in_4bit") else {}),
    }


def _prepare(t: Translation) -> None:
    t.objective, t.obstacle = objective_of(t.document)
    said = t.document.values
    if truth(said.get("use_peft")) or any(key in said for key in ("lora_r", "load_in_4bit")):
        quantized = truth(said.get("load_in_4bit")) or truth(said.get("load_in_8bit"))
        t.method = "qlora" if quantized else "dora" if truth(said.get("use_dora")) else "lora"


_WORDS = key_tables.of("trl")
TABLE: Mapping[str, Rule] = {
    **training_arguments.TABLE,
    **_WORDS.rules,
    "model_revision": Alias("model.revision", {"main": "None"}),
    **by_word(
        {
            "assistant_only_loss": assistant_only_loss,
            "model_name_or_path": shared_rules.model,
            "torch_dtype dtype": shared_rules.weights_type,
            "attn_implementation": shared_rules.attention,
            "use_peft": shared_rules.method,
            "lora_target_modules": shared_rules.target,
            "load_in_4bit load_in_8bit": shared_rules.bits,
            "dataset_name": dataset_name,
            "dataset_config dataset_train_split dataset_test_split dataset_text_field": told_with("the data set"),
            "dataset_mixture datasets": mixture,
        }
    ),
}

TOOL = Tool("TRL", TABLE, _begin, _settle, _prepare, others=_WORDS.others)
