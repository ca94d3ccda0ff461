"""Task scores through `lm-eval`, in its own conventions: its prompts, its few-shot examples, its seeds, its metrics.

Nothing of them is decided here, so that they compare with published ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from tuner.errors import MachineError, UsageError, did_you_mean
from tuner.results.model import LoadedModel


def check(tasks: Sequence[str]) -> None:
    """Check that lm-eval is here and has every task, before a model is loaded.

    Raises:
        MachineError: it is not here.
        UsageError: no such task.
    """
    if find_spec("lm_eval") is None:
        fix = "Install it: pip install 'tuner-deepspeed[eval]', or pip install lm-eval."
        raise MachineError("task scores need lm-eval, which is not installed", where="--tasks", fix=fix)
    from lm_eval.tasks import TaskManager  # an extra; it reads the names of thousands of tasks

    known = TaskManager().all_tasks
    for name in tasks:
        if name not in known and not name.endswith((".yaml", ".yml")):
            fix = did_you_mean(name, known, "lm-eval ls tasks")
            raise UsageError(f"lm-eval has no task {name!r}", where="--tasks", fix=fix)


def scores(loaded: LoadedModel, tasks: Sequence[str], batch_size: int, **options: Any) -> dict[str, Any]:
    """Return lm-eval's results by task: metrics with their standard errors, by lm-eval's names.

    Args:
        options: As lm-eval's own command line takes them: num_fewshot, apply_chat_template, limit.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    done = simple_evaluate(
        model=HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=batch_size),
        tasks=[*tasks],
        task_manager=TaskManager(),
        log_samples=False,
        **options,
    )
    assert done is not None, "this process is rank 0"
    # numpy's numbers, and NaN where a task has too few rows for an error
    results: dict[str, Any] = json.loads(json.dumps(done["results"], default=float), parse_constant=lambda _: None)
    return results
