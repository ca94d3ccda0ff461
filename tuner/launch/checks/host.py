"""What the machine gives a run: room on disks and in memory, installed libraries, its port, open files, its health.

Sizes come from `fit`. It looks at file systems and holds the port for an instant; it changes nothing else.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import resource
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tuner import paths
from tuner.errors import DiskError, Key, MachineError, Option, TunerError
from tuner.files import sized
from tuner.fit.estimate import PROCESS_BYTES, peak, state_bytes
from tuner.fit.levels import Costs
from tuner.fit.parameters import count, has_formula, num_parameters
from tuner.launch.checks import Finding
from tuner.launch.resolved_run import ResolvedRun
from tuner.machine import clusters, hardware, health, libraries, slurm
from tuner.machine.hostfile import NODE
from tuner.machine.kernel import parents_words
from tuner.machine.ports import listening
from tuner.machine.topology import AGENT_STORE
from tuner.recipes.schema import PREFETCHED
from tuner.runs.checkpoints import unfinished
from tuner.runs.directory import RunDirectory
from tuner.runs.resume_point import ResumePoint

SHM = Path("/dev/shm")  # noqa: S108 (asked for its size)
_NCCL_SHM_BYTES = 1024**3
"""Source: NVIDIA, NCCL User Guide, "Troubleshooting", "Shared memory": docker run --shm-size=1g."""
_BYTES_OF_WEIGHT = 2
"""Published LLMs have 16 bits a weight."""
_BATCH_BYTES_A_TOKEN = 3 * 8
"""input_ids, labels and positions, as int64."""

_MORE_ROOM = f"Free space, choose another {Option('work_dir')}"


def checkpoints(run: ResolvedRun) -> Iterator[Finding]:
    """Find a disk without room for the checkpoints that are kept, one more being written, and the result."""
    sizes = checkpoint_bytes(run) if run.topology.leads else None
    if sizes is None:
        return
    of_one, final = sizes
    number = num_checkpoints(run)
    needed, free, existing_folder = of_one * number + final, _free(run), existing(run.run_path)
    if free < needed:
        files = f"{number} checkpoints of {sized(of_one)} and the result"
        message = f"{sized(free)} are free, and {files} need {sized(needed)}"
        fix = f"{_MORE_ROOM}."
        if number > 2:  # one is kept, and another is being written
            fix = f"{_MORE_ROOM}, or keep fewer: {Key('checkpoint.max_keep_ckpts', 1)}."
        yield DiskError(message, where=existing_folder, fix=fix)


def conversion(run: ResolvedRun) -> Iterator[Finding]:
    """Find a disk without room for the checkpoint that is resumed from, written once more as these ranks load it."""
    point = run.resume
    if point is None or not run.topology.leads or point.folder(RunDirectory(run.run_path)).is_dir():
        return
    max_bytes, kept_bytes = _conversion_bytes(run, point)
    sizes, existing_folder = checkpoint_bytes(run), existing(run.run_path)
    # It stays until the next checkpoint is whole.
    needed, free = max(max_bytes, kept_bytes + (sizes[0] if sizes else 0)), _free(run)
    if free < needed:
        message = f"{sized(free)} are free, and converting {point.path.name} for these ranks needs {sized(needed)}"
        saved, fix = point.checkpoint.facts.state, f"{_MORE_ROOM}."
        if saved:
            savers = f"{saved.world_size} ranks and {Option('deepspeed', saved.deepspeed)}"
            fix = f"{_MORE_ROOM}, or use the {savers} that saved it."
        yield DiskError(f"{message}, until the next one is saved", where=existing_folder, fix=fix)


def joined_model(run: ResolvedRun) -> Iterator[Finding]:
    """Find a disk without room for the folder in which an LLM and a vision tower are joined.

    If the cache holds such a folder, it may be that of this run.
    """
    architecture, cache = run.recipe.config.architecture, paths.cache(run.environ)
    if run.recipe.config.model.vision is None or architecture is None or not has_formula(architecture):
        return
    needed, free = num_parameters(architecture) * _BYTES_OF_WEIGHT, shutil.disk_usage(existing(cache)).free
    if free >= needed:
        return
    message = f"{sized(free)} are free, and the joined model needs {sized(needed)}"
    if any(cache.glob("llava-v*")):
        yield f"{cache}: {message}, unless it is there already."
    else:
        yield DiskError(message, where=cache, fix="Free space, or set TUNER_CACHE to a folder on another disk.")


def _conversion_bytes(run: ResolvedRun, point: ResumePoint) -> tuple[float, float]:
    """Return the most bytes that a conversion takes while it is made, and what it leaves.

    DeepSpeed 0.19.8 cuts all states into pieces before it puts them together: twice their size. The weights alone are
    fp32.
    """
    states = sum(path.stat().st_size for path in point.path.rglob("*_optim_states.pt"))
    if point.is_redistributed:
        return 2 * states, states
    states = states or sum(path.stat().st_size for path in point.path.rglob("*_model_states.pt"))
    weights = states * 4 / (4 + state_bytes(run.recipe.config))
    return weights, weights


def _free(run: ResolvedRun) -> int:
    free, folder = shutil.disk_usage(existing(run.run_path)).free, RunDirectory(run.run_path).checkpoints
    if not folder.is_dir():
        return free
    # Files left by a killed save are removed before the next save.
    return free + sum(path.stat().st_size for path in unfinished(folder).rglob("*") if path.is_file())


def checkpoint_bytes(run: ResolvedRun) -> tuple[float, float] | None:
    """Return the bytes of one checkpoint and of the result, without tokenizer; None if the model's size is unknown.

    A checkpoint holds the saved model (below stage 3 once more in DeepSpeed's own file), and the fp32 weights and
    optimizer states of the trained weights; in fp32 at stage 0 the weights are their own masters. With frozen layers it
    holds no model. Measured on DeepSpeed 0.19.8 and
    transformers 5.23, stages 0 to 3, full, LoRA and freeze.
    """
    config, architecture = run.recipe.config, run.recipe.config.architecture
    if architecture is None or not has_formula(architecture):
        return None
    trained = count(config, architecture).trainable
    width = run.precision.weight_bytes
    result = width * (trained if config.adapter else num_parameters(architecture))
    as_model = 0 if config.train_cfg.trainable_layers else result
    stage = Costs.of_config(run.final.config).stage
    in_states = 0 if stage == 3 else width * trained
    masters = 0 if stage == 0 and run.precision.dtype == "fp32" else 4
    return as_model + in_states + (masters + state_bytes(config)) * trained, result


def num_checkpoints(run: ResolvedRun) -> int:
    """Return how many checkpoints this run will have at once beside those of its directory that will be removed."""
    saving, steps = run.recipe.config.checkpoint, run.steps
    # The best one stays beside the newest, and one more is being written.
    room = saving.max_keep_ckpts + 1 + bool(saving.save_best)
    room -= len(list((run.run_path / "checkpoints").glob("checkpoint-*")))
    if steps.total.most is not None and not saving.save_best:  # and one at the end
        interval = saving.interval_of(steps.total.most)
        room = min(room, steps.total.most // interval - steps.done // interval + 1)
    return max(1, room)


def shared_memory(run: ResolvedRun) -> Iterator[Finding]:
    """Find a /dev/shm too small for the batches of dataloader workers, or for NCCL between GPUs."""
    if not SHM.is_dir():
        return
    free, ranks = shutil.disk_usage(SHM).free, run.topology.nproc_per_node
    needed = ranks * sum(
        loader.num_workers * PREFETCHED * loader.micro_batch * loader.dataset.max_length * _BATCH_BYTES_A_TOKEN
        for loader in run.recipe.config.loaders.values()
    )
    if needed > free:
        batches = "the batches of the dataloader workers"
        message = f"{sized(free)} of shared memory are free, and {batches} need {sized(needed)}"
        fix = f"Use {Key('train_dataloader.num_workers', 0)}, or enlarge it: docker run --shm-size=8g, or --ipc=host."
        yield MachineError(message, where=SHM, fix=fix)
    elif run.hardware.gpus and ranks > 1 and free < _NCCL_SHM_BYTES:
        yield (
            f"{SHM} has {sized(free)} free, and NCCL needs up to 1 GiB between GPUs without a "
            "link: docker run --shm-size=1g, or --ipc=host."
        )


def host_memory(run: ResolvedRun) -> Iterator[Finding]:
    """Find a host with less memory than the run needs: an error on a CPU, otherwise a warning."""
    config, ram_bytes, needed = run.recipe.config, run.hardware.host_memory_bytes, host_bytes(run)
    if needed is None or not ram_bytes:
        return
    if not run.hardware.gpus and needed > ram_bytes and not run.request.ignore_fit:
        lack = f"this run needs at least {sized(needed)} of RAM, and this machine has {sized(ram_bytes)}"
        fix = "Use a GPU or a smaller model" + (" (it uses LoRA already)." if config.adapter else ", or LoRA.")
        yield MachineError(f"not enough memory: {lack}", fix=f"{fix} To start anyway: {Option('ignore_fit', True)}.")
        return
    free = hardware.available_host_bytes()
    if free is not None and free < needed <= ram_bytes:
        yield f"This run needs about {sized(needed)} of host memory, and {sized(free)} are free: close other programs."


def host_bytes(run: ResolvedRun) -> float | None:
    """Return the bytes of host memory that a run needs: from the fit, or all its states without a GPU."""
    if run.fit:
        return run.fit.peak.host_bytes
    config, architecture, topology = run.recipe.config, run.recipe.config.architecture, run.topology
    if run.hardware.gpus or architecture is None or not has_formula(architecture):
        return None
    costs, width = Costs.of_config(run.final.config), run.precision.weight_bytes
    needs = peak(config, architecture, costs, topology.world_size, topology.nproc_per_node, width)
    offloaded = needs.host.get("optimizer_states", 0.0) + needs.host.get("weights", 0.0)
    # Without a GPU the interpreter is all that a rank takes beside its states: a fourth of what it takes with CUDA.
    return topology.nproc_per_node * (needs.model_states + PROCESS_BYTES / 4) + offloaded


def existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that is there."""
    return next(folder for folder in itertools.chain((path,), path.absolute().parents) if paths.exists(folder))


_LIBRARIES = ("torch", "transformers", "trl", "peft", "deepspeed", "datasets", "accelerate", "bitsandbytes", "numpy")
_DEEPSPEED_ENV = ".deepspeed_env"
"""Variables that DeepSpeed's own launcher hands to its ranks, from the working directory or the home folder."""
_FEWEST_FILES = 48
"""Measured: one rank trains with this limit; with 12, it waits for torch's store for minutes."""
_FILES_OF_A_RANK = 256
_FILES_OF_A_WORKER = 32
"""Pipes, semaphores and the shared tensors of the batches in flight."""


def installed(run: ResolvedRun) -> Iterator[Finding]:
    """Find libraries that are missing, too old or at odds, and trackers and optimizers without their package."""
    config = run.recipe.config
    yield from libraries.problems(quantized=config.quantization is not None, needs_cuda=run.hardware.has_nvidia)
    for tracker in config.log.trackers:
        yield from _missing(tracker, f"log.trackers = {tracker!r}")
    if config.optim_wrapper.optimizer.facts.library == "bitsandbytes":
        yield from _missing("bitsandbytes", "optim_wrapper.optimizer.type")


def notifies(run: ResolvedRun) -> Iterator[Finding]:
    """Find a missing command of log.notify: at the end of the run it would be too late to correct it."""
    for program in run.recipe.config.log.command[:1] if run.topology.leads else ():
        if shutil.which(program, path=run.environ.get("PATH")) is None:
            yield MachineError(f"no command {program!r}", where="log.notify", fix="Install it, or write its full path.")


def _missing(package: str | None, where: str) -> Iterator[Finding]:
    if package and importlib.util.find_spec(package) is None:
        fix = f"Install it (pip install {package}) or switch it off"
        yield MachineError(f"{package} is not installed", where=where, fix=fix)


def shadows(run: ResolvedRun) -> Iterator[Finding]:
    """Find settings that bring other modules or variables into a run than the installed ones."""
    if folders := [folder for folder in run.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]:
        places = [(name, Path(folder) / name) for name in _LIBRARIES for folder in folders]
        hidden = [name for name, module in places if module.with_suffix(".py").is_file() or module.is_dir()]
        message = f", and finds {', '.join(hidden)} there" if hidden else ""
        yield f"PYTHONPATH is set: Python looks for modules in {', '.join(folders)} first{message}."
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
    with suppress(TunerError):  # `--launcher env` itself refuses incomplete variables
        of_cluster = clusters.nodes(run.environ).get("--nnodes", {})
        for name, number in of_cluster.items():
            if number != "1" and run.topology.launcher != "env":
                yield f"{name} is {number} nodes, and the run uses one: --launcher env uses all."


KEEPALIVE = {"oob_tcp_keepalive_time": 10, "oob_tcp_keepalive_intvl": 5, "oob_tcp_keepalive_probes": 3}


def lost_hosts(run: ResolvedRun) -> Iterator[Finding]:
    """Find an mpirun of Open MPI that would notice a host that is gone only after 8 minutes, or never.

    Source: `ompi_info --param oob tcp --level 9` of 4.1.4 and `prte_info --param oob tcp` of 5.0.11: 300 s, then 9
    times 20 s; a message that was sent before is repeated for longer. Seen: 4.1.4 was still there 150 s after a cut.
    With the options it ended after 19 s, and 5.0.11 after 21 s. There -mca is taken and changes nothing, and ranks are
    not told of --prtemca.
    """
    of_4 = any(name.startswith("OMPI_MCA_orte_") for name in run.environ)
    of_5 = "PRTE_LAUNCHED" in run.environ
    if run.topology.num_nodes == 1 or not (of_4 or of_5):
        return
    settings = " ".join(parents_words()) if of_5 else " ".join(run.environ)
    if not any(name in settings for name in KEEPALIVE):
        options = " ".join(f"{'--prtemca' if of_5 else '-mca'} {name} {value}" for name, value in KEEPALIVE.items())
        yield f"mpirun notices a host that is gone after 8 min or never. To end in half a minute: mpirun {options} ..."


_ENDING_S = 10.0
"""For processes of the attempt before, at a resume."""


def port(run: ResolvedRun) -> Iterator[Finding]:
    """Find the master port taken by another process; the leader alone listens on it."""
    number = run.topology.master_port
    if number is None or not run.topology.leads or (run.topology.launcher == "env" and AGENT_STORE in run.environ):
        return
    try:
        # What a rank had started may outlive it for some seconds, with the socket that it inherited.
        listening(number, "where ranks meet", _ENDING_S if run.request.resume else 0.0).close()
    except MachineError as error:
        yield error


def open_files(run: ResolvedRun) -> Iterator[Finding]:
    """Find a limit of open files that is too low to start, or too low for this number of dataloader workers."""
    workers = sum(loader.num_workers for loader in run.recipe.config.loaders.values())
    needed, (soft, hard) = _FILES_OF_A_RANK + _FILES_OF_A_WORKER * workers, resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = f"ulimit -n {needed}" if hard == resource.RLIM_INFINITY or hard >= needed else "fewer workers"
        message = f"a process may open {soft} files, and one with {workers} dataloader workers needs {needed}"
        fix = f"Raise both limits: ulimit -n {needed}."
        yield MachineError(message, where="ulimit -n", fix=fix) if soft < _FEWEST_FILES else f"{message}: {raised}."


def is_well(run: ResolvedRun) -> Iterator[Finding]:
    """Find ill GPUs, a folder that hangs, and a wrong clock; once on each node, by its name; also at each restart."""
    if run.topology.local_rank:
        return
    node, ailments = socket.gethostname(), health.gpus([gpu.uuid for gpu in run.hardware.gpus])
    with suppress(OSError):  # it cannot be written: the start tells why
        ailments += health.folder(existing(run.run_path))
    for ailment in ailments:
        problem = f"{node}: {ailment.what}"
        error = MachineError(problem, where="this node", fix=ailment.fix)
        yield error if ailment.is_fatal else f"{problem}. {ailment.fix}"
