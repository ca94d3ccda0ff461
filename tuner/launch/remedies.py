"""What can be changed after a run failed: settings that need less memory, and for each cause the next command.

It returns changes and texts; it starts nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from tuner.errors import Option
from tuner.fit.advice import smaller_batches
from tuner.launch.pins import Pins
from tuner.launch.resolved_run import Request
from tuner.machine.hostfile import NODE
from tuner.machine.topology import Topology
from tuner.recipes.schema import RecipeConfig
from tuner.runs.causes import GPU_MEMORY, HOST_MEMORY, NOT_A_NUMBER, SHARED_MEMORY
from tuner.runs.records import HOSTFILE_FLAGS
from tuner.runs.resume_point import share_states
from tuner.zero import presets

_OFFLOADS = {GPU_MEMORY: True, HOST_MEMORY: False}
"""Causes after which a change that needs less memory may help, and whether offloading to the host may."""
_LESS_LR = 0.1
ON_OOM = str(Option("on_oom", "retry"))


def lighter(config: RecipeConfig, level: str, world_size: int, cause: str) -> Pins | None:
    """Return what makes a run lighter that ran out of memory, or None: no change is left, or the cause is another.

    Half the micro-batch with the same global batch comes first, then recomputation, then the next level. Each change
    shrinks the micro-batch, recomputes or climbs the levels, so a run is made lighter a finite number of times.
    """
    if cause not in _OFFLOADS:
        return None
    smaller = _smaller_batch(config)
    if smaller:
        return Pins(ON_OOM, smaller)
    if cause == GPU_MEMORY and config.split.keeps_layers:
        return Pins(ON_OOM, {"train_cfg.gradient_checkpointing": True, "train_cfg.recomputed_layers": None})
    higher = _next_level(level, world_size, offload=_OFFLOADS[cause])
    return Pins(ON_OOM, level=higher) if higher else None


def _smaller_batch(config: RecipeConfig) -> dict[str, int]:
    micro = config.split.micro_batch
    halves = [pair for pair in smaller_batches(config) if pair[0] <= micro // 2]
    size, accumulation = max(halves, default=(micro, 0))
    validation = config.val_dataloader.micro_batch if config.val_dataloader else 1
    batch = {"train_dataloader.batch_size": size, "optim_wrapper.accumulative_counts": accumulation} if halves else {}
    return {**batch, "val_dataloader.batch_size": size} if validation > size else batch


def _next_level(level: str, world_size: int, *, offload: bool) -> str | None:
    """Return the first rung of `auto` that shards or offloads more and does no less of the other; a JSON has none.

    Args:
        offload: Whether offloading to the host may help.
    """
    if level not in presets.names():
        return None
    current = presets.find(level)
    for rung in presets.rungs():
        shards = rung.stage > current.stage and world_size > 1  # sharding needs several ranks
        offloads = not current.offloaded and bool(rung.offloaded)
        # Without the host's memory to spare, a level may leave offloading.
        is_less = rung.stage >= current.stage and (bool(rung.offloaded) or not current.offloaded or not offload)
        if (shards or offloads) and is_less and (offload or not rung.offloaded):
            return rung.name
    return None


def node_flags(request: Request, environ: Mapping[str, str], topology: Topology, num_gpus: int) -> list[str]:
    """Return the flags that start each node of a run anew, besides its rank; none where tuner does not start its ranks.

    With --hostfile one launcher starts the nodes, so they are as typed; else they are those of the nodes that meet.
    """
    if not topology.is_supervised or (topology.nnodes == "1" and NODE not in environ):
        return []
    typed = dict(_flags(request.command))
    restarts = {"--max-restarts": str(request.max_restarts)} if request.max_restarts else {}
    if NODE in environ:
        kept = {name: value for name, value in typed.items() if name in HOSTFILE_FLAGS}
        flags = {**kept, "--hostfile": str(Path(typed["--hostfile"]).absolute())} if "--hostfile" in typed else kept
    elif request.flags.launcher == "env":  # a pod has the rest in its variables
        flags = {"--launcher": "env"}
    else:
        port, nproc = str(topology.master_port), str(topology.nproc_per_node)
        flags = {"--nnodes": topology.nnodes, "--master-addr": str(topology.master_addr), "--master-port": port}
        flags |= {"--nproc-per-node": nproc} if topology.nproc_per_node != max(num_gpus, 1) else {}
    return [f"{name}={value}" for name, value in {**flags, **restarts}.items()]


def _flags(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the flags of a command with their values, with dashes for underscores; the last of one counts."""
    for word, following in zip_longest(command, command[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            yield name.replace("_", "-"), value if equals else following


def commands(
    command: Sequence[str],
    config: RecipeConfig,
    level: str,
    topology: Topology,
    num_gpus: int,
    run_path: Path,
    node_flags: Sequence[str] = (),
) -> dict[str, str]:
    """Return the next command to type by cause; 'again' resumes the run without a change.

    Args:
        level: The level that ran, or the path of a user's JSON.
        num_gpus: The GPUs of this machine: the number of ranks that start by default.
        node_flags: Those of `node_flags`. What a node has to add to them, `RunRecord.on_node` knows.
    """
    names = [flag.partition("=")[0] for flag in node_flags]
    again = _without(command, "--resume", "--work-dir", "--output-dir", *names, *(["--node-rank"] if names else []))
    again += node_flags
    if topology.is_supervised and not names and topology.nproc_per_node != max(num_gpus, 1):
        again = [*_without(again, "--nproc-per-node"), "--nproc-per-node", str(topology.nproc_per_node)]
    goes_on = ["--work-dir", str(run_path), "--resume", "auto"]
    typed_next = {"again": [*again, *goes_on]}
    for cause in _OFFLOADS:
        change = lighter(config, level, topology.world_size, cause)
        if change:
            typed = _without(again, "--deepspeed") if change.level else again
            shared = not change.level or share_states(presets.find(level).stage, presets.find(change.level).stage)
            alone = [] if shared or "--resume-weights" in again else ["--resume-weights"]
            typed_next[cause] = [*typed, *goes_on, *alone, *change.flags]
    slower = f"optim_wrapper.optimizer.lr={config.optim_wrapper.optimizer.lr * _LESS_LR:g}"
    typed_next[NOT_A_NUMBER] = [*again, *goes_on, "--set", slower]
    if config.train_dataloader.num_workers:
        typed_next[SHARED_MEMORY] = [*again, *goes_on, "--set", "train_dataloader.num_workers=0"]
    return {cause: shlex.join(words) for cause, words in typed_next.items()}


def for_lost_node_0(again: str, topology: Topology, hosts: Sequence[str], run_path: Path) -> str:
    """Return what to type when node 0 is lost: the other nodes call its address, and its process holds the run.

    Args:
        hosts: Those of the hostfile; its launcher starts a lost node again. Empty without a hostfile.
    """
    address = topology.master_addr
    if not hosts:
        return (
            f"Node 0 must come back at {address}, on its host or on one that has this address now. Type there: {again}"
        )
    words = shlex.split(again)
    flags = dict(_flags(words))
    elsewhere = ["--resume", str(run_path), "--work-dir", f"{run_path}-2"]
    # Without spare hosts there is one node less; with them, the start leaves out a host that does not answer.
    fewer: dict[str, str] = {}
    if "--spare-nodes" not in flags:
        if "--include" in flags:
            kept = [entry for entry in flags["--include"].split("@") if entry.partition(":")[0] != hosts[0]]
            fewer["--include"] = "@".join(kept)
        else:
            left_out = filter(None, flags.get("--exclude", "").split("@"))
            kept = [entry for entry in left_out if entry.partition(":")[0] != hosts[0]]
            fewer["--exclude"] = "@".join((*kept, hosts[0]))
        if topology.min_nodes:
            max_nodes = topology.max_nodes - 1
            fewer["--nnodes"] = f"{min(topology.min_nodes, max_nodes)}:{max_nodes}"
    changed = ("--resume", "--work-dir", "--master-addr", *fewer)
    fewer_flags = [f"{name}={value}" for name, value in fewer.items()]
    typed = shlex.join([*_without(words, *changed), *fewer_flags, *elsewhere])
    return (
        f"Node 0 is started again when {hosts[0]} answers. To go on without this host, stop the run and type: {typed}"
    )


def _without(command: Sequence[str], *flags: str) -> list[str]:
    """Return a command without some flags and their values; underscores in a flag count as dashes."""
    kept: list[str] = []
    is_value = False
    for word in command:
        name, equals, _ = word.partition("=")
        is_flag = name.startswith("--") and name.replace("_", "-") in flags
        if is_value or (is_flag and not equals):
            is_value = not is_value
        elif not is_flag:
            kept.append(word)
    return kept
