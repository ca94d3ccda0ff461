"""Checks the machine and the installation for `tuner doctor`, without a recipe.

It only reports. The report holds no values of environment variables, so it is safe to share.
"""

from __future__ import annotations

import codecs
import locale
import platform
import re
import resource
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tuner import __version__, paths
from tuner.errors import MachineError
from tuner.files import JsonObject, sized
from tuner.lab import probes
from tuner.lab.probes import DEADLINE_S, Row
from tuner.launch.checks import gpus, host
from tuner.machine import hardware, health, libraries
from tuner.machine.hardware import Hardware

_MIN_OPEN_FILES = 1024
_MIN_SHM_BYTES = 1024**3
_MIN_FREE_BYTES = 10 * 1024**3
_SECRET_LENGTH = 8
_MIXERS = (
    ("linear attention", libraries.LINEAR_ATTENTION, "Qwen3.5, Qwen3-Next, Kimi Linear, LFM2 and OLMo hybrid"),
    ("state spaces", libraries.STATE_SPACE, "Mamba, Nemotron-H, Granite 4, Falcon-H1 and similar models"),
)
"""Names, packages of GPU kernels, and the models that use them."""


@dataclass(frozen=True)
class DoctorReport:
    """All rows, and the conclusion."""

    rows: tuple[Row, ...]

    @property
    def failed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.status == "failed")

    @property
    def conclusion(self) -> str:
        """The conclusion in one line."""
        if self.failed:
            return f"Not ready to train: {', '.join(dict.fromkeys(row.name for row in self.failed))}."
        warned = list(dict.fromkeys(row.name for row in self.rows if row.status == "warning"))
        return f"Ready to train, with warnings: {', '.join(warned)}." if warned else "Ready to train."

    def to_json(self) -> JsonObject:
        return {
            "verdict": self.conclusion,
            "tuner": __version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "versions": libraries.versions(),
            "checks": [asdict(row) for row in self.rows],
        }


def examine(environ: Mapping[str, str], deadline_s: float = DEADLINE_S) -> DoctorReport:
    """Check this machine. Heavy libraries are tried in separate processes, each for at most `deadline_s` seconds."""
    try:
        this_machine = hardware.detect(environ)
        of_gpus = list(_gpus(this_machine))
    except MachineError as error:
        this_machine = hardware.detect({**environ, "DS_ACCELERATOR": "cpu"})
        of_gpus = [Row("GPUs", "failed", error.what, error.fix)]
    rows = [*_software(this_machine), *of_gpus, *_host(this_machine, environ)]
    env = {**environ, "PYTHONSAFEPATH": "1", "DS_ACCELERATOR": this_machine.device}
    has_flash = libraries.is_installed("flash_attn")
    capabilities = [gpu.compute_capability for gpu in this_machine.gpus]
    has_varlen = this_machine.has_nvidia and libraries.has_varlen_attention(capabilities)
    rows += probes.run_all(
        probes.heavy(len(this_machine.gpus), has_flash=has_flash, has_varlen=has_varlen), env, deadline_s
    )
    if not (has_flash or has_varlen) and this_machine.gpus:
        text = "not installed, and not in torch before 2.12 or below compute capability 8.0; packed rows get a mask"
        rows.append(Row("flash attention", "absent", text, "pip install flash-attn --no-build-isolation"))
    rows += _optional(this_machine)
    return DoctorReport(tuple(_without_secrets(row, environ) for row in rows))


def _software(this_machine: Hardware) -> Iterator[Row]:
    yield Row("interpreter", "ok", f"Python {platform.python_version()}, {platform.platform()}")
    yield _locale()
    problems = list(libraries.problems(quantized=True, needs_cuda=this_machine.has_nvidia))
    yield from (Row("libraries", "failed", problem.what, problem.fix) for problem in problems)
    untested = [
        f"{name} {version} (tested: {libraries.TESTED[name]})"
        for name, version in libraries.versions().items()
        if version and version.split("+")[0] != libraries.TESTED[name]
    ]
    if untested:
        yield Row("versions", "warning", f"differ from the tested versions: {', '.join(untested)}", "make install")
    elif not problems:
        yield Row("versions", "ok", f"the tested versions: {len(libraries.TESTED)} libraries")


def _locale() -> Row:
    # Python's own answer: in the locales C and POSIX it turns to UTF-8 by itself, unless PYTHONUTF8=0.
    encoding = codecs.lookup(locale.getpreferredencoding(False)).name
    if encoding == "utf-8":
        return Row("locale", "ok", "its encoding is UTF-8")
    text = f"its encoding is {encoding}, not UTF-8: names of files with other characters are not found"
    return Row("locale", "warning", f"{text}, and your own code misreads text", "export LC_ALL=C.UTF-8")


def _optional(this_machine: Hardware) -> Iterator[Row]:
    if this_machine.gpus:
        fused = "fused norms, rotary embeddings and MLPs"
        use, fix = f"{fused} are used (model.use_liger_kernel)", "pip install 'tuner-deepspeed[gpu]'"
        yield _of_package("Liger", "liger_kernel", use, fused, fix)
    else:
        yield Row("Liger", "absent", "its kernels are for GPUs")
    for name, packages, use in _MIXERS:
        lacks = libraries.missing_kernels(packages)
        slower = "train without them, much slower" if this_machine.gpus else "do not use them on a CPU"
        absent = Row(name, "absent", f"no GPU kernels: {use} {slower}", f"pip install {lacks}")
        yield absent if lacks else Row(name, "ok", f"GPU kernels are installed, for {use}")
    use, lack = "rows are tokenized with it (dataset.tokenizer_backend)", "rows are tokenized more slowly"
    yield _of_package("fastokens", "fastokens", use, lack, "pip install fastokens")


