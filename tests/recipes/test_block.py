"""A block is checked by pydantic and behaves as a value: it is copied, sent and compared whole."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError, ValidationInfo, field_validator

from tuner.recipes import loading
from tuner.recipes.schema.block import Block, Lax

CONFIG = loading.load("tiny_dpo_qlora_sample_preferences_e1").config


class Inner(Block):
    sizes: Annotated[tuple[int, ...], Lax, Field(min_length=1)]
    kind: Literal["a", "b"] = "a"


class Outer(Block):
    least: int
    inner: Inner | None
    most: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"

    @field_validator("most")
    @classmethod
    def _no_less(cls, most: int | str, info: ValidationInfo) -> int | str:
        if isinstance(most, int) and most < info.data.get("least", most):
            raise ValueError("less than least")
        return most


def test_values_are_taken_with_their_defaults_and_a_list_for_a_tuple() -> None:
    block = Outer.model_validate({"least": 1, "inner": {"sizes": [1, 2]}})

    assert block.model_dump() == {"least": 1, "inner": {"sizes": (1, 2), "kind": "a"}, "most": "auto"}
    assert block.model_dump(mode="json", exclude={"least", "most"}) == {"inner": {"sizes": [1, 2], "kind": "a"}}
    assert block.model_fields_set == {"least", "inner"}


def test_every_mistake_is_told_with_its_place() -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"least": "1", "inner": {"sizes": [], "kind": "c", "odd": 1}, "most": -1})

    told = {(error["loc"][:2], error["type"]) for error in caught.value.errors()}
    assert told == {
        (("least",), "int_type"),
        (("inner", "sizes"), "too_short"),
        (("inner", "kind"), "literal_error"),
        (("inner", "odd"), "extra_forbidden"),
        (("most", "constrained-int"), "greater_than_equal"),
        (("most", "literal['auto']"), "literal_error"),
    }


def test_a_check_of_a_key_sees_the_keys_before_it() -> None:
    with pytest.raises(ValidationError, match="less than least"):
        Outer(least=2, inner=None, most=1)


def test_a_block_is_copied_and_sent_whole_and_a_change_of_the_copy_is_the_copy_s_alone() -> None:
    sent = pickle.loads(pickle.dumps(CONFIG))  # noqa: S301  as `datasets` sends it to its processes
    for again in (sent, copy.deepcopy(CONFIG), copy.copy(CONFIG)):
        assert again == CONFIG
        assert again.model_dump() == CONFIG.model_dump()

    changed = CONFIG.model_copy(update={"deepspeed": "none"})

    assert (changed.deepspeed, CONFIG.deepspeed) == ("none", "auto")
    assert changed != CONFIG


def test_values_of_inner_blocks_are_changed_by_dotted_key() -> None:
    block = Outer.model_validate({"least": 1, "inner": {"sizes": [1, 2]}})

    changed = block.with_values({"inner.sizes": (3,), "least": 0})

    assert changed.model_dump() == {"least": 0, "inner": {"sizes": (3,), "kind": "a"}, "most": "auto"}
    assert block.least == 1


def test_a_command_that_imports_the_schema_builds_no_validator() -> None:
    program = "from tuner.recipes.schema import RecipeConfig; print(RecipeConfig.__pydantic_complete__)"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == "False\n"
