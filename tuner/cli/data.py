"""`tuner data`: show the data as the model will see it, without a GPU."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.text import Text

from tuner.cli.help import Command
from tuner.cli.options import OptionValue, overrides, recipe_options
from tuner.cli.say import say_json
from tuner.errors import DataError, shortened, visible
from tuner.recipes import loading
from tuner.recipes.names import Name
from tuner.recipes.schema import Dataset

if TYPE_CHECKING:
    from tuner.data.inspection import Piece, Shown, TemplateDifference, View
    from tuner.data.text_encoder import TextEncoder

_FIRST_ROWS = 1_000
_MAX_BAD = 20
_BAR_WIDTH = 40
_MAX_DIFFERENCES = 10
_MAX_PIECE, _END_OF_PIECE = 1_000, 200
"""Characters of a run of tokens that are shown, and how many of them are its last."""
_TRAINED, _MARKS = "bold green", ("[[", "]]")
_SHADES = ("green4", "green3", "chartreuse2")
"""Of tokens that weigh less than a third, less than two thirds, and less than 1."""


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
    from tuner.data.inspection import view

    with suppress(DataError):
        other_rows = view(dataset.model_copy(update={"bad_rows": sys.maxsize}), encoder, objective, 0)
        console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        print_changed(console, "validation" if dataset.held_out else "train", other_rows, without=("bad",))


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


def print_split(console: Console, split: str, view: View) -> None:
    """Print what was read of one split, what it became, and how long its samples are."""
    from tuner.data.inspection import histogram
    from tuner.data.prepare import describe

    console.print(describe(view.prepared, split))
    for side, lengths in view.lengths.items():
        bars = histogram(lengths)
        shortest, longest = lengths.min(), lengths.max()
        console.print(f"  {side}: {shortest:,} to {longest:,} tokens, {lengths.mean():,.0f} on average")
        width = len(f"{bars[-1][1]:,}")
        highest = max(count for _, _, count in bars)
        for low, high, count in bars:
            full_mark, part_mark = ("#", ".") if console.options.ascii_only else ("█", "▏")
            bar = full_mark * round(_BAR_WIDTH * count / highest) or (part_mark if count else "")
            console.print(f"    {low:>{width},} - {high:>{width},}  {bar} {count:,}")
    console.print()


def print_changed(console: Console, split: str, view: View, *, without: Sequence[str] = ()) -> None:
    """Print each sample that is not trained on as it is, with its place and the reason; `without`: not these kinds."""
    from tuner.data.outcomes import MAX_LISTED

    console.print(f"{split}: samples that are dropped or changed")
    for line in (line for line in view.prepared.changed() if line["what"] not in without):
        before, after = line["tokens_before"], line["tokens_after"]
        tokens = "" if before is None else f" ({before:,} -> {after:,} tokens)"
        console.print(f"  {visible(line['where'])}: {line['what']}: {visible(line['reason'])}{tokens}")
    totals = [total_of for total_of in view.prepared.data.changes if total_of.what not in ("copied", *without)]
    total = sum(total_of.samples for total_of in totals)
    listed = sum(min(total_of.samples, MAX_LISTED) for total_of in totals)
    left_out = f" of {total:,}; {MAX_LISTED:,} of each reason are listed" if listed < total else ""
    console.print(f"  {listed:,} listed{left_out}\n" if total else "  none\n")


def print_differences(console: Console, differences: Sequence[TemplateDifference]) -> None:
    """Print where training reads a conversation otherwise than serving, the first of them."""
    from tuner.data.inspection import CHECKED_SAMPLES

    if not differences:
        console.print(f"Training and serving see the same tokens in the first {CHECKED_SAMPLES} samples.\n")
        return
    count = len({(difference.place, difference.turn) for difference in differences})
    console.print(
        f"In {count:,} answers of the first {CHECKED_SAMPLES} samples, training and serving see different tokens:"
    )
    for difference in differences[:_MAX_DIFFERENCES]:
        part, token = difference.part, difference.token
        console.print(
            f"  {visible(difference.place)}, turn {difference.turn}: the {part} differs from token {token:,} on"
        )
        console.print(f"    serving:  {visible(repr(difference.serving))}")
        console.print(f"    training: {visible(repr(difference.training))}")
    num_more = len(differences) - _MAX_DIFFERENCES
    console.print(f"  and {num_more:,} more\n" if num_more > 0 else "")


def print_samples(console: Console, samples: Sequence[Shown]) -> None:
    """Print samples as the chat template renders them; trained tokens are green, or in marks where colours are not."""
    colours = bool(console.is_terminal and console.color_system and not console.no_color)
    shown = f"in {_TRAINED.split()[-1]}" if colours else f"between {' and '.join(_MARKS)}"
    weights = {weight for sample in samples for pieces in sample.parts.values() for _, weight in pieces} - {0, 1}
    shades = ("; darker is less" if colours else ", behind a weight below 1") if weights else ""
    if samples:
        console.print(f"Samples as the model sees them; the tokens with loss are {shown}{shades}.")
    for sample in samples:
        where = "split off into other rows" if sample.splits else "cut off, beyond max_length"
        cut = f", {sample.num_cut:,} more are {where}" if sample.num_cut else ""
        counts = f"{sample.num_tokens:,} tokens, {sample.num_trained:,} of them trained{cut}"
        console.print(f"\n{visible(sample.place)}: {counts}", style="bold")
        for image in sample.images:
            console.print(
                f"image of {image.width} x {image.height} pixels: {image.num_tokens:,} tokens", style="italic"
            )
        for name, pieces in sample.parts.items():
            if len(sample.parts) > 1:
                console.print(f"{name}:", style="italic")
            console.print(_text(pieces, colours=colours))


def _text(pieces: Sequence[Piece], *, colours: bool) -> Text:
    text = Text()
    for piece, weight in pieces:
        before, after = _MARKS if weight and not colours else ("", "")
        number = f"{weight:.3g}: " if 0 < weight < 1 and not colours else ""
        shown = shortened(visible(piece), _MAX_PIECE, _END_OF_PIECE)
        text.append(f"{before}{number}{shown}{after}", style=_style(weight) if colours else "")
    text.rstrip()
    return text


def _style(weight: float) -> str:
    if weight in (0, 1):
        return _TRAINED if weight else ""
    return _SHADES[min(int(weight * len(_SHADES)), len(_SHADES) - 1)]
