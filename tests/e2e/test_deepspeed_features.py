"""docs/deepspeed.md says what runs; `tuner check` says the same of every cell, `tuner smoke` trains some of them."""

from __future__ import annotations

import os
import random
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner, Result

from tests.e2e.runs import environment
from tests.e2e.warm import warm
from tuner.cli import tuner
from tuner.zero import presets

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PAGE = Path(__file__).parents[2] / "docs" / "deepspeed.md"
METHODS = ("full", "lora", "qlora")
DRAWS = int(os.environ.get("TUNER_DRAWS", "2"))
"""Of features, and of pairs of them, that `tuner smoke` tries: half a minute each."""


class Feature(NamedTuple):
    name: str
    flags: tuple[str, ...]
    stages: dict[str, tuple[int, ...]]
    elsewhere: str

    def runs(self, method: str, stage: int) -> bool:
        return stage in self.stages[method]


def features() -> Iterator[Feature]:
    table = PAGE.read_text(encoding="utf-8").partition("<!-- features -->")[2].partition("<!-- end -->")[0]
    for line in table.strip().splitlines()[2:]:
        name, flags, *cells, elsewhere = _cells(line)
        stages = {method: tuple(map(int, cell.split())) for method, cell in zip(METHODS, cells, strict=True)}
        yield Feature(name, tuple(shlex.split(flags.strip("`"))), stages, elsewhere)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


FEATURES = tuple(features())


def words(command: str, method: str, stage: int, *flags: str) -> list[str]:
    return [command, f"tiny_{method}_sample_e1", "--deepspeed", presets.of_stage(stage, offloads=False).name, *flags]


def check(method: str, stage: int, *flags: str) -> Result:
    return CliRunner().invoke(tuner, words("check", method, stage, *flags), env={"NPROC_PER_NODE": "2"})


@pytest.mark.parametrize("feature", FEATURES, ids=[feature.name for feature in FEATURES])
def test_check_says_of_every_feature_what_the_page_says(feature: Feature) -> None:
    assert len(FEATURES) > 20
    for method in METHODS:
        for stage in range(4):
            said = check(method, stage, *feature.flags)
            runs = feature.runs(method, stage) or feature.elsewhere.startswith("no effect")
            assert (said.exit_code == 0) is runs, (method, stage, said.output)


def _drawn() -> list[tuple[str, str, int, tuple[str, ...]]]:
    """Draw features and pairs of features, each with a method and a stage at which the page has them run."""
    draw = random.Random(20)  # noqa: S311 (the same draw every time, so that a failure comes again)
    drawn: list[tuple[str, str, int, tuple[str, ...]]] = []
    for size in (1, 2):
        while len(drawn) < DRAWS * size:
            several = draw.sample(FEATURES, size)
            method, stage = draw.choice(METHODS), draw.randrange(4)
            flags = tuple(flag for feature in several for flag in feature.flags)
            if all(feature.runs(method, stage) for feature in several):
                drawn.append((" and ".join(feature.name for feature in several), method, stage, flags))
    return drawn


@pytest.mark.parametrize(("name", "method", "stage", "flags"), _drawn())
def test_what_check_passes_trains_saves_resumes_and_reloads(
    name: str, method: str, stage: int, flags: tuple[str, ...]
) -> None:
    if check(method, stage, *flags).exit_code:
        pytest.skip("the two contradict each other, and check says so")

    env = environment(NPROC_PER_NODE="2")
    done = warm(has_bitsandbytes=method == "qlora").run(words("smoke", method, stage, *flags), env=env)

    assert done.returncode == 0, (name, done.stdout + done.stderr)
