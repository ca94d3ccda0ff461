"""docs/performance.md has a reason for each value of the presets; each table has a place on it or on another page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.__main__ import SUITE
from tuner.recipes import catalog
from tuner.zero import presets

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)


def values(config: dict[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield each key with those above it, and its value as JSON."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from values(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", json.dumps(value)


def test_each_value_that_auto_may_take_has_a_reason_and_each_reason_a_value() -> None:
    chosen = {catalog.short_name(rung.name): rung.config for rung in presets.rungs() if rung.stage}
    shipped = {(key, value, name) for name, config in chosen.items() for key, value in values(config)}
    every = ", ".join(chosen)

    told = {
        (key, value, preset)
        for key, value, where in _ROW.findall(PAGE)
        for preset in where.replace("all", every).split(", ")
    }

    assert told == shipped


def test_each_measurement_has_its_place_and_its_command() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))

    for name in SUITE:
        assert f"<!-- table: {name} -->" in pages, name
        assert f"python -m bench {name}`" in pages, name


def test_what_the_page_cites_is_there() -> None:
    sources = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))

    for name in set(re.findall(r"`(test_\w+)`", PAGE)):
        assert f"def {name}(" in sources, name
    for path in set(re.findall(r"`((?:tests|bench|tuner|docs)/[\w/.]+)`", PAGE)):
        assert (ROOT / path).exists(), path
