"""Whether all ranks work with the same: libraries, the run's files, variables, the model's files and the rows.

Each node reads its own disk and environment. What differs there trains wrong in silence, or waits for ever in a
collective that the other ranks never enter.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from huggingface_hub import hf_hub_download

from tuner import __version__
from tuner.data.prepared import Prepared
from tuner.errors import MachineError
from tuner.files import sha256
from tuner.machine.libraries import QUANTIZED, versions
from tuner.recipes.schema.objective import Objective
from tuner.recipes.schema.rewards import file_of
from tuner.runs.directory import RunDirectory
from tuner.worker.rank_data import RankRows

_EQUAL = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NVLS_ENABLE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "CUBLAS_WORKSPACE_CONFIG",
)
"""Variables that choose how numbers are computed or how ranks talk: with different ones ranks hang or differ."""
_OWN = ("NCCL_", "GLOO_", "UCX_")
"""The beginnings of variables that a node may have of its own, such as NCCL_SOCKET_IFNAME: they only warn."""
_JSON = ("config.json", "adapter_config.json", "generation_config.json", "*processor_config.json", "*.index.json")
_WEIGHTS = ("model*.safetensors", "adapter_model*.safetensors", "pytorch_model*.bin")
"""Of a model's folder, what `from_pretrained` reads: other tools leave more files there. Its tokenizer makes the rows,
which are compared."""
ADAPTER = "adapter"
"""The role of an adapter that training continues."""
_FIX = "Give every node the same data, model, versions and variables, or one shared folder with them."
_MAX_TOLD = 3
_HASH_CHARACTERS = 12

Facts = Mapping[str, str | None]
"""What is compared -> its value on this rank, as a message shows it; None: it is not there."""


def environment(run_dir: RunDirectory, *, needs_bitsandbytes: bool) -> dict[str, str | None]:
    """Return the versions, the run's files and the variables that must be equal on all ranks."""
    environ = os.environ  # effect: they are compared
    unused = () if needs_bitsandbytes else QUANTIZED
    return {
        "tuner": __version__,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",  # a patch release computes nothing else
        **{name: version for name, version in versions().items() if name not in unused},
        **{path.name: _hash(path) for path in (run_dir.resolved_recipe, run_dir.deepspeed)},
        **{name: environ.get(name) for name in _EQUAL},
    }


def own_variables() -> dict[str, str | None]:
    """Return the variables of libraries that may differ between nodes."""
    environ = os.environ  # effect: they are compared
    return {name: value for name, value in environ.items() if name.startswith(_OWN) and name not in _EQUAL}


def model_files(path: str, revision: str | None, role: str = "model") -> dict[str, str | None]:
    """Return what identifies a model: on the hub its commit, in a folder its JSON files and the sizes of its weights.

    A node may have more files of a commit in its cache than another one: the weights are downloaded later.
    """
    folder = Path(path)
    if not folder.is_dir():
        file = "adapter_config.json" if role == ADAPTER else "config.json"
        with suppress(OSError, ValueError):  # the load, which needs it too, says what is wrong
            config = Path(hf_hub_download(path, file, revision=revision))
            return {f"the commit of the {role}": config.parent.name}
        return {}
    files = {file: _hash(file) for pattern in _JSON for file in folder.glob(pattern)}
    files |= {file: f"{file.stat().st_size:,} bytes" for pattern in _WEIGHTS for file in folder.glob(pattern)}
    return {f"{file.name} of the {role}": files[file] for file in sorted(files)}


def own_code(objective: Objective) -> dict[str, str | None]:
    """Return the hashes of the user's files that an objective calls: rewards, tools and an environment."""
    called = (name for names in objective.own_functions.values() for name in names)
    files = sorted({file for file in map(file_of, called) if file})
    return {f"{Path(file).name} of the {objective.type} objective": _hash(Path(file)) for file in files}


def rows(read: RankRows) -> dict[str, str | None]:
    """Return what identifies the rows of a rank: their number and hash."""
    first = {"the training data": read.train if isinstance(read.train, Prepared) else read.train.first}
    if read.val:
        first["the validation data"] = read.val
    return {
        name: f"{len(prepared.dataset):,} rows (hash {prepared.sha256[:_HASH_CHARACTERS]})"
        for name, prepared in first.items()
    }


def _hash(file: Path) -> str | None:
    return f"a file with hash {sha256(file)[:_HASH_CHARACTERS]}" if file.is_file() else None


def require(own_values: Facts) -> None:
    """Refuse facts that differ between ranks. Every rank takes part, and all raise the same error.

    Raises:
        MachineError: it names a node that differs from that of rank 0, and what differs there.
    """
    everywhere = _gathered(own_values)
    first_host, first = everywhere[0]
    for rank, (host, values) in enumerate(everywhere):
        if names := _differing(values, first):
            differences = [
                f"{name}: {values.get(name) or 'not there'} on {host} (rank {rank}), "
                f"{first.get(name) or 'not there'} on {first_host} (rank 0)"
                for name in names[:_MAX_TOLD]
            ]
            more = f" and {len(names) - _MAX_TOLD} more" if len(names) > _MAX_TOLD else ""
            raise MachineError(f"the nodes differ: {'; '.join(differences)}{more}", where=host, fix=_FIX)


def differing_variables() -> list[str]:
    """Return the names of variables that may differ between nodes and do. Every rank takes part."""
    everywhere = _gathered(own_variables())
    return sorted({name for _, values in everywhere for name in _differing(values, everywhere[0][1])})


def _gathered(own_values: Facts) -> list[tuple[str, Facts]]:
    everywhere: list[tuple[str, Facts]] = [("", {})] * dist.get_world_size()
    dist.all_gather_object(everywhere, (socket.gethostname(), own_values))
    return everywhere


def _differing(values: Facts, first: Facts) -> list[str]:
    return [name for name in dict.fromkeys((*first, *values)) if values.get(name) != first.get(name)]
