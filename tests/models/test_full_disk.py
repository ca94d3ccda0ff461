"""A cache of models on a real disk that is full: one error with the variable to set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tuner import assets
from tuner.errors import DiskError
from tuner.models.load import make_tiny


@pytest.mark.parametrize("free_kib", [4, 1024], ids=["small files", "weights"])
def test_a_small_model_that_does_not_fit_is_one_error_and_nothing_of_it_stays(
    free_kib: int, mounted: Callable[[str], Path]
) -> None:
    folder = mounted(f"size={free_kib}k")

    with pytest.raises(DiskError) as caught:
        make_tiny(Path(assets.asset("package:tiny")), folder)
    assert "TUNER_CACHE" in (caught.value.fix or "")

    assert [file.name for file in folder.iterdir() if not file.name.endswith(".lock")] == []
