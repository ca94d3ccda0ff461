"""Rules that several tools share, for keys that need a look at the value or at other keys.

Most are keys of transformers' `TrainingArguments`, which LLaMA-Factory, TRL and ms-swift share.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import get_args

from tuner.errors import Key, Option
from tuner.files import JsonObject
from tuner.importers import aliases
from tuner.importers.document import last_name
from tuner.importers.translation import Outcome, Rule, Setting, Translation, of_objective, when_on
from tuner.optimizers import OPTIMIZERS, unsuited
from tuner.recipes import catalog
from tuner.recipes.recipe_file import MAX_TEXT, read_part
from tuner.recipes.schema import ScheduleType, Tracker

_OPTIMIZER = "optim_wrapper.optimizer"
_RATIO, _STEPS = "param_scheduler.warmup_ratio", "param_scheduler.warmup_steps"
_FLOOR, _DECAY = "param_scheduler.min_lr_ratio", "param_scheduler.decay_ratio"
_SCHEDULE, _FLOORED = "param_scheduler.type", ("cosine", "cosine_with_min_lr", "cosine_warmup_with_min_lr")
_SHARES = {"tp_size": "autotp_size", "sp_size": "sequence_parallel_size", "cp_size": "sequence_parallel_size"}
"""The keys of accelerate's ParallelismConfig that a recipe has. `cp` shares samples as `sp` does, in a ring."""
_FEWEST_CYCLES, _WORDED = 2, ("decay_type", "warmup_type")
_METHODS = ("full", "freeze", "lora", "qlora", "dora", "lora_llm", "true", "false")
_OF_FILES = ("json", "csv", "parquet", "text", "arrow")
"""Names of the `datasets` library for its file readers; the file is then in `data_files`."""


def truth(value: object) -> bool:
    """Return whether a value of YAML or of a command line means true."""
    return str(value).lower() in ("true", "yes", "1")


def model(t: Translation, setting: Setting) -> None:
    """Keep the model for the end of the translation."""
    t.model = setting


def learned(t: Translation, setting: Setting) -> None:
    """Record the objective, which the tool's `prepare` has found."""
    if t.obstacle:
        t.note(setting, Outcome.CHANGED, f"objective.type = {t.objective!r}", t.obstacle)
    else:
        outcome = Outcome.TAKEN if setting.value == t.objective else Outcome.TRANSLATED
        t.note(setting, outcome, f"objective {t.objective}, method {t.method}")


def method(t: Translation, setting: Setting) -> None:
    """Record the method, which the tool's `prepare` has found."""
    word = str(setting.value).lower()
    if word in _METHODS:
        t.note(setting, Outcome.TAKEN if word == t.method else Outcome.TRANSLATED, f"method {t.method}")
    else:
        t.note(setting, Outcome.CHANGED, f"method {t.method}", f"tuner has no {setting.value!r}")


def bits(t: Translation, setting: Setting) -> None:
    """Set 4 or 8 bits, as the key's name says, if there is an adapter."""
    if not truth(setting.value):
        t.leave(setting, "nothing is quantized by it")
    elif t.method == "qlora":
        t.set(setting, "quantization.bits", 4 if "4bit" in setting.key else 8)
    else:
        t.leave(setting, "weights are only quantized with an adapter")


def target(t: Translation, setting: Setting) -> None:
    """Set the layers that get an adapter."""
    words = setting.words()
    if not words:
        raise setting.wrong("has no layer", "Use all-linear, or the names of layers such as q_proj, v_proj.")
    is_all = words[0] in ("all", "ALL", "all-linear", "auto")
    t.set(setting, "adapter.target_modules", "all-linear" if is_all else words)


def adapter_path(t: Translation, setting: Setting) -> None:
    """Continue from a trained adapter, the last of several; LLaMA-Factory merges the others into the model."""
    if t.method == "full":
        t.leave(setting, "all weights are trained: merge it into the model first (tuner export --merge)")
    else:
        adapters = setting.words() or [""]
        why = "one adapter is trained on: merge the others into the model first (tuner export --merge)"
        several = len(adapters) > 1
        t.set(setting, "adapter.path", adapters[-1], why if several else None, changed=several, is_learned=several)


def system(t: Translation, setting: Setting) -> None:
    """Set the system prompt for conversations without one, for each data set of a mixture."""
    t.system = " ".join(map(str, setting.value)) if isinstance(setting.value, list) else str(setting.value)
    t.note(setting, Outcome.TRANSLATED, "train_dataloader.dataset.system")


