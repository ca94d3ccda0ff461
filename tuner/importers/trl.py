"""Translates TRL's YAML and command lines, `trl sft|dpo|kto|reward|orpo|grpo|rloo`.

It also reads the recipes of the alignment handbook and open-r1. The command names the objective; in a file alone, the
keys of one objective tell it.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.importers import aliases, key_tables, reward_keys, shared_rules, training_arguments
from tuner.importers.aliases import Alias, by_word
from tuner.importers.document import ForeignConfig, Keys, Value
from tuner.importers.key_tables import Changes
from tuner.importers.objective_names import WORDS
from tuner.importers.shared_rules import truth
from tuner.importers.translation import Outcome, Rule, Setting, Tool, Translation, recorded_with, when_on
from tuner.recipes.schema.objectives import OBJECTIVES

_TELL = (
    ("rloo", {"normalize_advantages"}),
    ("grpo", {"num_generations", "reward_funcs", "reward_weights", "steps_per_generation", "scale_rewards"}),
    ("distill", {"teacher_model_name_or_path"}),
    ("kto", {"desirable_weight", "undesirable_weight"}),
    ("cpo", {"cpo_alpha", "simpo_gamma"}),
    ("reward", {"center_rewards_coefficient"}),
    (
        "dpo",
        {
            *("beta", "precompute_ref_log_probs", "max_prompt_length", "ref_model_init_kwargs", "f_divergence_type"),
            *("rpo_alpha", "ld_alpha", "loss_weights", "use_weighting", "discopop_tau", "reference_free"),
        },
    ),
)
"""Objective -> keys that it has and sft does not have."""
_OF_ENTRY = {"id", "path", "config", "name", "split", "weight", "columns", "data_files", "fraction"}
"""Keys of a mixture's entry."""
_WHOLE_CONVERSATION = "TRL computes the loss on every token of a conversation, tuner only on the assistant's turns"
_PROMPT = 2048
"""Tokens of the longest prompt of an objective that generates; TRL has no limit."""
_PLAIN = "TRL renders a prompt that is plain text as it is; tuner renders it as the user's turn of the chat template"


def objective_of(document: ForeignConfig) -> tuple[str, str | None]:
    """Return the objective, and why it differs from the source's objective, if it does."""
    command = document.command[1] if document.command[:1] == ("trl",) else None
    if command in WORDS["trl"]:
        return str(command), None
    if command:
        return "sft", f"tuner has no {command}"
    objective = next((name for name, keys in _TELL if keys & document.values.keys()), None)
    if objective == "cpo" and document.values.get("loss_type") == "simpo":
        objective = "simpo"  # a loss of TRL's CPOTrainer
    splits = [str(entry.get("split")) for entry in _mixture(document) if isinstance(entry, dict)]
    return objective or ("dpo" if any("prefs" in split for split in splits) else "sft"), None


def _mixture(document: ForeignConfig) -> list[Value]:
    mixture = document.values.get("dataset_mixture")
    entries = mixture.get("datasets") if isinstance(mixture, dict) else document.values.get("datasets")
    return entries if isinstance(entries, list) else []


def dataset_name(t: Translation, setting: Setting) -> None:
    """Add the one data set."""
    name, split = t.value("dataset_config"), str(t.value("dataset_train_split", "train"))
    field, prompt = t.value("dataset_text_field"), t.value("dataset_prompt_column")
    columns = {"text": field} if field not in (None, "text") and t.objective == "pretrain" else None
    if OBJECTIVES[t.objective].facts.generates and prompt not in (None, "prompt"):
        columns = {"prompt": prompt}
    t.datasets.append({"path": str(setting.value), "name": name, "split": split, "columns": columns})
    t.note(setting, Outcome.TRANSLATED, f"data {setting.value}")
    if t.value("eval_strategy", "no") not in ("no", False) and "dataset_test_split" in t.settings:
        t.validation.append({"path": str(setting.value), "name": name, "split": str(t.value("dataset_test_split"))})


