"""How `tuner data` shows rows: counts, a histogram of lengths, and samples with their trained tokens marked.

It reads no data, and no text of a row reaches the terminal as a control sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from tuner.errors import shortened, visible

if TYPE_CHECKING:
    from tuner.data.inspection import Piece, Shown, TemplateDifference, View

_BAR_WIDTH = 40
_MAX_DIFFERENCES = 10
_MAX_PIECE, _END_OF_PIECE = 1_000, 200
"""Characters of a run of tokens that are shown, and how many of them are its last."""
_TRAINED, _MARKS = "bold green", ("[[", "]]")
_SHADES = ("green4", "green3", "chartreuse2")
"""Of tokens that weigh less than a third, less than two thirds, and less than 1."""


def print_split(console: Console, split: str, view: View) -> None:
    """Print what was read of one split, what it became, and how long its samples are."""
    from tuner.data.inspection import histogram
    from tuner.data.prepare import describe

    console.print(describe(view.prepared, split))
    for side, lengths in view.lengths.items():
        bars = histogram(lengths)
        least, most = lengths.min(), lengths.max()
        console.print(f"  {side}: {least:,} to {most:,} tokens, {lengths.mean():,.0f} on average")
        width = len(f"{bars[-1][1]:,}")
        highest = max(count for _, _, count in bars)
        for low, high, count in bars:
            whole, part = ("#", ".") if console.options.ascii_only else ("█", "▏")
            bar = whole * round(_BAR_WIDTH * count / highest) or (part if count else "")
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
    totals = [total_of for total_of in view.prepared.totals if total_of.what not in ("copied", *without)]
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
    more = len(differences) - _MAX_DIFFERENCES
    console.print(f"  and {more:,} more\n" if more > 0 else "")


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
