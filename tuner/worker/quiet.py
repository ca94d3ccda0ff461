"""Silences messages of libraries that a user cannot act on, and their idle threads. It changes no result."""

from __future__ import annotations

import logging
import os
import sys
import warnings

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
)
QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "DS_LOG_LEVEL": "error",
}
"""Variables that are set where the user has not set them."""


def quiet_libraries() -> None:
    """Silence warnings and logs of libraries below errors, and their progress bars. Call it before importing them.

    Their idle threads sleep soon, unless this process is a rank on a GPU.

    A variable that the user has set, or a warning option of Python, is kept.
    """
    for variable, value in QUIET.items():
        os.environ.setdefault(variable, value)
    if os.environ.get("DS_ACCELERATOR", "cpu") == "cpu":
        os.environ |= short_spins(os.environ)
    if not sys.warnoptions:
        warnings.filterwarnings("ignore")
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    # DeepSpeed sets its level again when it is imported, and then logs that it found no GPU.
    logging.getLogger("DeepSpeed").addFilter(_is_not_about_a_missing_gpu)


def _is_not_about_a_missing_gpu(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Setting accelerator to CPU")
