"""What can be changed after a run failed: settings that need less memory, and for each cause the next command.

It returns changes and texts; it starts nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from tuner.errors import Option
from tuner.fit.advice import smaller_batches
from tuner.launch.pins import Pins
from tuner.machine.topology import Topology
from tuner.recipes.schema import RecipeConfig
from tuner.runs.causes import GPU_MEMORY, HOST_MEMORY, NOT_A_NUMBER, SHARED_MEMORY
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
    size, more = max(halves, default=(micro, 0))
    validation = config.val_dataloader.micro_batch if config.val_dataloader else 1
    batch = {"train_dataloader.batch_size": size, "optim_wrapper.accumulative_counts": more} if halves else {}
    return {**batch, "val_dataloader.batch_size": size} if validation > size else batch


def _next_level(level: str, world_size: int, *, offload: bool) -> str | None:
    """Return the first rung of `auto` that shards or offloads more and does no less of the other; a JSON has none.

    Args:
        offload: Whether offloading to the host may help.
    """
    if level not in presets.names():
        return None
    here = presets.find(level)
    for there in presets.rungs():
        shards = there.stage > here.stage and world_size > 1  # sharding needs several ranks
        offloads = not here.offloaded and bool(there.offloaded)
        # Without the host's memory to spare, a level may leave offloading.
        is_less = there.stage >= here.stage and (bool(there.offloaded) or not here.offloaded or not offload)
        if (shards or offloads) and is_less and (offload or not there.offloaded):
            return there.name
    return None


def commands(
    command: Sequence[str], config: RecipeConfig, level: str, topology: Topology, num_gpus: int, run_path: Path
) -> dict[str, str]:
    """Return the next command to type by cause; 'again' resumes the run without a change.

    Args:
        command: The command that started the run.
        level: The level that ran, or the path of a user's JSON.
        num_gpus: The GPUs of this machine: the number of ranks that start by default.
    """
    again = _without(command, "--resume", "--work-dir", "--output-dir")
    if topology.is_supervised and topology.nproc_per_node != max(num_gpus, 1):
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
        again: Its command, which resumes the run.
        hosts: Those of the hostfile, whose launcher starts a lost node again; empty: there is none.
    """
    words, address = shlex.split(again), topology.master_addr
    if not hosts:
        is_known = any(word.partition("=")[0] in ("--node-rank", "--launcher") for word in words)
        typed = again if is_known else f"NODE_RANK=0 {again}"
        return (
            f"Node 0 must come back at {address}, on its host or on one that has this address now. Type there: {typed}"
        )
    elsewhere = ["--resume", str(run_path), "--work-dir", f"{run_path}-2"]
    # Without spare hosts there is one node less; with them, the start leaves out a host that does not answer.
    left_out = [] if {"--spare-nodes", "--include", "--exclude"} & {*words} else ["--exclude", hosts[0]]
    typed = shlex.join([*_without(words, "--resume", "--work-dir", "--master-addr"), *left_out, *elsewhere])
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
