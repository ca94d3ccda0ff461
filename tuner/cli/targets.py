"""What a name on the command line means: a recipe, a DeepSpeed config or a run; and the machines it is looked at on.

It prints nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from tuner.cli import complete
from tuner.cli.options import all_of
from tuner.cli.say import say
from tuner.errors import TunerError, UsageError

if TYPE_CHECKING:
    from tuner.launch.run import Request, ResolvedRun
    from tuner.machine.hardware import Gpu, Hardware
    from tuner.machine.topology import LaunchFlags, Topology
    from tuner.recipes.diff import Section
    from tuner.zero.jsonfile import Document

Kind = Literal["recipe", "config", "run"]
Machines = tuple[int | None, str | None, int]
"""What --gpus, --gpu and --nodes say."""
_RUN_FACTS = ("versions", "hardware", "precision", "world_size", "num_nodes", "batch", "platform")
ASSUMED_GPU = "a100-80g"
"""Where none is here and none is named."""
machine_options = all_of(
    click.option("--gpus", type=click.IntRange(1), help="GPUs of each node. Default: those of this machine."),
    click.option("--gpu", metavar="NAME", help="Their product, such as a100-80g or h100."),
    click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Nodes of that kind."),
)
"""Machines that need not be here."""
deepspeed_option = all_of(
    click.option(
        "--deepspeed",
        metavar="PRESET|FILE",
        shell_complete=complete.deepspeed,
        help="A preset, a DeepSpeed JSON, an accelerate config, a preset of ROLL's, auto, or none.",
    ),
    click.option(
        "--ds",
        multiple=True,
        metavar="KEY=VALUE",
        shell_complete=complete.deepspeed_keys,
        help="Change one value of the DeepSpeed config, by key or by unique tail.",
    ),
)


def imported(ctx: click.Context, param: click.Parameter, name: str | None) -> str | None:
    """Return the recipe of another tool's config in a recipe's place, and say so; any other name as it is.

    Raises:
        TunerError: the config is wrong, or its recipe would learn something else.
    """
    if name is None or not name.endswith((".yaml", ".yml", ".json", ".py", ".sh")):
        return name
    from tuner.importers import direct
    from tuner.recipes import paths

    kept = direct.keep(name, Path(os.environ.get("TUNER_CACHE") or paths.home() / ".cache" / "tuner"))
    if kept is None:
        return name
    say(direct.told(name, kept), err=True)
    return str(kept.path)


def kind_of(name: str | None) -> Kind:
    """Say what a name means; none is a recipe made of options, and so is a model in its place.

    Raises:
        UsageError: a folder that is no run directory.
    """
    from tuner.recipes import catalog, foreign, starting_weights

    if name is None:
        return "recipe"
    path = Path(name)
    if foreign.trains(path):
        return "recipe"
    if os.path.isdir(path):  # noqa: PTH112 (a name too long is no folder, and no error)
        from tuner.runs import directory  # which other names do not need

        if directory.is_run(path):
            return "run"
        if starting_weights.holds_model(path):
            return "recipe"
        fix = "Name a recipe, a DeepSpeed config, or a run's folder."
        raise UsageError(f"the folder {name!r} is no run directory: no run.json and recipe.py", where="NAME", fix=fix)
    named = {name, f"deepspeed_{name}"} & {*catalog.presets()} or name == "none" or name.startswith("deepspeed_")
    is_file = path.suffix in (".json", ".yaml", ".yml") or (path.suffix != ".py" and os.path.isfile(path))  # noqa: PTH113
    return "config" if named or is_file else "recipe"


def refuse_changes(name: str | None, kind: Kind, given: dict[str, Any]) -> None:
    """Refuse options that are about a recipe where there is none.

    Args:
        given: The options' values by their names in Python.

    Raises:
        UsageError: one of them is not at its default.
    """
    if kind == "recipe":
        return
    what = {"config": "a DeepSpeed config", "run": "a run directory"}[kind]
    fix = f"Give it to a recipe: RECIPE --deepspeed {name}." if kind == "config" else f"Name {name}/recipe.py instead."
    for key, value in given.items():
        if value not in (None, (), 1):
            flag = {"sets": "--set", "more": "--cfg-options"}.get(key, f"--{key.replace('_', '-')}")
            raise UsageError(f"{flag} is about recipes, and {name!r} is {what}", where=flag, fix=fix)


def machines(
    gpus: int | None, gpu: str | None, nodes: int, file: LaunchFlags | None = None
) -> tuple[Hardware, Topology]:
    """Return the machines that the flags mean, where they are silent this one with what its launch variables say.

    Args:
        file: What the DeepSpeed config says of the launch, where it is one that does.

    Raises:
        UsageError: --gpus without a GPU here or a name, an unknown name, or launch variables that contradict.
    """
    from tuner.machine import hardware
    from tuner.machine.launchers import filled, resolve
    from tuner.machine.topology import LaunchFlags, Topology

    here = hardware.detect(os.environ)
    if gpus is None and gpu is None and nodes == 1:
        return here, resolve(filled(LaunchFlags(), file, os.environ), os.environ, len(here.gpus))
    if gpu is None and not here.gpus:
        raise UsageError("no GPU is here, so its kind must be said", where="--gpus", fix="Add: --gpu a100-80g.")
    made = node(here, gpus, known_gpu(gpu) if gpu else None)
    return made, Topology("torchrun", nodes, 0, len(made.gpus), nodes * len(made.gpus))


def planned(request: Request, gpus: int | None, gpu: str | None, nodes: int) -> ResolvedRun:
    """Return what would run on the machines that the flags mean.

    Raises:
        TunerError: it would not.
    """
    from datetime import datetime

    from tuner.launch.resolve import resolve_run
    from tuner.machine import hardware

    now = datetime.now().astimezone()
    if (gpus, gpu, nodes) == (None, None, 1):
        return resolve_run(request, dict(os.environ), hardware.detect(os.environ), now)
    made, topology = machines(gpus, gpu, nodes)
    return resolve_run(request, dict(os.environ), made, now, topology)


def lacks(document: Document) -> list[TunerError]:
    """Return what this machine lacks for a DeepSpeed config by itself."""
    from tuner.launch.checks import zero
    from tuner.machine import hardware
    from tuner.zero.conflicts import check_device
    from tuner.zero.lint import inspect

    here, value, found = hardware.detect(os.environ), inspect(document)[0].value, []
    try:
        check_device(value, here.device, document.where)
    except TunerError as error:
        found.append(error)
    return [*found, *zero.lacks(value, here, os.environ, document.where)]


def node(here: Hardware, gpus: int | None, kind: Gpu | None) -> Hardware:
    """Return one node as the flags mean it: so many GPUs of a kind, where they are silent those that are here."""
    from dataclasses import replace

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
    from tuner.fit import gpu_catalog
    from tuner.machine.hardware import Gpu

    product = gpu_catalog.find(name)
    return Gpu(gpu_catalog.spelled(name), product.memory_bytes, product.compute_capability)


def config_section(document: Document) -> Section:
    """Return a DeepSpeed config as it is written, each value with its line and column."""
    from tuner.recipes.diff import Section
    from tuner.recipes.merging import leaves
    from tuner.recipes.origin import Origin

    origins = {key: Origin(document.place(tuple(key.split(".")))) for key, _ in leaves(document.value)}
    return Section(document.value, origins)


def run_section(path: Path) -> Section:
    """Return the versions, the hardware and the geometry of a run.

    Raises:
        RunDirectoryError: run.json cannot be read.
    """
    from tuner.recipes.diff import Section
    from tuner.recipes.merging import leaves
    from tuner.recipes.origin import Kind, Origin, Place
    from tuner.runs.directory import RunDirectory

    run = RunDirectory(path)
    facts = run.read_json(run.run)
    values = {key: facts[key] for key in _RUN_FACTS if key in facts}
    return Section(values, {key: Origin(Place(Kind.DERIVED, str(run.run))) for key, _ in leaves(values)})