def mixture(t: Translation, setting: Setting) -> None:
    """Add every data set of a mixture, of any split: TRL joins them all."""
    block = setting.value if isinstance(setting.value, dict) else {}
    entries = block.get("datasets") if block else setting.value
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise setting.wrong("not a list of data sets", "Use a list of path, name, split, columns.")
    t.check_block("a mixture", block, setting.keys, {"datasets", "test_split_size"}, _WORDS.blocks["mixture"])
    for number, entry in enumerate(entries):
        keys = (*setting.keys, *(["datasets"] if block else []), str(number))
        t.check_block("an entry of a mixture", entry, keys, _OF_ENTRY, _WORDS.blocks["entry"])
        _one_of_mixture(t, entry, keys)
    if block.get("test_split_size"):
        shared_rules.held_out(t, t.inner((*setting.keys, "test_split_size"), block["test_split_size"]))
    t.note(setting, Outcome.TRANSLATED, f"{len(entries)} data sets")


def _one_of_mixture(t: Translation, entry: Mapping[str, Value], keys: Keys) -> None:
    path = entry.get("id") or entry.get("path")
    name = entry.get("config") or entry.get("name")
    weight = entry.get("weight") or entry.get("fraction")
    share = t.inner((*keys, "weight"), weight)
    dataset = {
        "path": shared_rules.place_of_rows(path, entry.get("data_files")),
        "name": None if name == "default" else name,
        "split": str(entry.get("split") or "train"),
        "weight": share.number() if weight not in (None, 1, 1.0) else None,
    }
    t.datasets.append(dataset)
    if entry.get("fraction") is not None:
        why = "TRL takes as many rows as give the mixture these parts; tuner takes this part of the data set"
        t.change(t.inner((*keys, "fraction"), entry["fraction"]), why)
    if entry.get("columns"):
        setting = t.inner((*keys, "columns"), entry["columns"])
        t.note(setting, Outcome.CHANGED, "format None", "the columns to keep: tuner uses those of the row format")


def mixer(t: Translation, setting: Setting) -> None:
    """Add the data sets of the older `dataset_mixer`: id -> part; `dataset_splits` names splits of all of them."""
    if not isinstance(setting.value, dict) or not setting.value:
        raise setting.wrong("not a mapping of data sets to parts")
    splits = t.settings["dataset_splits"].words() if t.value("dataset_splits") is not None else ["train"]
    names = t.value("dataset_configs") or [None] * len(setting.value)
    for (path, part), name in zip(setting.value.items(), names, strict=False):
        weight = t.inner((*setting.keys, str(path)), part).number()
        for split in splits:
            rows = {"path": str(path), "name": name, "split": split, "weight": weight if weight != 1 else None}
            (t.validation if "test" in split else t.datasets).append(rows)
    t.note(setting, Outcome.TRANSLATED, f"{len(t.datasets)} data sets")


def vocabulary_matching(t: Translation, setting: Setting) -> None:
    """Set how GOLD compares the probabilities of a teacher with another vocabulary, of its two switches."""
    if t.objective != "distill" or not truth(setting.value):
        t.leave(setting, "the teacher has the vocabulary of the student")
    else:
        is_hybrid = truth(t.value("uld_use_hybrid_loss"))
        t.set(setting, "objective.vocabulary_matching", "hybrid" if is_hybrid else "sorted")


def _finish(t: Translation) -> None:
    """Record TRL's default loss and the obstacle, after all keys are translated."""
    if t.objective == "sft" and not t.obstacle and t.value("assistant_only_loss") is None:
        shown = Setting("assistant_only_loss", False, "TRL's default", is_default=True)
        t.note(shown, Outcome.CHANGED, why=_WHOLE_CONVERSATION)
    if t.objective != "pretrain":
        t.note_way("plain prompts", _PLAIN)
    if t.obstacle:
        shown = Setting("objective", " ".join(t.document.command) or t.objective, t.document.name)
        t.note(shown, Outcome.CHANGED, f"objective.type = {t.objective!r}", t.obstacle)


