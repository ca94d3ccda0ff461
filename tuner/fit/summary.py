"""What `tuner plan` says of one recipe on one kind of machines: memory, the level to take, traffic, time.

It gathers what the other modules of this room compute; it computes no bytes of its own and prints nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from tuner import paths
from tuner.errors import ModelError, Option, TunerError, options
from tuner.fit import advice, operations, step_time
from tuner.fit.advice import Change, changes
from tuner.fit.candidates import Candidate, Choice, Comparison, best_of_levels, traffic
from tuner.fit.levels import Costs, Fit, Machines
from tuner.fit.parameters import Parameters, active_parameters, count, num_parameters
from tuner.fit.splits import data_parallel_ranks, sizes
from tuner.fit.step_time import Cluster, StepTime, Traffic
from tuner.recipes.schema import RecipeConfig, Split
from tuner.recipes.schema.architecture import Architecture
from tuner.recipes.schema.long_context import SHARED_TYPES, TILED_TYPES, tokens_per_sample
from tuner.zero import presets
from tuner.zero.config import NONE


class Step(NamedTuple):
    """One level's traffic a rank and step, and its seconds where a network is given.

    `range_s` are the least and the most seconds that published speeds allow, where the GPU alone decides them.
    """

    level: str
    traffic: Traffic
    time: StepTime | None
    range_s: tuple[float, float] | None = None


class Price(NamedTuple):
    """What the size of a step costs: the part of it in which no token is computed, and what a larger one would give.

    Args:
        part: Of the seconds of a step: the update, and what ranks send that nothing hides.
        larger_tokens: Of a step with `LARGER` times as many micro-batches.
        gain: By how much more tokens a second are trained on then.
    """

    part: float
    larger_tokens: int
    gain: float


class PlanReport(NamedTuple):
    """All of it. `steps` has hierarchical partitioning as one more line where there are several nodes.

    Args:
        levels: Each level with its best split.
        refused: Why a run at some of them would be refused, by the level's name.
        choice: The level to take; None if nothing fits.
        taken: The config that the user named, else that of `choice`; None if nothing fits.
        tokens_per_step: Of all ranks; every split has as many.
        price: What so many tokens a step cost at the level to take; None if that is little, or not known.
        sample_tokens: As for `operations.of_step`.
    """

    name: str
    config: RecipeConfig
    architecture: Architecture
    parameters: Parameters
    machines: Machines
    levels: list[Candidate]
    refused: Mapping[str, TunerError]
    choice: Choice | None
    taken: Candidate | None
    changes: list[Change]
    steps: list[Step]
    tokens_per_step: int
    price: Price | None = None
    sample_tokens: float | None = None

    @property
    def recommended(self) -> Fit | None:
        """The level to take; None if nothing fits."""
        return self.choice.taken.fit if self.choice else None


def make(
    name: str,
    config: RecipeConfig,
    machines: Machines,
    compared: Comparison,
    *,
    cluster: Cluster | None,
    assumed: Cluster | None = None,
    named: Candidate | None = None,
) -> PlanReport:
    """Gather everything.

    Args:
        cluster: What a step's seconds are shown for; None: they are not.
        assumed: What the seconds of one GPU are computed with where no network is named.
        named: The config that is taken in place of the choice, with its split.

    Raises:
        ModelError: nothing is known of the model, or there is no formula for its architecture.
    """
    architecture = known_architecture(config)
    choice, levels = compared.choice, best_of_levels(compared.candidates)
    possible = [choice for choice in levels if choice.level not in compared.refused]
    offloads = choice is None or choice.taken.fit.offloads
    ranks = data_parallel_ranks(config, machines.world_size)
    tokens = config.split.samples * tokens_per_sample(config) * ranks
    taken = named or (choice and choice.taken)
    timed = None if taken and taken.fit.costs.swaps else cluster or assumed
    return PlanReport(
        name=name,
        config=config,
        architecture=architecture,
        parameters=count(config, architecture),
        machines=machines,
        levels=levels,
        refused=compared.refused,
        choice=choice,
        taken=taken,
        # Of the split with the least memory, which is the first.
        changes=changes(compared.candidates[0].config, architecture, machines, compared.refused) if offloads else [],
        steps=_steps(architecture, machines, possible, cluster)
        if machines.world_size > 1
        else _steps_alone(config, architecture, machines, taken, timed, compared.sample_tokens),
        tokens_per_step=tokens,
        price=_price(choice.taken, architecture, machines, timed, tokens, compared.sample_tokens)
        if choice and timed
        else None,
        sample_tokens=compared.sample_tokens,
    )


LARGER = 4
"""How many times larger a step is that the price of a small one is told by."""
_NOTABLE = 0.05
"""The part of a step from which on its price is told."""


def _price(
    taken: Candidate,
    architecture: Architecture,
    machines: Machines,
    cluster: Cluster,
    tokens: int,
    sample_tokens: float | None,
) -> Price | None:
    if taken.time is None or taken.time.beside_s < _NOTABLE * taken.time.total_s:
        return None
    split, costs = taken.split, taken.fit.costs
    larger = taken.config.with_split(split._replace(accumulation=LARGER * split.accumulation))
    of_machines = machines.world_size, machines.weight_bytes
    counted = operations.of_step(larger, architecture, costs, *of_machines, sample_tokens=sample_tokens)
    time = step_time.step_time(costs, traffic(larger, architecture, machines, costs), counted, cluster)
    return Price(
        taken.time.beside_s / taken.time.total_s, LARGER * tokens, LARGER * taken.time.total_s / time.total_s - 1
    )


def known_architecture(config: RecipeConfig) -> Architecture:
    """Return the model's architecture.

    Raises:
        ModelError: the architecture is unknown, or no formula counts the parameters of its model_type.
    """
    path = config.model.path
    if path is None:
        raise ModelError(
            "no model is given", where="model.path", fix=f"Give one: {Option('model')} with a path or a hub id."
        )
    if config.architecture is None:
        on_hub = f"Download it (hf download {path} config.json), give" if paths.local(path) is None else "Name"
        raise ModelError(
            f"unknown model {path!r}: no catalog entry and no config.json",
            where="model.path",
            fix=f"{on_hub} a local folder that holds its config.json, or set architecture=dict(...) in the recipe.",
        )
    num_parameters(config.architecture)
    return config.architecture


def unknown_size(config: RecipeConfig) -> ModelError | None:
    """Return why a named model's memory cannot be worked out, or None where it can."""
    try:
        if config.model.path:
            known_architecture(config)
    except ModelError as error:
        return error
    return None


