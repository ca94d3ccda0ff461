"""Rules that several tools share: what their words mean here, where that needs a look at the value or at other keys.

Most are of transformers' `TrainingArguments`, whose words LLaMA-Factory, TRL and ms-swift have too.
"""

from __future__ import annotations

import math
import re
from typing import Any, get_args

from tuner.importers.translation import Given, Outcome, Rule, Translation
from tuner.recipes import aliases
from tuner.recipes.schema import OptimizerType, ParamScheduler, Tracker

_OPTIMIZER = "optim_wrapper.optimizer"
_RATIO = "param_scheduler.warmup_ratio"
_SCHEDULES = get_args(ParamScheduler.model_fields["type"].annotation)
_METHODS = ("full", "freeze", "lora", "qlora", "dora", "lora_llm", "true", "false")
_OF_FILES = ("json", "csv", "parquet", "text", "arrow")
"""What `datasets` calls its readers of files: the file then stands in `data_files`."""


def truth(value: Any) -> bool:
    """Say whether a value of YAML or of a command line means yes."""
    return str(value).lower() in ("true", "yes", "1")


def model(t: Translation, given: Given) -> None:
    """Take the model."""
    t.model = given


def learned(t: Translation, given: Given) -> None:
    """Take what is learned, as the tool's `prepare` has told it from all of its words."""
    if t.obstacle:
        t.note(given, Outcome.CHANGED, "objective.type = 'sft'", t.obstacle)
    else:
        outcome = Outcome.TAKEN if given.value == t.objective else Outcome.TRANSLATED
        t.note(given, outcome, f"objective {t.objective}, method {t.method}")


def method(t: Translation, given: Given) -> None:
    """Take the method, as the tool's `prepare` has told it."""
    word = str(given.value).lower()
    if word in _METHODS:
        t.note(given, Outcome.TAKEN if word == t.method else Outcome.TRANSLATED, f"method {t.method}")
    else:
        t.note(given, Outcome.CHANGED, f"method {t.method}", f"tuner has no {given.value!r}")


def bits(t: Translation, given: Given) -> None:
    """Take 4 or 8 bits, by the word's own name, where there is an adapter."""
    if not truth(given.value):
        t.leave(given, "nothing is quantized by it")
    elif t.method == "qlora":
        t.set(given, "quantization.bits", 4 if "4bit" in given.key else 8)
    else:
        t.leave(given, "weights are only quantized with an adapter")


def target(t: Translation, given: Given) -> None:
    """Take the layers that are adapted."""
    words = given.words()
    if not words:
        raise given.wrong("has no layer", "Use all-linear, or the names of layers such as q_proj, v_proj.")
    is_all = words[0] in ("all", "ALL", "all-linear", "auto")
    t.set(given, "adapter.target_modules", "all-linear" if is_all else words)


def adapter_path(t: Translation, given: Given) -> None:
    """Go on with a trained adapter, the first of several."""
    if t.method == "full":
        t.leave(given, "all weights are trained: merge it into the model first (tuner export --merge)")
    else:
        several = isinstance(given.value, list) and given.value
        t.set(given, "adapter.path", str(given.value[0] if several else given.value))


def system(t: Translation, given: Given) -> None:
    """Take the system turn of conversations that have none; each data set of a mixture has its own."""
    t.system = " ".join(map(str, given.value)) if isinstance(given.value, list) else str(given.value)
    t.note(given, Outcome.TRANSLATED, "train_dataloader.dataset.system")


def one_file(files: Any) -> str | None:
    """Return the only file of `data_files`, or None where there are several, or none."""
    files = files.get("train") if isinstance(files, dict) else files
    file = files[0] if isinstance(files, list | tuple) and len(files) == 1 else files
    return file if isinstance(file, str) else None


def source(path: Any, files: Any) -> str:
    """Return where rows are: the one file that a reader of files is given, else the path itself."""
    return (one_file(files) if path in _OF_FILES else None) or str(path)


def renamed(columns: dict[str, str]) -> dict[str, str] | None:
    """Return columns that are called otherwise than the format's own, or None where none is."""
    return {ours: theirs for ours, theirs in columns.items() if ours != theirs} or None


