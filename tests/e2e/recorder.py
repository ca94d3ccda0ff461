"""A rank that notes the rows of each micro-batch that it trains on, in RUN/seen-RANK.jsonl."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def _record() -> None:
    from tuner.worker.trainers import TunerTrainer

    real, path = TunerTrainer.weighed_loss, Path(sys.argv[1]) / f"seen-{os.environ['RANK']}.jsonl"

    def noted(self: Any, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        if model.training and inputs["counts"].rows:
            with path.open("a") as file:
                file.write(json.dumps([self.state.global_step + 1, inputs["input_ids"].flatten().tolist()]) + "\n")
        return real(self, model, inputs, *args, **options)

    TunerTrainer.weighed_loss = noted  # type: ignore[method-assign]


def main() -> None:
    from tuner.worker.guard import Guard

    finish = Guard.finish
    # Only once the rank's signals and output are taken: a rank imports nothing heavy before that.
    Guard.finish = lambda guard, work: finish(guard, lambda: (_record(), work())[1])  # type: ignore
    import_module("tuner.worker.__main__")
