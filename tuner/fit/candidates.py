"""Which ZeRO level and which split of a step to take: every pair is counted and timed, and one rule chooses.

A pair's memory is `estimate`'s, its time `step_time`'s. All commands choose with this module, so they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tuner.errors import TunerError
from tuner.fit.estimate import fit_on, frozen_bytes
from tuner.fit.levels import Costs, Fit, Machines
from tuner.fit.operations import of_step
from tuner.fit.parameters import built, count
from tuner.fit.step_time import Cluster, Operations, StepTime, Traffic, step_time, zero_traffic
from tuner.recipes.schema import RecipeConfig, Split, expert_parallel
from tuner.recipes.schema.architecture import Architecture
from tuner.recipes.schema.long_context import tokens_per_sample
from tuner.recipes.schema.tensor_parallel import of_fullest_rank

MARGIN = 0.1
"""The part of each GPU and host that stays free: fragmentation and contexts are known to a few per cent, and a step
that runs out of memory after an hour costs more than the last tenth would bring (docs/plan.md)."""
TIGHT = 0.05
"""The part that stays free if no candidate leaves `MARGIN`: estimates are right to a few per cent (docs/plan.md)."""
WORTH = 0.1
"""A higher level is taken only if its step is shorter by more than this part: the time is an estimate, which hides
ZeRO-3's communication behind all of the arithmetic."""
TOLERANCE = 0.1
"""An estimate that exceeds the memory by less than this part of it is a warning, no error: it may be wrong."""


class Candidate(NamedTuple):
    """A level with a split: the recipe with that split, the memory that it needs, and how long a step takes.

    Args:
        fit: What it needs; `fit.room` is the part of each GPU and host that stays free; below 0 it is missing.
        operations: What one rank computes and moves for a step.
        time: None if the speed of the GPUs is not known, or the level swaps: no model knows the speed of a disk.
        has_least_buckets: The level's last variant is taken: ranks send the least at a time.
    """

    config: RecipeConfig
    fit: Fit
    operations: Operations
    time: StepTime | None
    has_least_buckets: bool = True

    @property
    def level(self) -> str:
        return self.fit.level

    @property
    def split(self) -> Split:
        return self.config.split

    @property
    def sort_key(self) -> tuple[float, int]:
        """The best split of a level has the least; of equals the largest micro-batch: kernels start less often."""
        return self.time.total_s if self.time else self.operations.matmul_flops, -self.split.micro_batch

    def describe(self) -> str:
        """Return level, split and seconds, such as "deepspeed_zero3, 2 x 8 without recomputation, 1.06 s"."""
        seconds = f", {self.time.total_s:.2f} s" if self.time else ""
        recomputed = "with" if self.split.recompute else "without"
        if self.split.recomputed_layers is not None:
            recomputed = f"with {self.split.recomputed_layers} layers'"
        return f"{self.level}, {self.split.micro_batch} x {self.split.accumulation} {recomputed} recomputation{seconds}"


class Choice(NamedTuple):
    """The candidate to take, and why.

    Args:
        margin: The part of each GPU and host that all compared candidates leave free; 0 if that is no condition.
        runner_up: The best of the other levels that leave as much free.
    """

    taken: Candidate
    why: str
    margin: float = 0.0
    runner_up: Candidate | None = None

    def describe(self) -> str:
        """Return why it is taken, its seconds, and the best of the other levels."""
        if self.runner_up is None:
            return self.why
        seconds = f": {self.taken.time.total_s:.2f} s a step" if self.taken.time else ""
        return f"{self.why}{seconds}; next best: {self.runner_up.describe()}"


class Comparison(NamedTuple):
    """Candidates, and the one to take.

    Args:
        candidates: Level by level; in each level the split that needs the least memory is first.
        taken: That of `choice`, or the candidate that comes nearest to fitting.
        choice: None if nothing fits.
        refused: Why a run at a level would be refused with this recipe, by the level's name. Such a level is estimated,
            and never taken.
        sample_tokens: The mean length of a token's sample in packed rows; None: each row is one sample.
    """

    candidates: tuple[Candidate, ...]
    taken: Candidate
    choice: Choice | None
    refused: Mapping[str, TunerError]
    sample_tokens: float | None = None


