"""Accelerators that are not NVIDIA's: which there are, told from the installed torch and from files of the kernel.

It starts no program and imports neither torch nor DeepSpeed: a dry run looks too. None of these could be tried for
real here; the files are those that their drivers document.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from tuner.machine import libraries


class Maker(NamedTuple):
    """One maker's accelerators.

    Attributes:
        name: As a user knows it.
        device: DeepSpeed's and torch's name of the kind (DS_ACCELERATOR).
        visible: The variables that choose among its devices; the first that is set counts.
        is_installed: Whether a torch for it is here.
        devices: A pattern of the kernel's files, one a device.
    """

    name: str
    device: str
    visible: tuple[str, ...]
    is_installed: Callable[[], bool]
    devices: str


def _torch_is_for(key: str) -> Callable[[], bool]:
    return lambda: libraries.torch_built_for(key) is not None


def _has(package: str) -> Callable[[], bool]:
    return lambda: libraries.is_installed(package)


NVIDIA = "NVIDIA"
MAKERS = (
    Maker(
        "AMD",
        "cuda",  # ROCm's torch and DeepSpeed say cuda
        ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        _torch_is_for("hip"),
        "sys/class/kfd/kfd/topology/nodes/*",
    ),
    Maker("Ascend", "npu", ("ASCEND_RT_VISIBLE_DEVICES",), _has("torch_npu"), "dev/davinci[0-9]*"),
    Maker("Gaudi", "hpu", ("HABANA_VISIBLE_MODULES",), _has("habana_frameworks"), "dev/accel/accel[0-9]*"),
    Maker("Intel", "xpu", ("ZE_AFFINITY_MASK",), _torch_is_for("xpu"), "dev/dri/renderD*"),
)
"""Sources: deepspeed/accelerator/*_accelerator.py (visible_devices_envs), and each driver's own documentation."""
OF_NAME: Mapping[str, Maker] = {maker.name: maker for maker in MAKERS}


def found(root: Path = Path("/")) -> tuple[Maker, list[int]] | None:
    """Return the maker whose torch and devices are here, with each device's memory in bytes (0: unknown), or None."""
    for maker in MAKERS:
        if maker.is_installed():
            files = [Path(name) for name in sorted(glob.glob(str(root / maker.devices)))]  # noqa: PTH207
            sizes = [size for file in files if (size := _memory(maker, file)) is not None]
            if sizes:
                return maker, sizes
    return None


def _memory(maker: Maker, file: Path) -> int | None:
    """Return a device's memory; None where the file is of no such device, as AMD's list holds the CPUs too."""
    if maker.name != "AMD":
        return 0
    if _number(file / "properties", "simd_count") == 0:
        return None
    return sum(_number(bank, "size_in_bytes") for bank in file.glob("mem_banks/*/properties"))


def _number(file: Path, key: str) -> int:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [key]), 0)
