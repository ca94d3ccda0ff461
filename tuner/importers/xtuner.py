"""XTuner 0.1's configs: its classes are looked at by their names, and nothing of the file is run.

Names set above and used below are only how a value is written; what nothing uses is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.importers import training_arguments
from tuner.importers.document import Document, Keys, Name
from tuner.importers.translation import Given, Outcome, Rule, Tool, Translation
from tuner.recipes import catalog
from tuner.recipes.aliases import Alias
from tuner.recipes.merging import lookup
from tuner.recipes.part import read_part

_OBJECTIVES = {"SupervisedFinetune": "sft", "DPO": "dpo", "ORPO": "orpo", "RewardModel": "reward"}
_FORMATS = {
    "alpaca_map_fn": "alpaca",
    "alpaca_zh_map_fn": "alpaca",
    "oasst1_map_fn": "oasst1",
    "openai_map_fn": "messages",
    "llava_map_fn": "sharegpt",
    "pretrain_map_fn": "text",
    "msagent_react_map_fn": "msagent",
    "moss_map_fn": "moss",
}
_TEMPLATES = {"default": "xtuner_default", "internlm_chat": "internlm", "internlm2_chat": "internlm2"}
_VISION = "tuner trains text models: it has nothing for images"
_BLOCKS = ("model", "train_dataloader", "optim_wrapper", "param_scheduler", "train_cfg", "custom_hooks")


def _last(value: Any) -> str:
    return value.last if isinstance(value, Name) else str(value).rpartition(".")[2]


def _prepare(t: Translation) -> None:
    model = t.document.values.get("model")
    model = model if isinstance(model, dict) else {}
    kind = _last(model.get("type", "SupervisedFinetune"))
    t.objective = _OBJECTIVES.get(kind, "sft")
    if kind not in _OBJECTIVES:
        t.obstacle = f"{kind} is no text model's training: {_VISION}"
    quantized = lookup(model, ("llm", "quantization_config"))
    t.method = ("qlora" if quantized else "lora") if model.get("lora") else "full"


def model_type(t: Translation, given: Given) -> None:
    """Take what is learned."""
    if t.obstacle:
        t.note(given, Outcome.CHANGED, "objective.type = 'sft'", t.obstacle)
    else:
        t.note(given, Outcome.TRANSLATED, f"objective {t.objective}, method {t.method}")


def setting(t: Translation, given: Given) -> None:
    """Take a setting of DPO or ORPO."""
    name = given.keys[-1]
    if t.objective in ("dpo", "orpo") and (name == "beta" or t.objective == "dpo"):
        t.set(given, f"objective.{name}", [given.value] if name == "loss_type" else given.value)
    else:
        t.leave(given, f"is no setting of {t.objective}")


def bits(t: Translation, given: Given) -> None:
    """Take 4 or 8 bits."""
    if given.value and t.method == "qlora":
        t.set(given, "quantization.bits", 4 if "4bit" in given.key else 8)
    else:
        t.leave(given, "always so" if not given.value else "without an adapter nothing is quantized")


def names(ours: str) -> Rule:
    """Return the rule of a list of modules."""

    def rule(t: Translation, given: Given) -> None:
        t.set(given, ours, list(given.value) if isinstance(given.value, tuple) else given.value)

    return rule


def optimizer_type(t: Translation, given: Given) -> None:
    """Take the optimizer's class."""
    training_arguments.optimizer(t, Given(given.key, _last(given.value), given.where, given.keys))


def scheduler(t: Translation, given: Given) -> None:
    """Take a warm-up that is linear, and the course after it."""
    stages = given.value if isinstance(given.value, list) else [given.value]
    stages = [one for one in stages if isinstance(one, dict)]
    epochs = float(lookup(t.document.values, ("train_cfg", "max_epochs")) or 1)
    warm = next((one for one in stages if _last(one.get("type")) == "LinearLR" and len(stages) > 1), None)
    main: dict[str, Any] = next((one for one in stages if one is not warm), {})
    kinds = {"CosineAnnealingLR": "cosine", "LinearLR": "linear", "ConstantLR": "constant", "PolyLR": "polynomial"}
    kind = kinds.get(_last(main.get("type")), "cosine")
    t.set(given, "param_scheduler.type", kind, f"of {', '.join(_last(one.get('type')) for one in stages)}")
    # In epochs, unless it says otherwise: its `end` is warmup_ratio x max_epochs.
    end = float(warm.get("end") or 0) if warm else 0.0
    if warm and warm.get("by_epoch") is False:
        t.warmup_steps = Given(given.key, end, given.where, given.keys)
    else:
        t.set(given, "param_scheduler.warmup_ratio", min(1.0, end / epochs))
    if main.get("eta_min"):
        t.note(given, Outcome.CHANGED, why=f"eta_min {main['eta_min']}: the schedules of tuner end at 0")


