"""Which libraries are installed, and whether they are new enough; read from metadata, never by importing them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tuner.errors import MachineError
from tuner.files import read_text

MINIMUM = {
    "torch": "2.9",
    "transformers": "5.24",
    "trl": "1.16",
    "peft": "0.21",
    "accelerate": "1.14",
    "datasets": "4.7",
    "deepspeed": "0.19.8",  # the schema of zero is this one's, and older ones train wrong in several ways
}
QUANTIZED = {"bitsandbytes": "0.48"}
TESTED = {
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "trl": "1.16.0",
    "peft": "0.21.2",
    "accelerate": "1.15.0",
    "datasets": "5.2.0",
    "deepspeed": "0.19.8",
    "bitsandbytes": "0.50.2",
}
"""What requirements.txt pins, which is not installed with the package; a test holds the two together."""
_LOADED_ALONG = {
    "torchvision": "transformers imports it when it is installed, and with another torch its operators are missing",
    "torchaudio": "transformers imports it when it is installed, and it is compiled for one torch",
    "huggingface_hub": "models and data sets are downloaded with it",
    "tokenizers": "transformers cannot be imported with another version",
    "safetensors": "weights are read with it",
    "numpy": "the other libraries are compiled for one major version of it",
    "pyarrow": "rows are kept in it",
}
"""Libraries that no recipe needs and that end a run when their version is wrong, with the reason."""
KERNELS = {"causal_conv1d": "causal-conv1d", "fla": "'tuner-deepspeed[gpu]'", "mamba_ssm": "mamba-ssm"}
"""Packages of GPU kernels, and what pip installs them by. Without them transformers computes the same, much slower."""
LINEAR_ATTENTION, STATE_SPACE = ("fla",), ("causal_conv1d", "mamba_ssm")
KERNELS_OF = {
    **dict.fromkeys(("kimi_linear", "lfm2", "lfm2_moe", "olmo_hybrid"), LINEAR_ATTENTION),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), LINEAR_ATTENTION),
    **dict.fromkeys(("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "mamba"), STATE_SPACE),
    **dict.fromkeys(("mamba2", "nemotron_h", "zamba2"), STATE_SPACE),
}
"""model_types with convolutions, linear attention or a state space, and the packages that have all their kernels.

fla (pure Python, compiled by Triton) brings the convolution too: `models.compat` offers it to transformers. The others
are compiled by nvcc."""


class Flash(NamedTuple):
    """The package of an attention kernel, and the compute capabilities that it is made for."""

    package: str
    oldest: tuple[int, int]
    newest: tuple[int, int] = (99, 0)


FLASH = {
    "flash_attention_3": Flash("flash_attn_interface", (9, 0), (9, 0)),
    "flash_attention_2": Flash("flash_attn", (8, 0)),
}
"""Transformers' names, fastest first. Source: Dao-AILab/flash-attention, README: 2 from Ampere on, 3 for Hopper."""
_OLDEST_GPU = {"13": (7, 5)}
"""Lowest compute capability that CUDA of a major version compiles for.

Source: NVIDIA, CUDA Toolkit 13.0 Release Notes, "Deprecated Architectures": Maxwell, Pascal and Volta are gone.
"""
TESTED_CUDA = "13.0"
"""The CUDA for which the torch of requirements.txt is built on PyPI."""
_NEEDS_CUDA = {(12, 0): (12, 8), (10, 0): (12, 8)}
"""Compute capabilities (Blackwell) and the CUDA version that first compiled for them."""


