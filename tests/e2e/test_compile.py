"""torch.compile by one key: it engages, changes no loss, and survives a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import ok, quick, train

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.mark.parametrize(
    ("method", "level"), [("full", "zero2"), ("full", "zero3"), ("lora", "zero2"), ("qlora", "zero1")]
)
def test_compiled_steps_have_the_same_losses_also_after_a_resume(method: str, level: str, tmp_path: Path) -> None:
    recipe = quick(tmp_path, method)
    given = ("--deepspeed", level)
    plain = ok(train(recipe, tmp_path / "plain", *given))
    compiled = ok(train(recipe, tmp_path / "compiled", *given, "--set", "torch_compile=True"))

    assert compiled.json("status.json")["num_compiled_graphs"] > 0
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-4)

    checkpoint = compiled.path / "checkpoints" / "checkpoint-2"
    again = ok(train(recipe, tmp_path / "again", *given, "--set", "torch_compile=True", "--resume", checkpoint))
    assert again.losses == pytest.approx(compiled.losses[2:], rel=1e-4)
