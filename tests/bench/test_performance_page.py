"""docs/performance.md has a reason for each value of all presets; each table has a place on it or on another page."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import SUITE
from docs import generate
from tuner.recipes import catalog
from tuner.zero import presets
from tuner.zero.config import ZERO

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)


def add_preset(folder: Path, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    """Give the package one preset more: zero3 with other values of `zero_optimization`."""
    shutil.copytree(catalog.PACKAGE / catalog.PRESETS, folder / catalog.PRESETS)
    config = presets.find("deepspeed_zero3").config
    text = json.dumps({**config, ZERO: {**config[ZERO], **changed}})
    (folder / catalog.PRESETS / "deepspeed_sixth.json").write_text(text, encoding="utf-8")
    monkeypatch.setattr(catalog, "PACKAGE", folder)
    catalog._files.cache_clear()


def where(page: str) -> dict[tuple[str, str], set[str]]:
    return {(key, value): {*names.split(", ")} for key, value, names in _ROW.findall(page)}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    catalog._files.cache_clear()


def test_a_preset_of_known_values_stands_in_the_rows_of_these_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = where(PAGE)
    add_preset(tmp_path, monkeypatch, overlap_comm=False)
    after = where(generate.filled(PAGE))

    assert after.keys() == before.keys()
    with_sixth = {pair for pair, names in after.items() if names == {*before[pair], "sixth"}}
    assert with_sixth > {("zero_optimization.stage", "3"), ("zero_optimization.overlap_comm", "false")}
    unchanged = after.keys() - with_sixth
    assert all(after[pair] == before[pair] for pair in unchanged)
    assert unchanged > {("zero_optimization.stage", "2"), ("zero_optimization.overlap_comm", "true")}
    assert after["bf16.enabled", '"auto"'] == {"all"}


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"sub_group_size": 7}, '["zero_optimization.sub_group_size"]\n7 = '),
        ({"offload_param": {"ratio": 0.5}}, "[\"zero_optimization.offload_param.ratio\"]\n'0.5' = "),
        ({"offload_param": {"device": "new"}}, '["zero_optimization.offload_param.device"]\n\'"new"\' = '),
    ],
)
def test_a_value_without_a_reason_is_refused_with_the_line_to_write(
    changed: dict[str, Any], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_preset(tmp_path, monkeypatch, **changed)

    with pytest.raises(ValueError, match=re.escape(line)):
        generate.filled(PAGE)


def test_a_reason_without_a_value_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = tmp_path / "reasons.toml"
    reasons.write_text(f"{generate.REASONS.read_text(encoding='utf-8')}\n[no_such_key]\n1 = 'WHY'\n", encoding="utf-8")
    monkeypatch.setattr(generate, "REASONS", reasons)

    with pytest.raises(ValueError, match="no_such_key = 1"):
        generate.filled(PAGE)


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
