"""Other tools' words for a recipe's keys, in one table: those of XTuner, Hugging Face, PEFT, LLaMA-Factory and others.

It rewrites one word and its value; whether the result is a recipe's, `overrides` and the schema decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from tuner.errors import did_you_mean

Meaning = TypeVar("Meaning")


class Alias(NamedTuple):
    """One word of another tool: a key of a recipe, a flag that does the same, or what to do instead."""

    key: str | None = None
    values: Mapping[str, str] = MappingProxyType({})
    """Pattern of the whole value, in any case -> how it is written here; any other value stays as it is."""
    instead: str | None = None
    """What to do where there is no key, or where no pattern of `values` fits."""
    flag: str | None = None

    def value(self, text: str) -> str | None:
        """Return a value as it is written here, or None where it has no counterpart."""
        for pattern, ours in self.values.items():
            if found := re.fullmatch(pattern, text.strip(), re.IGNORECASE):
                return found.expand(ours)
        return None if self.instead else text


_YES, _NO = "true|yes|1", "false|no|0"
_WHOLE = {r"(\d+)\.0+": r"\1"}
_NONE_BELOW_ZERO = {r"-\d+": "None"}
_LOADER, _ROWS, _OPTIMIZER = "train_dataloader", "train_dataloader.dataset", "optim_wrapper.optimizer"
_DTYPES = {
    "bfloat16|torch.bfloat16": "bf16",
    "float16|half|torch.float16": "fp16",
    "float32|float|torch.float32": "fp32",
}
_OPTIMIZERS = {
    "adamw|adamw_(?:hf|torch|torch_fused|torch_xla|apex_fused)|torch.optim.AdamW": "AdamW",
    "adamw_(?:8bit|bnb_8bit)": "AdamW8bit",
    "paged_adamw_8bit": "PagedAdamW8bit",
    "paged_adamw(?:_32bit)?": "PagedAdamW32bit",
    "adam": "Adam",
    "sgd": "SGD",
    "rmsprop": "RMSprop",
    "lion": "Lion",
    "muon": "Muon",
    "(AdamW|Adam|NAdam|RAdam|Adamax|SGD|RMSprop|AdamW8bit|PagedAdamW8bit|PagedAdamW32bit|FusedAdam|Lamb|Lion|Muon)": (
        r"\1"
    ),
}
_MODULES = {
    "all|all-linear|all_linear": "all-linear",
    r"\[(.*)\]": r"[\1]",
    r"([\w.-]+(?:\s*,\s*[\w.-]+)*)": r"[\1]",  # PEFT would read 'q_proj,v_proj' as one regular expression
}
_SCHEDULES = {
    "constant_with_warmup": "constant",
    "cosine_annealing|CosineAnnealingLR": "cosine",
    "LinearLR": "linear",
}
_ATTENTION = {
    "fa2|flash_attn|flash_attention": "flash_attention_2",
    "fa3": "flash_attention_3",
    "disabled|eager": "eager",
    "auto": "None",
}

_FLAGS = {
    "--model": "model model_name_or_path pretrained_model_name_or_path base_model model_id",
    "--data": "dataset datasets dataset_name data_path train_file train_dataset",
}
"""Flag that sets a path and what belongs to it -> words."""
_PATHS = {"--model": "model.path", "--data": f"{_ROWS}.path"}
_RENAMED = {
    "model.revision": "model_revision",
    "model.resize_embeddings": "resize_vocab",
    "model.router_aux_loss_coef": "moe_aux_loss_coef",
    "adapter.r": "lora_rank lora_r rank",
    "adapter.modules_to_save": "lora_modules_to_save additional_target",
    "adapter.lora_dropout": "dropout",
    "quantization.bits": "quantization_bit quant_bits",
    "quantization.quant_type": "bnb_4bit_quant_type quantization_type",
    "quantization.double_quant": "bnb_4bit_use_double_quant double_quantization",
    "train_cfg.trainable_layers": "freeze_trainable_layers",
    "objective.beta": "pref_beta",
    "objective.loss_type": "pref_loss",
    f"{_ROWS}.name": "dataset_config dataset_config_name",
    f"{_ROWS}.split": "dataset_train_split",
    f"{_ROWS}.max_length": (
        "cutoff_len max_seq_length max_seq_len model_max_length sequence_len sequence_length block_size"
    ),
    f"{_ROWS}.max_rows": "max_samples max_train_samples",
    f"{_ROWS}.packing": "sample_packing pack_to_max_length packed",
    f"{_ROWS}.system": "SYSTEM default_system",
    f"{_LOADER}.num_workers": "dataloader_num_workers",
    f"{_OPTIMIZER}.lr": "learning_rate",
    f"{_OPTIMIZER}.eps": "adam_epsilon",
    "optim_wrapper.clip_grad.max_norm": "max_grad_norm gradient_clipping clip_grad_norm",
    "optim_wrapper.accumulative_counts": "gradient_accumulation_steps",
    f"{_LOADER}.batch_size": "per_device_train_batch_size micro_batch_size train_micro_batch_size_per_gpu",
    "val_dataloader.batch_size": "per_device_eval_batch_size",
    "train_cfg.val_interval": "eval_steps",
    "checkpoint.interval": "save_steps",
    "checkpoint.max_keep_ckpts": "save_total_limit",
    "log.interval": "logging_steps",
    "train_cfg.gradient_checkpointing": "activation_checkpointing",
}
"""Key -> words that mean it, with the same values."""
_CONVERTED = {
    "attn_impl flash_attn": Alias("model.attn_implementation", _ATTENTION),
    "attn_implementation": Alias("model.attn_implementation", {"flash_attn|fa2": "flash_attention_2"}),
    "lora_target lora_target_modules": Alias("adapter.target_modules", _MODULES),
    "target_modules": Alias("adapter.target_modules", {r"([\w.-]+(?:\s*,\s*[\w.-]+)+)": r"[\1]"}),
    "bnb_4bit_compute_dtype torch_dtype": Alias("optim_wrapper.dtype", _DTYPES),
    "optim": Alias(f"{_OPTIMIZER}.type", _OPTIMIZERS, "Use torch's name: --set optimizer.type=AdamW."),
    "optim_type optimizer": Alias(f"{_OPTIMIZER}.type", _OPTIMIZERS),
    "bf16": Alias("optim_wrapper.dtype", {_YES: "bf16", "auto": "auto"}, "Use --set dtype=fp16, fp32 or auto."),
    "pure_bf16": Alias("optim_wrapper.dtype", {_YES: "bf16"}, "Use --set dtype=fp16, fp32 or auto."),
    "fp16": Alias("optim_wrapper.dtype", {_YES: "fp16", "auto": "auto"}, "Use --set dtype=bf16, fp32 or auto."),
    "mixed_precision": Alias("optim_wrapper.dtype", {"no": "fp32"}),
    "lr_scheduler_type lr_scheduler": Alias("param_scheduler.type", _SCHEDULES),
    "num_train_epochs num_epochs epochs": Alias("train_cfg.max_epochs", _WHOLE),
    "max_steps": Alias("train_cfg.max_steps", _NONE_BELOW_ZERO),
    "load_best_model_at_end": Alias("checkpoint.save_best", {_YES: "eval_loss", _NO: "None"}),
    "metric_for_best_model": Alias("checkpoint.save_best", {"(?:eval_)?loss": "eval_loss"}, "Use eval_loss."),
    "report_to log_with": Alias("log.trackers", {"none": "[]"}),
    "gradient_checkpointing": Alias("train_cfg.gradient_checkpointing", {"unsloth": "True"}),
    "disable_gradient_checkpointing": Alias(
        "train_cfg.gradient_checkpointing", {_YES: "False", _NO: "True"}, "Use true or false."
    ),
}
"""Words -> the key, and its values. A word that is a recipe's own key stands here for another tool's values of it."""
_DECIDED = "tuner sets this itself: remove it."
_REFUSED = {
    "template prompt_template": (
        "tuner uses the tokenizer's own chat template; for another one: --set model.chat_template=FILE.jinja."
    ),
    "tokenizer_name_or_path": "tuner uses the model's tokenizer: put its files into the model's folder.",
    "adapter finetuning_type tuner_type train_type use_peft use_lora": (
        "The method is part of the recipe's name: full, lora, qlora or dora, as in qwen3_8b_qlora_alpaca_e3."
    ),
    "load_in_4bit load_in_8bit": "Use a recipe with qlora in its name; --set quantization.bits=8 makes it 8 bits.",
    "adapter_name_or_path": "Resume from a run: --resume RUN --resume-weights.",
    "stage rlhf_type": (
        "The objective is part of the recipe's name: qwen3_8b_lora_alpaca_e3, llama3_1_8b_dpo_qlora_..._e1."
    ),
    "dataset_dir": "Pass the file itself: --data FILE.",
    "dataset_text_field": f"Set the text column: --set \"{_ROWS}.columns=dict(text='COLUMN')\".",
    "use_varlen_attn neat_packing": "Remove it: in tuner, packed samples never attend to each other.",
    "padding_free": f"Use packing instead: --set {_ROWS}.packing=true.",
    "bias task_type preprocessing_num_workers dataset_num_proc overwrite_cache tf32 lr_scheduler_kwargs": _DECIDED,
    "min_lr gradient_checkpointing_kwargs overwrite_output_dir do_train remove_unused_columns": _DECIDED,
    "group_by_length": f"tuner does not support this: remove it. Packing wastes less: --set {_ROWS}.packing=true.",
    "train_on_prompt train_on_inputs mask_history streaming neftune_noise_alpha": (
        "tuner does not support this: remove it."
    ),
    "val_set_size val_size split_dataset_ratio eval_dataset val_dataset dataset_test_split do_eval": (
        "Set val_dataloader in a recipe file (docs/runs.md), and its interval: --set train_cfg.val_interval=STEPS."
    ),
    "adam_beta1 adam_beta2": f"Set both at once: --set {_OPTIMIZER}.betas=0.9,0.999.",
    "train_batch_size": f"Set train_cfg.global_batch_size, or {_LOADER}.batch_size for one GPU's batch.",
    "loss_scale": "Put it into a DeepSpeed JSON and pass that: --deepspeed my.json.",
    "warmup_steps num_warmup_steps": "Warmup is a share of all steps: --set param_scheduler.warmup_ratio=0.03.",
    "ddp_timeout": "Set the seconds without progress that end a run: --set train_cfg.hang_timeout=1800.",
    "save_strategy eval_strategy evaluation_strategy saves_per_epoch evals_per_epoch": (
        "Intervals are in steps, not epochs: --set checkpoint.interval=STEPS, --set train_cfg.val_interval=STEPS."
    ),
    "logging_strategy": "Intervals are in steps: --set log.interval=STEPS.",
    "save_only_model": "A checkpoint is always resumable; to get only the weights: tuner export RUN DEST.",
    "evaluation_freq evaluation_inputs": "Sample answers are written after training: --set log.num_samples=4.",
    "plot_loss": "Curves are in the run's report: tuner report RUN.",
    "run_name wandb_project logging_dir": (
        "Trackers read their own variables (WANDB_PROJECT, WANDB_NAME ...); choose them with --set log.trackers=wandb."
    ),
    "output_dir work_dir": "Use --work-dir DIR.",
    "resume_from_checkpoint load_from auto_resume": "Use --resume CHECKPOINT, or --resume auto.",
    "push_to_hub": "Export the run, then: huggingface-cli upload NAME DEST.",
    "data_seed": "There is one seed: --seed N.",
    "local_rank": "The launcher sets it. For several machines: --nnodes, --node-rank, --master-addr.",
    "num_processes": "Use --nproc-per-node N.",
    "num_machines": "Use --nnodes N.",
    "main_process_port": "Use --master-port PORT.",
    "zero_stage": "Use --deepspeed zero2 or zero3.",
    "fsdp": "tuner trains with DeepSpeed: --deepspeed zero3 splits the weights as FSDP does.",
}
"""Words without a counterpart -> what to do instead."""


def by_word(groups: Mapping[str, Meaning]) -> dict[str, Meaning]:
    """Return a table that says for several words at once what they mean as one that says it for each."""
    return {word: meaning for words, meaning in groups.items() for word in words.split()}


ALIASES: Mapping[str, Alias] = {
    **by_word({words: Alias(flag=flag) for flag, words in _FLAGS.items()}),
    **by_word({words: Alias(key) for key, words in _RENAMED.items()}),
    **by_word(_CONVERTED),
    **by_word({words: Alias(instead=instead) for words, instead in _REFUSED.items()}),
}
"""Word -> what it means."""

_BLOCKS = ("training_args.", "model_args.", "data_args.", "peft_config.", "model.llm.", "model.lora.", "lora.")
"""Under which blocks other tools keep these words; `model.lora.r` is their `r`."""
_PATH = r"(?!dict\(|\{|none$|null$).+"
_BLOCK_HERE = {
    "model": _PATH,
    "dataset": _PATH,
    "optimizer": r"(?:paged_)?adamw?(?:_\w+)?|sgd|rmsprop|lion",
    "adapter": "[qd]?lora",
}
"""Words that are a block here, and another tool's where the value is as this pattern says."""


