"""Draws held-out figures against trained tokens and against steps, one picture for data and method."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.tools import NAMES

FIGURES = {
    "loss": "held-out loss", "exact": "exact answers", "dpo_loss": "held-out DPO loss", "preferred": "preferred",
}  # fmt: skip
COLORS = {"tuner": "#3f51b5", "trl": "#e67e22", "llamafactory": "#2e8b57", "axolotl": "#c0392b"}


def draw(records: Iterable[dict[str, Any]], folder: Path) -> list[Path]:
    """Write the pictures; return their files."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("--draw needs matplotlib: pip install matplotlib")
    matplotlib.use("svg")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        if "after" in record:
            groups.setdefault((record["cell"]["data"], record["cell"]["method"]), []).append(record)
    folder.mkdir(parents=True, exist_ok=True)
    return [_picture(folder / f"learning-{data}-{method}.svg", group) for (data, method), group in groups.items()]


def points(record: dict[str, Any]) -> list[tuple[int, float, float]]:
    """Return steps, tokens and the first figure of a run, from before the first step to after the last."""
    figure = next(name for name in FIGURES if name in record["after"])
    measured = [(0, record["before"]), *((int(step), figures) for step, figures in record["curve"].items())]
    measured.append((record["steps"], record["after"]))
    whole = record["tokens"] * record["cell"]["epochs"] / max(1, record["max_steps"])
    return [(step, step * whole, figures[figure]) for step, figures in measured]


def _picture(file: Path, records: list[dict[str, Any]]) -> Path:
    from matplotlib import pyplot

    # Text stays text, and the same figures make the same file.
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "learning", "font.size": 9}):
        figure, (by_tokens, by_steps) = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
        for record in records:
            cell = record["cell"]
            label = ", ".join([NAMES[cell["tool"]].replace("`", ""), cell["settings"], *cell["changes"]])
            style = {
                "color": COLORS[cell["tool"]],
                "linestyle": "-" if cell["settings"] == "own" else "--",
                "marker": ".",
            }
            steps, tokens, values = zip(*points(record), strict=True)
            by_tokens.plot(tokens, values, label=label, **style)
            by_steps.plot(steps, values, **style)
        name = next(name for name in FIGURES if name in records[0]["after"])
        by_tokens.set(xlabel="trained tokens", ylabel=FIGURES[name])
        by_steps.set(xlabel="optimizer steps", xscale="symlog")
        by_tokens.legend(frameon=False, fontsize=7)
        figure.savefig(file, metadata={"Date": None})
        pyplot.close(figure)
    return file
