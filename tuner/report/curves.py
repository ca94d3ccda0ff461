"""The curves of runs as charts: the quantity of each chart, the points that are drawn, and their colours.

It takes numbers and returns data for the page's script, which draws with uPlot. The page itself colours text and grid,
for light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence

from tuner.files import JsonObject
from tuner.report.gathered import QUANTITIES, Gathered, Quantity
from tuner.runs.metrics import Curve

COLOURS = ("#3b7ddd", "#e0700f", "#1a9c55", "#cf3f80", "#8b62d4", "#0f9a9a", "#b08914", "#78808c")
"""Colours of the runs, distinct on white and on black; the ninth run gets the first colour again."""
_MAX_GROUPS = 1000
"""Groups of neighbouring points of a curve, as many as a screen can show."""


def charts(runs: Sequence[Gathered]) -> list[JsonObject]:
    """Return a chart for each quantity that any of the runs has logged."""
    every = (_chart(place, quantity, runs) for place, quantity in enumerate(QUANTITIES))
    return [chart for chart in every if chart["lines"]]


def drawn(curve: Curve) -> Curve:
    """Return the points of a curve that are drawn: its ends, and the lowest and the highest of each group."""
    num_points = len(curve.steps)
    size = max(1, -(-num_points // _MAX_GROUPS))
    places = {0, num_points - 1}
    for first in range(0, num_points, size):
        group = curve.values[first : first + size]
        places |= {first + group.index(min(group)), first + group.index(max(group))}
    shown = sorted(places)
    return Curve([curve.steps[place] for place in shown], [curve.values[place] for place in shown])


def _chart(place: int, quantity: Quantity, runs: Sequence[Gathered]) -> JsonObject:
    is_validated = any(quantity.validation and run.curves[quantity.validation].steps for run in runs)
    return {
        "id": f"chart-{quantity.key.replace('/', '-')}",
        "place": place,
        "title": quantity.title,
        "note": "; ".join([*(["dotted: validation"] if is_validated else []), *filter(None, [quantity.note])]),
        "exponents": quantity.exponents,
        "noisy": quantity.is_noisy,
        "range": quantity.range,
        "lines": [
            _line(quantity, number, run, is_validation=key == quantity.validation)
            for number, run in enumerate(runs)
            for key in filter(None, (quantity.key, quantity.validation))
            if run.curves[key].steps
        ],
    }


def _line(quantity: Quantity, number: int, run: Gathered, *, is_validation: bool) -> JsonObject:
    steps, values = drawn(run.curves[quantity.validation if is_validation else quantity.key])
    return {
        "run": number,
        "name": f"{run.name}{' (validation)' * is_validation}",
        "colour": COLOURS[number % len(COLOURS)],
        "dash": "dot" if is_validation else "solid",
        "x": steps,
        "y": [value / quantity.unit for value in values],
    }
