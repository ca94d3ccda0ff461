"""The pages promise nothing that no test holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLES = {"docs/security.md": ("## What is not trusted", 14), "docs/guarantees.md": ("## Guarantees", 40)}


def test_every_test_that_a_page_names_is_there() -> None:
    pages = sorted((ROOT / "docs").rglob("*.md"))
    named = [
        (page, *test)
        for page in pages
        for test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8"))
    ]

    assert len(named) > 100
    for page, path, test in named:
        assert f"\ndef {test}(" in (ROOT / path).read_text(encoding="utf-8"), (page, path, test)


@pytest.mark.parametrize("page", TABLES)
def test_every_promise_has_a_test(page: str) -> None:
    title, least = TABLES[page]
    section = (ROOT / page).read_text(encoding="utf-8").partition(title)[2]
    table = section[section.index("\n| ") :].strip().partition("\n\n")[0]
    rows = table.splitlines()[2:]

    assert len(rows) >= least
    assert all("::test_" in row for row in rows)
