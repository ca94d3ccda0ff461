"""The DeepSpeed config that training uses, as data: `merge` makes it."""

from __future__ import annotations

from typing import Any, NamedTuple

from tuner.recipes.merging import Origin


class FinalConfig(NamedTuple):
    """What training uses: strict JSON values, an origin for each leaf (dotted), and what was overridden."""

    name: str
    config: dict[str, Any]
    origins: dict[str, Origin]
    warnings: tuple[str, ...]
    from_catalog: bool
    """The values come from a preset or 'none', not from a user's JSON."""
    config_warnings: tuple[str, ...]
    """Those of the warnings that the config gives by itself, whatever the recipe and the machine."""
