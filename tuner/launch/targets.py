"""What a name means: a recipe, a DeepSpeed config or a run; and the machines, here or not, that it is looked at on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from tuner.errors import UsageError
from tuner.fit import gpu_catalog
from tuner.machine import hardware
from tuner.machine.hardware import Gpu, Hardware
from tuner.machine.launchers import filled, resolve
from tuner.machine.topology import LaunchFlags, Topology, planned
from tuner.recipes import catalog, foreign, origin, starting_weights
from tuner.recipes.diff import Section
from tuner.recipes.merging import leaves
from tuner.recipes.origin import Origin, Place
from tuner.runs import directory, listing
from tuner.runs.directory import RunDirectory
from tuner.zero.jsonfile import Document

Kind = Literal["recipe", "config", "run"]
Machines = tuple[int | None, str | None, int]
"""What `gpus`, `gpu` and `nodes` say: GPUs of each node, their product, and the number of nodes."""
HERE: Machines = (None, None, 1)
ASSUMED_GPU = "a100-80g"
"""Where none is here and none is named."""
_RUN_FACTS = ("versions", "hardware", "precision", "world_size", "num_nodes", "batch", "platform")


def kind_of(name: str | None) -> Kind:
    """Say what a name means; none is a recipe made of options, and so is a model in its place.

    Raises:
        RunDirectoryError: a folder that is no run directory.
    """
    if name is None:
        return "recipe"
    path = Path(name)
    if foreign.trains(path):
        return "recipe"
    if os.path.isdir(path):  # noqa: PTH112 (a name too long is no folder, and no error)
        if directory.is_run(path):
            return "run"
        if starting_weights.holds_model(path):
            return "recipe"
        raise listing.no_run(name, "NAME", "Name a recipe, a DeepSpeed config, or a run's folder.")
    named = {name, f"deepspeed_{name}"} & {*catalog.presets()} or name == "none" or name.startswith("deepspeed_")
    is_file = path.suffix in (".json", ".yaml", ".yml") or (path.suffix != ".py" and os.path.isfile(path))  # noqa: PTH113
    return "config" if named or is_file else "recipe"


def machines(asked: Machines, environ: Mapping[str, str], file: LaunchFlags | None = None) -> tuple[Hardware, Topology]:
    """Return the machines that are asked for, where nothing is said this one with what its launch variables say.

    Args:
        file: What the DeepSpeed config says of the launch, where it is one that does.

    Raises:
        UsageError: a number of GPUs without a GPU here or a name, an unknown name, or launch variables that contradict.
    """
    here, (gpus, gpu, nodes) = hardware.detect(environ), asked
    if asked == HERE:
        return here, resolve(filled(LaunchFlags(), file, environ), environ, len(here.gpus))
    if gpu is None and not here.gpus:
        raise UsageError(
            "this machine has no GPU, so the kind of GPU is unknown", where="--gpus", fix="Add: --gpu a100-80g."
        )
    made = node(here, gpus, known_gpu(gpu) if gpu else None)
    return made, planned(nodes, len(made.gpus))


def node(here: Hardware, gpus: int | None, kind: Gpu | None) -> Hardware:
    """Return one node as it is asked for: so many GPUs of a kind, where nothing is said those that are here."""
    if kind is None:
        # Where those that are here differ, the smallest decides what fits.
        smallest = min(here.gpus, key=lambda gpu: gpu.memory_bytes)
        return here if gpus in (None, len(here.gpus)) else replace(here, gpus=(smallest,) * gpus)
    # Nobody knows the host's memory of a machine that is not here, so it is not judged.
    return replace(here, gpus=(kind,) * (gpus or 1), host_memory_bytes=0)


def known_gpu(name: str) -> Gpu:
    """Return the GPU that a product's name means.

    Raises:
        UsageError: no such GPU is known.
    """
    product = gpu_catalog.find(name)
    return Gpu(gpu_catalog.spelled(name), product.memory_bytes, product.compute_capability)


def config_section(document: Document) -> Section:
    """Return a DeepSpeed config as it is written, each value with its line and column."""
    origins = {key: Origin(document.place(tuple(key.split(".")))) for key, _ in leaves(document.value)}
    return Section(document.value, origins)


def run_section(path: Path) -> Section:
    """Return the versions, the hardware and the geometry of a run.

    Raises:
        RunDirectoryError: run.json cannot be read.
    """
    run = RunDirectory(path)
    facts = run.read_json(run.run)
    values = {key: facts[key] for key in _RUN_FACTS if key in facts}
    return Section(values, {key: Origin(Place(origin.Kind.DERIVED, str(run.run))) for key, _ in leaves(values)})