def _of_package(name: str, package: str, use: str, lack: str, fix: str) -> Row:
    """Return what a package is used for, or what is lacking without it."""
    is_there = libraries.is_installed(package)
    return Row(name, "ok", use) if is_there else Row(name, "absent", f"not installed: {lack}", fix)


def _gpus(this_machine: Hardware) -> Iterator[Row]:
    driver, built = hardware.cuda_driver_version(), libraries.torch_cuda_version()
    if not this_machine.gpus:
        why = "no NVIDIA driver" if driver is None else "a driver, but no visible GPU (CUDA_VISIBLE_DEVICES)"
        yield Row("GPUs", "absent", f"{why}; training runs on the CPU")
        return
    yield Row("GPUs", "ok", this_machine.describe())
    if not this_machine.has_nvidia:
        return
    old = list(gpus.too_old_driver(driver, built))
    yield from (Row("driver", "failed", problem.what, problem.fix) for problem in old)
    if driver and not old:
        yield Row("driver", "ok", f"it supports CUDA {driver[0]}.{driver[1]}, torch is built for {built or 'the CPU'}")
    for gpu in {gpu.name: gpu for gpu in this_machine.gpus}.values():
        if problem := libraries.cuda_problem(gpu.compute_capability):
            yield Row("kernels", "failed", f"{gpu.name}: {problem}", "Install torch for another CUDA version.")
    for ailment in health.gpus([gpu.uuid for gpu in this_machine.gpus]):
        yield Row("GPU health", "failed" if ailment.is_fatal else "warning", ailment.what, ailment.fix)
    use = hardware.gpu_use()
    for number, gpu in enumerate(this_machine.gpus):
        processes = use[gpu.uuid].processes if gpu.uuid in use else ()
        if processes:
            users = ", ".join(f"pid {pid} has {sized(size)}" for pid, size in processes)
            yield Row(f"GPU {number}", "warning", f"in use: {users}; {sized(use[gpu.uuid].free_bytes)} free")


def _host(this_machine: Hardware, environ: Mapping[str, str]) -> Iterator[Row]:
    free = hardware.available_host_bytes()
    available = f"{sized(free)} free of " if free is not None else ""
    yield Row("host memory", "ok", f"{available}{sized(this_machine.host_memory_bytes)}, {this_machine.num_cpus} cores")
    yield _compiler(this_machine, environ)
    yield from _limits()
    yield _room(str(host.SHM), host.SHM, _MIN_SHM_BYTES, "docker run --shm-size=8g, or --ipc=host.")
    from huggingface_hub import constants  # 0.01 s

    # Only sizes: a folder's name may be the value of an environment variable.
    yield _room("disk of the hub's cache", Path(constants.HF_HUB_CACHE), _MIN_FREE_BYTES, "Free space, or set HF_HOME.")
    yield _room(
        "disk of this folder",
        Path.cwd(),
        _MIN_FREE_BYTES,
        "Free space; runs are written here unless --work-dir is set.",
    )
    if shutil.which("srun", path=environ.get("PATH")):
        inside = "inside a job" if "SLURM_JOB_ID" in environ else "not inside a job"
        yield Row("Slurm", "ok", f"srun is available; this process is {inside}")
    else:
        yield Row("Slurm", "absent", "no srun on PATH")


def _compiler(this_machine: Hardware, environ: Mapping[str, str]) -> Row:
    if this_machine.has_compiler:
        return Row("compiler", "ok", f"g++ and ninja{' and nvcc' * bool(this_machine.gpus)}, for DeepSpeed's CPU Adam")
    lacks = "nvcc" if hardware.has_compiler(hardware.tool_path(environ)) else "g++ or ninja"
    fix = "Install the CUDA toolkit of torch's CUDA version." if lacks == "nvcc" else "Install g++ and ninja."
    return Row("compiler", "warning", f"no {lacks}: offloaded optimizers use torch's Adam, several times slower", fix)


def _limits() -> Iterator[Row]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    status = "warning" if soft != resource.RLIM_INFINITY and soft < _MIN_OPEN_FILES else "ok"
    yield Row("open files", status, f"{_limit(soft)}, can be raised to {_limit(hard)}", "ulimit -n 65536")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if locked == resource.RLIM_INFINITY else f"{sized(locked)}; InfiniBand needs unlimited"
    yield Row("locked memory", "ok", text)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def _room(name: str, folder: Path, least: int, fix: str) -> Row:
    free = shutil.disk_usage(host.existing(folder)).free
    return Row(name, "ok" if free >= least else "warning", f"{sized(free)} free", fix)


def _without_secrets(row: Row, environ: Mapping[str, str]) -> Row:
    """Return the row without values of variables, credentials in URLs, and the name of the home folder."""
    fix = _clean(row.fix, environ) if row.fix and row.status != "ok" else None
    return replace(row, text=_clean(row.text, environ), fix=fix)


def _clean(text: str, environ: Mapping[str, str]) -> str:
    text = text.replace(str(paths.expanded("~")), "~")
    # Paths are not secret, and short values occur in any text; one value may hold another.
    secrets = {value for value in environ.values() if len(value) >= _SECRET_LENGTH and not value.startswith("/")}
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, "***")
    text = re.sub(r"\b(hf|sk|ghp)_\w{10,}", "***", text)
    return re.sub(r"//[^/@\s]+@", "//***@", text)