def one_file(files: object) -> str | None:
    """Return the file in `data_files` if it names exactly one."""
    files = files.get("train") if isinstance(files, dict) else files
    file = files[0] if isinstance(files, list | tuple) and len(files) == 1 else files
    return file if isinstance(file, str) else None


def place_of_rows(path: object, files: object) -> str:
    """Return where the rows are: the file in `data_files` if `path` names a file reader, else `path`."""
    return (one_file(files) if path in _OF_FILES else None) or str(path)


def parts_that_name(path: str) -> Iterator[tuple[str, JsonObject]]:
    """Yield the name and the values of each data set of the catalog whose file holds this path."""
    for name in catalog.names("datasets"):
        if path in catalog.text_of("datasets", name):
            yield name, read_part("datasets", name).values


def renamed(columns: dict[str, str]) -> dict[str, str] | None:
    """Return the columns that have other names than those of the format; None if all names are the same."""
    return {our_name: their_name for our_name, their_name in columns.items() if our_name != their_name} or None


def draws_rows(t: Translation, setting: Setting) -> None:
    """Record that the tool draws a number of rows at random, and repeats them if there are fewer."""
    why = f"{t.tool.name} draws rows at random, and repeats rows if there are fewer; these are the first"
    t.note(setting, Outcome.CHANGED, f"max_rows = {setting.value}", why)


def added_loss(loss: str) -> Rule:
    """Return the rule for the weight of a loss that is added to those of DPO: 'sft' is one on the chosen answers."""

    def rule(t: Translation, setting: Setting) -> None:
        if setting.number() <= 0:
            t.leave(setting, "0 adds no loss")
        elif t.objective == "dpo":
            t.added_losses[loss] = setting
        else:
            t.change(setting, f"{t.objective} has no loss beside its own")

    return rule


def divided_experts(t: Translation, setting: Setting) -> None:
    """Keep for the end over how many ranks experts are divided: the DeepSpeed config says it."""
    if setting.whole() > 1:
        t.divided_by = setting
    else:
        t.leave(setting, "each rank has all experts, as without it")


def parallelism(t: Translation, setting: Setting) -> None:
    """Take the ranks that share samples, or split layers, from accelerate's ParallelismConfig."""
    block = _block(setting)
    for key, size in block.items():
        inner = t.inner((*setting.keys, key), size)
        name = _SHARES.get(key.removeprefix("parallelism_config_"))
        if size is None:
            continue
        if name is None:
            t.leave(inner, "DeepSpeed's ZeRO splits the model over all ranks")
        elif inner.whole() > 1:
            our_key = f"train_cfg.{name}"
            t.set(inner, our_key, inner.whole(), t.replaced(inner, our_key, inner.whole()))
        else:
            t.leave(inner, "ranks share nothing, as without it")
    t.note(setting, Outcome.TRANSLATED, f"{len(block)} values")


def held_out(t: Translation, setting: Setting) -> None:
    """Set the share of the rows to validate on. A number of rows has no counterpart."""
    part = setting.number()
    if 0 < part < 1:
        t.set(setting, "train_dataloader.dataset.val_split", part)
    elif part == 0:
        t.leave(setting, "no rows are held out, as without val_split")
    else:
        t.leave(setting, f"a number of rows: tuner holds out a share of them, {Option('val_split', 0.05)}")


def named_template(t: Translation, setting: Setting, our_templates: Mapping[str, str] = MappingProxyType({})) -> None:
    """Set the chat template that the source names, unless it is that of the model's family.

    Templates are named after the family: another name (`alpaca`, `default`) renders other prompts.

    Args:
        t: The translation.
        setting: The template's name.
        our_templates: The tool's name of a template -> tuner's name.
    """
    word, another = str(setting.value), Key("model.chat_template", "NAME")
    model_setting = t.model or next(
        (other for other in t.settings.values() if t.tool.table.get(other.key) is model), None
    )
    family = re.match("[a-z]+", word.lower())
    if model_setting and family and family[0] in str(model_setting.value).lower().rpartition("/")[2]:
        t.leave(setting, f"tuner uses the model's own chat template, or the catalog's: {another}")
    elif word in our_templates:
        t.set(setting, "model.chat_template", our_templates[word])
    else:
        t.change(setting, f"tuner renders prompts with the model's own chat template; for another one: {another}")


def epochs(t: Translation, setting: Setting) -> None:
    """Set the number of epochs, rounded up to a whole number."""
    number = setting.number()
    if number <= 0:
        raise setting.wrong("the number of epochs must be above 0")
    rounded = math.ceil(number)
    why = f"epochs are whole numbers: {rounded}; for part of one: {Key('max_steps', 'STEPS')}"
    t.set(setting, "train_cfg.max_epochs", rounded, why if number != rounded else None, changed=number != rounded)