def candidates(
    config: RecipeConfig,
    architecture: Architecture,
    machines: Machines,
    levels: Mapping[str, Sequence[Costs]],
    splits: Sequence[Split],
    cluster: Cluster | None,
    settle: Callable[[RecipeConfig, Costs], RecipeConfig] | None = None,
    *,
    sample_tokens: float | None = None,
) -> list[Candidate]:
    """Return every pair of a level and a split, level by level.

    Args:
        levels: The variants of each by its name, from the lowest level; of the variants the first that leaves `MARGIN`
            free is taken, or else the last.
        splits: As `splits.possible_splits` returns them.
        cluster: The speed of GPUs and network, which gives a step's seconds; None: it is not known.
        settle: Returns the recipe with what is decided for a split at a level, such as its loss.
        sample_tokens: As in `Comparison`.
    """
    pairs = []
    for name, variants in levels.items():
        for split in splits:
            of_split = config.with_split(split)
            for costs in variants:
                settled = settle(of_split, costs) if settle else of_split
                fit = fit_on(settled, architecture, name, costs, machines)
                if fit.room >= MARGIN:
                    break
            of_machines = machines.world_size, machines.weight_bytes
            operations = of_step(settled, architecture, fit.costs, *of_machines, sample_tokens=sample_tokens)
            time = None
            if cluster is not None and not fit.costs.swaps:
                volume = traffic(settled, architecture, machines, fit.costs)
                time = step_time(fit.costs, volume, operations, cluster)
            pairs.append(Candidate(settled, fit, operations, time, has_least_buckets=fit.costs == variants[-1]))
    return pairs


def choose(candidates: Sequence[Candidate]) -> Choice | None:
    """Return the candidate to take; None if none fits.

    Candidates without offloading come before all with it, offloading to the host's memory before swapping to disks, and
    then a candidate that leaves `MARGIN` free before one that leaves `TIGHT`. Of the levels that remain, each with its
    shortest step, the lowest is taken that no higher one beats by more than `WORTH`. If none leaves even `TIGHT` free,
    the candidate that leaves the most is taken.
    """
    fitting = [candidate for candidate in candidates if candidate.fit.fits]
    in_memory = [candidate for candidate in fitting if not candidate.fit.offloads]
    of_kind = in_memory or [candidate for candidate in fitting if not candidate.fit.costs.swaps] or fitting
    if not of_kind:
        return None
    for margin in (MARGIN, TIGHT):
        enough = [candidate for candidate in of_kind if candidate.fit.room >= margin]
        if enough:
            choice = _shortest(enough, margin)
            return choice if in_memory else choice._replace(why=f"nothing fits without offloading; {choice.why}")
    why = f"nothing leaves {TIGHT:.0%} of each GPU free, and this leaves the most"
    return Choice(max(of_kind, key=lambda candidate: candidate.fit.room), why)


