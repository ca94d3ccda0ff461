"""What the operating system and the installation give a run: libraries, what is compiled, its port, open files.

It holds the port for an instant and changes nothing else.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tuner.errors import MachineError, TunerError
from tuner.launch import builds
from tuner.launch.checks import Finding
from tuner.launch.run import ResolvedRun
from tuner.machine import libraries, slurm, variables
from tuner.machine.topology import AGENT_STORE
from tuner.recipes.schema import BITSANDBYTES_OPTIMIZERS

_LIBRARIES = ("torch", "transformers", "trl", "peft", "deepspeed", "datasets", "accelerate", "bitsandbytes", "numpy")
_DEEPSPEED_ENV = ".deepspeed_env"
"""Variables that DeepSpeed's own launcher hands to its ranks, from the working directory or the home folder."""
_FEWEST_FILES = 48
"""Measured: one rank trains with so many, and with 12 torchrun waits for its own store for minutes."""
_FILES_OF_A_RANK = 256
_FILES_OF_A_WORKER = 32
"""Pipes, semaphores and the shared tensors of the batches in flight."""


def installed(run: ResolvedRun) -> Iterator[Finding]:
    """Find libraries that are missing, too old or at odds, and trackers and optimizers without their package."""
    config = run.recipe.config
    yield from libraries.problems(quantized=config.quantization is not None, needs_cuda=run.hardware.has_nvidia)
    for tracker in config.log.trackers:
        yield from _missing(tracker, f"log.trackers = {tracker!r}")
    if config.optim_wrapper.optimizer.type in BITSANDBYTES_OPTIMIZERS:
        yield from _missing("bitsandbytes", "optim_wrapper.optimizer.type")


def notifies(run: ResolvedRun) -> Iterator[Finding]:
    """Find no command of log.notify's name: at the run's end, perhaps days later, it is too late to correct it."""
    for program in run.recipe.config.log.command[:1] if run.topology.leads else ():
        if shutil.which(program, path=run.environ.get("PATH")) is None:
            yield MachineError(f"no command {program!r}", where="log.notify", fix="Install it, or write its full path.")


def _missing(package: str | None, where: str) -> Iterator[Finding]:
    if package and importlib.util.find_spec(package) is None:
        yield MachineError(
            f"{package} is not installed", where=where, fix=f"Install it (pip install {package}) or switch it off"
        )


def compiles(run: ResolvedRun) -> Iterator[Finding]:
    """Tell what DeepSpeed compiles for this run before it starts; a start says so itself, when it does it."""
    if ops := builds.missing(run):
        yield f"{builds.foretold(ops)}."


def shadows(run: ResolvedRun) -> Iterator[Finding]:
    """Find what can put other modules or variables into a run than those that are installed and set."""
    from tuner.machine.hostfile import NODE  # a dry run does not ask

    if folders := [folder for folder in run.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]:
        places = [(name, Path(folder) / name) for name in _LIBRARIES for folder in folders]
        hidden = [name for name, place in places if place.with_suffix(".py").is_file() or place.is_dir()]
        what = f", and finds {', '.join(hidden)} there" if hidden else ""
        yield f"PYTHONPATH is set: Python looks for modules in {', '.join(folders)} first{what}."
    for folder in dict.fromkeys((Path.cwd(), Path(run.environ.get("HOME") or Path.cwd()))):
        if (folder / _DEEPSPEED_ENV).is_file() and NODE not in run.environ:
            yield f"{folder / _DEEPSPEED_ENV} is ignored: tuner reads it only with --hostfile and several hosts."


def forgotten_nodes(run: ResolvedRun) -> Iterator[Finding]:
    """Find a run on one node in a job that has several."""
    if run.topology.num_nodes > 1:
        return
    nodes = slurm.num_nodes_outside_srun(run.environ)
    if nodes > 1:
        all_of_them = "srun ... tuner train ... --launcher slurm uses all"
        yield f"this Slurm job has {nodes} nodes, and the run uses one: {all_of_them}."
    with suppress(TunerError):  # half of what a cluster says is --launcher env's to refuse
        of_cluster = variables.nodes(run.environ).get("--nnodes", {})
        for name, number in of_cluster.items():
            if number != "1" and run.topology.launcher != "env":
                yield f"{name} is {number} nodes, and the run uses one: --launcher env uses all."


def port(run: ResolvedRun) -> Iterator[Finding]:
    """Find the master port taken by another process; the leader alone listens on it."""
    number = run.topology.master_port
    if number is None or not run.topology.leads or (run.topology.launcher == "env" and AGENT_STORE in run.environ):
        return
    import socket  # a dry run does not ask

    with socket.socket() as listener:
        # As torch's store does it: a port that a finished run left in TIME_WAIT is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", number))
            listener.listen()
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            what = f"cannot listen on port {number}: {os.strerror(error.errno)}"
            fix = f"Use another one on all nodes, such as --master-port {max(number, 1024) + 1}."
            yield MachineError(what, where="--master-port / MASTER_PORT / PORT", fix=fix)


def open_files(run: ResolvedRun) -> Iterator[Finding]:
    """Find a limit of open files under which nothing starts, or that many dataloader workers reach."""
    workers = sum(loader.num_workers for loader in run.recipe.config.loaders.values())
    needed, (soft, hard) = _FILES_OF_A_RANK + _FILES_OF_A_WORKER * workers, resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = f"ulimit -n {needed}" if hard == resource.RLIM_INFINITY or hard >= needed else "fewer workers"
        what = f"a process may open {soft} files, and one with {workers} dataloader workers needs {needed}"
        fix = f"Raise both limits: ulimit -n {needed}."
        yield MachineError(what, where="ulimit -n", fix=fix) if soft < _FEWEST_FILES else f"{what}: {raised}."
