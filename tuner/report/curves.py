"""The curves of runs as charts: the quantity of each chart, the points that are drawn, and their colours.

It takes numbers and returns data for the page's script, which draws with uPlot. The page itself colours text and grid,
for light and dark. Runs may grow: only the points that are new since a version are returned.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from tuner.files import JsonObject
from tuner.report.gathered import QUANTITIES, Gathered, Quantity
from tuner.runs.metrics import Curve

COLOURS = ("#3b7ddd", "#e0700f", "#1a9c55", "#cf3f80", "#8b62d4", "#0f9a9a", "#b08914", "#78808c")
"""Colours of the runs, distinct on white and on black; the ninth run gets the first colour again."""
_MAX_POINTS = 2000
_EVERYTHING = -1


class Drawn:
    """The points of a curve that are drawn: as many as a screen can show, and every peak.

    From each group of neighbours it takes the lowest and the highest. The size of a group is a power of two, so a curve
    that grows by one point nearly always changes only its last few points.
    """

    def __init__(self) -> None:
        self.version = 0
        """The last version that changed anything."""
        self._curve = Curve([], [])
        self._num_seen = 0
        self._restart(1)

    def _restart(self, size: int) -> None:
        self._size, self._places = size, list[int]()
        self._versions: list[int] = []
        """The version in which each place was added; they never decrease."""
        self._num_settled, self._settled_places = 0, 0

    def follow(self, curve: Curve, version: int) -> None:
        """Take the new points of a curve, or replace it by another curve."""
        num_points = len(curve.steps)
        if curve is self._curve and num_points == self._num_seen:
            return
        size = _num_neighbours(num_points)
        if curve is not self._curve or size != self._size:
            self._restart(size)
        self._curve, self._num_seen, self.version = curve, num_points, version
        del self._places[self._settled_places :], self._versions[self._settled_places :]
        for first in range(self._num_settled, num_points, size):
            part = curve.values[first : first + size]
            peaks = {first + part.index(min(part)), first + part.index(max(part))} | ({0} if first == 0 else set())
            is_last = first + size >= num_points
            self._places += sorted(peaks | ({num_points - 1} if is_last else set()))
            self._versions += [version] * (len(self._places) - len(self._versions))
            if not is_last:
                self._num_settled, self._settled_places = first + size, len(self._places)

    def since(self, version: int) -> tuple[int, Curve]:
        """Return the index of the first point that is new since a version, and the points from there on."""
        first = bisect.bisect_right(self._versions, version)
        steps, values = self._curve
        places = self._places[first:]
        return first, Curve([steps[place] for place in places], [values[place] for place in places])


def _num_neighbours(num_points: int) -> int:
    size = 1
    while num_points > _MAX_POINTS and 2 * num_points > size * _MAX_POINTS:
        size *= 2
    return size


class Charts:
    """A chart for each quantity that any of the runs has logged."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, int], Drawn] = {}

    def follow(self, runs: Sequence[Gathered], version: int) -> None:
        """Take the new points of some runs; each call passes the same runs."""
        for index, run in enumerate(runs):
            for key, curve in run.curves.items():
                if curve.steps or (key, index) in self._lines:
                    self._lines.setdefault((key, index), Drawn()).follow(curve, version)

    def since(self, runs: Sequence[Gathered], version: int = _EVERYTHING) -> list[JsonObject]:
        """Return the charts with something new, each with the lines that have grown."""
        charts = (self._chart(index, runs, version) for index, _ in enumerate(QUANTITIES))
        return [chart for chart in charts if chart["lines"]]

    def _chart(self, index: int, runs: Sequence[Gathered], version: int) -> JsonObject:
        quantity = QUANTITIES[index]
        is_validated = any((quantity.validation, index) in self._lines for index, _ in enumerate(runs))
        return {
            "id": f"chart-{quantity.key.replace('/', '-')}",
            "place": index,
            "title": quantity.title,
            "note": "; ".join([*(["dotted: validation"] if is_validated else []), *filter(None, [quantity.note])]),
            "exponents": quantity.exponents,
            "noisy": quantity.is_noisy,
            "range": quantity.range,
            "lines": [
                self._line(quantity, key, index, runs[index].name, version)
                for index, _ in enumerate(runs)
                for key in (quantity.key, quantity.validation)
                if (line := self._lines.get((key, index))) and line.version > version
            ],
        }

    def _line(self, quantity: Quantity, key: str, index: int, name: str, version: int) -> JsonObject:
        first, (steps, values) = self._lines[key, index].since(version)
        is_validation = key == quantity.validation
        return {
            "run": index,
            "name": f"{name}{' (validation)' * is_validation}",
            "colour": COLOURS[index % len(COLOURS)],
            "dash": "dot" if is_validation else "solid",
            "from": first,
            "x": steps,
            "y": [value / quantity.unit for value in values],
        }
