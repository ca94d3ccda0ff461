"""transformers' `TrainingArguments`, whose words LLaMA-Factory, TRL and ms-swift share: each with what it is here.

The words with the same meaning in all of them are `recipes.aliases`'; here stand those that need a look at others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, get_args

from tuner.importers import deepspeed
from tuner.importers.document import Document
from tuner.importers.training_arguments_left_out import LAUNCH, NOT, REASONS
from tuner.importers.translation import Given, Outcome, Rule, Tool, Translation
from tuner.recipes.aliases import ALIASES, Alias, by_word
from tuner.recipes.optimizer import OptimizerType
from tuner.recipes.schema import ParamScheduler, Tracker

_LOADER, _OPTIMIZER = "train_dataloader", "optim_wrapper.optimizer"
RATIO = "param_scheduler.warmup_ratio"
LIGER = Alias("model.use_liger_kernel")
NUM_PROC = Alias(f"{_LOADER}.dataset.num_proc")
SHARED_SAMPLES = Alias("train_cfg.sequence_parallel_size")
_SCHEDULES = get_args(ParamScheduler.model_fields["type"].annotation)


def same(words: str) -> dict[str, Rule]:
    """Return the rules of words that `recipes.aliases` knows."""
    return {word: ALIASES[word] for word in words.split()}


def epochs(t: Translation, given: Given) -> None:
    """Take whole epochs; a part of one counts as one."""
    number = given.number()
    if number <= 0:
        raise given.wrong("the number of epochs must be above 0")
    if number != int(number):
        why = f"epochs are whole numbers: {math.ceil(number)}; for part of one: --set max_steps=STEPS"
        t.set(given, "train_cfg.max_epochs", math.ceil(number), why, changed=True)
    else:
        t.set(given, "train_cfg.max_epochs", int(number))


def warmup_ratio(t: Translation, given: Given) -> None:
    """Take a part of all steps; it stands back where steps are named too."""
    if t.number("warmup_steps", 0) > 0:
        t.leave(given, "warmup_steps is set too and overrides it")
    else:
        t.set(given, RATIO, given.value)


def warmup_steps(t: Translation, given: Given) -> None:
    """Take steps of warm-up; below 1 they are a part of all steps (transformers 5)."""
    steps = given.number()
    if steps < 0:
        raise given.wrong("the number of steps must be 0 or more")
    if steps == 0 and not given.is_default:
        t.set(given, RATIO, t.number("warmup_ratio", 0.0))
    elif 0 < steps < 1:
        t.set(given, RATIO, steps)
    elif steps >= 1:
        t.warmup_steps = given


def schedule(t: Translation, given: Given) -> None:
    """Take a course of the learning rate, or the nearest that there is."""
    name = str(given.value)
    ours = ALIASES["lr_scheduler_type"].value(name) or name
    if ours in _SCHEDULES:
        t.set(given, "param_scheduler.type", ours)
        return
    near = next((one for one in ("cosine_with_restarts", "cosine", "linear") if one in name), "cosine")
    if name == "cosine_with_min_lr":
        near = "cosine"
    t.set(given, "param_scheduler.type", near, f"tuner has no schedule {name!r}; this one ends at 0", changed=True)


def optimizer(t: Translation, given: Given) -> None:
    """Take an optimizer, or AdamW where there is none of that name."""
    name = str(given.value)
    ours = ALIASES["optim"].value(name)
    if ours in get_args(OptimizerType):
        t.set(given, f"{_OPTIMIZER}.type", ours)
        return
    near = "PagedAdamW8bit" if "paged" in name else "AdamW8bit" if "8bit" in name else "AdamW"
    t.set(given, f"{_OPTIMIZER}.type", near, f"tuner has no optimizer {name!r}", changed=True)


def betas(t: Translation, given: Given) -> None:
    """Take both of Adam's betas at once."""
    t.set(given, f"{_OPTIMIZER}.betas", (t.number("adam_beta1", 0.9), t.number("adam_beta2", 0.999)))


def clipping(t: Translation, given: Given) -> None:
    """Take the largest norm; 0 is no clipping."""
    if given.number() > 0:
        t.set(given, "optim_wrapper.clip_grad.max_norm", given.value)
    else:
        t.set(given, "optim_wrapper.clip_grad", None)


