"""Other tools' words for a recipe's keys, in one table: those of XTuner, Hugging Face, PEFT, LLaMA-Factory and others.

It rewrites one word and its value; whether the result is a recipe's, `overrides` and the schema decide.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Alias:
    """One word of another tool: a key of a recipe, a flag that does the same, or what to do instead."""

    key: str | None = None
    """The key it means, or `--model` and `--data`, which set more than one."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Pattern of the whole value, in any case -> how it is written here; any other value stays as it is."""
    instead: str | None = None
    """What to do where there is no key, or where no pattern of `values` fits."""

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
    "(AdamW|Adam|NAdam|RAdam|Adamax|SGD|RMSprop|AdamW8bit|PagedAdamW8bit|PagedAdamW32bit|Lamb|Lion)": r"\1",
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


def _not(instead: str) -> Alias:
    return Alias(instead=instead)


_METHOD = "The method is a word of the recipe's name: full, lora, qlora or dora, as in qwen3_8b_qlora_alpaca_e3."
_OBJECTIVE = "What is learned is a word of the recipe's name: qwen3_8b_lora_alpaca_e3, llama3_1_8b_dpo_qlora_..._e1."
_TEMPLATE = "The tokenizer's own chat template is taken; another one: --set model.chat_template=FILE.jinja."
_WORK_DIR = "Write --work-dir DIR."
_RESUME = "Write --resume CHECKPOINT, or --resume auto."
_VALIDATION = "Set val_dataloader in a recipe file (docs/recipes.md); when: --set train_cfg.val_interval=STEPS."
_WARMUP = "The warm-up is a part of all steps: --set param_scheduler.warmup_ratio=0.03."
_BITS = "Take a recipe with qlora in its name; --set quantization.bits=8 makes it 8 bits."
_BETAS = f"Write both at once: --set {_OPTIMIZER}.betas=0.9,0.999."
_ALWAYS = "tuner always does that: leave it out."
_GLOBAL = f"It is {_LOADER}.batch_size x optim_wrapper.accumulative_counts x GPUs: set the first two."
_NEVER = "tuner does not do that: leave it out."
_TRACKER = "Trackers read their own variables (WANDB_PROJECT, WANDB_NAME ...); which ones: --set log.trackers=wandb."
_LAUNCH = "The launcher sets it; several machines: --nnodes, --node-rank, --master-addr."
_DEEPSPEED = "Write it into a DeepSpeed JSON and name it: --deepspeed my.json."
_INTERVAL = "Steps decide, never epochs: --set checkpoint.interval=STEPS, --set train_cfg.val_interval=STEPS."

