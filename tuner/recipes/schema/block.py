"""The base of every block of a recipe's schema: a pydantic model that refuses what it does not know and never changes.

It knows no key of a recipe. A module of blocks has no `from __future__ import annotations`: pydantic would have to
compile each of its annotations anew when a command starts.
"""

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

Fraction = Annotated[float, Field(ge=0, lt=1)]
Lax = Field(strict=False)
"""Accept a list where a tuple is declared."""


class Block(BaseModel):
    """A part of a recipe: unknown keys, other types, NaN and infinity are errors; immutable.

    Its validator is built when the first value is checked, so that a command pays for the blocks that it uses.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)

    def with_values(self, values: Mapping[str, object]) -> Self:
        """Return the block with other values by dotted key, also those of blocks inside it; they are not checked."""
        changed = self
        for dotted, value in values.items():
            key, _, inner = dotted.partition(".")
            new = getattr(changed, key).with_values({inner: value}) if inner else value
            changed = changed.model_copy(update={key: new})
        return changed


def wrong_key(key: str, why: str) -> PydanticCustomError:
    """Return the error of a block in which `key` does not fit values outside the block; `why` completes "`key` ..."."""
    return PydanticCustomError("wrong_key", "{key} {why}", {"key": key, "why": why})


def refuse_unread(block: type[Block], key: str, value: object, when: str) -> None:
    """Refuse a value other than the default of a key that nothing reads; `when` completes "nothing reads it ...".

    Raises:
        ValueError: it has another value.
    """
    default = block.model_fields[key].default
    if value != default:
        raise ValueError(f"has no effect: nothing reads it {when}; remove it, or set it to {default!r}")
