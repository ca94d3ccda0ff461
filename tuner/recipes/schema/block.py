"""The base of every block of a recipe's schema: a pydantic model that refuses what it does not know and never changes.

It knows no key of a recipe. A module of blocks has no `from __future__ import annotations`: pydantic would have to
compile each of its annotations anew when a command starts.
"""

from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

Fraction = Annotated[float, Field(ge=0, lt=1)]
Lax = Field(strict=False)
"""Accept a list where a tuple is declared."""
CONTRADICTION = "contradiction"
"""The type of the validation error for a value that does not fit the others."""
Contradictions = Iterator[tuple[str, str]]
"""The key of each value that does not fit the others, with dots if it is in a block inside, and why."""


class Block(BaseModel):
    """A part of a recipe: unknown keys, other types, NaN and infinity are errors; immutable.

    Its validator is built when the first value is checked, so that a command pays for the blocks that it uses.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)

    def contradictions(self) -> Contradictions:
        """Yield what does not fit together in the block. Each value by itself has been checked before."""
        yield from ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        refuse(self, self.contradictions())
        return self

    def unread(self, when: str, *keys: str) -> Contradictions:
        """Yield the keys that have another value than the default; `when` completes "nothing reads it ..."."""
        for key in keys:
            default = type(self).model_fields[key].default
            if getattr(self, key) != default:
                yield key, f"has no effect: nothing reads it {when}; remove it, or set it to {default!r}"

    def with_values(self, values: Mapping[str, object]) -> Self:
        """Return the block with other values by dotted key, also those of blocks inside it; they are not checked."""
        changed = self
        for dotted, value in values.items():
            key, _, inner = dotted.partition(".")
            new = getattr(changed, key).with_values({inner: value}) if inner else value
            changed = changed.model_copy(update={key: new})
        return changed


def refuse(block: BaseModel, contradictions: Iterable[tuple[str, str]]) -> None:
    """Refuse a block with values that do not fit each other; all of them are in one error.

    Raises:
        ValidationError: there are some.
    """
    errors = [
        InitErrorDetails(
            type=PydanticCustomError(CONTRADICTION, "{why}", {"why": why}),
            loc=tuple(key.split(".")),
            input=value.model_dump() if isinstance(value := attrgetter(key)(block), BaseModel) else value,
        )
        for key, why in contradictions
    ]
    if errors:
        raise ValidationError.from_exception_data(type(block).__name__, errors)
