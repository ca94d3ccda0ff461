"""Every family of the catalog, and those that users bring, trains two steps, and its result reloads as it was."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import environment
from tests.e2e.warm import of_module, warm
from tests.worker.families import METHODS, examples
from tuner.recipes.schema.architecture import KEEPS_APART

SCALES_ITS_LOGITS = ("minicpm3",)
"""By a number over its width, which for a small model is a large one."""
Train = Callable[[str, str, Path], dict[str, Any]]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """Return what has a family trained by a process that stays: what it does first takes longer than a family."""
    requests, answers = pipes = [tmp_path_factory.mktemp("families") / name for name in ("requests", "answers")]
    for pipe in pipes:
        os.mkfifo(pipe)
    env = environment(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")
    child = warm().start([requests, answers], env=env, code=of_module("tests.worker.families"))
    with requests.open("w", buffering=1) as asked, answers.open() as answered:

        def ask(kind: str, method: str, folder: Path) -> dict[str, Any]:
            print(kind, method, folder, file=asked)
            answer = answered.readline()
            if not answer:
                pytest.fail("".join(child.communicate())[-4000:])
            found: dict[str, Any] = json.loads(answer)
            return found

        yield ask
    child.communicate()


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", examples())
def test_a_family_trains_two_steps_and_reloads(train: Train, kind: str, method: str, tmp_path: Path) -> None:
    found = train(kind, method, tmp_path)

    assert "error" not in found, found["error"]
    first, second = found["losses"]
    assert 6 < first < (30 if kind in SCALES_ITS_LOGITS else 9), "near the logarithm of the vocabulary"
    assert second < first
    assert found["moved"] > 0
    assert found["apart"] == 0
    assert found["packing"] == (kind in KEEPS_APART)


def test_every_native_part_is_of_a_family_that_is_tried() -> None:
    assert len([kind for kind, part in examples().items() if part]) >= 46
    assert {"bamba", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "mamba2"} <= examples().keys()