def target(t: Translation, given: Given) -> None:
    """Take the layers that are adapted."""
    words = given.words()
    if not words:
        raise given.wrong("has no layer", "Use all-linear, or the names of layers such as q_proj, v_proj.")
    is_all = words[0] in ("all", "ALL", "all-linear", "auto")
    t.set(given, "adapter.target_modules", "all-linear" if is_all else words)


def trackers(t: Translation, given: Given) -> None:
    """Take the trackers that there are."""
    names = [name for name in given.words() if name not in ("none", "all")]
    unknown = [name for name in names if name not in get_args(Tracker)]
    why = f"tuner has no tracker {', '.join(unknown)}" if unknown else None
    t.set(given, "log.trackers", [name for name in names if name not in unknown], why, changed=bool(unknown))


def interval(ours: str) -> Rule:
    """Return the rule of a number of steps; a part of all steps is none."""

    def rule(t: Translation, given: Given) -> None:
        if given.number() >= 1:
            t.set(given, ours, given.value)
        else:
            t.leave(given, "intervals are in steps, and a share of all steps is only known after the data is read")

    return rule


def kept(t: Translation, given: Given) -> None:
    """Take how many checkpoints stay; no limit is a large number."""
    number = given.whole()
    t.set(given, "checkpoint.max_keep_ckpts", number if number > 0 else 1000)


def no_epochs(what: str, ours: str) -> Rule:
    """Return the rule of *_strategy: steps are what tuner counts."""

    def rule(t: Translation, given: Given) -> None:
        word = str(given.value).lower()
        if word in ("steps", "interval"):
            t.leave(given, f"intervals are in steps: {ours}")
        else:
            t.leave(given, f"{what} only by steps ({ours}), and at the end")

    return rule


def truth(value: Any) -> bool:
    """Say whether a value of YAML or of a command line means yes."""
    return str(value).lower() in ("true", "yes", "1")


def switched(ours: str) -> Rule:
    """Return the rule of a key that is on or off here, and may name a way of its own there."""

    def rule(t: Translation, given: Given) -> None:
        is_on = given.value not in (None, "") and str(given.value).lower() not in ("false", "no", "0", "off")
        t.set(given, ours, is_on)

    return rule


def compute_type(t: Translation, given: Given) -> None:
    """Take bf16 or fp16; false says nothing, as the other may be true."""
    word = given.key.rpartition(".")[2].removeprefix("pure_").replace("bfloat16", "bf16").replace("float16", "fp16")
    if str(given.value).lower() in ("auto", "full"):
        t.set(given, "optim_wrapper.dtype", "auto")
    elif truth(given.value):
        t.set(given, "optim_wrapper.dtype", word)
    else:
        t.leave(given, "false: the compute type follows the GPUs or another key")


def weights_type(t: Translation, given: Given) -> None:
    """Take torch_dtype: weights are loaded as they are computed with."""
    if str(given.value) in ("auto", "None"):
        t.leave(given, "tuner loads weights in the compute type")
    else:
        t.set(given, "optim_wrapper.dtype", ALIASES["torch_dtype"].value(str(given.value)))


def attention(t: Translation, given: Given) -> None:
    """Take the attention's kernel, in the words of any tool."""
    ours = ALIASES["attn_impl"].value(str(given.value))
    t.set(given, "model.attn_implementation", None if ours == "None" else ours)


def liger(t: Translation, given: Given) -> None:
    """Take one of Liger's kernels, all of which are one setting here."""
    if truth(given.value):
        t.set(given, "model.use_liger_kernel", True, "all of its kernels together")
    else:
        t.leave(given, "false: its kernels are one setting, which another key may enable")


def model(t: Translation, given: Given) -> None:
    """Take the model."""
    t.model = given


