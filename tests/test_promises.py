"""docs/security.md and docs/guarantees.md promise nothing that no test holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLES = {"docs/security.md": ("## What is not trusted", 14), "docs/guarantees.md": ("## Guarantees", 40)}


@pytest.mark.parametrize("page", TABLES)
def test_every_test_that_a_page_names_is_there(page: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / page).read_text(encoding="utf-8"))

    assert len(named) > 20
    for path, test in named:
        assert f"\ndef {test}(" in (ROOT / path).read_text(encoding="utf-8"), (path, test)


@pytest.mark.parametrize("page", TABLES)
def test_every_promise_has_a_test(page: str) -> None:
    title, least = TABLES[page]
    section = (ROOT / page).read_text(encoding="utf-8").partition(title)[2]
    table = section[section.index("\n| ") :].strip().partition("\n\n")[0]
    rows = table.splitlines()[2:]

    assert len(rows) >= least
    assert all("::test_" in row for row in rows)