def _steps_alone(
    config: RecipeConfig,
    architecture: Architecture,
    machines: Machines,
    taken: Candidate | None,
    cluster: Cluster | None,
    sample_tokens: float | None,
) -> list[Step]:
    """Return how long a step takes on one GPU, which sends nothing: at the level taken, or else without ZeRO.

    Args:
        cluster: What the seconds are computed with; None: they are not known.
    """
    if cluster is None:
        return []
    if taken and taken.fit.offloads and taken.time:  # no published speed is of one that offloads
        return [Step(taken.level, Traffic(), taken.time)]
    counted = operations.of_step(config, architecture, Costs(0), 1, machines.weight_bytes, sample_tokens=sample_tokens)
    time = step_time.step_time(Costs(0), Traffic(), counted, cluster)
    usual = ((1 - step_time.OFF_BY) * time.total_s, (1 + step_time.OFF_BY) * time.total_s)
    return [Step(NONE, Traffic(), time, usual)]


def _steps(
    architecture: Architecture, machines: Machines, levels: Sequence[Candidate], cluster: Cluster | None
) -> list[Step]:
    """Return what is sent at levels that shard without offloading, and how long it takes."""
    steps = []
    for candidate in levels:
        costs = candidate.fit.costs
        variants = {candidate.level: costs} if costs.stage and not costs.offloads else {}
        if costs.stage == 3 and variants and machines.num_nodes > 1 and machines.gpus_per_node > 1:
            variants[f"{candidate.level}_hpz"] = costs._replace(hpz=machines.gpus_per_node)  # copies in each node
        for name, of_variant in variants.items():
            volume = traffic(candidate.config, architecture, machines, of_variant)
            timed = step_time.step_time(of_variant, volume, candidate.operations, cluster) if cluster else None
            steps.append(Step(name, volume, timed))
    return steps


def to_json(report: PlanReport) -> dict[str, Any]:
    """Return the report as plain values; sizes are whole bytes."""
    return {
        "recipe": report.name,
        "parameters": {
            "total": num_parameters(report.architecture),
            "active": active_parameters(report.architecture),
            "trainable": report.parameters.trainable,
            "frozen": report.parameters.frozen,
            "quantized": report.parameters.quantized,
        },
        "machines": {
            "nodes": report.machines.num_nodes,
            "gpus_per_node": report.machines.gpus_per_node,
            "gpu_bytes": report.machines.gpu_bytes,
            "host_bytes": report.machines.host_bytes or None,
        },
        "split": report.config.split._asdict(),
        "tokens_per_step": report.tokens_per_step,
        "sample_tokens": report.sample_tokens and round(report.sample_tokens),
        "price_of_step": report.price._asdict() if report.price else None,
        "presets": {best.level: _level_json(best, report.refused.get(best.level)) for best in report.levels},
        "recommended": report.recommended.level if report.recommended else None,
        "step_s": report.taken.time.total_s if report.taken and report.taken.time else None,
        "runner_up": _candidate_json(report.choice.runner_up) if report.choice and report.choice.runner_up else None,
        "changes": [
            {"what": change.description, "flags": change.flags, "level": change.level} for change in report.changes
        ],
        "communication": {step.level: _step_json(step) for step in report.steps},
    }


def _level_json(best: Candidate, refused: TunerError | None) -> dict[str, Any]:
    value = {"split": best.split._asdict(), **best.fit.to_json(), "refused": refused and refused.what}
    return value | {"fits": best.fit.fits and refused is None}


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    seconds = candidate.time.total_s if candidate.time else None
    return {"level": candidate.level, "split": candidate.split._asdict(), "step_s": seconds}