def best_of_levels(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the best split of each level: the one that `choose` would take if there were no other level.

    Where nothing fits, it is the split that comes nearest.
    """
    of_level: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        of_level.setdefault(candidate.level, []).append(candidate)
    chosen = ((choose(several), several) for several in of_level.values())
    return [
        choice.taken if choice else max(several, key=lambda candidate: candidate.fit.room) for choice, several in chosen
    ]


def _shortest(candidates: Sequence[Candidate], margin: float) -> Choice:
    """Return the lowest level that no higher one beats by more than `WORTH`, with its best split."""
    best: dict[str, Candidate] = {}
    for candidate in candidates:
        best_of_level = best.get(candidate.level, candidate)
        best[candidate.level] = min(best_of_level, candidate, key=lambda other: other.sort_key)
    levels = [*best.values()]
    lowest, *higher = levels
    is_alone = lowest.fit.machines.world_size == 1  # one GPU shards nothing: all levels take the same time
    if not higher and not is_alone:
        return Choice(lowest, f"no other level leaves {margin:.0%} of each GPU free", margin)
    if is_alone or any(candidate.time is None for candidate in levels):
        why = f"the lowest level that leaves {margin:.0%} of each GPU free"
        return Choice(lowest, why, margin, None if is_alone else higher[0])
    taken = next(
        candidate
        for place, candidate in enumerate(levels)
        if not any(_is_worth_it(other, candidate) for other in levels[place + 1 :])
    )
    runner_up = min((other for other in levels if other is not taken), key=lambda candidate: candidate.sort_key)
    if taken is lowest:
        why = f"the lowest level that leaves {margin:.0%} of each GPU free, and none is more than {WORTH:.0%} faster"
    elif taken.sort_key < runner_up.sort_key:
        why = f"the shortest step of all levels that leave {margin:.0%} of each GPU free"
    else:
        why = f"of the levels that leave {margin:.0%} of each GPU free no higher one is more than {WORTH:.0%} faster"
    return Choice(taken, why, margin, runner_up)


def _is_worth_it(higher: Candidate, lower: Candidate) -> bool:
    assert higher.time and lower.time
    return higher.time.total_s < (1 - WORTH) * lower.time.total_s


def traffic(config: RecipeConfig, architecture: Architecture, machines: Machines, costs: Costs) -> Traffic:
    """Return what a rank sends for one step of the recipe at a level."""
    size = config.train_cfg.autotp_size
    parameters, ranks = count(config, of_fullest_rank(config, architecture)), machines.world_size // size
    trained = machines.weight_bytes * parameters.trainable
    frozen = frozen_bytes(parameters, machines.weight_bytes)
    volume = zero_traffic(costs, trained, frozen, ranks, config.split.accumulation)
    if costs.expert_ranks > 1:
        return _with_divided_experts(config, architecture, machines, costs, volume)
    if size > 1:
        return volume._replace(layer_bytes=_between_layers(config, architecture, machines.weight_bytes))
    return volume


def _with_divided_experts(
    config: RecipeConfig, architecture: Architecture, machines: Machines, costs: Costs, volume: Traffic
) -> Traffic:
    """Return the traffic of a step in which only ranks with the same experts share those, and tokens travel to them."""
    size, width = costs.expert_ranks, machines.weight_bytes
    all_trainable, part = (
        count(config, model).trainable for model in (architecture, expert_parallel.of_rank(architecture, size))
    )
    of_experts = (all_trainable - part) // (size - 1)
    shared = zero_traffic(costs, width * of_experts, 0, machines.world_size // size, config.split.accumulation)
    other_share = 1 - size * of_experts / all_trainable
    return volume._replace(
        gather_bytes=other_share * volume.gather_bytes + shared.gather_bytes,
        reduce_bytes=other_share * volume.reduce_bytes + shared.reduce_bytes,
        layer_bytes=_to_experts(config, architecture, size, width),
    )


def _to_experts(config: RecipeConfig, architecture: Architecture, size: int, weight_bytes: int) -> float:
    """Return the bytes of tokens that a rank sends to the experts of other ranks, and back, for one step.

    Each pass of a layer sends the states of its tokens to the experts that they chose, of which each rank has a part,
    and gets the same number of states back; the backward pass sends their gradients on the same two ways.
    """
    layers, split = built(architecture).layers, config.split
    again = split.num_recomputed(len(layers))
    chosen = [layer.experts.per_token if layer.experts else 0 for layer in layers]
    states = weight_bytes * split.samples * tokens_per_sample(config) * architecture.hidden_size
    return 2 * (size - 1) / size * (2 * sum(chosen) + sum(chosen[:again])) * states


def _between_layers(config: RecipeConfig, architecture: Architecture, weight_bytes: int) -> float:
    """Return the bytes that ranks which split the layers send for one step, while the layers wait.

    An all-reduce sums the hidden states behind each of a layer's two last matrices, and their gradients before each of
    the others (DeepSpeed 0.19.8, module_inject/layers.py). LoRA's are as narrow as its rank, and left out.
    """
    size, split = config.train_cfg.autotp_size, config.split
    layers, trained = built(architecture).layers, config.train_cfg.trainable_layers
    again = split.num_recomputed(len(layers))
    states = weight_bytes * split.samples * tokens_per_sample(config) * architecture.hidden_size
    sums = 2 * (len(layers) + again) + sum(len(layer.linears) - 2 for layer in layers[-(trained or 0) :])
    return 2 * (size - 1) / size * sums * states