def warmup_ratio(t: Translation, setting: Setting) -> None:
    """Set the share of all steps to warm up for, unless a number of steps is set too."""
    if t.number(setting.beside("warmup_steps"), 0) > 0:
        t.leave(setting, "warmup_steps is set too and overrides it")
    else:
        t.set(setting, _RATIO, setting.value)


def warmup_steps(t: Translation, setting: Setting) -> None:
    """Set the warm-up steps; a number below 1 is a share of all steps (transformers 5)."""
    steps = setting.number()
    if steps < 0:
        raise setting.wrong("the number of steps must be 0 or more")
    if steps == 0 and not setting.is_default:
        t.set(setting, _RATIO, t.number(setting.beside("warmup_ratio"), 0.0))
    elif 0 < steps < 1:
        t.set(setting, _RATIO, steps)
    elif steps >= 1:
        t.set(setting, _STEPS, math.ceil(steps))


def schedule(t: Translation, setting: Setting) -> None:
    """Set the learning-rate schedule, or the most similar one of tuner."""
    name = str(setting.value)
    options = _schedule_options(t.settings.get(setting.beside("lr_scheduler_kwargs")))
    their_schedule, our_schedule = _schedule(name, options)
    if our_schedule in get_args(ScheduleType):
        t.set(setting, _SCHEDULE, our_schedule, _ONE_CYCLE if their_schedule == _RESTARTS != our_schedule else None)
    else:
        near = next((word for word in ("cosine", "linear") if word in name), "cosine")
        t.set(setting, _SCHEDULE, near, f"tuner has no schedule {name!r}; this one ends at 0", changed=True)
    if our_schedule == "warmup_stable_decay" and "num_decay_steps" not in options:
        share = (1 - t.number(setting.beside("warmup_ratio"), 0.0)) * 2 / 3
        t.set(setting, _DECAY, round(share, 4), "LLaMA-Factory's, where num_decay_steps is not set")


_RESTARTS, _ONE_CYCLE = "cosine_with_restarts", "one cycle of it is a cosine"


def _schedule(name: str, options: Mapping[str, float]) -> tuple[str, str]:
    """Return another tool's schedule in transformers' word, and the type that it has here; tuner may have no such."""
    their_schedule = aliases.table()["lr_scheduler_type"].value(name) or name
    is_single = their_schedule == _RESTARTS and options.get("num_cycles", 1) < _FEWEST_CYCLES
    return their_schedule, "cosine" if their_schedule in _FLOORED or is_single else their_schedule


def _schedule_options(setting: Setting | None) -> dict[str, float]:
    """Return the numbers in the block with a schedule's options, which a command line holds as JSON; words are NaN.

    Raises:
        RecipeError: the value is no block, or holds something else.
    """
    if setting is None or setting.value is None:
        return {}
    return {
        name: math.nan if name in _WORDED else replace(setting, key=f"{setting.key}.{name}", value=value).number()
        for name, value in _block(setting).items()
        if value is not None and (name, value) != ("decay_type", "cosine")
    }


def _block(setting: Setting) -> JsonObject:
    """Return a block, which a command line holds as JSON."""
    block = setting.value
    if isinstance(block, str):
        try:
            block = json.loads(block)
        except ValueError:
            raise setting.wrong("neither a block nor JSON") from None
    if not isinstance(block, dict):
        raise setting.wrong("not a block")
    return block


_VALUES = "model.chat_template_kwargs"


def template_values(t: Translation, setting: Setting) -> None:
    """Set the values of names in the chat template."""
    t.set(setting, _VALUES, _block(setting) or None)


def thinks(t: Translation, setting: Setting) -> None:
    """Let the chat template ask for answers without thinking, where the model thinks by default."""
    if setting.truth():
        t.note(setting, Outcome.TAKEN, why="as tuner does it")
    else:
        t.set(setting, _VALUES, {"enable_thinking": False}, "for a model whose chat template uses it; else remove it")


