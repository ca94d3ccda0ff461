"""The package's small model as a folder with weights, made once for all tests."""

from __future__ import annotations

from pathlib import Path

from tuner import assets
from tuner.models.load import CACHE, make_tiny


def tiny() -> Path:
    """Return the folder, which no test may change."""
    return make_tiny(Path(assets.asset("package:tiny")), CACHE)