def find(key: str, value: str = "") -> Alias | None:
    """Return what a word of another tool means, or None where it is none: a recipe's own key, or an unknown one."""
    word = bare(key)
    theirs = _BLOCK_HERE.get(word)
    return None if theirs and not re.fullmatch(theirs, value.strip(), re.IGNORECASE) else ALIASES.get(word)


def bare(key: str) -> str:
    """Return a key without the block that another tool keeps it in."""
    block = next((block for block in _BLOCKS if key.startswith(block)), "")
    return key.removeprefix(block).replace("-", "_")


def note(key: str, value: str, where: str) -> str | None:
    """Return the line that says what a word is called here, or None where it is called so here too."""
    alias = find(key, value)
    ours = alias and (alias.flag or alias.key)
    return f"{key} is called {ours} in tuner ({where})." if ours and ours.split(".")[-1] != key.split(".")[-1] else None


def key_hint(key: str, known: Iterable[str]) -> str:
    """Return what to write instead of an unknown key in a recipe file, where the `known` ones may stand."""
    known = list(known)
    return _hint(key) or did_you_mean(key, known) or f"Known: {', '.join(known)}."


def _hint(key: str) -> str:
    alias = ALIASES.get(bare(key), Alias())
    ours = _PATHS[alias.flag] if alias.flag else alias.key
    return f"It is called {ours} in tuner." if ours else alias.instead or ""
