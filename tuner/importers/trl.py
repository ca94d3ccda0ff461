"""TRL's YAML and its command lines: `trl sft|dpo|kto|reward`, the recipes of the alignment handbook and open-r1.

What is learned stands in the command; a file alone tells it by the keys that one objective has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tuner.importers import training_arguments
from tuner.importers.document import Document, Keys
from tuner.importers.training_arguments import NUM_PROC, attention, model, same, target, truth, weights_type
from tuner.importers.translation import Given, Outcome, Rule, Tool, Translation, told_with
from tuner.recipes.aliases import Alias, by_word
from tuner.recipes.objective import objectives_with
from tuner.recipes.schema import schema_keys

_COMMANDS = {"sft": "sft", "dpo": "dpo", "kto": "kto", "reward": "reward", "orpo": "orpo"}
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
        return _COMMANDS[command], None
    if command or _ONLINE & document.values.keys():
        return "sft", _LEARNS_ONLINE
    told = next((name for name, keys in _TELL if keys & document.values.keys()), None)
    splits = [str(one.get("split")) for one in _mixture(document) if isinstance(one, dict)]
    return told or ("dpo" if any("prefs" in split for split in splits) else "sft"), None


def _mixture(document: Document) -> list[Any]:
    mixture = document.values.get("dataset_mixture")
    found = mixture.get("datasets") if isinstance(mixture, dict) else document.values.get("datasets")
    return found if isinstance(found, list) else []


def setting(t: Translation, given: Given) -> None:
    """Take a setting of the objective where it has one; TRL's names are ours."""
    if ("objective", given.key) in schema_keys() and t.objective in objectives_with(given.key):
        value = given.value
        if given.key == "loss_type" and not isinstance(value, list):
            value = [value] if t.objective == "dpo" else value
        t.set(given, f"objective.{given.key}", value)
    else:
        t.leave(given, f"is not a setting of {t.objective} in tuner")


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
    files = one.get("data_files")
    name = one.get("config") or one.get("name")
    weight = one.get("weight") or one.get("fraction")
    share = Given(".".join((*keys, "weight")), weight, t.document.where(keys), keys)
    made = {
        "path": str(files if isinstance(files, str) and path in ("json", "csv", "parquet", "text") else path),
        "name": None if name == "default" else name,
        "split": str(one.get("split") or "train"),
        "weight": share.number() if weight not in (None, 1, 1.0) else None,
    }
    t.datasets.append(made)
    if one.get("columns"):
        given = Given(".".join((*keys, "columns")), one["columns"], t.document.where((*keys, "columns")), keys)
        t.note(given, Outcome.CHANGED, "format None", "the columns to keep: tuner uses those of the row format")


def peft(t: Translation, given: Given) -> None:
    """Take the method."""
    t.note(given, Outcome.TRANSLATED, f"method {t.method}")


def bits(number: int) -> Callable[[Translation, Given], None]:
    """Return the rule of load_in_4bit and load_in_8bit."""

    def rule(t: Translation, given: Given) -> None:
        if truth(given.value) and t.method == "qlora":
            t.set(given, "quantization.bits", number)
        else:
            t.leave(
                given,
                "nothing is quantized" if not truth(given.value) else "weights are only quantized with an adapter",
            )

    return rule


def scheduler_settings(t: Translation, given: Given) -> None:
    """The schedules end at 0."""
    t.note(given, Outcome.LEFT_OUT, why="schedules have only warmup_ratio and end at 0")


def chat_template(t: Translation, given: Given) -> None:
    """A whole template is a file's to hold."""
    t.leave(given, "put the template into FILE.jinja and use --set model.chat_template=FILE.jinja")


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
        **training_arguments.no_warmup(training_arguments.DEFAULTS, document),
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