def dataset(t: Translation, given: Given) -> None:
    """Take the data, one set or several, and how it becomes samples."""
    if not isinstance(given.value, dict):
        raise t.wrong(given, "no data set")
    _dataset(t, given, given.value, given.keys)
    t.note(given, Outcome.TRANSLATED, f"{len(t.datasets)} data sets")


def _dataset(t: Translation, given: Given, value: Mapping[str, Any], keys: Keys) -> None:
    inner = value.get("datasets") or value.get("datasets_cfg")
    if isinstance(inner, list | tuple):
        for one in inner:
            _dataset(t, given, one, keys)
        return
    for name, ours in (("max_length", "max_length"), ("pack_to_max_length", "packing")):
        if value.get(name) is not None:
            place = Given(f"{given.key}.{name}", value[name], t.document.where((*keys, name)), (*keys, name))
            t.set(place, f"train_dataloader.dataset.{ours}", value[name])
    source = value.get("dataset")
    if not isinstance(source, dict):
        t.obstacle = t.obstacle or "its data is of a kind that tuner does not read: name yours with --data"
        return
    made = _rows(t, source, value)
    if value.get("max_dataset_length"):
        made["max_rows"] = int(value["max_dataset_length"])
    t.datasets.append(made)


def _rows(t: Translation, source: Mapping[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    files = source.get("data_files")
    files = files.get("train") if isinstance(files, dict) else files
    file = files[0] if isinstance(files, list | tuple) and len(files) == 1 else files
    path = str(source.get("path") or source.get("dataset_path"))
    path = file if isinstance(file, str) and path in ("json", "csv", "parquet", "text") else path
    made = {"path": path, "name": source.get("name"), "split": str(source.get("split") or "train")}
    map_fn = value.get("dataset_map_fn")
    word = _last(map_fn) if map_fn is not None else ""
    known = _of_catalog(path)
    if word == "pretrain_map_fn" and t.objective == "sft":
        t.objective = "pretrain"
    if word in _FORMATS:
        return made | {"format": _FORMATS[word]}
    if known:
        return made | {key: known.get(key) for key in ("format", "columns")}
    if word:
        t.note(Given("dataset_map_fn", word, t.document.name), Outcome.CHANGED, "format None", "told from the columns")
    return made


def _of_catalog(path: str) -> dict[str, Any] | None:
    """Return how the catalog reads the data set of this path."""
    for name in catalog.names("datasets"):
        rows = lookup(read_part("datasets", name).values, ("train_dataloader", "dataset"), {})
        if rows.get("path") == path:
            return dict(rows)
    return None


def checkpoints(t: Translation, given: Given) -> None:
    """Take how many checkpoints stay."""
    training_arguments.kept(t, given)


def seed(t: Translation, given: Given) -> None:
    """Take the seed."""
    t.set(given, "randomness.seed", given.value)


def dtype(t: Translation, given: Given) -> None:
    """Under DeepSpeed XTuner takes what the GPUs can, whatever stands here."""
    t.leave(given, "under DeepSpeed XTuner decides by the GPUs, and so does tuner")


def unused(t: Translation, given: Given) -> None:
    """A name at the top is how others are written, or nothing's."""
    word = given.keys[0]
    if word in t.document.environ:
        t.note(given, Outcome.TAKEN, why="where it is used")
    else:
        t.leave(given, "nothing in the file uses it")


def _defaults(_: Document) -> Mapping[str, Any]:
    return {
        "optim_wrapper.accumulative_counts": 1,
        "train_dataloader.batch_size": 1,
        "optim_wrapper.optimizer.weight_decay": 0.01,
    }


_HOOK = "tuner has its own: metrics, heartbeat, checkpoints; answers after training: log.num_samples"
_CODE = "transformers' own classes are taken; code of the hub needs a commit as model.revision"
_OWN = "tuner decides it"
_OPTIMIZER = "optim_wrapper.optimizer"

TABLE: Mapping[str, Rule] = {
    "model.type": model_type,
    "model.llm.pretrained_model_name_or_path": training_arguments.model,
    "model.llm.trust_remote_code": _CODE,
    "model.llm.torch_dtype": dtype,
    "model.llm.type": "transformers' Auto classes find it",
    "model.llm.attn_implementation": Alias("model.attn_implementation"),
    "model.llm.quantization_config.load_in_4bit": bits,
    "model.llm.quantization_config.load_in_8bit": bits,
    "model.llm.quantization_config.bnb_4bit_quant_type": Alias("quantization.quant_type"),
    "model.llm.quantization_config.bnb_4bit_use_double_quant": Alias("quantization.double_quant"),
    "model.llm.quantization_config.*": "bitsandbytes computes in the run's compute type",
    "model.llm.*": _OWN,
    "model.lora.r": Alias("adapter.r"),
    "model.lora.lora_alpha": Alias("adapter.lora_alpha"),
    "model.lora.lora_dropout": Alias("adapter.lora_dropout"),
    "model.lora.target_modules": names("adapter.target_modules"),
    "model.lora.modules_to_save": names("adapter.modules_to_save"),
    "model.lora.*": "PEFT's LoRA, its bias 'none'; the objective decides the task",
    "model.beta": setting,
    "model.loss_type": setting,
    "model.label_smoothing": setting,
    "model.use_varlen_attn": "packed samples never see each other: always so",
    "model.ref_llm*": "the reference is the model before training",
    "model.reward_token_id": "the score is read at the last token",
    "model.loss_weight*": "TRL's loss of a reward model is taken",
    "model.penalty*": "TRL's loss of a reward model is taken",
    "model.max_position_embeddings": "a model's context is its own",
    "model.*": f"{_VISION}, and no such setting",
    "train_dataloader.batch_size": Alias("train_dataloader.batch_size"),
    "train_dataloader.num_workers": Alias("train_dataloader.num_workers"),
    "train_dataloader.dataset": dataset,
    "train_dataloader.*": "tuner shuffles by the seed, and pads or packs by itself",
    "val_dataloader": "validation: --val FILE, or --val-split 0.05",
    "val_*": "validation: --val FILE, or --val-split 0.05",
    "test_*": "about evaluation: tuner eval",
    f"{_OPTIMIZER}.type": optimizer_type,
    f"{_OPTIMIZER}.lr": Alias(f"{_OPTIMIZER}.lr"),
    f"{_OPTIMIZER}.betas": Alias(f"{_OPTIMIZER}.betas"),
    f"{_OPTIMIZER}.eps": Alias(f"{_OPTIMIZER}.eps"),
    f"{_OPTIMIZER}.weight_decay": Alias(f"{_OPTIMIZER}.weight_decay"),
    "optim_wrapper.clip_grad.max_norm": Alias("optim_wrapper.clip_grad.max_norm"),
    "optim_wrapper.accumulative_counts": Alias("optim_wrapper.accumulative_counts"),
    "optim_wrapper.dtype": dtype,
    "optim_wrapper.*": "the loss is scaled by DeepSpeed where it must be",
    "param_scheduler": scheduler,
    "train_cfg.max_epochs": training_arguments.epochs,
    "train_cfg.max_iters": Alias("train_cfg.max_steps"),
    "train_cfg.*": _OWN,
    "custom_hooks": _HOOK,
    "default_hooks.logger.interval": Alias("log.interval"),
    "default_hooks.checkpoint.interval": training_arguments.interval("checkpoint.interval"),
    "default_hooks.checkpoint.max_keep_ckpts": checkpoints,
    "default_hooks.*": _HOOK,
    "randomness.seed": seed,
    "randomness.*": "one seed decides",
    "tokenizer.*": "the tokenizer is the model's",
    "env_cfg.*": _OWN,
    "visualizer": "trackers: log.trackers=tensorboard",
    "visualizer.*": "trackers: log.trackers=tensorboard",
    "log_*": _OWN,
    "resume": "tuner train --resume auto",
    "load_from": "tuner train --resume CHECKPOINT",
    "launcher": "tuner train --launcher",
    "work_dir": "each run gets its own run directory: --work-dir DIR",
    "strategy*": "the DeepSpeed config: --deepspeed",
    "*": unused,
}

TOOL = Tool("XTuner", TABLE, frozenset(_BLOCKS), _defaults, prepare=_prepare)
