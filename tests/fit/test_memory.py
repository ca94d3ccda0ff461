from __future__ import annotations

from tuner.fit.memory import LEVELS
from tuner.recipes import catalog


def test_every_level_is_a_preset_or_none() -> None:
    assert set(LEVELS) == {*catalog.presets(), "none"}
