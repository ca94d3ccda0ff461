"""What this machine has: GPUs of NVIDIA (through NVML) and of other makers, memory, cores, a compiler, no torch."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from tuner.errors import Key, MachineError, words_of
from tuner.files import read_text
from tuner.machine import kernel, libraries

Answer = TypeVar("Answer")
Seen = TypeVar("Seen", "Gpu", "Gpu | _Unreadable")
_NO_GPU = ("", "-1", "NoDevFiles", "none", "void")
"""Of CUDA_VISIBLE_DEVICES: values that hide every GPU on purpose."""
_ON_CPU = 'CUDA_VISIBLE_DEVICES="" trains on the CPU.'
_NVCC = Path("/usr/local/cuda/bin/nvcc")
_USES_LIBAIO = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"


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


class Gpu(NamedTuple):
    """One visible GPU or other accelerator; memory as the driver reports it, 0 where it tells none.

    The compute capability of another maker than NVIDIA is (0, 0).
    """

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    uuid: str = ""


class _Unreadable(Exception):
    """A GPU that NVIDIA's driver counts and cannot describe: its number, NVML's call that fails, and the message."""

    uuid = ""


class GpuUse(NamedTuple):
    """One GPU's free memory, and its processes as (pid, bytes); inside a container those outside are not listed."""

    free_bytes: int
    processes: tuple[tuple[int, int], ...] = ()


class Hardware(NamedTuple):
    """The visible hardware of this machine."""

    gpus: tuple[Gpu, ...] = ()
    num_cpus: int = 1
    host_memory_bytes: int = 0
    has_compiler: bool = False
    """A C++ compiler and ninja, and nvcc beside NVIDIA's GPUs: what DeepSpeed's CPU Adam is built with at first use."""
    maker: str = NVIDIA
    """The maker of the GPUs."""

    @property
    def device(self) -> str:
        """What torch and DeepSpeed (DS_ACCELERATOR) call the device of a run: 'cuda', 'npu', ..., or 'cpu'."""
        if not self.gpus:
            return "cpu"
        return "cuda" if self.maker == NVIDIA else OF_NAME[self.maker].device

    @property
    def has_nvidia(self) -> bool:
        """GPUs are visible, and they are NVIDIA's: what is made for CUDA alone runs on them."""
        return bool(self.gpus) and self.maker == NVIDIA

    @property
    def has_native_bf16(self) -> bool:
        """Every visible GPU computes in bf16 without emulation: NVIDIA's from compute capability 8.0 on, and others."""
        return bool(self.gpus) and (not self.has_nvidia or all(gpu.compute_capability >= (8, 0) for gpu in self.gpus))

    @property
    def has_old_gpus(self) -> bool:
        """Some visible GPU is NVIDIA's and older than compute capability 8.0: PyTorch has fewer kernels for it."""
        return self.has_nvidia and any((0, 0) < gpu.compute_capability < (8, 0) for gpu in self.gpus)

    @property
    def smallest_gpu_bytes(self) -> int:
        return min((gpu.memory_bytes for gpu in self.gpus), default=0)

    def describe(self) -> str:
        """Return one line, such as '8 x NVIDIA A100 (80 GiB)' or 'CPU, 2 cores'."""
        if not self.gpus:
            return f"CPU, {self.num_cpus} cores, no GPU"
        kinds = Counter(
            f"{gpu.name} ({gpu.memory_bytes / 1024**3:.0f} GiB)" if gpu.memory_bytes else gpu.name for gpu in self.gpus
        )
        return ", ".join(f"{count} x {label}" for label, count in kinds.items())

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "gpus": [gpu._asdict() for gpu in self.gpus]}


