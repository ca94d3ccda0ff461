"""Two hosts for each test of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.cluster import hosts as network
from tests.cluster.hosts import Host
from tests.faults.conftest import once as once
from tests.faults.conftest import undisturbed as undisturbed

_why_not = cache(network.why_not)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.long)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    if reason := _why_not():
        pytest.skip(reason)
    with network.hosts(2, tmp_path) as made:
        yield made
