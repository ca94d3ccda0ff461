"""Show a recipe's data as training sees it, before a run: for `tuner data` and `tuner.preview_data`.

Rows go through the same code as in training. It loads the model's encoder and no weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from html import escape
from typing import TYPE_CHECKING

from tuner.errors import DataError, MachineError, together
from tuner.files import JsonObject
from tuner.fit.splits import data_parallel_ranks
from tuner.launch import admit, batch_size
from tuner.launch.validation_rows import hold_out
from tuner.machine import hardware
from tuner.notebook import brief, paragraphs
from tuner.progress import told
from tuner.recipes.recipe import Recipe
from tuner.recipes.schema import Dataset
from tuner.runs.directory import RunDirectory, is_run

if TYPE_CHECKING:
    from tuner.data.inspection import View
    from tuner.data.text_encoder import TextEncoder

_MAX_BAD, _MAX_LINES, _MAX_HTML_SAMPLES = 20, 18, 20
_SPLITS = {"train_dataloader": "train", "val_dataloader": "validation"}
_TRAINED = "background:#1a7f37;color:#ffffff"


def opened(
    recipe: Recipe, environ: Mapping[str, str], *, first_rows: int, every: bool, allow_code: bool
) -> tuple[TextEncoder, dict[str, Dataset]]:
    """Check the recipe's model and data, and return the model's encoder and the data sets to read, by split.

    Args:
        environ: The variables of this process: packed rows are as long as in a run on its GPUs.
        first_rows: How many rows of each split are read.
        every: Read every row instead.
        allow_code: The recipe may name functions of installed packages.

    Raises:
        TunerError: the model or the data are not there, or code is not allowed.
    """
    told(*(f"WARNING: {warning}" for warning in recipe.warnings))
    admit.require(recipe, admit.OF_ROWS, allow_code=allow_code)
    ranks = data_parallel_ranks(recipe.config, max(1, _num_gpus(environ)))
    recipe = batch_size.choose_global_batch(hold_out(recipe), ranks).with_template_text()
    from tuner.models.load import pretrained_path  # torch
    from tuner.worker.encoders import encoder_of  # transformers

    splits = {}
    for key, loader in recipe.config.loaders.items():
        rows = loader.dataset.max_rows
        # A stream may be larger than the disk: its other rows are checked and not kept.
        keeps_all = every and not loader.dataset.streaming
        limit = rows if keeps_all else min(rows or first_rows, first_rows)
        splits[_SPLITS[key]] = loader.dataset.model_copy(update={"max_rows": limit})
    encoder = encoder_of(recipe.config, pretrained_path(recipe.config.model, weights=False), _day_of_run(recipe))
    return encoder, splits


def _day_of_run(recipe: Recipe) -> date | None:
    """Return the date of the run that this recipe belongs to; None if it belongs to no run."""
    name = recipe.arguments and recipe.arguments.name
    file = name and name.path
    return RunDirectory(file.parent).day if file and file.name == "recipe.py" and is_run(file.parent) else None


def _num_gpus(environ: Mapping[str, str]) -> int:
    try:
        return len(hardware.detect(environ).gpus)
    except MachineError:  # to look at rows no GPU is needed
        return 0


def _number(weight: float) -> str:
    return f"{weight:.3g}: " if weight < 1 else ""


def _shade(weight: float) -> str:
    return _TRAINED if weight == 1 else f"{_TRAINED};opacity:{0.4 + weight * 0.5:.2f}"


@dataclass(frozen=True, repr=False)
class Preview:
    """What training would see of the data: `views` by split, with counts, lengths and samples as text."""

    name: str
    objective: str
    views: Mapping[str, View]

    def to_json(self) -> JsonObject:
        """Return the preview as plain values."""
        data = {split: view.to_json() for split, view in self.views.items()}
        return {"recipe": self.name, "objective": self.objective, "data": data}

    def __repr__(self) -> str:
        lines = self._counts()
        for sample in self.views["train"].samples:
            lines.append(f"{sample.place}: {sample.num_tokens:,} tokens, {sample.num_trained:,} with loss, in [[ ]]")
            for name, pieces in sample.parts.items():
                text = "".join(f"[[{_number(weight)}{piece}]]" if weight else piece for piece, weight in pieces)
                lines.append(f"  {name}: {brief(text.strip())}")
        more = len(lines) - _MAX_LINES
        return "\n".join([*lines[:_MAX_LINES], *([f"... {more} more lines"] if more > 0 else [])])

    def _repr_html_(self) -> str:
        samples = []
        for sample in self.views["train"].samples[:_MAX_HTML_SAMPLES]:
            title = f"{sample.place}: {sample.num_tokens:,} tokens, {sample.num_trained:,} with loss (marked)"
            samples.append(f"<b>{escape(brief(title))}</b>")
            for pieces in sample.parts.values():
                text = "".join(
                    f"<span style='{_shade(weight)}'>{_number(weight)}{escape(piece)}</span>"
                    if weight
                    else escape(piece)
                    for piece, weight in pieces
                )
                samples.append(f"<pre style='white-space:pre-wrap'>{text}</pre>")
        return paragraphs(self._counts()) + "".join(samples)

    def _counts(self) -> list[str]:
        from tuner.data.prepare import describe  # datasets

        return [line for split, view in self.views.items() for line in describe(view.prepared, split).splitlines()]


def preview(
    recipe: Recipe, environ: Mapping[str, str], *, num_samples: int, first_rows: int, every: bool, allow_code: bool
) -> Preview:
    """Read the data as `opened` says, and show the first samples.

    Raises:
        DataError: a row cannot be trained on; the first bad rows are one error.
        TunerError: as `opened`.
    """
    from tuner.data.inspection import bad_rows, view  # datasets

    encoder, splits = opened(recipe, environ, first_rows=first_rows, every=every, allow_code=allow_code)
    objective, views = recipe.config.objective.type, {}
    for split, dataset in splits.items():
        try:
            views[split] = view(dataset, encoder, objective, num_samples if split == "train" else 0)
        except DataError as first:
            errors = list(itertools.islice(bad_rows(dataset, encoder, objective), _MAX_BAD))
            raise (together(errors) if len(errors) > 1 else first) from first
    return Preview(recipe.name, objective, views)