def _step_json(step: Step) -> dict[str, Any]:
    volume, time = step.traffic, step.time
    value: dict[str, Any] = {
        "gather_bytes": int(volume.gather_bytes),
        "reduce_bytes": int(volume.reduce_bytes),
        "inside_node_bytes": int(volume.inside_bytes),
        "bytes_per_step_and_rank": int(volume.total_bytes),
    }
    if time:
        value |= {**time._asdict(), "compute_s": time.compute_s, "step_s": time.total_s}
    if step.range_s:
        value["usual_step_s"] = list(step.range_s)
    return value


# --- The longest rows that fit at each ZeRO level, for every number of ranks that may share them ---

UNIT = 1024
_MOST = 1 << 25
"""Tokens: no more are looked for."""


@dataclass(frozen=True)
class Longest:
    """The most tokens of a row that fit, in whole `UNIT`s; 0: not even one fits."""

    level: str
    sequence_parallel_size: int
    tokens: int


def longest(
    config: RecipeConfig, architecture: Architecture, machines: Machines, refused: Collection[str] = ()
) -> list[Longest]:
    """Return the longest row at each level for each size that the ranks and the heads divide by.

    One row a micro-batch, recomputed, with flash attention and the loss in chunks: each needs the least memory. Tiled
    MLPs and offloaded activations are as the recipe has them.

    Args:
        refused: The names of levels that are left out.
    """
    shares = config.objective.facts.packs and architecture.model_type in SHARED_TYPES
    shares = shares and config.train_cfg.autotp_size == 1
    row_sharers = sizes(architecture, machines.world_size) if shares else [1]
    rungs = [rung for rung in presets.rungs(machines.disk) if rung.name not in refused]
    return [
        Longest(rung.name, size, _most_tokens(config, architecture, machines, rung.name, size))
        for rung, size in product(rungs, row_sharers)
    ]


def settings(architecture: Architecture) -> tuple[str, ...]:
    """Return the settings of `train_cfg` with which a model's longer rows fit."""
    tiles = ("tiled_mlp",) if architecture.model_type in TILED_TYPES else ()
    return (*tiles, "activation_offloading")


def with_everything(config: RecipeConfig, architecture: Architecture) -> RecipeConfig:
    """Return the recipe with offloaded activations, and with tiled MLPs if the model has no experts."""
    return config.with_values({f"train_cfg.{key}": True for key in settings(architecture)})


class LongestRow(NamedTuple):
    """The most tokens of a row that fit on the GPUs alone, and where states or weights may be offloaded; 0: none.

    Args:
        on_disk: What names a preset that swaps to a disk, with the folder, where only it has room for `offloaded`.
    """

    on_gpus: int
    offloaded: int
    on_disk: Option


def longest_row(config: RecipeConfig, architecture: Architecture, machines: Machines, max_tokens: int) -> LongestRow:
    """Return the longest row of all levels, as `longest` does for rows that ranks do not share.

    Args:
        max_tokens: No longer row is looked for, as the model has no position for it.
    """
    on_gpus, offloaded, on_disk = 0, 0, options()
    for rung in presets.rungs(machines.disk):  # those that offload come last
        shorter, offloaded = (
            offloaded,
            _most_tokens(config, architecture, machines, rung.name, 1, offloaded, max_tokens),
        )
        on_gpus = on_gpus if rung.offloaded else offloaded
        if offloaded > shorter and rung.needs_disk:
            on_disk = options(Option("deepspeed", rung.name), advice.folder(rung.name, machines))
    return LongestRow(on_gpus, offloaded, on_disk)


def _most_tokens(
    config: RecipeConfig,
    architecture: Architecture,
    machines: Machines,
    level: str,
    size: int,
    known_tokens: int = 0,
    max_tokens: int = _MOST,
) -> int:
    """Return the longest row that fits at a level, or `known_tokens` if no longer one does; `size` ranks share it."""

    def lacks(tokens: int) -> bool:
        return not advice.fit_of_preset(_of_length(config, tokens, size), architecture, machines, level).fits

    if known_tokens >= max_tokens or lacks(min(known_tokens + UNIT, max_tokens)):
        return known_tokens
    if not lacks(max_tokens):
        return max_tokens
    units = range(known_tokens // UNIT + 1, -(-max_tokens // UNIT))
    return (units.start - 1 + bisect_right(units, 0, key=lambda unit: lacks(unit * UNIT))) * UNIT


def _of_length(config: RecipeConfig, tokens: int, size: int) -> RecipeConfig:
    changed = config.with_values(
        {
            "train_dataloader.dataset.max_length": tokens,
            "train_cfg.sequence_parallel_size": size,
            "train_cfg.loss": "chunked",
            "model.attn_implementation": "flash_attention_2",
        }
    )
    return changed.with_split(Split(1, 2, recompute=True))  # it fits then with any accumulation