def _begin(document: ForeignConfig) -> Mapping[str, Value]:
    """Return TRL's defaults, which partly differ from those of transformers."""
    values = document.values
    objective, _ = objective_of(document)
    rates = {"sft": 2e-5, "reward": 1e-4}  # of all others 1e-6
    is_online = OBJECTIVES[objective].facts.generates
    # TRL names no layers; PEFT then adapts these two layers of models like Llama.
    adapter = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"]}
    return {
        **training_arguments.defaults(document),
        "learning_rate": rates.get(objective, 1e-6),
        "logging_steps": 10,
        "gradient_checkpointing": True,
        **({"max_prompt_length": _PROMPT} if is_online else {"max_length": values.get("max_seq_length") or 1024}),
        **({"num_generations": 2} if objective == "rloo" else {}),
        **({"beta": 0.1, "simpo_gamma": 0.5, "cpo_alpha": 1.0} if objective == "simpo" else {}),
        "packing": False,
        **(adapter if truth(values.get("use_peft")) or values.get("load_in_4bit") else {}),
        **({"use_bnb_nested_quant": False} if truth(values.get("load_in_4bit")) else {}),
    }


def _prepare(t: Translation) -> None:
    t.objective, t.obstacle = objective_of(t.document)
    values = t.document.values
    if t.value("reward_model_name_or_path") is None:
        reward_keys.require_reward(t, "reward_funcs")
    quantized = truth(values.get("load_in_4bit")) or truth(values.get("load_in_8bit"))
    # Keys such as lora_r alone train no adapter; quantized weights cannot be trained without it.
    if truth(values.get("use_peft")) or quantized:
        t.method = "qlora" if quantized else "dora" if truth(values.get("use_dora")) else "lora"


_WORDS = key_tables.of("trl")
_OF_OBJECTIVES = {
    key: Alias(f"objective.{key}")
    for block in OBJECTIVES.values()
    for key in block.model_fields
    if key not in block.own_keys
}
"""The settings of the objectives, which have TRL's names."""
TABLE: Mapping[str, Rule] = {
    **training_arguments.TABLE,
    **_OF_OBJECTIVES,
    **_WORDS.rules,
    **reward_keys.RULES,
    "model_revision": Alias("model.revision", {"main": "None"}),
    **by_word(
        {
            "assistant_only_loss": Changes(_WHOLE_CONVERSATION, frozenset({"true", "yes", "1"})),
            "model_name_or_path": shared_rules.model,
            "torch_dtype dtype": shared_rules.weights_type,
            "attn_implementation": aliases.table()["attn_impl"],
            "use_peft": shared_rules.method,
            "lora_target_modules": shared_rules.target,
            "load_in_4bit load_in_8bit": shared_rules.bits,
            "use_flash_attention_2": when_on(
                "model.attn_implementation", "flash_attention_2", "the kernel follows the GPUs"
            ),
            "dataset_name": dataset_name,
            "dataset_config dataset_train_split dataset_test_split": recorded_with("the data set"),
            "dataset_text_field dataset_prompt_column": recorded_with("the data set"),
            "dataset_mixture datasets": mixture,
            "dataset_mixer": mixer,
            "dataset_splits dataset_configs": recorded_with("dataset_mixer"),
            "chat_template chat_template_path": shared_rules.jinja_template,
            "chat_template_kwargs": shared_rules.template_values,
            "system_prompt": shared_rules.system,
            "loss_type": reward_keys.loss_type,
            "rpo_alpha": shared_rules.added_loss("sft"),
            "max_prompt_length": reward_keys.prompt_length,
            "reward_model_name_or_path": reward_keys.reward_model,
            "teacher_model_name_or_path": reward_keys.teacher,
            "use_uld_loss": vocabulary_matching,
            "uld_use_hybrid_loss": recorded_with("use_uld_loss"),
        }
    ),
}

TOOL = Tool("TRL", TABLE, _begin, _finish, _prepare, others=_WORDS.others)
