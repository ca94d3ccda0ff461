"""Silences messages of libraries that a user cannot act on, and their idle threads. It changes no result."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from tuner.machine.kernel import short_spins

_NOISY = (
    "deepspeed",
    "DeepSpeed",
    "accelerate",
    "transformers",
    "trl",
    "peft",
    "datasets",
    "torch.distributed",
    "bitsandbytes",
    "liger_kernel",
    "ContinuousBatchingLogger",
    "torchao",  # transformers imports it where it is
    "torch.utils._pytree",  # what torchao registers there
)
_LEVEL_VARIABLES = {
    "DeepSpeed": "DS_LOG_LEVEL",
    "transformers": "TRANSFORMERS_VERBOSITY",
    "datasets": "DATASETS_VERBOSITY",
}
_BARS = "HF_HUB_DISABLE_PROGRESS_BARS"
QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    _BARS: "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "DS_LOG_LEVEL": "error",
}
"""Variables that are set where the user has not set them."""
_IGNORE_ALL = ("ignore", None, Warning, None, 0)
_lock = threading.Lock()
_quiet_calls: list[ExitStack] = []
"""What undoes the changes of each call. A call that ends takes the newest, so the last one undoes the first changes."""


def quiet_libraries() -> None:
    """Silence warnings and logs of libraries below errors, and their progress bars. Call it before importing them.

    Their idle threads sleep soon, unless this process is a rank on a GPU.

    A variable or a log level that the user has set, or a warning option of Python, is kept.
    """
    _silence(QUIET)
    if os.environ.get("DS_ACCELERATOR", "cpu") == "cpu":
        os.environ |= short_spins(os.environ)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence libraries as `quiet_libraries` does, imported or not, and put everything back at the end.

    Until then other threads of the process are silent too. Threads of libraries wait as the user's program lets them.
    """
    with _lock:
        # A library that is imported under this variable could never show a bar again.
        undo = _silence(QUIET.keys() - {_BARS})
        if _BARS not in os.environ:
            _hide_bars(undo)
        _quiet_calls.append(undo)
    try:
        yield
    finally:
        with _lock:
            _quiet_calls.pop().close()


def _silence(variables: Iterable[str]) -> ExitStack:
    """Set the variables, the filter of warnings and the levels; return what undoes it when it is closed."""
    undo = ExitStack()
    for name in _NOISY:
        logger = logging.getLogger(name)
        # Any other level was set by the user.
        if _LEVEL_VARIABLES.get(name, "") not in os.environ and logger.level in (logging.NOTSET, logging.WARNING):
            undo.callback(_put_level_back, logger, logger.level)
            logger.setLevel(logging.ERROR)
    for variable in set(variables) - os.environ.keys():
        os.environ[variable] = QUIET[variable]
        undo.callback(os.environ.pop, variable, None)
    if not sys.warnoptions and _IGNORE_ALL not in warnings.filters:
        warnings.simplefilter("ignore")
        undo.callback(_hear_warnings)
    # DeepSpeed sets its level again when it is imported, and then logs that it found no GPU.
    deepspeed = logging.getLogger("DeepSpeed")
    if _is_not_about_a_missing_gpu not in deepspeed.filters:
        deepspeed.addFilter(_is_not_about_a_missing_gpu)
        undo.callback(deepspeed.removeFilter, _is_not_about_a_missing_gpu)
    return undo


def _put_level_back(logger: logging.Logger, level: int) -> None:
    if logger.level != logging.ERROR:  # set since by the library or the user
        return
    if level == logging.NOTSET and logger.name in _LEVEL_VARIABLES.keys() & sys.modules.keys():
        level = logging.WARNING  # as a library that was imported since sets it without our variable
    logger.setLevel(level)


def _hear_warnings() -> None:
    # Filters that libraries have added since stay, as they would without us.
    warnings.filters = [entry for entry in warnings.filters if entry != _IGNORE_ALL]


def _hide_bars(undo: ExitStack) -> None:
    """Hide the bars of transformers, which reads the hub's state when it is imported, and of the hub."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    loaded = sys.modules.get("transformers.utils.logging")
    hub_showed = not are_progress_bars_disabled()
    transformers_showed = loaded.is_progress_bar_enabled() if loaded else hub_showed
    (loaded.disable_progress_bar if loaded else disable_progress_bars)()

    def show() -> None:
        if transformers_showed and (now := sys.modules.get("transformers.utils.logging")):
            now.enable_progress_bar()  # the hub's too
        (enable_progress_bars if hub_showed else disable_progress_bars)()

    undo.callback(show)


def _is_not_about_a_missing_gpu(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Setting accelerator to CPU")
