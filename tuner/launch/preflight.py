"""What can be checked before any process starts, each failure one message with its fix.

It looks and refuses; it changes nothing.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.errors import MachineError
from tuner.launch.plan import LaunchPlan
from tuner.machine import libraries

_MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""Blocks of a DeepSpeed config that need a package, and transformers' trackers of the same names."""
_TRACKERS = {**_MONITORS, "mlflow": "mlflow", "trackio": "trackio", "swanlab": "swanlab", "clearml": "clearml"}
_STALE_LOCK_S = 600


def check(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Refuse a run that would end while its ranks start.

    Raises:
        MachineError: a library is missing or too old, torch cannot use the GPUs that are there, or a build of
            DeepSpeed's CPU Adam was interrupted and would be waited for without end.
    """
    config = plan.recipe.config
    libraries.check(quantized=config.quantization is not None, needs_cuda=bool(plan.hardware.gpus))
    for tracker in config.log.trackers:
        _require(_TRACKERS.get(tracker), f"log.trackers = {tracker!r}")
    for block, package in _MONITORS.items():
        if _is_on(plan.final.config.get(block)):
            _require(package, f"{block}.enabled in the DeepSpeed config")
    if plan.final.config.get("zero_force_ds_cpu_optimizer"):
        _refuse_stale_lock(environ)


def _is_on(block: Any) -> bool:
    return isinstance(block, dict) and bool(block.get("enabled"))


def _require(package: str | None, where: str) -> None:
    if package and importlib.util.find_spec(package) is None:
        raise MachineError(f"{package} is not installed", where=where, fix=f"pip install {package}, or switch it off")


def _refuse_stale_lock(environ: Mapping[str, str]) -> None:
    # torch waits for the lock file of an extension's build for ever, also when its builder was killed.
    root = Path(environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    for lock in root.glob("**/cpu_adam/lock"):
        age_s = time.time() - lock.stat().st_mtime
        if age_s > _STALE_LOCK_S:
            what = f"a build of DeepSpeed's CPU Adam was interrupted {age_s / 60:.0f} minutes ago"
            raise MachineError(what, where=lock, fix=f"If no other run builds it now: rm {lock}")