def detect(environ: Mapping[str, str]) -> Hardware:
    """Look at this machine; GPUs hidden by CUDA_VISIBLE_DEVICES, or their maker's variable, do not count.

    Raises:
        MachineError: NVIDIA's driver is loaded, and a GPU that a run would use cannot be read, or the variable names
            none: training on the CPU in its place would be no answer.
    """
    gpus: tuple[Gpu, ...] = ()
    maker, builds = NVIDIA, has_compiler(tool_path(environ))
    if environ.get("DS_ACCELERATOR") != "cpu":
        gpus = _nvidia_gpus(environ.get("CUDA_VISIBLE_DEVICES"))
        # DeepSpeed 0.19.8 compiles its CPU Adam with nvcc where it sees a GPU (op_builder/builder.py, nvcc_args).
        builds = builds and (not gpus or has_nvcc(environ))
        if not gpus and (other := other_accelerators()):
            maker, gpus = other[0].name, _of_another_maker(*other, environ)
    return Hardware(gpus, num_cpus(), _host_memory_bytes(), builds, maker)


def _nvidia_gpus(visible_devices: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA shows with CUDA_VISIBLE_DEVICES at `visible_devices`."""
    if visible_devices is not None and visible_devices.strip() in _NO_GPU:
        return ()
    every = _read_gpus()
    visible = _visible(every, visible_devices)
    if every and not visible:
        fix = f"Name some of 0 to {len(every) - 1}, or a UUID of nvidia-smi -L; {_ON_CPU}"
        raise MachineError(f"{visible_devices!r} names no GPU of this machine", where="CUDA_VISIBLE_DEVICES", fix=fix)
    for gpu in visible:
        if isinstance(gpu, _Unreadable):
            readable = ",".join(str(at) for at, gpu in enumerate(every) if isinstance(gpu, Gpu))
            without = f"Train without it: CUDA_VISIBLE_DEVICES={readable}; " if readable else ""
            problem = "GPU {} cannot be read: {} fails with {!r}".format(*gpu.args)
            raise MachineError(problem, where="NVIDIA's driver", fix=f"nvidia-smi shows its state. {without}{_ON_CPU}")
    gpus = tuple(gpu for gpu in visible if isinstance(gpu, Gpu))
    # CUDA shows a process one instance, whatever the variable names (NVIDIA, MIG User Guide, "Device Enumeration").
    return gpus[:1] if gpus and gpus[0].uuid.startswith("MIG-") else gpus


def _read_gpus() -> list[Gpu | _Unreadable]:
    """Return the GPUs in the order of the PCI bus, an instance of MIG each by itself; none without a loaded driver."""
    if not has_driver():
        return []
    import pynvml  # which takes 12 ms, and would only look for the driver's library

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
            return []
        problem = f"NVIDIA's driver is here and does not answer: nvmlInit fails with {str(error)!r}"
        fix = f"nvidia-smi shows more; after an update of the driver, restart the machine. {_ON_CPU}"
        raise MachineError(problem, where="NVIDIA's driver", fix=fix) from error
    try:
        return _nvml_gpus(pynvml)
    finally:
        pynvml.nvmlShutdown()


def _of_another_maker(maker: Maker, sizes: list[int], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    visible_devices = next((environ[name] for name in maker.visible if name in environ), None)
    every = [Gpu(f"{maker.name} accelerator", size, (0, 0), f"{maker.name}-{at}") for at, size in enumerate(sizes)]
    return _visible(every, visible_devices)


def gpu_use() -> dict[str, GpuUse]:
    """Return what the driver says of each GPU's memory and processes, by UUID; empty where there is no driver."""
    return with_nvml(_nvml_use) or {}


def cuda_driver_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver works with, or None without a driver."""
    number = with_nvml(lambda nvml: nvml.nvmlSystemGetCudaDriverVersion())  # 12080 is 12.8
    return (number // 1000, number % 1000 // 10) if number is not None else None


def tool_path(environ: Mapping[str, str]) -> str:
    """Return PATH with this interpreter's scripts first, so that pip's ninja is found without an activated venv."""
    scripts, path = str(Path(sys.executable).parent), environ.get("PATH", os.defpath)
    return path if scripts in path.split(os.pathsep) else f"{scripts}{os.pathsep}{path}"


def has_compiler(path: str) -> bool:
    """Return whether a C++ compiler and ninja are on `path`."""
    return bool(shutil.which("ninja", path=path) and (shutil.which("g++", path=path) or shutil.which("c++", path=path)))


def has_libaio(environ: Mapping[str, str]) -> bool:
    """Return whether a program with libaio compiles and links here, as DeepSpeed's asynchronous disk access must.

    Source: deepspeed/ops/op_builder/async_io.py, which asks the linker alone, and then compiles against the header.
    """
    path = tool_path(environ)
    compiler = shutil.which("g++", path=path) or shutil.which("c++", path=path)
    if compiler is None:
        return False
    import subprocess  # a plan compiles nothing
    import tempfile

    before, after = (words_of(environ.get(name, ""), name) for name in ("CFLAGS", "LDFLAGS"))
    with tempfile.TemporaryDirectory() as folder:
        argv = [compiler, *before, "-x", "c++", "-", "-o", f"{folder}/program", *after, "-laio"]
        done = subprocess.run(argv, input=_USES_LIBAIO, capture_output=True, text=True, env=dict(environ), check=False)
    return done.returncode == 0


def has_nvcc(environ: Mapping[str, str]) -> bool:
    """Return whether CUDA's compiler is where torch looks for it: CUDA_HOME, PATH, /usr/local/cuda."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := environ.get(variable):
            return (Path(home) / "bin" / "nvcc").exists()
    return bool(shutil.which("nvcc", path=tool_path(environ))) or _NVCC.exists()


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """Return the host memory that a new process could have: what is free or can be freed, within the control group.

    None where the kernel does not say.
    """
    free_kib = _numbers_in(root / "proc/meminfo").get("MemAvailable:")
    if free_kib is None:
        return None
    group = _group_memory(root)
    return min(1024 * free_kib, group[0] - group[1]) if group else 1024 * free_kib


def _group_memory(root: Path) -> tuple[int, int] | None:
    """Return the bytes that this process's control group may have, and those that it cannot free; None: no limit.

    A job of Slurm and a container have fewer than the machine, and are killed at this number.
    """
    for folder in kernel.control_groups(root):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with contextlib.suppress(OSError, ValueError):  # the other version's names, or 'max', which is no limit
                sizes = [int(read_text(folder / name)) for name in (limit, used)]
                parts = _numbers_in(folder / "memory.stat")
                file_cache = sum(parts.get(name, 0) for name in ("inactive_file", "total_inactive_file"))
                return sizes[0], sizes[1] - file_cache
    return None


def _numbers_in(file: Path) -> dict[str, int]:
    """Return the numbers of a kernel's file, by the word before each; empty if it cannot be read."""
    try:
        rows = [line.split() for line in read_text(file).splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def num_cpus() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _host_memory_bytes() -> int:
    installed, group = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _group_memory(Path("/"))
    return min(installed, group[0]) if group else installed


def with_nvml(ask: Callable[[Any], Answer]) -> Answer | None:
    """Return NVML's answer, or None where there is no NVML or it fails."""
    if not has_driver():
        return None
    import pynvml  # which takes 12 ms, and would only look for the driver's library

    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            return ask(pynvml)
        finally:
            pynvml.nvmlShutdown()
    return None


def has_driver() -> bool:
    """Return whether the library of NVIDIA's driver is here."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def _nvml_gpus(nvml: Any) -> list[Gpu | _Unreadable]:
    gpus: list[Gpu | _Unreadable] = []
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        return [_Unreadable(0, "nvmlDeviceGetCount", str(error))]
    for number in range(count):
        try:
            gpus += _nvml_gpu(nvml, number)
        except _Unreadable as unreadable:
            gpus.append(unreadable)
    return gpus


def _nvml_gpu(nvml: Any, number: int) -> list[Gpu]:
    """Return a GPU, or in its place its instances of MIG."""

    def ask(call: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, call)(*arguments)
        except nvml.NVMLError as error:
            raise _Unreadable(number, call, str(error)) from error

    def described(handle: Any) -> Gpu:
        name, uuid = (str(ask(call, handle)) for call in ("nvmlDeviceGetName", "nvmlDeviceGetUUID"))
        return Gpu(name, ask("nvmlDeviceGetMemoryInfo", handle).total, capability, uuid)

    handle = ask("nvmlDeviceGetHandleByIndex", number)
    capability = tuple(ask("nvmlDeviceGetCudaComputeCapability", handle))
    if not _has_instances(nvml, handle):
        return [described(handle)]
    instances = []
    for index in range(ask("nvmlDeviceGetMaxMigDeviceCount", handle)):
        with contextlib.suppress(nvml.NVMLError):  # no instance at this place
            instances.append(described(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)))
    return instances


def _has_instances(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:  # a GPU without MIG
        return False


def _nvml_use(nvml: Any) -> dict[str, GpuUse]:
    uses = {}
    for handle in map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount())):
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        used = tuple((int(process.pid), int(process.usedGpuMemory or 0)) for process in processes)
        uses[str(nvml.nvmlDeviceGetUUID(handle))] = GpuUse(nvml.nvmlDeviceGetMemoryInfo(handle).free, used)
    return uses


def _visible(gpus: list[Seen], visible_devices: str | None) -> tuple[Seen, ...]:
    if visible_devices is None:
        return tuple(gpus)
    chosen: list[Seen] = []
    for item in (part.strip() for part in visible_devices.split(",")):
        matches = [gpu for index, gpu in enumerate(gpus) if item and (item == str(index) or gpu.uuid.startswith(item))]
        if not matches:
            break  # CUDA ignores everything after the first entry that it does not know
        if matches[0] in chosen:
            return ()  # and shows no GPU at all when one is named twice
        chosen.append(matches[0])
    return tuple(chosen)


# --- Accelerators of other makers, from the installed torch and from files of the kernel ---
# None of these could be tried for real here; the files are those that their drivers document.


def other_accelerators(root: Path = Path("/")) -> tuple[Maker, list[int]] | None:
    """Return the maker of the devices here, if its torch is installed, and the bytes of each device (0: unknown)."""
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
    if not _numbers_in(file / "properties").get("simd_count"):
        return None
    return sum(_numbers_in(bank).get("size_in_bytes", 0) for bank in file.glob("mem_banks/*/properties"))


# --- The compute type: one decision for DeepSpeed, the loaded weights and 4-bit compute ---

Dtype = Literal["bf16", "fp16", "fp32"]


class Precision(NamedTuple):
    """The compute type, and the reason. `by_recipe`: the recipe decides, not the machine."""

    dtype: Dtype
    reason: str
    by_recipe: bool = False

    @property
    def weight_bytes(self) -> int:
        """The bytes of one weight."""
        return 4 if self.dtype == "fp32" else 2


def decide_precision(dtype: str, hardware: Hardware) -> Precision:
    """Return the compute type for `optim_wrapper.dtype` on this hardware.

    bf16 by compute capability, never by `torch.cuda.is_bf16_supported()`, which counts emulation and is true on a V100.

    Raises:
        MachineError: fp16 on a CPU, which DeepSpeed refuses.
    """
    if dtype == "fp16" and not hardware.gpus:
        fix = f"Use {Key('dtype', 'fp32')}, or bf16."
        raise MachineError("fp16 training needs a GPU, and none is visible", where="optim_wrapper.dtype", fix=fix)
    if dtype != "auto":
        slow = dtype == "bf16" and hardware.gpus and not hardware.has_native_bf16
        reason = "optim_wrapper.dtype" + (", emulated on this GPU" if slow else "")
        return Precision(dtype, reason, by_recipe=True)  # type: ignore[arg-type]
    if not hardware.gpus:
        return Precision("fp32", "no GPU: fp32 is exact on any CPU")
    if not hardware.has_nvidia:
        return Precision("bf16", f"{hardware.maker} accelerators compute in bf16")
    weakest = min(gpu.compute_capability for gpu in hardware.gpus)
    shown = ".".join(map(str, weakest))
    if hardware.has_native_bf16:
        return Precision("bf16", f"every GPU has compute capability 8.0 or more (lowest: {shown})")
    return Precision("fp16", f"compute capability {shown} is below 8.0")
