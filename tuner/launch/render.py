"""A resolved run as text: the command of the ranks, their environment, and the files of the run directory.

It decides nothing about training, and it writes and starts nothing.
"""

from __future__ import annotations

import sys

from tuner import __version__, assets
from tuner.assets import WORKER
from tuner.files import dump_json, read_json_object
from tuner.launch import memory, promised, remedies
from tuner.launch.resolved_run import ResolvedRun
from tuner.machine.hardware import tool_path
from tuner.machine.kernel import short_spins
from tuner.machine.libraries import versions
from tuner.machine.slurm import Job
from tuner.machine.topology import AGENT_STORE, SUPERVISED, Topology
from tuner.recipes import model_facts
from tuner.recipes.schema import Model, resolved_document
from tuner.runs import restarts
from tuner.runs.directory import RunDirectory
from tuner.runs.records import BatchCounts, FitBytes, HardwareFacts, PrecisionRecord, RunRecord
from tuner.zero.config import swap_paths

_UNSAFE_LOAD = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_ALLOCATOR = "PYTORCH_ALLOC_CONF"
_ALLOCATORS = (_ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Every name that torch 2.9 to 2.13 reads settings of CUDA's allocator from; of two that are set, an older one may win.

Source: torch, c10/cuda/CUDAAllocatorConfig.h and c10/core/AllocatorConfig.h.
"""


def argv(run: ResolvedRun) -> list[str]:
    """Return the command of each rank that this process starts or becomes."""
    return [sys.executable, "-m", WORKER, str(run.run_path)]


def environment(run: ResolvedRun) -> dict[str, str]:
    """Return the variables that ranks get in addition to those of this process."""
    environ = run.environ
    env = {
        # A torch.py or datasets.py in the working directory must not be imported in place of the real one.
        "PYTHONSAFEPATH": "1",
        "DS_ACCELERATOR": run.hardware.device,
        "TOKENIZERS_PARALLELISM": "false",
        # Checkpoints are pickles: torch.load must never run code from them.
        "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
    }
    if run.topology.is_supervised:
        env[SUPERVISED] = "1"
    if _UNSAFE_LOAD in environ:
        env[_UNSAFE_LOAD] = "0"
    env |= {name: value for name, value in _defaults(run).items() if name not in environ}
    env |= _rendezvous(run.topology)
    if run.topology.launcher == "mpi":
        env["TERM"] = "dumb"  # Open MPI gives each rank a terminal (4.1), also where its own output goes into a file
    if run.topology.launcher == "env":  # which `variables.without_leftovers` removes
        env |= {name: environ[name] for name in (AGENT_STORE,) if name in environ}
    path = tool_path(environ)
    return env if path == environ.get("PATH") else {**env, "PATH": path}


def _defaults(run: ResolvedRun) -> dict[str, str]:
    """Return variables that keep the user's value if they are set."""
    defaults = {"OMP_NUM_THREADS": str(max(1, run.hardware.num_cpus // run.topology.nproc_per_node))}
    if run.hardware.device == "cpu":
        defaults |= short_spins(run.environ)
    if run.hardware.device == "cuda" and not any(name in run.environ for name in _ALLOCATORS):
        # Batches of different lengths leave holes that a segment of fixed size cannot give to a longer one.
        defaults[_ALLOCATOR] = "expandable_segments:True"
    if run.hardware.has_nvidia:
        # The order in which NVML, and so the plan, counts GPUs; CUDA's own puts the fastest first.
        defaults["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return defaults


def _rendezvous(topology: Topology) -> dict[str, str]:
    """Return the variables that torchrun would set: where the ranks meet, and which rank this process becomes."""
    rank_env = {} if topology.rank is None else {"RANK": str(topology.rank), "LOCAL_RANK": str(topology.local_rank)}
    return rank_env | {
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_WORLD_SIZE": str(topology.nproc_per_node),
        "MASTER_ADDR": str(topology.master_addr),
        "MASTER_PORT": str(topology.master_port),
    }


def of_ranks(topology: Topology) -> list[dict[str, str]]:
    """Return the variables of each rank that this process starts itself, in addition to `environment`."""
    return [{"RANK": str(rank), "LOCAL_RANK": str(at)} for at, rank in enumerate(topology.local_ranks)]


def files(run: ResolvedRun) -> dict[str, str]:
    """Return the run directory's files by name. The ranks read all of them but recipe.py, which is for people."""
    line = f" The recipe of this run: the values of {run.recipe.name} with the changes of the command line."
    return {
        "recipe.py": run.recipe_as_run.standalone(line),
        "recipe.json": dump_json(resolved_document(run.recipe_as_run.config)),
        "deepspeed.json": dump_json(run.final.config),
        "run.json": dump_json(_record(run).to_json()),
    }


def _record(run: ResolvedRun) -> RunRecord:
    import platform  # a dry run writes no files

    request, config, point, job = run.request, run.recipe.config, run.resume, Job.of(run.environ)
    # A start from Python has no command: recipe.py holds all its overrides.
    typed = request.command or ("tuner", "train", str(RunDirectory(run.run_path).recipe))
    num_gpus = len(run.hardware.gpus)
    flags = remedies.node_flags(request, run.environ, run.topology, num_gpus)
    return RunRecord(
        name=run.recipe.name,
        launch_id=run.launch_id,
        started=run.started.isoformat(timespec="seconds"),
        command=list(request.command),
        argv=argv(run),
        node_flags=flags,
        next=remedies.commands(typed, config, run.level, run.topology, num_gpus, run.run_path, flags),
        attempts=list(request.attempts),
        follows_failure=bool(request.attempts or (job and restarts.of_job(RunDirectory(run.run_path), job.id))),
        seed=config.randomness.seed,
        deepspeed=run.level,
        precision=PrecisionRecord(dtype=run.precision.dtype, reason=run.precision.reason),
        resume=str(point.path) if point else None,
        resume_as=point.load_as if point else None,
        resume_step=point.checkpoint.step if point else None,
        world_size=run.topology.world_size,
        num_nodes=run.topology.num_nodes,
        batch=batch_counts(run),
        state=run.state,
        bind_cores=request.bind_cores,
        saves_result=request.saves_result,
        needs_bitsandbytes=config.needs_bitsandbytes or _is_stored_in_fewer_bits(config.model),
        swaps_to=swap_paths(run.final.config),
        arithmetic=memory.arithmetic(config, run.hardware, run.precision.dtype),
        planned=promised.of(run),
        fit=FitBytes.model_validate(run.fit.to_json()) if run.fit else None,
        warnings=list(run.warnings),
        hardware=HardwareFacts.model_validate(run.hardware.to_json()),
        versions={"tuner": __version__, "python": platform.python_version(), **versions()},
        platform=platform.platform(),
        interpreter=sys.executable,
    )


def _is_stored_in_fewer_bits(model: Model) -> bool:
    """Return whether a model's weights may be quantized already; True if its config.json is not here."""
    if str(model.path).startswith(assets.ASSET):
        return False
    folder = model_facts.folder_of(str(model.path), model.revision)
    return folder is None or "quantization_config" in read_json_object(folder / "config.json")


def batch_counts(run: ResolvedRun) -> BatchCounts:
    """Return the batch arithmetic: counts of rows and samples of an epoch, and of optimizer steps."""
    batch, cfg, steps = run.batch, run.recipe.config.train_cfg, run.steps
    return BatchCounts.model_validate(
        {
            **batch._asdict(),
            "global_batch": batch.global_batch,
            **steps.to_json(),
            "epochs": cfg.max_epochs,
            "max_steps": cfg.max_steps,
            "steps_done": steps.done,
            "steps_left": steps.left,
        }
    )
