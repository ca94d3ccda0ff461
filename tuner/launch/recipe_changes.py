"""Which keys of a recipe may change when its run goes on, and what is said of those that did.

A checkpoint is a point in one sequence of samples, for one model: what decides about these must stay. It compares; what
the ranks' optimizer states stand is `runs.resume_point`'s to say.
"""

from __future__ import annotations

from pathlib import Path

from tuner.errors import RecipeError
from tuner.recipes import loading
from tuner.recipes.merging import Difference, Section, differences
from tuner.recipes.recipe import Recipe

FIXED = {
    "model.path": "the weights belong to another model",
    "model.revision": "the weights belong to another model",
    "model.chat_template": "the samples differ",
    "architecture": "the weights belong to another model",
    "quantization": "the base weights differ",
    "adapter": "the adapter differs",
    "objective.type": "the loss differs",
    "train_dataloader.dataset": "the samples or their order differ",
    "optim_wrapper.optimizer.loraplus_lr_ratio": "the optimizer's parameter groups differ",
    "train_cfg.trainable_layers": "other weights are trained",
    "randomness.seed": "the order of the samples differs",
}
"""What a checkpoint's state depends on, by key or block, and what would be wrong with it."""
_ROWS = "train_dataloader.dataset"
_FREE = frozenset(("adapter.lora_dropout", f"{_ROWS}.bad_rows", f"{_ROWS}.num_proc", f"{_ROWS}.tokenizer_backend"))
"""What may change although its block may not: the ranks see whether other rows are left out."""


def compare(saved: Path | None, new: Recipe) -> tuple[str, ...]:
    """Return one line for each key that the recipe of a run holds otherwise now.

    Args:
        saved: The recipe.py of the checkpoint; where there is none, nothing can be compared.
        new: The recipe that will run, as recipe.py will hold it.

    Raises:
        RecipeError: a key changed that the state of the checkpoint depends on.
    """
    if saved is None or not saved.is_file():
        return ()
    old = loading.load(str(saved))
    changed = list(differences(Section(old.values, old.origins), Section(new.values, new.origins)))
    refused = [(one, why) for one in changed if (why := _reason(one.key))]
    if not refused:
        return tuple(f"changed since the checkpoint: {_arrow(one)}" for one in changed)
    lines = [f"{_arrow(one)}: {why}" for one, why in refused]
    what = f"the checkpoint does not fit this recipe: {'; '.join(lines)}"
    back = [f"{one.key} = {one.left.value!r}" if one.left else f"no {one.key}" for one, _ in refused]
    first = refused[0][0]
    where = f"{first.key} ({first.right.origin.source})" if first.right else first.key
    fix = f"Restore {' and '.join(back)}, or start a new run without --resume."
    raise RecipeError(what, where=where, fix=fix)


def _reason(key: str) -> str | None:
    if key in _FREE:
        return None
    return next((why for fixed, why in FIXED.items() if key == fixed or key.startswith(f"{fixed}.")), None)


def _arrow(one: Difference) -> str:
    old, new = (repr(side.value) if side else "(absent)" for side in (one.left, one.right))
    return f"{one.key} {old} -> {new}"
