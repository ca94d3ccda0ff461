"""The model card: what a published result says of itself, from the run's own facts.

It leaves the license to the user, and names no folder of the machine that the model was trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from huggingface_hub import ModelCard, ModelCardData

from tuner import paths
from tuner.models.load import pretrained_path
from tuner.recipes.schema import Model, RecipeConfig
from tuner.results.base_model import hub_id
from tuner.results.saved import SavedModel
from tuner.runs.directory import RunDirectory
from tuner.runs.metrics import curves

Kind = Literal["adapter", "merged", "whole"]
_KINDS: dict[Kind, str] = {
    "adapter": "an adapter, loaded with its base model",
    "merged": "a whole model: the adapter is merged into its base",
    "whole": "a whole model",
}
_USE = """{imports}

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = {auto}.from_pretrained("{name}", dtype="auto"{head})
"""
Row = tuple[str, object]


def card(name: str, kind: Kind, base: Model | None, saved: SavedModel, *, scores: bool, needs_tuner: bool) -> ModelCard:
    """Return the model card of an export, with the facts of its run, if it comes from one.

    Args:
        name: Name of the folder, or `OWNER/NAME` on the hub.
        needs_tuner: transformers does not know its architecture without tuner.
    """
    recipe, run_dir = saved.recipe(), saved.run_dir
    published = hub_id(base) if base else None
    data = ModelCardData(
        base_model=published,
        base_model_relation=("adapter" if kind == "adapter" else "finetune") if published else None,
        datasets=[path for path in _datasets(recipe) if paths.local(path) is None] or None,
        library_name="peft" if kind == "adapter" else "transformers",
        pipeline_tag="text-classification" if scores else "text-generation",
        tags=["tuner", "trl", "deepspeed", *([recipe.objective.type] if recipe else [])],
    )
    rows: list[Row] = [("what", _KINDS[kind]), ("base model", _base(base))]
    rows += [*_method(recipe), *_training(recipe, run_dir, saved.step)] if recipe and run_dir else []
    auto = f"Auto{'Peft' if kind == 'adapter' else ''}ModelFor{'SequenceClassification' if scores else 'CausalLM'}"
    peft = f"from peft import {auto}\nfrom transformers import AutoTokenizer"
    imports = peft if kind == "adapter" else f"from transformers import {auto}, AutoTokenizer"
    if needs_tuner:
        imports = f"import tuner.models  # teaches transformers this architecture\n{imports}"
    head = ", num_labels=1" if scores and kind == "adapter" else ""
    parts = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# {name.rpartition('/')[2]}\n",
        _table("Trained with tuner", rows),
        f"## Use\n\n```python\n{_USE.format(imports=imports, auto=auto, name=name, head=head)}```\n",
    ]
    if run_dir:
        parts += [
            _table("Results", _losses(run_dir, saved.step)),
            _table("Versions", run_dir.read_run().versions.items()),
        ]
    return ModelCard("\n".join(part for part in parts if part))


def _base(base: Model | None) -> str | None:
    if base is None:
        return None
    name = _last(pretrained_path(base.model_copy(update={"vision": None})))
    if base.vision:
        name += f" and {_last(base.vision.path)}"
    return f"{name}, revision {base.revision}" if base.revision else name


def _method(recipe: RecipeConfig) -> Iterator[Row]:
    adapter, layers = recipe.adapter, recipe.train_cfg.trainable_layers
    if adapter:
        kind = "DoRA" if adapter.use_dora else "rank-stabilized LoRA" if adapter.use_rslora else "LoRA"
        on = f", on a base in {recipe.quantization.bits} bits" if recipe.quantization else ""
        yield "method", f"{kind}, r = {adapter.r}, lora_alpha = {adapter.lora_alpha}{on}"
    else:
        of_tower = "; LoRA on the vision tower, merged into it" if recipe.model.vision_lora else ""
        yield "method", f"the last {layers} layers" if layers else f"every weight{of_tower}"
    yield "objective", recipe.objective.type
    yield "data", ", ".join(_last(path) for path in _datasets(recipe))


def _training(recipe: RecipeConfig, run_dir: RunDirectory, step: int | None) -> Iterator[Row]:
    record, optim, data = run_dir.read_run(), recipe.optim_wrapper.optimizer, recipe.train_dataloader.dataset
    batch, schedule = record.batch, recipe.param_scheduler
    yield "recipe", record.name
    yield "optimizer steps", step
    factors = f"{batch.micro_batch} x {batch.accumulation} accumulated x {batch.ranks} ranks"
    yield "global batch", f"{batch.global_batch} = {factors}"
    yield "longest sample", f"{data.max_length} tokens{', packed' if data.packing else ''}"
    yield "optimizer", f"{optim.type}, learning rate {optim.lr:g}, weight decay {optim.weight_decay:g}"
    steps = " steps" if schedule.warmup_steps else ""
    yield "schedule", f"{schedule.type}, warmup {schedule.warmup:g}{steps}"
    yield "precision", record.precision.dtype if record.precision else None
    yield "DeepSpeed", record.deepspeed
    yield "GPUs", ", ".join(sorted({gpu.name for gpu in record.hardware.gpus})) or None
    yield "seed", record.seed


def _losses(run_dir: RunDirectory, step: int | None) -> Iterator[Row]:
    names = {"loss": "training loss", "eval_loss": "validation loss"}
    for key, (steps, values) in curves(run_dir, names).items():
        upto = [point for point in zip(steps, values, strict=True) if step is None or point[0] <= step]
        if upto:
            yield names[key], f"{upto[-1][1]:.4f} at step {upto[-1][0]}"


def _table(title: str, rows: Iterable[Row]) -> str:
    lines = [f"| {name} | {value} |" for name, value in rows if value is not None]
    return "\n".join([f"## {title}\n", "| | |", "|---|---|", *lines, ""]) if lines else ""


def _datasets(recipe: RecipeConfig | None) -> list[str]:
    if recipe is None:
        return []
    dataset = recipe.train_dataloader.dataset
    return [rows.path for rows in (dataset.mixture or (dataset,)) if rows.path]


def _last(path: str) -> str:
    """Return a hub id unchanged, and only the last part of a local path, which may be private."""
    return path if paths.local(path) is None else path.rstrip("/").rsplit("/", 1)[-1]