FLAGS = ("--model", "--data")
"""They set a path and what belongs to it."""
ALIASES: Mapping[str, Alias] = {
    # The model.
    "model": Alias("--model"),
    "model_name_or_path": Alias("--model"),
    "pretrained_model_name_or_path": Alias("--model"),
    "base_model": Alias("--model"),
    "model_id": Alias("--model"),
    "model_revision": Alias("model.revision"),
    "attn_impl": Alias("model.attn_implementation", _ATTENTION),
    "flash_attn": Alias("model.attn_implementation", _ATTENTION),
    "attn_implementation": Alias("model.attn_implementation", {"flash_attn|fa2": "flash_attention_2"}),
    "resize_vocab": Alias("model.resize_embeddings"),
    "template": _not(_TEMPLATE),
    "prompt_template": _not(_TEMPLATE),
    "tokenizer_name_or_path": _not("The tokenizer is the model's: put its files into the model's folder."),
    # The method.
    "adapter": _not(_METHOD),
    "finetuning_type": _not(_METHOD),
    "tuner_type": _not(_METHOD),
    "train_type": _not(_METHOD),
    "use_peft": _not(_METHOD),
    "use_lora": _not(_METHOD),
    "lora_rank": Alias("adapter.r"),
    "lora_r": Alias("adapter.r"),
    "rank": Alias("adapter.r"),
    "lora_target": Alias("adapter.target_modules", _MODULES),
    "lora_target_modules": Alias("adapter.target_modules", _MODULES),
    "target_modules": Alias("adapter.target_modules", {r"([\w.-]+(?:\s*,\s*[\w.-]+)+)": r"[\1]"}),
    "lora_modules_to_save": Alias("adapter.modules_to_save"),
    "additional_target": Alias("adapter.modules_to_save"),
    "dropout": Alias("adapter.lora_dropout"),
    "load_in_4bit": _not(_BITS),
    "load_in_8bit": _not(_BITS),
    "quantization_bit": Alias("quantization.bits"),
    "quant_bits": Alias("quantization.bits"),
    "bnb_4bit_quant_type": Alias("quantization.quant_type"),
    "quantization_type": Alias("quantization.quant_type"),
    "bnb_4bit_use_double_quant": Alias("quantization.double_quant"),
    "double_quantization": Alias("quantization.double_quant"),
    "bnb_4bit_compute_dtype": Alias("optim_wrapper.dtype", _DTYPES),
    "adapter_name_or_path": _not("Go on from a run: --resume RUN --resume-weights."),
    "freeze_trainable_layers": Alias("train_cfg.trainable_layers"),
    "bias": _not("PEFT's bias stays 'none': leave it out."),
    "task_type": _not("The objective decides it: leave it out."),
    "stage": _not(_OBJECTIVE),
    "rlhf_type": _not(_OBJECTIVE),
    "pref_beta": Alias("objective.beta"),
    "pref_loss": Alias("objective.loss_type"),
    # Data.
    "dataset": Alias("--data"),
    "datasets": Alias("--data"),
    "dataset_name": Alias("--data"),
    "data_path": Alias("--data"),
    "train_file": Alias("--data"),
    "train_dataset": Alias("--data"),
    "dataset_dir": _not("Name the file itself: --data FILE."),
    "dataset_config": Alias(f"{_ROWS}.name"),
    "dataset_config_name": Alias(f"{_ROWS}.name"),
    "dataset_train_split": Alias(f"{_ROWS}.split"),
    "dataset_text_field": _not(f"Say which column is the text: --set \"{_ROWS}.columns=dict(text='COLUMN')\"."),
    "cutoff_len": Alias(f"{_ROWS}.max_length"),
    "max_seq_length": Alias(f"{_ROWS}.max_length"),
    "max_seq_len": Alias(f"{_ROWS}.max_length"),
    "model_max_length": Alias(f"{_ROWS}.max_length"),
    "sequence_len": Alias(f"{_ROWS}.max_length"),
    "sequence_length": Alias(f"{_ROWS}.max_length"),
    "block_size": Alias(f"{_ROWS}.max_length"),
    "max_samples": Alias(f"{_ROWS}.max_rows"),
    "max_train_samples": Alias(f"{_ROWS}.max_rows"),
    "sample_packing": Alias(f"{_ROWS}.packing"),
    "pack_to_max_length": Alias(f"{_ROWS}.packing"),
    "packed": Alias(f"{_ROWS}.packing"),
    "use_varlen_attn": _not("Packed samples never see each other: always so in tuner. Leave it out."),
    "neat_packing": _not("Packed samples never see each other: always so in tuner. Leave it out."),
    "padding_free": _not(f"Pack instead: --set {_ROWS}.packing=true."),
    "SYSTEM": Alias(f"{_ROWS}.system"),
    "default_system": Alias(f"{_ROWS}.system"),
    "preprocessing_num_workers": _not("Data is prepared once and kept: leave it out."),
    "dataset_num_proc": _not("Data is prepared once and kept: leave it out."),
    "overwrite_cache": _not("Prepared data is made anew where its rows changed: leave it out."),
    "dataloader_num_workers": Alias(f"{_LOADER}.num_workers"),
    "group_by_length": _not(f"{_NEVER} Packing wastes less: --set {_ROWS}.packing=true."),
    "train_on_prompt": _not(_NEVER),
    "train_on_inputs": _not(_NEVER),
    "mask_history": _not(_NEVER),
    "streaming": _not(_NEVER),
    "val_set_size": _not(_VALIDATION),
    "val_size": _not(_VALIDATION),
    "split_dataset_ratio": _not(_VALIDATION),
    "eval_dataset": _not(_VALIDATION),
    "val_dataset": _not(_VALIDATION),
    "dataset_test_split": _not(_VALIDATION),
    "do_eval": _not(_VALIDATION),
    # The optimizer's step.
    "learning_rate": Alias(f"{_OPTIMIZER}.lr"),
    "optim": Alias(f"{_OPTIMIZER}.type", _OPTIMIZERS, "Write it as torch does: --set optimizer.type=AdamW."),
    "optim_type": Alias(f"{_OPTIMIZER}.type", _OPTIMIZERS),
    "optimizer": Alias(f"{_OPTIMIZER}.type", _OPTIMIZERS),
    "adam_epsilon": Alias(f"{_OPTIMIZER}.eps"),
    "adam_beta1": _not(_BETAS),
    "adam_beta2": _not(_BETAS),
    "max_grad_norm": Alias("optim_wrapper.clip_grad.max_norm"),
    "gradient_clipping": Alias("optim_wrapper.clip_grad.max_norm"),
    "clip_grad_norm": Alias("optim_wrapper.clip_grad.max_norm"),
    "gradient_accumulation_steps": Alias("optim_wrapper.accumulative_counts"),
    "per_device_train_batch_size": Alias(f"{_LOADER}.batch_size"),
    "micro_batch_size": Alias(f"{_LOADER}.batch_size"),
    "train_micro_batch_size_per_gpu": Alias(f"{_LOADER}.batch_size"),
    "per_device_eval_batch_size": Alias("val_dataloader.batch_size"),
    "train_batch_size": _not(_GLOBAL),
    "global_batch_size": _not(_GLOBAL),
    "bf16": Alias("optim_wrapper.dtype", {_YES: "bf16", "auto": "auto"}, "Write --set dtype=fp16, fp32 or auto."),
    "pure_bf16": Alias("optim_wrapper.dtype", {_YES: "bf16"}, "Write --set dtype=fp16, fp32 or auto."),
    "fp16": Alias("optim_wrapper.dtype", {_YES: "fp16", "auto": "auto"}, "Write --set dtype=bf16, fp32 or auto."),
    "torch_dtype": Alias("optim_wrapper.dtype", _DTYPES),
    "mixed_precision": Alias("optim_wrapper.dtype", {"no": "fp32"}),
    "tf32": _not("torch's own setting stands: leave it out."),
    "loss_scale": _not(_DEEPSPEED),
    "neftune_noise_alpha": _not(_NEVER),
    "use_liger_kernel": _not(_NEVER),
    "enable_liger_kernel": _not(_NEVER),
    # The learning rate's course.
    "lr_scheduler_type": Alias("param_scheduler.type", _SCHEDULES),
    "lr_scheduler": Alias("param_scheduler.type", _SCHEDULES),
    "warmup_steps": _not(_WARMUP),
    "num_warmup_steps": _not(_WARMUP),
    "lr_scheduler_kwargs": _not("The schedules have no settings but warmup_ratio: leave it out."),
    "min_lr": _not("The schedules end at 0: leave it out."),
    # How long, and what is kept.
    "num_train_epochs": Alias("train_cfg.max_epochs", _WHOLE),
    "num_epochs": Alias("train_cfg.max_epochs", _WHOLE),
    "epochs": Alias("train_cfg.max_epochs", _WHOLE),
    "max_steps": Alias("train_cfg.max_steps", _NONE_BELOW_ZERO),
    "eval_steps": Alias("train_cfg.val_interval"),
    "save_steps": Alias("checkpoint.interval"),
    "save_total_limit": Alias("checkpoint.max_keep_ckpts"),
    "load_best_model_at_end": Alias("checkpoint.save_best", {_YES: "eval_loss", _NO: "None"}),
    "metric_for_best_model": Alias("checkpoint.save_best", {"(?:eval_)?loss": "eval_loss"}, "Take eval_loss."),
    "logging_steps": Alias("log.interval"),
    "report_to": Alias("log.trackers", {"none": "[]"}),
    "log_with": Alias("log.trackers", {"none": "[]"}),
    "gradient_checkpointing": Alias("train_cfg.gradient_checkpointing", {"unsloth": "True"}),
    "disable_gradient_checkpointing": Alias(
        "train_cfg.gradient_checkpointing", {_YES: "False", _NO: "True"}, "Write true or false."
    ),
    "activation_checkpointing": Alias("train_cfg.gradient_checkpointing"),
    "gradient_checkpointing_kwargs": _not("The form without reentrance is taken: leave it out."),
    "ddp_timeout": _not("How long a run may stand still, in seconds: --set train_cfg.hang_timeout=1800."),
    "save_strategy": _not(_INTERVAL),
    "eval_strategy": _not(_INTERVAL),
    "evaluation_strategy": _not(_INTERVAL),
    "logging_strategy": _not("Steps decide: --set log.interval=STEPS."),
    "saves_per_epoch": _not(_INTERVAL),
    "evals_per_epoch": _not(_INTERVAL),
    "save_only_model": _not("A checkpoint is always resumable; weights alone: tuner export RUN DEST."),
    "evaluation_freq": _not("Answers are given after training, and in a chat: --set log.num_samples=4."),
    "evaluation_inputs": _not("Answers are given after training, and in a chat: --set log.num_samples=4."),
    "plot_loss": _not("Curves are in the run's report: tuner report RUN."),
    "run_name": _not(_TRACKER),
    "wandb_project": _not(_TRACKER),
    "logging_dir": _not(_TRACKER),
    "output_dir": _not(_WORK_DIR),
    "work_dir": _not(_WORK_DIR),
    "overwrite_output_dir": _not("A run directory is never overwritten: each run gets its own. Leave it out."),
    "resume_from_checkpoint": _not(_RESUME),
    "load_from": _not(_RESUME),
    "auto_resume": _not(_RESUME),
    "push_to_hub": _not("Export the run, then: huggingface-cli upload NAME DEST."),
    "do_train": _not(_ALWAYS),
    "remove_unused_columns": _not(_ALWAYS),
    "data_seed": _not("One seed decides: --seed N."),
    "local_rank": _not(_LAUNCH),
    "num_processes": _not("Write --nproc-per-node N."),
    "num_machines": _not("Write --nnodes N."),
    "main_process_port": _not("Write --master-port PORT."),
    "zero_stage": _not("Write --deepspeed zero2 or zero3."),
    "sequence_parallel_size": _not("tuner keeps each sample on one GPU: leave it out."),
    "fsdp": _not("tuner trains with DeepSpeed: --deepspeed zero3 splits the weights as FSDP does."),
}  # fmt: skip
"""Word -> what it means. A word that is a recipe's own key stands here for another tool's values of it."""

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
    found = find(key, value)
    if found is None or found.key is None or found.key.split(".")[-1] == key.split(".")[-1]:
        return None
    return f"{key} is {found.key} here ({where})."


def hint(key: str) -> str:
    """Return what to write instead of a word that stands in a recipe file, or nothing where it is no known word."""
    found = ALIASES.get(bare(key))
    if found is None:
        return ""
    if found.key is None:
        return found.instead or ""
    named = {"--model": "model.path", "--data": f"{_ROWS}.path"}.get(found.key, found.key)
    return f"It is {named} here."
