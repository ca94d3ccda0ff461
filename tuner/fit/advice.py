"""What each ZeRO level needs, and the cheapest change with which one fits if none does.

Every answer is checked by the arithmetic of `estimate`; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from tuner.errors import Key, Option, Text, options
from tuner.fit.candidates import Candidate, choose
from tuner.fit.estimate import fit_on
from tuner.fit.levels import Costs, Fit, Machines
from tuner.fit.step_time import Operations
from tuner.recipes.schema import Adapter, Quantization, RecipeConfig, four_bit_experts, tensor_parallel
from tuner.recipes.schema.architecture import Architecture
from tuner.zero import presets

_LORA = options(Key("adapter", dict(r=64, lora_alpha=16, lora_dropout=0.1)), Key("optim_wrapper.optimizer.lr", 2e-4))
_NOTHING = options()
WITHOUT_OFFLOADING = "Without offloading, each of these changes fits:"
"""What stands above the changes of a recipe that fits by offloading alone."""
_SHORTEST = 256
_MOST_GPUS = 4096


class Change(NamedTuple):
    """A change after which `level` fits: what it is in words, and the options to type, without that of the level."""

    description: str
    flags: Option
    level: str
    machines: Machines

    @property
    def options(self) -> Option:
        """What to type."""
        return options(self.flags, Option("deepspeed", self.level))

    @classmethod
    def to(cls, fit: Fit, description: str, flags: Option) -> Change:
        """Return the change after which this level fits; if its preset swaps to a disk, with the folder."""
        return cls(description, options(flags, folder(fit.level, fit.machines)), fit.level, fit.machines)

    @property
    def text(self) -> Text:
        """The change in words, and what to type."""
        return Text(f"{self.description}: {self.options}")


def levels(recipe: RecipeConfig, architecture: Architecture, machines: Machines) -> list[Fit]:
    """Return each level that `auto` may choose, from the fastest on, with whether it fits."""
    rungs = presets.rungs(machines.disk)
    return [fit_of_preset(recipe, architecture, machines, rung.name) for rung in rungs]


def folder(level: str, machines: Machines) -> Option:
    """Return the option that names the machines' folder where a preset swaps to one; empty for other presets."""
    return Option("nvme", machines.disk) if presets.find(level).needs_disk else _NOTHING


def fit_of_preset(recipe: RecipeConfig, architecture: Architecture, machines: Machines, preset: str) -> Fit:
    """Return what one of the package's presets needs on these machines."""
    return fit_on(recipe, architecture, preset, Costs.of_preset(preset, architecture.hidden_size), machines)


class _Limits(NamedTuple):
    """What a changed recipe has to fit into.

    Attributes:
        refused: The names of levels that a run of this recipe may not take.
        offload: Whether a level that offloads may be taken.
    """

    architecture: Architecture
    machines: Machines
    refused: Collection[str]
    offload: bool

    def best(self, recipe: RecipeConfig) -> Fit | None:
        """Return the level to take with the recipe's own split; None if none fits."""
        fits = [
            fit
            for fit in levels(recipe, self.architecture, self.machines)
            if fit.level not in self.refused and not (fit.costs.swaps and recipe.packs_experts)  # `refuse_disks`
        ]
        is_alone = self.machines.world_size == 1
        choice = choose([Candidate(recipe, fit, Operations(), None) for fit in fits if fit.costs.stage or is_alone])
        if choice is None or (choice.taken.fit.offloads and not self.offload):
            return None
        return choice.taken.fit


def changes(
    recipe: RecipeConfig, architecture: Architecture, machines: Machines, refused: Collection[str] = ()
) -> list[Change]:
    """Return the changes that make a level fit, the cheapest first; those that cost nothing go into all others.

    Changes after which a level fits without offloading come before all others, and are all that is returned if the
    recipe itself fits by offloading.

    Args:
        refused: The names of levels that a run of this recipe may not take.
    """
    limits = _Limits(architecture, machines, refused, offload=True)
    without_offloading = _changes(recipe, limits._replace(offload=False))
    if limits.best(recipe):
        return without_offloading
    known = {(change.description, change.flags) for change in without_offloading}
    return [
        *without_offloading,
        *(change for change in _changes(recipe, limits) if (change.description, change.flags) not in known),
    ]


def _changes(recipe: RecipeConfig, limits: _Limits) -> list[Change]:
    free, flags = recipe, _NOTHING
    for description, step in _FREE:
        changed = step(free)
        if changed is None:
            continue
        free, flags = changed[0], options(flags, changed[1])
        if best := limits.best(free):
            return [Change.to(best, description, flags)]
    return list(_costly(free, limits, flags))


def _costly(recipe: RecipeConfig, limits: _Limits, flags: Option) -> Iterator[Change]:
    for description, step in _COSTLY:
        changed = step(recipe)
        if not changed or not _is_allowed(changed[0], limits.machines):
            continue
        if best := limits.best(changed[0]):
            yield Change.to(best, description, options(flags, changed[1]))
    for way in (_shorter, _more_gpus):
        if change := way(recipe, limits, flags):
            yield change


