"""Experiment trackers (TensorBoard, Weights & Biases ...), through transformers' own integrations; none can end a run.

It decides nothing about what is logged; `progress` adds what it has measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from tuner.runs.directory import RunDirectory
from tuner.worker.output import warn

PATIENCE_S = 60.0
"""A call that takes longer hangs: what trackers send they send in the background."""
_EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]


class Tracker(TrainerCallback):  # type: ignore[misc]
    """One integration. Whatever it raises, and a call that hangs, is one warning, and it is off from then on."""

    def __init__(self, name: str, run: RunDirectory) -> None:
        self.name, self._run, self._inner = name, run, None
        # One thread for all calls, because a call may hang; MLflow and Trackio keep the run of a thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        _set_places(run)
        self._inner = self._within_patience(INTEGRATION_TO_CALLBACK[name])

    def _forward(self, event: str, *args: Any, **kwargs: Any) -> None:
        if self._inner is not None:
            self._within_patience(partial(getattr(self._inner, event), *args, **kwargs))
        if event == "on_train_end" and self._inner is not None and self.name == "wandb":
            # A rank ends without Python's exit functions, in which wandb marks its run as finished.
            self._within_patience(_finish_wandb)

    def _within_patience(self, call: Callable[[], Any]) -> Any:
        try:
            return self._thread.submit(call).result(PATIENCE_S)
        except TimeoutError:
            why = f"it took more than {PATIENCE_S:.0f} s"
        except (Exception, SystemExit) as error:
            why = f"{type(error).__name__}: {error}"
        self._inner = None
        self._thread.shutdown(wait=False, cancel_futures=True)
        warn(self._run, f"the tracker {self.name} is disabled for the rest of the run: {why}")
        return None


def _forwarding(event: str) -> Callable[..., None]:
    return lambda self, *args, **kwargs: self._forward(event, *args, **kwargs)


for _event in _EVENTS:
    setattr(Tracker, _event, _forwarding(_event))


def trackers(names: Iterable[str], run: RunDirectory) -> list[Tracker]:
    """Return a callback for each tracker; only rank 0 needs them."""
    return [Tracker(name, run) for name in names]


def _set_places(run: RunDirectory) -> None:
    """Say where trackers keep their files: in the run directory, where the user has not said something else."""
    places = {"TENSORBOARD_LOGGING_DIR": run.path / "tensorboard", "WANDB_DIR": run.path, "WANDB_PROJECT": "tuner"}
    for name, value in places.items():
        os.environ.setdefault(name, str(value))


def _finish_wandb() -> None:
    import wandb  # type: ignore[import-not-found]  # only who tracks with it has it

    wandb.finish()