def schedule_options(t: Translation, setting: Setting) -> None:
    """Set what the schedule takes beside its warm-up; steps become a share of all where their number is known."""
    options, steps = _schedule_options(setting), t.number("max_steps", 0)
    word = t.value(setting.beside("lr_scheduler_type")) or t.value(setting.beside("lr_scheduler"))
    their_schedule, our_schedule = _schedule(str(word), options)
    if not options:
        t.note(setting, Outcome.TAKEN, why="as tuner does it")
    for name, value in options.items():
        if name in ("min_lr_rate", "min_lr_ratio") and their_schedule in (*_FLOORED, "warmup_stable_decay"):
            t.set(setting, _FLOOR, value)
        elif name == "min_lr" and their_schedule in _FLOORED and (rate := t.number(setting.beside("learning_rate"), 0)):
            t.set(setting, _FLOOR, value / rate)
        elif name == "num_cycles" and our_schedule == _RESTARTS:
            t.set(setting, "param_scheduler.num_cycles", round(value))
        elif name == "num_cycles" and their_schedule == _RESTARTS:
            t.note(setting, Outcome.TRANSLATED, f"{_SCHEDULE} = {our_schedule!r}", _ONE_CYCLE)
        elif name == "decay_type" and our_schedule == "warmup_stable_decay":
            t.set(setting, "param_scheduler.decay_type", _block(setting)[name])
        elif name == "num_decay_steps" and our_schedule == "warmup_stable_decay" and steps >= 1:
            t.set(setting, _DECAY, round(min(value / steps, 1), 4))
        elif name == "num_decay_steps" and our_schedule == "warmup_stable_decay":
            why = f"a share of all steps, not {value:g} of them; set it for your number of steps"
            t.set(setting, _DECAY, 0.1, why, changed=True)
        else:
            t.note(setting, Outcome.CHANGED, why=f"tuner's schedule has no such {name}")


def cosine_floor(t: Translation, setting: Setting) -> None:
    """Set the rate at the end of a cosine, as a part of the rate."""
    if str(t.value("lr_scheduler")) == "cosine":
        t.set(setting, _FLOOR, setting.number())
    else:
        t.leave(setting, "belongs to the cosine schedule")


def trained_turns(
    t: Translation, setting: Setting, turns: str, why: str | None = None, *, is_learned: bool = False
) -> None:
    """Set which turns carry loss; `why` says what differs."""
    if t.is_of(("sft",), setting):
        our_key = "train_dataloader.dataset.trained_turns"
        t.set(setting, our_key, turns, why, changed=why is not None, is_learned=is_learned)


dynamic_fine_tuning = of_objective(
    "sft", when_on("objective.loss_type", "dft", "the loss is the negative log-likelihood")
)
"""The rule for the switch that weighs the gradient of each token by its probability."""


def noise(t: Translation, setting: Setting) -> None:
    """Set NEFTune's noise on the embeddings, in SFT."""
    if not setting.number():
        t.leave(setting, "0 adds no noise")
    elif t.objective == "sft":
        why = "scaled by the tokens of each sample, as in the paper; transformers takes those of the whole row"
        t.set(setting, "objective.neftune_noise_alpha", setting.number(), why)
    else:
        t.change(setting, f"belongs to sft, and this is {t.objective}")


def optimizer(t: Translation, setting: Setting) -> None:
    """Set the optimizer by its name or its class, or AdamW if tuner has no such optimizer."""
    name = last_name(setting.value)
    setting, our_optimizer = replace(setting, value=name), aliases.table()["optim"].value(name)
    if our_optimizer in OPTIMIZERS:
        t.set(setting, f"{_OPTIMIZER}.type", our_optimizer)
        return
    near = "PagedAdamW8bit" if "paged" in name else "AdamW8bit" if "8bit" in name else "AdamW"
    why = unsuited(name)
    reason = f"{name} does not suit ZeRO: {why}" if why else f"tuner has no optimizer {name!r}"
    t.set(setting, f"{_OPTIMIZER}.type", near, reason, changed=True)


def betas(t: Translation, setting: Setting) -> None:
    """Set both of Adam's betas together."""
    first, second = setting.beside("adam_beta1"), setting.beside("adam_beta2")
    t.set(setting, f"{_OPTIMIZER}.betas", (t.number(first, 0.9), t.number(second, 0.999)))


def clipping(t: Translation, setting: Setting) -> None:
    """Set the largest gradient norm; 0 switches clipping off."""
    if setting.number() > 0:
        t.set(setting, "optim_wrapper.clip_grad.max_norm", setting.value)
    else:
        t.set(setting, "optim_wrapper.clip_grad", None)


def trackers(t: Translation, setting: Setting) -> None:
    """Set the trackers that tuner has."""
    names = [name for name in setting.words() if name not in ("none", "all", "stdout")]
    unknown = [name for name in names if name not in get_args(Tracker)]
    why = f"tuner has no tracker {', '.join(unknown)}" if unknown else None
    t.set(setting, "log.trackers", [name for name in names if name not in unknown], why, changed=bool(unknown))