def _is_allowed(recipe: RecipeConfig, machines: Machines) -> bool:
    """Return whether a run of a changed recipe may start, with split layers and with experts in 4 bits."""
    of_experts = four_bit_experts.problems(recipe) if recipe.packs_experts else ()
    return not any((*tensor_parallel.refusals(recipe, machines.world_size), *of_experts))


def smaller_batches(recipe: RecipeConfig) -> list[tuple[int, int]]:
    """Return each (micro-batch, accumulation) below the recipe's with the same global batch, the smallest first."""
    split = recipe.split
    sizes = recipe.objective.micro_batches(split.micro_batch - 1)
    return [(size, split.samples // size) for size in sizes if split.samples % size == 0]


Step = Callable[[RecipeConfig], tuple[RecipeConfig, Option] | None]


def _checkpointing(recipe: RecipeConfig) -> tuple[RecipeConfig, Option] | None:
    if not recipe.split.keeps_layers:
        return None
    flags = Key("gradient_checkpointing", True)
    if recipe.split.recomputed_layers is not None:
        flags = Key("recomputed_layers", None)
    return recipe.with_split(recipe.split._replace(recompute=True, recomputed_layers=None)), flags


def _smallest_batch(recipe: RecipeConfig) -> tuple[RecipeConfig, Option] | None:
    smaller = smaller_batches(recipe)
    if not smaller:
        return None
    micro, accumulation = smaller[0]
    flags = options(Key("train_dataloader.batch_size", micro), Key("accumulative_counts", accumulation))
    return recipe.with_split(recipe.split._replace(micro_batch=micro, accumulation=accumulation)), flags


def _lora(recipe: RecipeConfig) -> tuple[RecipeConfig, Option] | None:
    if recipe.adapter:
        return None
    adapter = Adapter(r=64, lora_alpha=16, lora_dropout=0.1)
    return recipe.with_values({"train_cfg.trainable_layers": None, "adapter": adapter}), _LORA


def _qlora(recipe: RecipeConfig) -> tuple[RecipeConfig, Option] | None:
    if recipe.quantization:
        return None
    changed, flags = _lora(recipe) or (recipe, _NOTHING)
    has_experts = recipe.architecture is not None and recipe.architecture.is_mixture
    flag = Key("quantization", {"bits": 4, **({"experts": True} if has_experts else {})})
    return changed.with_values({"quantization": Quantization(experts=has_experts)}), options(flags, flag)


_FREE: tuple[tuple[str, Step], ...] = (
    ("recompute activations: takes about a third more time", _checkpointing),
    ("the smallest micro-batch and more accumulation: the same global batch", _smallest_batch),
)
_COSTLY: tuple[tuple[str, Step], ...] = (
    ("LoRA: train adapters instead of the weights", _lora),
    ("QLoRA: adapters on a 4-bit base", _qlora),
)


def _shorter(recipe: RecipeConfig, limits: _Limits, flags: Option) -> Change | None:
    length = recipe.train_dataloader.dataset.max_length // 2
    while length >= _SHORTEST:
        changed = recipe.with_values({"train_dataloader.dataset.max_length": length})
        if best := limits.best(changed):
            flags = options(flags, Key("train_dataloader.dataset.max_length", length))
            description = f"samples of at most {length} tokens"
            if pixels := _most_pixels(recipe, limits.architecture, length):
                description = f"{description}, and images of fewer tokens"
                flags = options(flags, Key("train_dataloader.dataset.image_max_pixels", pixels))
            return Change.to(best, description, flags)
        length //= 2
    return None


def _most_pixels(recipe: RecipeConfig, architecture: Architecture, length: int) -> int | None:
    """Return how many pixels an image may have so that half a sample is left for text.

    None: the model reads no images, or each image has the same number of tokens.
    """
    tower = architecture.vision_config
    if not recipe.reads_images or tower is None or tower.num_tokens or tower.image_size or not tower.patch_size:
        return None
    return length // 2 * (tower.patch_size * tower.merge_size) ** 2


def _more_gpus(recipe: RecipeConfig, limits: _Limits, flags: Option) -> Change | None:
    """Double the GPUs of one node to 8, then the nodes, until a level fits; each node then has the same number."""
    machines = limits.machines._replace(uneven_ranks=0)
    while machines.world_size * 2 <= _MOST_GPUS:
        if machines.gpus_per_node < 8 and machines.num_nodes == 1:
            machines = machines._replace(gpus_per_node=min(8, machines.gpus_per_node * 2))
        else:
            machines = machines._replace(num_nodes=machines.num_nodes * 2)
        if best := limits._replace(machines=machines).best(recipe):
            nodes = f" on {machines.num_nodes} nodes" if machines.num_nodes > 1 else ""
            return Change.to(best, f"{machines.world_size} GPUs{nodes}", flags)
    return None
