"""`tuner data`: what a recipe's data becomes, before a GPU is booked."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from tuner.cli import complete
from tuner.cli.options import override_options, overrides
from tuner.errors import DataError, TunerError, visible

if TYPE_CHECKING:
    from tuner.data.inspection import View
    from tuner.data.serving import Difference
    from tuner.recipes.schema import Dataset, RecipeConfig

_FIRST_ROWS = 1_000
_MAX_BAD = 20


@click.command()
@click.argument("name", required=False, shell_complete=complete.recipes)
@click.option("--all", "every", is_flag=True, help=f"Read and check every row, not the first {_FIRST_ROWS:,}.")
@click.option("--samples", type=click.IntRange(0), default=3, show_default=True, help="How many samples to show.")
@click.option("--bad", is_flag=True, help="List every row that is bad, dropped, truncated, split or changed.")
@click.option("--template-check", "check", is_flag=True, help="Compare training's text with serving's, by token.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@override_options
def command(
    name: str | None,
    every: bool,
    samples: int,
    bad: bool,
    check: bool,
    as_json: bool,
    allow_code: bool,
    debug: bool,
    **changes: Any,
) -> None:
    """Read the data of recipe NAME as training would, and show what becomes of it.

    Counts, token lengths, and samples as the chat template renders them, with the trained tokens marked. Of the model
    only the tokenizer is loaded. Exit code 2 when a row cannot be trained on.
    """
    from tuner.recipes import paths, recipe
    from tuner.worker.quiet import hush

    found = recipe.load(name, overrides(**changes), allow_code=allow_code)
    recipe.refuse_functions(found, allow_code=allow_code)
    paths.check_model(found.config)
    paths.check_data(found.config)
    hush()
    from tuner.models.load import source, tokenizer_of

    tokenizer = tokenizer_of(found.config, source(found.config.model))
    objective = found.config.objective.type
    views = {
        split: _view(dataset, tokenizer, objective, samples if split == "train" else 0, bad=bad, as_json=as_json)
        for split, dataset in _splits(found.config, every)
    }
    unlike = _unlike(found.config, tokenizer) if check else None
    if as_json:
        _print_json(found.name, found.config, views, unlike, bad=bad)
    else:
        _print(found.name, views, unlike, every=every, bad=bad)


def _splits(config: RecipeConfig, every: bool) -> Iterable[tuple[str, Dataset]]:
    for split, loader in (("train", config.train_dataloader), ("validation", config.val_dataloader)):
        if loader:
            rows = loader.dataset.max_rows
            limit = rows if every else min(rows or _FIRST_ROWS, _FIRST_ROWS)
            yield split, loader.dataset.model_copy(update={"max_rows": limit})


def _unlike(config: RecipeConfig, tokenizer: Any) -> list[Difference]:
    from tuner.data.inspection import template_check

    return list(template_check(config.train_dataloader.dataset, tokenizer, config.objective.type))


def _view(dataset: Dataset, tokenizer: Any, objective: str, samples: int, *, bad: bool, as_json: bool) -> View:
    from tuner.data.inspection import bad_rows, view

    try:
        return view(dataset, tokenizer, objective, samples)
    except DataError as first:
        limit = sys.maxsize if bad else _MAX_BAD
        raise _told(first, bad_rows(dataset, tokenizer, objective), limit, as_json=as_json) from first


def _told(first: DataError, found: Iterable[DataError], limit: int, *, as_json: bool) -> TunerError:
    """Print what is wrong with each bad row and return how many there are; a single mistake is returned itself.

    So is that of rows of several shapes: what would mend one of them would spoil another.
    """
    from tuner.data.formats import MixedShapes
    from tuner.files import dump_json

    is_mixed = isinstance(first, MixedShapes)
    listed, count = [], 0
    for error in found:
        count += 1
        if count <= limit:
            listed.append(error)
    if as_json:
        rows = [
            {"where": error.where, "what": error.what, "fix": first.fix if is_mixed else error.fix} for error in listed
        ]
        click.echo(dump_json({"num_bad_rows": count, "bad_rows": rows}), nl=False)
    if count < 2 or is_mixed:
        return first
    for error in listed:
        click.echo(str(error), err=True)
    more = f"; the first {limit} are listed" if count > limit else ""
    all_of_them = "; --bad lists all of them" if more else ""
    return DataError(
        f"{count:,} rows cannot be trained on{more}", fix=f"Correct or remove them, then look again{all_of_them}."
    )


def _print_json(
    name: str, config: RecipeConfig, views: Mapping[str, View], unlike: list[Difference] | None, *, bad: bool
) -> None:
    from tuner.files import dump_json

    listed = {split: {"changed": list(view.prepared.changed())} if bad else {} for split, view in views.items()}
    data = {split: _json(view) | listed[split] for split, view in views.items()}
    told = {} if unlike is None else {"template_check": [asdict(one) for one in unlike]}
    click.echo(dump_json({"recipe": name, "objective": config.objective.type, "data": data, **told}), nl=False)


def _json(view: View) -> dict[str, Any]:
    from tuner.data.inspection import histogram

    prepared = view.prepared
    bars = {
        side: [{"from": low, "to": high, "samples": count} for low, high, count in histogram(lengths)]
        for side, lengths in view.lengths.items()
    }
    samples = [
        {
            **asdict(sample),
            "parts": {
                part: [{"text": text, "trained": trained} for text, trained in pieces]
                for part, pieces in sample.parts.items()
            },
        }
        for sample in view.samples
    ]
    return {
        **prepared.facts(),
        "efficiency": prepared.counts.efficiency if prepared.counts.packing else None,
        "sets": [asdict(one) for one in prepared.sets],
        "lengths": bars,
        "samples": samples,
    }


def _print(name: str, views: Mapping[str, View], unlike: list[Difference] | None, *, every: bool, bad: bool) -> None:
    from rich.console import Console

    from tuner.cli.data_tables import print_changed, print_differences, print_samples, print_split

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for split, view in views.items():
        print_split(console, split, view)
        if bad:
            print_changed(console, split, view)
    if not every and any(view.prepared.counts.read == _FIRST_ROWS for view in views.values()):
        console.print(f"Only the first {_FIRST_ROWS:,} rows were read. All of them: tuner data {visible(name)} --all\n")
    if unlike is not None:
        print_differences(console, unlike)
    print_samples(console, views["train"].samples)
