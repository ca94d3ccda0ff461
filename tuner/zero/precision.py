"""One decision on the compute type, used for DeepSpeed, the loaded weights and 4-bit compute alike."""

from __future__ import annotations

from typing import Literal, NamedTuple

from tuner.errors import MachineError
from tuner.machine.hardware import Hardware

Dtype = Literal["bf16", "fp16", "fp32"]


class Precision(NamedTuple):
    """The compute type, and why; `asked`: the recipe says so, not the machine."""

    dtype: Dtype
    reason: str
    asked: bool = False

    @property
    def weight_bytes(self) -> int:
        """The bytes of one weight."""
        return 4 if self.dtype == "fp32" else 2


def decide(wanted: str, hardware: Hardware) -> Precision:
    """Return the compute type for `optim_wrapper.dtype` on this hardware.

    bf16 by compute capability, never by `torch.cuda.is_bf16_supported()`, which counts emulation and is true on a V100.

    Raises:
        MachineError: fp16 on a CPU, which DeepSpeed refuses.
    """
    if wanted == "fp16" and not hardware.gpus:
        fix = "Use --set dtype=fp32, or bf16."
        raise MachineError("fp16 training needs a GPU, and none is visible", where="optim_wrapper.dtype", fix=fix)
    if wanted != "auto":
        slow = wanted == "bf16" and hardware.gpus and not hardware.has_native_bf16
        reason = "optim_wrapper.dtype" + (", emulated on this GPU" if slow else "")
        return Precision(wanted, reason, asked=True)  # type: ignore[arg-type]
    if not hardware.gpus:
        return Precision("fp32", "no GPU: fp32 is exact on any CPU")
    if not hardware.has_nvidia:
        return Precision("bf16", f"{hardware.maker} accelerators compute in bf16")
    weakest = min(gpu.compute_capability for gpu in hardware.gpus)
    shown = ".".join(map(str, weakest))
    if hardware.has_native_bf16:
        return Precision("bf16", f"every GPU has compute capability 8.0 or more (lowest: {shown})")
    return Precision("fp16", f"compute capability {shown} is below 8.0")
