"""torch.compile by one key: it engages, changes no loss, and survives a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import ok, quick, train

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_compiled_steps_have_the_same_losses_also_after_a_resume(tmp_path: Path) -> None:
    # One rank and few graphs: the C++ compiler takes minutes of two cores for more.
    recipe, compiling = quick(tmp_path, "full"), ("--set", "torch_compile=True")
    given = ("--deepspeed", "zero2")
    plain = ok(train(recipe, tmp_path / "plain", *given, ranks=1))
    compiled = ok(train(recipe, tmp_path / "compiled", *given, *compiling, ranks=1))

    assert compiled.json("status.json")["num_compiled_graphs"] > 0
    # The compiler adds in another order: 3e-4 apart after four steps of LoRA (measured).
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-3)

    checkpoint = compiled.path / "checkpoints" / "checkpoint-2"
    again = ok(train(recipe, tmp_path / "again", *given, *compiling, "--resume", checkpoint, ranks=1))
    assert again.losses == pytest.approx(compiled.losses[2:], rel=1e-4)
