"""How values with origins are printed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tuner.recipes.layers import leaves
from tuner.recipes.recipe import Origin


def with_origins(values: Mapping[str, Any], origins: Mapping[str, Origin], *, width: int = 44) -> Iterator[str]:
    """Yield `key = value  # origin, over what it beat`, one line a leaf."""
    for key, value in leaves(values):
        origin = origins.get(key, Origin("default"))
        beat = "".join(f", over {old!r} ({source})" for old, source in origin.beat)
        yield f"{f'{key} = {value!r}':<{width}}  # {origin.source}{beat}"


def origins_json(origins: Mapping[str, Origin]) -> dict[str, Any]:
    """Return origins as plain values for --json."""
    return {key: origin.to_json() for key, origin in origins.items()}
