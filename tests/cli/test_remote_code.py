"""Models that exist as code on the hub alone are listed and shown, and refused before anything starts."""

from __future__ import annotations

import pytest

from tests.cli.command import Tuner
from tuner.recipes import catalog, loading
from tuner.recipes.path_checks import _RELATIVES
from tuner.recipes.recipe import Overrides
from tuner.recipes.recipe_file import read_file

pytestmark = pytest.mark.usefixtures("nothing_starts")

NAME = "chatglm3_6b_qlora_alpaca_e3"
PINNED = ("--set", f"model.revision={'0123456789' * 4}", "--set", "model.trust_remote_code=True")
REMOTE = [
    name
    for name in catalog.names("models")
    if read_file(catalog.part_file("models", name).path).values["model"].get("remote_code")
]


@pytest.mark.parametrize("options", [("--dry-run",), ()], ids=["dry-run", "train"])
def test_training_one_is_refused_with_what_to_set_and_a_native_relative(tuner: Tuner, options: tuple[str, ...]) -> None:
    result = tuner("train", NAME, *options)

    assert result.code == 2
    (message,) = result.messages
    assert "transformers has no architecture for 'THUDM/chatglm3-6b'" in message
    assert "--trust-remote-code --set model.revision=COMMIT" in message
    assert "glm4_9b_chat_hf" in message


def test_trusting_one_commit_lets_it_through(tuner: Tuner) -> None:
    result = tuner("train", NAME, "--dry-run", *PINNED)

    assert result.code == 0, result.messages


def test_trusting_the_newest_commit_is_not_enough(tuner: Tuner) -> None:
    result = tuner("train", NAME, "--dry-run", "--set", "model.trust_remote_code=True")

    assert result.code == 2
    assert "full 40-digit commit" in result.messages[0]


def test_it_can_be_shown(tuner: Tuner) -> None:
    assert tuner("show", NAME).code == 0


def test_another_model_in_its_place_is_not_refused() -> None:
    config = loading.load(NAME, Overrides(model="Qwen/Qwen3-8B")).config

    assert not config.model.remote_code


def test_exactly_these_parts_say_so_in_their_summary() -> None:
    assert REMOTE
    said = [
        name
        for name in catalog.names("models")
        if "remote code only" in catalog.summary(catalog.part_file("models", name))
    ]
    assert said == REMOTE


def test_the_relatives_are_parts_that_need_no_such_code() -> None:
    assert set(_RELATIVES.values()) <= set(catalog.names("models")) - set(REMOTE)
