"""What every block of a recipe's schema is made of: strict, immutable, and numbers with a range.

It knows no key of a recipe.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

Fraction = Annotated[float, Field(ge=0, lt=1)]
PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]


class Block(BaseModel):
    """A part of a recipe: unknown keys, other types, NaN and infinity are errors; immutable."""

    # Built when a value is first checked: as a part of RecipeConfig, and not once more for each block by itself.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True)


def wrong_key(key: str, why: str) -> PydanticCustomError:
    """Return the error of a block whose `key` does not go with values outside of it; `why` completes "`key` ..."."""
    return PydanticCustomError("wrong_key", "{key} {why}", {"key": key, "why": why})