def held_out(t: Translation, given: Given) -> None:
    """Take the part of the rows that validates; a number of rows is none."""
    part = given.number()
    if 0 < part < 1:
        t.set(given, "train_dataloader.dataset.val_split", part)
    elif part == 0:
        t.leave(given, "no rows are held out, as without val_split")
    else:
        t.leave(given, "a number of rows: tuner holds out a share of them, --val-split 0.05")


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


def _beside(given: Given) -> str:
    """Return what stands before the key's last word, which other words of its block have there too."""
    return given.key.removesuffix(given.key.rpartition(".")[2])


def warmup_ratio(t: Translation, given: Given) -> None:
    """Take a part of all steps; it stands back where steps are named too."""
    if t.number(f"{_beside(given)}warmup_steps", 0) > 0:
        t.leave(given, "warmup_steps is set too and overrides it")
    else:
        t.set(given, _RATIO, given.value)


def warmup_steps(t: Translation, given: Given) -> None:
    """Take steps of warm-up; below 1 they are a part of all steps (transformers 5)."""
    steps = given.number()
    if steps < 0:
        raise given.wrong("the number of steps must be 0 or more")
    if steps == 0 and not given.is_default:
        t.set(given, _RATIO, t.number(f"{_beside(given)}warmup_ratio", 0.0))
    elif 0 < steps < 1:
        t.set(given, _RATIO, steps)
    elif steps >= 1:
        t.warmup_steps = given


def schedule(t: Translation, given: Given) -> None:
    """Take a course of the learning rate, or the nearest that there is."""
    name = str(given.value)
    ours = aliases.table()["lr_scheduler_type"].value(name) or name
    if ours in _SCHEDULES:
        t.set(given, "param_scheduler.type", ours)
        return
    near = next((one for one in ("cosine_with_restarts", "cosine", "linear") if one in name), "cosine")
    t.set(given, "param_scheduler.type", near, f"tuner has no schedule {name!r}; this one ends at 0", changed=True)


def optimizer(t: Translation, given: Given) -> None:
    """Take an optimizer, or AdamW where there is none of that name."""
    name = str(given.value)
    ours = aliases.table()["optim"].value(name)
    if ours in get_args(OptimizerType):
        t.set(given, f"{_OPTIMIZER}.type", ours)
        return
    near = "PagedAdamW8bit" if "paged" in name else "AdamW8bit" if "8bit" in name else "AdamW"
    t.set(given, f"{_OPTIMIZER}.type", near, f"tuner has no optimizer {name!r}", changed=True)


def betas(t: Translation, given: Given) -> None:
    """Take both of Adam's betas at once."""
    block = _beside(given)
    t.set(given, f"{_OPTIMIZER}.betas", (t.number(f"{block}adam_beta1", 0.9), t.number(f"{block}adam_beta2", 0.999)))


def clipping(t: Translation, given: Given) -> None:
    """Take the largest norm; 0 is no clipping."""
    if given.number() > 0:
        t.set(given, "optim_wrapper.clip_grad.max_norm", given.value)
    else:
        t.set(given, "optim_wrapper.clip_grad", None)


def trackers(t: Translation, given: Given) -> None:
    """Take the trackers that there are."""
    names = [name for name in given.words() if name not in ("none", "all", "stdout")]
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


def no_epochs(what: str, ours: str) -> Rule:
    """Return the rule of *_strategy: steps are what tuner counts."""

    def rule(t: Translation, given: Given) -> None:
        if str(given.value).lower() in ("steps", "interval"):
            t.leave(given, f"intervals are in steps: {ours}")
        else:
            t.leave(given, f"{what} only by steps ({ours}), and at the end")

    return rule


def kept(t: Translation, given: Given) -> None:
    """Take how many checkpoints stay; no limit is a large number."""
    number = given.whole()
    t.set(given, "checkpoint.max_keep_ckpts", number if number > 0 else 1000)


def best(t: Translation, given: Given) -> None:
    """Save the best where the source does."""
    if truth(given.value):
        t.set(given, "checkpoint.save_best", "eval_loss")
    else:
        t.leave(given, "the last weights are the result, as they are without checkpoint.save_best")


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
        t.set(given, "optim_wrapper.dtype", aliases.table()["torch_dtype"].value(str(given.value)))


def attention(t: Translation, given: Given) -> None:
    """Take the attention's kernel, in the words of any tool."""
    ours = aliases.table()["attn_impl"].value(str(given.value))
    t.set(given, "model.attn_implementation", None if ours == "None" else ours)
