"""The plan's estimate against a simulation that shares no formula with it: models of published shapes, few layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.simulate import IMAGES, KINDS, LEAST, MOST, POINTS, Point, compare, lines

# PEFT's, of fused experts.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")

FEW = tuple(replace(point, layers=8) for point in KINDS)
OPEN = {
    "Llama 3 8B, lora, ZeRO-3, 8 x A100, 1 x 4096, kept",  # 10.6 % high
    "Llama 3 8B, qlora, ZeRO-3, 8 x A100, 1 x 4096, recomputed",  # 12.8 % low: 0.6 GB
}
"""Runs of a few layers with an estimate that is known to be wrong: what ZeRO-3 gathers is bounded and not followed."""
OPEN_WHEN_WHOLE = {
    "Llama 3 8B, full, ZeRO-2 offload, 8 x A100, 1 x 4096, recomputed",  # 2.3 % low
    "Llama 3 8B, full, ZeRO-3 offload, 8 x A100, 1 x 4096, recomputed",  # 15.7 % high: 1.1 GB
    "Llama 3 8B, lora, ZeRO-3 offload, 8 x A100, 1 x 4096, recomputed",  # 11.1 % high: 0.5 GB
}
"""The same with all layers."""


def check(point: Point, folder: Path, least: float = LEAST, most: float = MOST) -> None:
    found = compare(point, folder)

    both = f"simulated: {lines(found.simulated.lines)}\nestimated: {lines(found.estimated)}"
    assert least <= found.off_by <= most, f"{found.off_by:+.1%}\n{both}"


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(replace(point, layers=4), marks=() if number == 2 else pytest.mark.long)
        for number, point in enumerate(IMAGES)
        if not (point.model.startswith("Qwen") and point.method == "full")  # minutes: the tower has 32 layers
    ],
    ids=str,
)
def test_the_estimate_of_a_model_that_reads_images_is_within_five_percent_of_the_simulation(
    point: Point, tmp_path: Path
) -> None:
    check(point, tmp_path, -0.05, 0.05)


QUICK = tuple(replace(KINDS[number], layers=3) for number in (0, 5, 11, 15))
"""Full at 0 and at 3 (packed), QLoRA at 2, and LoRA with fused experts at 2."""


@pytest.mark.parametrize("point", QUICK, ids=str)
def test_the_estimate_of_three_layers_is_close_to_the_simulation(point: Point, tmp_path: Path) -> None:
    check(point, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("point", [point for point in FEW if str(point) not in OPEN], ids=str)
def test_the_estimate_of_a_few_layers_is_close_to_the_simulation(point: Point, tmp_path: Path) -> None:
    check(point, tmp_path)


WHOLE = [point for point in POINTS if point not in KINDS and str(point) not in OPEN_WHEN_WHOLE]


@pytest.mark.long
@pytest.mark.parametrize("point", WHOLE[::2], ids=str)  # python -m bench simulate compares them all
def test_the_estimate_is_close_to_the_simulation(point: Point, tmp_path: Path) -> None:
    check(point, tmp_path)