def own_template(t: Translation, given: Given) -> None:
    """Say that the model's own chat template writes the prompts, in place of the one that is named.

    Templates are named after the model's family: one that begins otherwise (`alpaca`, `default`) writes other prompts.
    """
    named = t.model or next((one for one in t.given.values() if t.tool.table.get(one.key) is model), None)
    family = re.match("[a-z]+", str(given.value).lower())
    if named and family and family[0] in str(named.value).lower().rpartition("/")[2]:
        t.leave(given, "tuner uses the model's own chat template, or the catalog's for it: --set model.chat_template")
    else:
        why = (
            "tuner renders prompts with the model's own chat template; for another one: --set model.chat_template=NAME"
        )
        t.note(given, Outcome.CHANGED, why=why)


def best(t: Translation, given: Given) -> None:
    """Save the best where the source does."""
    if truth(given.value):
        t.set(given, "checkpoint.save_best", "eval_loss")
    else:
        t.leave(given, "the last weights are the result, as they are without checkpoint.save_best")


def held_out(t: Translation, given: Given) -> None:
    """Take the part of the rows that validates; a number of rows is none."""
    part = given.number()
    if 0 < part < 1:
        t.set(given, f"{_LOADER}.dataset.val_split", part)
    elif part == 0:
        t.leave(given, "no rows are held out, as without val_split")
    else:
        t.leave(given, "a number of rows: tuner holds out a share of them, --val-split 0.05")


def val_batch(t: Translation, given: Given) -> None:
    """Take the validation's micro-batch."""
    t.set(given, "val_dataloader.batch_size", given.value)


def smoothing(t: Translation, given: Given) -> None:
    """Label smoothing of the cross entropy is nothing that tuner has; 0 is none."""
    t.leave(given, "tuner does not smooth labels" if given.number() else "none: the default")


TABLE: Mapping[str, Rule] = {
    "weight_decay": Alias(f"{_OPTIMIZER}.weight_decay"),
    "seed": Alias("randomness.seed"),
    **same("learning_rate adam_epsilon max_steps gradient_accumulation_steps"),
    **same("per_device_train_batch_size dataloader_num_workers"),
    "gradient_checkpointing": ALIASES["gradient_checkpointing"],
    "activation_checkpointing": ALIASES["activation_checkpointing"],
    "torch_compile": switched("train_cfg.torch_compile"),
    "num_train_epochs": epochs,
    "lr_scheduler_type": schedule,
    "warmup_ratio": warmup_ratio,
    "warmup_steps": warmup_steps,
    "optim": optimizer,
    "adam_beta1": betas,
    "adam_beta2": betas,
    "max_grad_norm": clipping,
    "label_smoothing_factor": smoothing,
    "bf16": compute_type,
    "fp16": compute_type,
    "report_to": trackers,
    "logging_steps": interval("log.interval"),
    "save_steps": interval("checkpoint.interval"),
    "eval_steps": interval("train_cfg.val_interval"),
    "save_total_limit": kept,
    "per_device_eval_batch_size": val_batch,
    "eval_strategy": no_epochs("validation runs", "train_cfg.val_interval"),
    "evaluation_strategy": no_epochs("validation runs", "train_cfg.val_interval"),
    "save_strategy": no_epochs("checkpoints are saved", "checkpoint.interval"),
    "logging_strategy": no_epochs("metrics are written", "log.interval"),
    "load_best_model_at_end": best,
    "use_liger_kernel": LIGER,
    "deepspeed": deepspeed.chosen,
    **by_word(REASONS),
}

DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "logging_steps": 500,
    "save_steps": 500,
    "seed": 42,
    "gradient_checkpointing": False,
}
"""What transformers 5 means by a word that is not written, where a recipe without it would mean something else."""


def no_warmup(defaults: Mapping[str, Any], document: Document) -> dict[str, Any]:
    """Return defaults with no warm-up, unless the source names one."""
    named = any(document.values.get(key) is not None for key in ("warmup_ratio", "warmup_steps"))
    return {key: value for key, value in defaults.items() if key != "warmup_steps"} | (
        {} if named else {"warmup_ratio": 0.0}
    )


TOOL = Tool(
    "TrainingArguments",
    {**TABLE, "model_name_or_path": model, "_n_gpu": LAUNCH, "mp_parameters": NOT},
    defaults=lambda document: no_warmup(DEFAULTS, document),
    keys="training_arguments",
)
"""A file of these words alone says nothing of a model or data: those come with --model and --data."""
