"""`tuner data`: show the data as the model will see it, without a GPU."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from tuner.cli.data_tables import print_changed, print_differences, print_samples, print_split
from tuner.cli.help import Command
from tuner.cli.options import OptionValue, overrides, recipe_options
from tuner.cli.say import say_json
from tuner.errors import DataError, visible
from tuner.recipes import loading
from tuner.recipes.names import Name
from tuner.recipes.schema import Dataset

if TYPE_CHECKING:
    from tuner.data.inspection import TemplateDifference, View
    from tuner.data.text_encoder import TextEncoder

_FIRST_ROWS = 1_000
_MAX_BAD = 20


@click.command(
    cls=Command,
    examples=(
        "tuner data --model ./my-model --data my.jsonl --samples 5",
        "tuner data my_recipe.py --all --bad",
    ),
    json_keys={
        "tuner data RECIPE --json": "`recipe`, `objective`, `data`",
    },
)
@recipe_options("name", deepspeed=False)
@click.option("--all", "every", is_flag=True, help=f"Check every row, not only the first {_FIRST_ROWS:,}.")
@click.option("--samples", type=click.IntRange(0), default=3, help="Number of samples to show.")
@click.option("--bad", is_flag=True, help="List all rows that are wrong, dropped, truncated, split or changed.")
@click.option(
    "--template-check",
    "check",
    is_flag=True,
    help="Check that the chat template gives the same tokens in training and in serving.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    name: Name | None,
    every: bool,
    samples: int,
    bad: bool,
    check: bool,
    as_json: bool,
    allow_code: bool,
    **changes: OptionValue,
) -> None:
    """Show the data as the model will see it, and the rows that cannot be trained on.

    Prints counts, token lengths, and samples as the chat template renders them, with the trained tokens marked. NAME
    is a recipe, or give --model and --data. It needs no GPU and no weights, only the tokenizer. Exit code 2 if a row
    cannot be trained on.
    """
    from tuner.launch import previewing
    from tuner.worker.quiet import quiet_libraries

    recipe = loading.load(name, overrides(**changes), allow_code=allow_code)
    quiet_libraries()
    encoder, splits = previewing.opened(recipe, os.environ, first_rows=_FIRST_ROWS, every=every, allow_code=allow_code)
    objective = recipe.config.objective.type
    from tuner.data.inspection import template_check

    views = {
        split: _view(dataset, encoder, objective, samples if split == "train" else 0, bad=bad, as_json=as_json)
        for split, dataset in splits.items()
    }
    rows = recipe.config.train_dataloader.dataset
    if every and rows.streaming:
        _check_stream(rows, encoder, objective, bad=bad, as_json=as_json)
    differences = [*template_check(splits["train"], encoder, objective)] if check else None
    if as_json:
        _print_json(recipe.name, objective, views, differences, bad=bad)
    else:
        _print(recipe.name, views, differences, every=every, streams=bool(rows.streaming), bad=bad)


def _view(dataset: Dataset, encoder: TextEncoder, objective: str, samples: int, *, bad: bool, as_json: bool) -> View:
    from tuner.data.inspection import bad_rows, view

    try:
        return view(dataset, encoder, objective, samples)
    except DataError as first:
        limit = sys.maxsize if bad else _MAX_BAD
        error = _list_bad(first, bad_rows(dataset, encoder, objective), limit, as_json=as_json)
        if bad and not as_json:
            _print_others(dataset, encoder, objective)
        raise error from first


def _print_others(dataset: Dataset, encoder: TextEncoder, objective: str) -> None:
    """Print the samples of the rows beside bad ones that are not trained on as they are, if the others can be read."""
    from rich.console import Console

    from tuner.data.inspection import view

    with suppress(DataError):
        others = view(dataset.model_copy(update={"bad_rows": sys.maxsize}), encoder, objective, 0)
        console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        print_changed(console, "validation" if dataset.held_out else "train", others, without=("bad",))


def _check_stream(dataset: Dataset, encoder: TextEncoder, objective: str, *, bad: bool, as_json: bool) -> None:
    """Raise an error if a stream has more bad rows than may be left out."""
    from tuner.data.inspection import bad_rows

    errors = iter(bad_rows(dataset, encoder, objective))
    first = list(itertools.islice(errors, dataset.bad_rows + 1))
    if len(first) > dataset.bad_rows:
        limit = sys.maxsize if bad else _MAX_BAD
        raise _list_bad(first[0], itertools.chain(first, errors), limit, as_json=as_json)


def _list_bad(first: DataError, errors: Iterable[DataError], limit: int, *, as_json: bool) -> DataError:
    """Print the mistake of each bad row, and return an error with their number.

    A single mistake is returned as it is, and so is that of rows of several shapes: they have no common fix.
    """
    from tuner.data.formats import MixedShapes

    every = iter(errors)
    listed = list(itertools.islice(every, limit))
    count = len(listed) + sum(1 for _ in every)
    is_mixed = isinstance(first, MixedShapes)
    if as_json:
        fixes = [first.fix if is_mixed else error.fix for error in listed]
        rows = [
            {"where": error.where, "what": error.what, "fix": fix} for error, fix in zip(listed, fixes, strict=True)
        ]
        say_json({"num_bad_rows": count, "bad_rows": rows})
    if count < 2 or is_mixed:
        return first
    for error in listed:
        click.echo("\n".join(error.for_people()), err=True)
    more, all_of_them = (f"; the first {limit} are listed", "; --bad lists all") if count > limit else ("", "")
    problem = f"{count:,} rows cannot be trained on{more}"
    leave_out = f"or leave them out: --set bad_rows={count}"
    return DataError(problem, fix=f"Correct or remove them, {leave_out}{all_of_them}.")


def _print_json(
    name: str, objective: str, views: Mapping[str, View], differences: list[TemplateDifference] | None, *, bad: bool
) -> None:
    changed = {split: {"changed": list(view.prepared.changed())} if bad else {} for split, view in views.items()}
    data = {split: view.to_json() | changed[split] for split, view in views.items()}
    data["train"]["hints"] = list(views["train"].prepared.hints)
    if "validation" in views:
        data["validation"]["in_training"] = views["validation"].prepared.in_training(views["train"].prepared)
    check = {} if differences is None else {"template_check": [asdict(difference) for difference in differences]}
    say_json({"recipe": name, "objective": objective, "data": data, **check})


def _leak_warning(views: Mapping[str, View]) -> str | None:
    from tuner.data import copies

    validation = views.get("validation")
    num_leaked = validation.prepared.in_training(views["train"].prepared) if validation else 0
    return copies.leak_warning(num_leaked, validation.prepared.counts.read) if validation and num_leaked else None


def _print(
    name: str,
    views: Mapping[str, View],
    differences: list[TemplateDifference] | None,
    *,
    every: bool,
    streams: bool,
    bad: bool,
) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for split, view in views.items():
        print_split(console, split, view)
        if bad:
            print_changed(console, split, view)
    for warning in filter(None, (*views["train"].prepared.hints, _leak_warning(views))):
        console.print(f"WARNING: {visible(warning)}\n")
    if not every and any(view.prepared.counts.read == _FIRST_ROWS for view in views.values()):
        console.print(f"Only the first {_FIRST_ROWS:,} rows were read. To read all: tuner data {visible(name)} --all\n")
    if every and streams:
        console.print(f"It is streamed: every row was checked, and the first {_FIRST_ROWS:,} are counted above.\n")
    if differences is not None:
        print_differences(console, differences)
    print_samples(console, views["train"].samples)