def versions() -> dict[str, str | None]:
    """Return the installed version of every library that training uses, None where it is missing."""
    return {name: version_of(name) for name in (*MINIMUM, *QUANTIZED)}


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, by the name that it is imported by."""
    return importlib.util.find_spec(package) is not None


def installed_flash_attention(capabilities: Iterable[tuple[int, int]]) -> list[str]:
    """Return those of `FLASH` that are installed and made for GPUs of all these compute capabilities."""
    weakest, strongest = min(capabilities := list(capabilities)), max(capabilities)
    return [
        name
        for name, flash in FLASH.items()
        if is_installed(flash.package) and flash.oldest <= weakest and strongest <= flash.newest
    ]


def has_varlen_attention(capabilities: Iterable[tuple[int, int]]) -> bool:
    """Return whether torch has flash attention for samples of all lengths, with windows and shared key-value heads.

    Source: docs.pytorch.org, torch.nn.attention.varlen: 2.12 is the first with `enable_gqa`; for Ampere and later.
    """
    version = version_of("torch")
    is_new = all(capability >= (8, 0) or capability == (0, 0) for capability in capabilities)  # (0, 0): not known
    return is_new and version is not None and numbers(version) >= (2, 12)


def missing_kernels(packages: Iterable[str]) -> str:
    """Return those of the packages of GPU kernels that are not installed, as pip takes them; '' where all are there."""
    return " ".join(KERNELS[name] for name in packages if not is_installed(name))


def problems(*, quantized: bool, needs_cuda: bool) -> Iterator[MachineError]:
    """Yield what is wrong with the libraries that training imports.

    That is one that is missing, too old, installed twice, or at odds with another, and a CPU build of torch while GPUs
    are to be used.
    """
    minimums = {**MINIMUM, **(QUANTIZED if quantized else {})}
    installed = {name: version_of(name) for name in (*minimums, *_LOADED_ALONG)}
    for name, minimum in minimums.items():
        version = installed[name]
        if version is None:
            yield MachineError(f"{name} is not installed", fix=f"pip install '{name}>={minimum}'")
        elif numbers(version) < numbers(minimum):
            yield MachineError(f"{name} {version} is older than {minimum}", fix=f"pip install '{name}>={minimum}'")
        elif problem := _installed_twice(name):
            yield problem
    if None not in map(installed.get, minimums):
        yield from _at_odds({name: version for name, version in installed.items() if version})
    if needs_cuda and torch_cuda_version() is None:
        fix = "Install a CUDA build of torch, or hide the GPUs with CUDA_VISIBLE_DEVICES=''."
        yield MachineError(f"there are GPUs, but torch {version_of('torch')} is a CPU build", fix=fix)


def _installed_twice(name: str) -> MachineError | None:
    """Return what is wrong with a library of which one folder lists two versions: which one is imported is not known.

    An update that was interrupted, or pip and conda in turn, leave that; of several folders the first one counts.
    """
    from importlib import metadata

    found = [
        (Path(str(distribution.locate_file(""))), distribution.version or "")
        for distribution in metadata.distributions(name=name)
    ]
    versions_there = sorted({version for folder, version in found if folder == found[0][0]} - {""}, key=numbers)
    if len(versions_there) < 2:
        return None
    fix = f"Remove both and install it anew: pip uninstall {name}, twice; pip install '{name}=={versions_there[-1]}'"
    return MachineError(f"{name} is installed as {' and as '.join(versions_there)}", where=found[0][0], fix=fix)


def _at_odds(installed: Mapping[str, str]) -> Iterator[MachineError]:
    """Yield an error for each of these installed libraries that requires another version of one of them."""
    from importlib import metadata

    from packaging.requirements import Requirement  # transformers depends on it, which is not missing here

    for name in sorted(installed):
        for text in metadata.requires(name) or ():
            version = installed.get(re.split(r"[^\w.-]", text, maxsplit=1)[0].replace("-", "_"))
            if version is None:
                continue  # most of 800, and to read each whole takes 20 ms
            requirement = Requirement(text)
            if requirement.marker and not requirement.marker.evaluate():
                continue
            if not requirement.specifier.contains(version, prereleases=True):
                needed = f"{requirement.name}{requirement.specifier}"
                problem = f"{name} {installed[name]} needs {needed}, and {requirement.name} is {version}"
                why = _LOADED_ALONG.get(name) or _LOADED_ALONG.get(requirement.name)
                fix = f"pip install --upgrade {name} '{needed}'"
                yield MachineError(f"{problem}; {why}" if why else problem, where="the installed libraries", fix=fix)


def cuda_problem(capability: tuple[int, int], *, elsewhere: bool = False) -> str | None:
    """Return why torch has no kernels for a GPU of this compute capability, or None.

    It is the installed torch. With `elsewhere` the GPU is in another machine, and `TESTED_CUDA` stands for a CPU build.
    """
    built = torch_cuda_version() or (TESTED_CUDA if elsewhere else None)
    if built is None:
        return None
    oldest = _OLDEST_GPU.get(built.split(".")[0], (0, 0))
    if capability < oldest:
        return f"CUDA {built} supports only compute capability {oldest[0]}.{oldest[1]} and newer"
    for newest, version in _NEEDS_CUDA.items():
        if capability >= newest and numbers(built)[:2] < version:
            return f"CUDA {built} is older than {version[0]}.{version[1]}, which this GPU needs"
    return None


def require_names(library: str, holder: Any, *names: str) -> None:
    """Refuse a library in which one of the names is gone that this package replaces: it would go unnoticed.

    Args:
        library: What pip calls it.
        holder: Its module or class that has the names.
        names: Those without the library's promise that they stay.

    Raises:
        MachineError: one is gone.
    """
    gone = [name for name in names if not hasattr(holder, name)]
    if gone:
        problem = f"{library} {version_of(library)} has no {holder.__name__}.{gone[0]}, which tuner needs"
        raise MachineError(problem, where=library, fix="Install the tested versions: pip install -r requirements.txt")


@contextmanager
def replaced(holder: Any, **values: object) -> Iterator[None]:
    """Give a library's module, class or object, or one of ours, other values of its attributes inside of the block."""
    before = {name: vars(holder).get(name) for name in values if name in vars(holder)}
    for name, value in values.items():
        setattr(holder, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(holder, name, before[name])
            else:  # its class has it
                delattr(holder, name)


def torch_cuda_version() -> str | None:
    """Return the CUDA version that the installed torch was built for, or None for another build or no torch."""
    return torch_built_for("cuda")


def torch_built_for(key: str) -> str | None:
    """Return the version of `cuda`, `hip` (ROCm) or `xpu` that the installed torch was built for, or None."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / "version.py"
    text = read_text(file) if file.is_file() else ""  # a build of one's own may lack it
    match = re.search(rf"^{key}\b.*=\s*['\"](.+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


@cache  # a plan asks for torch's a dozen times
def version_of(name: str) -> str | None:
    """Return the installed version of a library, None where it is missing."""
    from importlib import metadata  # 8 ms, which --help does without

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version, such as (0, 19, 8) of '0.19.8+cu130'; they can be compared."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