def interval(our_key: str) -> Rule:
    """Return the rule for an interval in steps, or for a share of all steps."""

    def rule(t: Translation, setting: Setting) -> None:
        number = setting.number()
        strategies = [str(t.value(setting.beside(key))).lower() for key in ("eval_strategy", "evaluation_strategy")]
        if our_key == "train_cfg.val_interval" and "epoch" in strategies:
            t.leave(setting, "validation runs at the end of each epoch, as eval_strategy says")
        elif number >= 1:
            t.set(setting, our_key, setting.whole())
        elif number > 0 and our_key != "log.interval":
            t.set(setting, our_key, number)
        else:
            t.leave(setting, "never" if number == 0 else f"{our_key} is a number of steps")

    return rule


def per_epoch(our_key: str) -> Rule:
    """Return the rule for how often something happens in an epoch: a share of all steps."""

    def rule(t: Translation, setting: Setting) -> None:
        times = setting.number() * t.number("num_epochs", 1)
        if setting.number() <= 0:
            t.leave(setting, "at the end of each epoch alone")
        elif times <= 1 or setting.number() == 1:
            t.note(setting, Outcome.TRANSLATED, why=f"at the end of each epoch, as without {our_key}")
        else:
            why = f"a share of all steps: {setting.value} x {times / setting.number():g} epochs"
            t.set(setting, our_key, 1 / times, why)

    return rule


_UNSET_EVAL_STEPS = {"ms-swift": "save_steps"}
"""Tool -> the key whose interval validation has if eval_steps is not set; in transformers it is logging_steps."""


def by_strategy(event: str, our_key: str) -> Rule:
    """Return the rule for a key `*_strategy`: when something happens."""

    def rule(t: Translation, setting: Setting) -> None:
        word = str(setting.value).lower()
        steps = t.settings.get(_UNSET_EVAL_STEPS.get(t.tool.name, "logging_steps"))
        is_validation = our_key == "train_cfg.val_interval"
        if word in ("steps", "interval") and is_validation and steps and t.value("eval_steps") is None:
            why = f"that of {steps.key}, as eval_steps is not set"
            t.set(setting, our_key, steps.number(), why)
        elif word in ("steps", "interval"):
            t.note(setting, Outcome.TAKEN, why=f"with {our_key}")
        elif word == "epoch" and our_key != "log.interval":
            t.note(setting, Outcome.TAKEN, why=f"{event} at the end of each epoch")
        elif word in ("no", "false") and our_key == "train_cfg.val_interval":
            t.note(setting, Outcome.TAKEN, why="without validation rows there is no validation")
        else:
            t.leave(setting, f"{event} by steps ({our_key}), and at the end")

    return rule


def kept(t: Translation, setting: Setting) -> None:
    """Set how many checkpoints are kept; no limit becomes a large number."""
    number = setting.whole()
    t.set(setting, "checkpoint.max_keep_ckpts", number if number > 0 else 1000)


def switched(our_key: str) -> Rule:
    """Return the rule for a key that is only on or off in a recipe; the tool may have more values."""

    def rule(t: Translation, setting: Setting) -> None:
        is_on = setting.value not in (None, "") and str(setting.value).lower() not in ("false", "no", "0", "off")
        t.set(setting, our_key, is_on)

    return rule


def compute_type(t: Translation, setting: Setting) -> None:
    """Set bf16 or fp16. False decides nothing: the other key may be true."""
    word = setting.key.rpartition(".")[2].removeprefix("pure_").replace("bfloat16", "bf16").replace("float16", "fp16")
    if str(setting.value).lower() in ("auto", "full"):
        t.set(setting, "optim_wrapper.dtype", "auto")
    elif truth(setting.value):
        t.set(setting, "optim_wrapper.dtype", word)
    else:
        t.leave(setting, "false: the compute type follows the GPUs or another key")


def weights_type(t: Translation, setting: Setting) -> None:
    """Set the compute type from torch_dtype: tuner loads the weights in it."""
    if str(setting.value) in ("auto", "None"):
        t.leave(setting, "tuner loads weights in the compute type")
    else:
        t.set(setting, "optim_wrapper.dtype", aliases.table()["torch_dtype"].value(str(setting.value)))


def jinja_template(t: Translation, setting: Setting) -> None:
    """Set the chat template, a file or its text, unless the text is longer than a recipe may hold."""
    text = str(setting.value)
    if text.endswith(".jinja") or ("{%" in text and len(text) <= MAX_TEXT):
        t.set(setting, "model.chat_template", text)
    else:
        why = f"put the template into FILE.jinja and use {Key('model.chat_template', 'FILE.jinja')}"
        t.change(setting, why)
