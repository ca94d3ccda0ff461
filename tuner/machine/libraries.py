"""Which libraries are installed, and whether they are new enough; read from metadata, never by importing them."""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata
from pathlib import Path

from tuner.errors import MachineError

MINIMUM = {
    "torch": "2.9",
    "transformers": "5.18",
    "trl": "1.12",
    "peft": "0.18",
    "accelerate": "1.10",
    "datasets": "4.0",
    "deepspeed": "0.18.5",
}
QUANTIZED = {"bitsandbytes": "0.48"}


def versions() -> dict[str, str | None]:
    """Return the installed version of every library that training uses, None where it is missing."""
    return {name: _version(name) for name in (*MINIMUM, *QUANTIZED)}


def check(*, quantized: bool, needs_cuda: bool) -> None:
    """Check what training imports.

    Raises:
        MachineError: a library is missing or too old, or torch is a CPU build while GPUs are to be used.
    """
    for name, minimum in {**MINIMUM, **(QUANTIZED if quantized else {})}.items():
        found = _version(name)
        if found is None:
            raise MachineError(f"{name} is not installed", fix=f"pip install '{name}>={minimum}'")
        if _numbers(found) < _numbers(minimum):
            raise MachineError(f"{name} {found} is older than {minimum}", fix=f"pip install '{name}>={minimum}'")
    if needs_cuda and torch_cuda_version() is None:
        raise MachineError(
            f"GPUs are there, but torch {_version('torch')} is a CPU build",
            fix="Install a CUDA build of torch, or hide the GPUs with CUDA_VISIBLE_DEVICES=''.",
        )


def torch_cuda_version() -> str | None:
    """Return the CUDA version that the installed torch was built for, or None for a CPU build or no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda\b.*=\s*['\"](.+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