_ROLLOUT = "belongs to learning from rewards (GRPO, RLOO), which tuner does not support"
_REASONS = {
    "env": "set variables before the command: NAME=VALUE tuner train ...",
    "dataset_batch_size dataset_kwargs shuffle_dataset dataset_streaming streaming": (
        "tuner prepares rows once, in its own way"
    ),
    "skip_prepare_dataset eval_packing dataset_prompt_column dataset_id_column ignore_bias_buffers dataset_weights": (
        "tuner prepares rows once, in its own way"
    ),
    "packing_strategy padding_free pad_to_multiple_of pad_token eos_token truncation_mode truncation_side": (
        "tuner packs whole samples that do not attend to each other, with the tokenizer's own tokens"
    ),
    "completion_only_loss": "tuner always computes the loss only on the answers",
    "max_prompt_length max_completion_length max_target_length": (
        "max_length limits the whole sample; in GRPO it limits generated answers"
    ),
    "model_init_kwargs ref_model_init_kwargs chat_template_path": "tuner has no such setting",
    "disable_dropout generate_during_eval sync_ref_model ref_model_* is_encoder_decoder label_pad_token_id": (
        "tuner's reference is the model before training, and dropout is off beside it"
    ),
    "padding_value rpo_alpha reference_free force_use_ref_model model_adapter_name ref_adapter_name tools": (
        "tuner has no such setting"
    ),
    "use_logits_to_keep base_model_attribute_name chosen_rejected_* loss_weight": "tuner has no such setting",
    (
        "lora_task_type lora_target_parameters use_unsloth num_completions_to_print"
    ): "tuner sets it, or does not support it",
    "bnb_4bit_quant_storage bnb_4bit_compute_dtype use_bnb_nested_quant": "4-bit weights are double-quantized NF4",
    "reward_* num_generations num_iterations temperature top_p top_k use_vllm vllm_* epsilon* scale_rewards": _ROLLOUT,
    "log_completions mask_truncated_completions cosine_* repetition_* code_* e2b_* callbacks benchmarks": _ROLLOUT,
    "system_prompt wandb_* parallel_code_exec_per_proc max_resamples generation_* num_mini_batches delta": _ROLLOUT,
    "importance_sampling_level top_entropy_quantile steps_per_generation morph_* gradio_* script_args": _ROLLOUT,
    "auto_insert_empty_system_msg tokenizer_name_or_path text_column decontaminate": (
        "tuner uses the model's tokenizer and chat template"
    ),
    "attn_implementation_* cast_lm_head_to_fp32 cache_implementation chat_template_kwargs": "tuner has no such setting",
    "entropy_* use_adaptive_entropy min_p max_tool_calling_iterations log_multimodal log_unique_prompts": _ROLLOUT,
    "multi_objective_aggregation normalize_advantages num_generations_eval off_policy_mask_threshold": _ROLLOUT,
    "sapo_* vespo_* use_bias_correction_kl use_transformers_* transformers_continuous_batching_config": _ROLLOUT,
    "soft_punish_cache max_completion_len ds3_gather_for_generation ioi_provider log_completions_*": _ROLLOUT,
    "cache_dir data_config use_auth_token hub_model_revision overwrite_hub_revision push_to_hub_revision": (
        "the hub's own variables set it (HF_HOME, HF_TOKEN)"
    ),
}

TABLE: Mapping[str, Rule] = {
    **training_arguments.TABLE,
    **by_word(_REASONS),
    "assistant_only_loss": assistant_only_loss,
    "model_name_or_path": model,
    "model_revision": Alias("model.revision", {"main": "None"}),
    "router_aux_loss_coef": Alias("model.router_aux_loss_coef"),
    "activation_offloading": Alias("train_cfg.activation_offloading"),
    "torch_dtype": weights_type,
    "dtype": weights_type,
    "attn_implementation": attention,
    "dataset_num_proc": NUM_PROC,
    "max_length": Alias("train_dataloader.dataset.max_length"),
    "max_seq_length": same("max_seq_length")["max_seq_length"],
    "packing": Alias("train_dataloader.dataset.packing"),
    "use_peft": peft,
    "lora_r": Alias("adapter.r"),
    "lora_alpha": Alias("adapter.lora_alpha"),
    "lora_dropout": Alias("adapter.lora_dropout"),
    "lora_target_modules": target,
    "lora_modules_to_save": Alias("adapter.modules_to_save"),
    "use_rslora": Alias("adapter.use_rslora"),
    "use_dora": Alias("adapter.use_dora"),
    "load_in_4bit": bits(4),
    "load_in_8bit": bits(8),
    "bnb_4bit_quant_type": Alias("quantization.quant_type"),
    "dataset_name": dataset_name,
    **dict.fromkeys(
        ("dataset_config", "dataset_train_split", "dataset_test_split", "dataset_text_field"), told_with("the data set")
    ),
    "dataset_mixture": mixture,
    "dataset_mixer": "the old form of dataset_mixture: write the data sets there",
    "dataset_splits": "the old form of dataset_mixture: write the data sets there",
    "datasets": mixture,
    "chat_template": chat_template,
    "lr_scheduler_kwargs": scheduler_settings,
    **dict.fromkeys(
        (
            *("beta", "loss_type", "label_smoothing", "ld_alpha", "f_divergence_type", "f_alpha_divergence_coef"),
            *("use_weighting", "discopop_tau", "precompute_ref_log_probs", "precompute_ref_batch_size", "loss_weights"),
            *("desirable_weight", "undesirable_weight", "center_rewards_coefficient"),
        ),
        setting,
    ),
}

TOOL = Tool(
    "TRL",
    TABLE,
    _begin,
    _settle,
    _prepare,
    keys="trl",
)
