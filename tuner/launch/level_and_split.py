"""The ZeRO level, the split of a step and the loss of a run: chosen together, by memory and time.

What the user named stays, and narrows the choice: a DeepSpeed config leaves one level, a recipe's numbers one split.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tuner.errors import Key, Option, RecipeError, TunerError
from tuner.fit import activations
from tuner.fit.candidates import MARGIN, TIGHT, Candidate, Choice, Comparison, candidates, choose
from tuner.fit.estimate import fit_on, swap_buffer
from tuner.fit.levels import Costs, Fit, Machines, large_buckets
from tuner.fit.parameters import built, count, has_formula
from tuner.fit.splits import DEFAULT_SPLIT, data_parallel_ranks, possible_splits
from tuner.launch import row_counts
from tuner.launch.machines import RunMachines
from tuner.machine.hardware import Precision
from tuner.machine.topology import Batch
from tuner.recipes.recipe import Recipe
from tuner.recipes.schema import RecipeConfig, Split
from tuner.recipes.schema.architecture import VARLEN, Architecture
from tuner.recipes.schema.tensor_parallel import of_fullest_rank
from tuner.zero import presets
from tuner.zero.choice import disk_of, open_chosen
from tuner.zero.config import NONE, Buckets, Document, FinalConfig, stage
from tuner.zero.merge import merge

OF_HOST = 0.5
"""The part of the host's memory that a chosen split may take on a CPU; the formulas are those of GPUs."""
_LOGITS_OF_HOST = 0.25
"""The part of the host's memory that whole logits may take if the ranks compute on the CPU."""
_NO_MEMORY = "no GPU memory to plan for"


@dataclass(frozen=True)
class LevelAndSplit:
    """What is chosen, and why.

    Args:
        document: The DeepSpeed config; if it is a preset, its name is the level.
        buckets: The sizes that it leaves open of what ranks send at a time; None: the least ones.
        split_reason: Why this split, for the origins of its values.
        loss: The `train_cfg.loss`; None if the recipe has one.
        level_reason: Why the level was taken, in a few words; None if the user named it.
        compared: Every split of the named config, or of every level; None if the memory is not known.
        choice: Why the level is taken; None if the user named it, its memory is not known, or nothing fits.
        of_presets: Every split of the levels that `auto` may choose, without `--ds`; None if no plan shows them.
        refused: The names of those levels that no run of this recipe may take, with `--ds`.
    """

    document: Document
    split: Split
    split_reason: str
    loss: str | None
    loss_reason: str
    level_reason: str | None
    compared: Comparison | None = None
    choice: Choice | None = None
    of_presets: Comparison | None = None
    buckets: Buckets | None = None
    refused: Collection[str] = ()

    @property
    def fit(self) -> Fit | None:
        """The memory that the run needs; None if it is not known."""
        return self.compared and self.compared.taken.fit


class _Loss(NamedTuple):
    """The `train_cfg.loss` that is chosen, and why; `name` is None if the recipe has one."""

    name: str | None
    reason: str


class _Undecided(NamedTuple):
    """A recipe on its machines, before its level, split and loss are decided.

    Args:
        architecture: The model's; None if no formula counts its parameters.
        splits: Those that the recipe leaves to the plan; the one that needs the least memory is first.
        large_buckets: The large sizes of what ranks send at a time; None: there are no GPUs, or a single rank.
    """

    recipe: Recipe
    machines: RunMachines
    precision: Precision
    architecture: Architecture | None
    ranks: int
    splits: Sequence[Split]
    large_buckets: Buckets | None = None

    @property
    def config(self) -> RecipeConfig:
        return self.recipe.config

    @property
    def lightest(self) -> RecipeConfig:
        """The recipe with the split that needs the least memory."""
        return self.config.with_split(self.splits[0])

    @property
    def machine_sizes(self) -> Machines:
        """The machines as `fit` counts with them."""
        return self.machines.to_fit(self.precision, disk_of(self.recipe))

    def preset(self, level: str) -> Document:
        return open_chosen(self.recipe, level)

    def rungs(self) -> dict[str, Document]:
        """Return the configs that `auto` may choose, with the values of `--ds`."""
        return {rung.name: self.preset(rung.name) for rung in presets.rungs(disk_of(self.recipe))}

    def costs_of(self, document: Document, buckets: Buckets | None = None) -> Costs:
        """Return what training with a DeepSpeed config costs; every split of it costs the same."""
        split, recipe = self.splits[0], replace(self.recipe, config=self.lightest)
        batch = Batch(split.micro_batch, split.accumulation, self.ranks)
        return Costs.of_config(final_config(recipe, document, batch, self.precision, self.machines, buckets).config)

    def variants_of(self, document: Document) -> tuple[Costs, ...]:
        """Return the costs of a DeepSpeed config: with large buckets, unless it offloads, and with the least ones."""
        least = self.costs_of(document)
        if self.large_buckets is None or least.offloads:
            return (least,)
        return tuple(dict.fromkeys((self.costs_of(document, self.large_buckets), least)))


def choose_level_and_split(
    recipe: Recipe,
    named_document: Document | None,
    machines: RunMachines,
    precision: Precision,
    pinned: str | None = None,
    *,
    compares: bool = False,
) -> LevelAndSplit:
    """Choose the level where no DeepSpeed config is named, the split where it is "auto", and the loss.

    Args:
        named_document: The DeepSpeed config that is chosen already; None: the level is "auto".
        pinned: Who chose it, if not the user.
        compares: Estimate also the levels that `auto` may choose, if a config is named or `--ds` changes it.

    Raises:
        RecipeError: the ranks cannot share the global batch.
        DeepSpeedConfigError, MachineError: as `zero.merge.merge`, if no level is possible.
    """
    architecture = recipe.config.architecture
    counted = architecture if architecture is not None and has_formula(architecture) else None
    ranks = data_parallel_ranks(recipe.config, machines.topology.world_size)
    inputs = _Undecided(recipe, machines, precision, counted, ranks, possible_splits(recipe.config, ranks))
    if not machines.hardware.gpus:
        chosen = _on_cpus(inputs, named_document)
    elif counted is None or not machines.hardware.smallest_gpu_bytes:
        chosen = _unknown(inputs, named_document)
    else:
        chosen = _on_gpus(inputs, counted, named_document, compares=compares)
    return replace(chosen, level_reason=pinned) if named_document else chosen


def _on_gpus(
    inputs: _Undecided, architecture: Architecture, named_document: Document | None, *, compares: bool
) -> LevelAndSplit:
    num_shards = inputs.machines.topology.world_size // inputs.config.train_cfg.autotp_size
    of_rank = of_fullest_rank(inputs.config, architecture)
    inputs = inputs._replace(large_buckets=_large_buckets(inputs.recipe, of_rank, num_shards))
    documents = {named_document.preset or named_document.name: named_document} if named_document else inputs.rungs()
    compared = of_presets = _compare(inputs, architecture, documents)
    if compares and (named_document or inputs.recipe.ds):
        without_ds = inputs._replace(recipe=replace(inputs.recipe, ds=(), nvme=disk_of(inputs.recipe)))
        of_presets = _compare(without_ds, architecture, without_ds.rungs())
    taken, choice = compared.taken, compared.choice
    of_split = inputs.config.with_split(taken.split)
    loss = _loss_on_gpus(of_split, taken.fit.costs, architecture, inputs.machine_sizes)
    return LevelAndSplit(
        document=documents[taken.level],
        split=taken.split,
        split_reason=_split_reason(choice, taken, inputs.splits),
        loss=loss.name,
        loss_reason=loss.reason,
        level_reason=choice.why if choice else "no level fits, and this one needs the least",
        compared=compared,
        choice=None if named_document else choice,
        of_presets=of_presets if compares else None,
        buckets=None if taken.has_least_buckets else inputs.large_buckets,
        refused=_refused(inputs) if named_document else compared.refused,
    )


def refused(recipe: Recipe, machines: RunMachines, precision: Precision) -> set[str]:
    """Return the names of the levels that `auto` may choose, and a run of this recipe may not, with any split.

    Raises:
        RecipeError: the ranks cannot share samples as the recipe says.
    """
    ranks = data_parallel_ranks(recipe.config, machines.topology.world_size)
    return _refused(_Undecided(recipe, machines, precision, None, ranks, [DEFAULT_SPLIT]))


def _refused(inputs: _Undecided) -> set[str]:
    """Return the names of the levels that `auto` may choose, and this recipe not."""
    names = set[str]()
    for name, document in inputs.rungs().items():
        try:
            inputs.costs_of(document)
        except TunerError:
            names.add(name)
    return names


def _large_buckets(recipe: Recipe, architecture: Architecture, num_shards: int) -> Buckets | None:
    """Return what ranks send at a time where GPUs have room; None: one rank sends nothing."""
    if num_shards == 1:
        return None
    # With an adapter the memory of a layer that is gathered ahead is not known well enough (simulated: 4 % beyond it).
    layers = () if recipe.config.adapter else built(architecture).layers
    largest = max((layer.parameters for layer in layers), default=0)
    trained = count(recipe.config, architecture).trainable
    return large_buckets(architecture.hidden_size, largest, trained)


def _compare(inputs: _Undecided, architecture: Architecture, documents: Mapping[str, Document]) -> Comparison:
    """Estimate every pair of a DeepSpeed config and a split, and take one; of several configs, one that shards."""
    levels, refused = _levels(inputs, documents, architecture)
    machines, sample_tokens = inputs.machine_sizes, row_counts.sample_tokens(inputs.config)

    def with_loss(of_split: RecipeConfig, costs: Costs) -> RecipeConfig:
        return _with_loss(of_split, _loss_on_gpus(of_split, costs, architecture, machines).name)

    def of_level(name: str, splits: Sequence[Split]) -> list[Candidate]:
        return candidates(
            inputs.config,
            architecture,
            machines,
            {name: levels[name]},
            splits,
            inputs.machines.cluster,
            settle=with_loss,
            sample_tokens=sample_tokens,
        )

    every = [candidate for name in levels for candidate in of_level(name, inputs.splits)]
    if inputs.config.may_recompute_some_layers:
        every = [*every, *_with_fewer_layers(every, architecture.num_hidden_layers, of_level)]
    allowed = [candidate for candidate in every if candidate.level not in refused]
    must_shard = len(documents) > 1 and machines.world_size > 1
    choice = choose([candidate for candidate in allowed if candidate.fit.costs.stage or not must_shard])
    # `max` takes the first of equals: the lightest split.
    taken = choice.taken if choice else max(allowed, key=lambda candidate: candidate.fit.room)
    return Comparison(tuple(every), taken, choice, refused, sample_tokens)


def _with_fewer_layers(
    every: Sequence[Candidate], num_layers: int, of_level: Callable[[str, Sequence[Split]], list[Candidate]]
) -> Iterator[Candidate]:
    """Yield candidates that recompute the fewest layers with which `MARGIN` stays free, if that takes some, not all.

    Args:
        of_level: Returns the candidates of a level with some splits.
    """
    kept = {
        (candidate.level, candidate.split.micro_batch)
        for candidate in every
        if not candidate.split.recompute and candidate.fit.room >= MARGIN
    }
    for candidate in every:
        split = candidate.split
        if not split.recompute or candidate.fit.room < MARGIN or (candidate.level, split.micro_batch) in kept:
            continue
        too_few, enough, fewest = 0, num_layers, None
        while enough - too_few > 1:  # more layers never need more memory
            middle = (too_few + enough) // 2
            [partial] = of_level(candidate.level, [split._replace(recomputed_layers=middle)])
            if partial.fit.room >= MARGIN:
                enough, fewest = middle, partial
            else:
                too_few = middle
        if fewest:
            yield fewest


def _levels(
    inputs: _Undecided, documents: Mapping[str, Document], architecture: Architecture
) -> tuple[dict[str, tuple[Costs, ...]], dict[str, TunerError]]:
    """Return the costs of the variants of each level, and the errors of those levels that this recipe cannot use."""
    levels: dict[str, tuple[Costs, ...]] = {}
    errors: dict[str, TunerError] = {}
    for name, document in documents.items():
        try:
            levels[name] = inputs.variants_of(document)
        except TunerError as error:
            if len(documents) == 1:
                raise
            errors[name] = error
            levels[name] = (Costs.of_preset(name, architecture.hidden_size),)
    if len(errors) == len(documents):
        raise next(iter(errors.values()))
    return levels, errors


def _split_reason(choice: Choice | None, taken: Candidate, splits: Sequence[Split]) -> str:
    if len(splits) == 1:
        return f"derived: {taken.split.samples} samples per rank and step"
    if choice is None or not choice.margin:
        return f"derived: no split leaves {TIGHT:.0%} of each GPU free, and this one needs the least"
    return f"derived: the fastest split that leaves {choice.margin:.0%} of each GPU free"


def _unknown(inputs: _Undecided, named_document: Document | None) -> LevelAndSplit:
    """Return the choice where no formula counts the memory: the level and the split that need the least."""
    architecture, hardware = inputs.config.architecture, inputs.machines.hardware
    why = split_reason = "the model's size is unknown"
    if not hardware.smallest_gpu_bytes:
        why, split_reason = f"the memory of {hardware.maker} accelerators is unknown", _NO_MEMORY
    elif architecture is not None:
        why = f"no formula for the size of model_type {architecture.model_type!r}"
    document = named_document or inputs.preset(presets.of_stage(3, offloads=False).name)
    loss = _loss_on_gpus(inputs.lightest, inputs.costs_of(document), None, None)
    return LevelAndSplit(document, inputs.splits[0], f"derived: {split_reason}", loss.name, loss.reason, why)


# --- On CPUs ---


def _on_cpus(inputs: _Undecided, named_document: Document | None) -> LevelAndSplit:
    ranks = inputs.machines.topology.world_size
    document = named_document or inputs.preset(NONE if ranks == 1 else presets.of_stage(2, offloads=False).name)
    reason = f"{ranks} rank{'s' * (ranks > 1)} on a CPU"
    split, split_reason = _split_on_cpus(inputs, document)
    loss = _loss_on_cpus(inputs, inputs.config.with_split(split))
    return LevelAndSplit(document, split, split_reason, loss.name, loss.reason, reason)


def _split_on_cpus(inputs: _Undecided, document: Document) -> tuple[Split, str]:
    lightest, architecture = inputs.splits[0], inputs.architecture
    if len(inputs.splits) == 1:
        return lightest, f"derived: {lightest.samples} samples per rank and step"
    planned, host = _as_gpus(inputs.config, inputs.machine_sizes, lightest)
    if not host.gpu_bytes:
        return lightest, f"derived: {_NO_MEMORY}"
    if architecture is None:
        return lightest, "derived: the model's size is unknown"
    possible = possible_splits(planned, data_parallel_ranks(planned, host.world_size))
    level = {document.name: (inputs.costs_of(document),)}
    choice = choose(candidates(planned, architecture, host, level, possible, None))
    leaves = f"takes at most {OF_HOST:.0%} of the host"
    if choice is None or not choice.margin:
        return lightest, f"derived: no other split {leaves}"
    return choice.taken.split, f"derived: the fastest split that {leaves}"


def _as_gpus(config: RecipeConfig, machines: Machines, least: Split) -> tuple[RecipeConfig, Machines]:
    """Return what the formulas of GPUs take for a plan on CPUs: a recipe with whole logits, unless chunks compute each
    once, and machines whose GPUs have each rank's part of the host's memory.

    Where attention computes each sample alone, rows are as long as sampled ones, and lie end to end without a mask.
    Elsewhere samples that are not packed cost the least one by one, without padding.
    """
    values: dict[str, object] = {}
    if config.model.attn_implementation == VARLEN:
        config = row_counts.with_sampled_length(config, least.samples)
    elif not config.train_dataloader.dataset.packing:
        values["train_dataloader.batch_size"] = least.micro_batch
    if config.train_cfg.loss == "auto":
        values["train_cfg.loss"] = "chunked" if config.computes_logits_once else "whole"
    per_rank = int(OF_HOST * machines.host_bytes / machines.gpus_per_node)
    return config.with_values(values), machines._replace(gpu_bytes=per_rank)


# --- The loss ---


def _simple_loss(config: RecipeConfig) -> _Loss | None:
    """Return the loss where no memory decides it; None: the memory decides."""
    if config.train_cfg.loss != "auto" or not config.objective.facts.can_chunk_logits:
        return _Loss(None, "")
    if config.computes_logits_once:
        return _Loss("chunked", "derived: chunks compute each logit once, and keep none")
    if _validates_larger_batches(config):
        return _Loss("chunked", "derived: the batches of the validation are larger than twice those of training")
    return None


def _loss_on_gpus(
    config: RecipeConfig, costs: Costs, architecture: Architecture | None, machines: Machines | None
) -> _Loss:
    """Return the loss for `auto`.

    Chunks take as little time as whole logits, and much less memory (docs/performance.md, "On GPUs"). A compiled model
    takes whole logits if there is room for them, and at ZeRO-3, where it cannot have chunks.
    """
    if simple := _simple_loss(config):
        return simple
    if not config.train_cfg.torch_compile:
        return _Loss("chunked", "derived: on a GPU chunks take less memory and no more time")
    if costs.stage == 3:
        return _Loss("whole", "derived: a compiled model cannot have chunks at ZeRO-3")
    if architecture is None or machines is None:
        return _Loss("chunked", "derived: the memory of full logits is not known")
    if fit_on(_with_loss(config, "whole"), architecture, "whole", costs, machines).room >= MARGIN:
        return _Loss("whole", "derived: the full logits fit on each GPU")
    return _Loss("chunked", "derived: the full logits do not fit on each GPU")


def _loss_on_cpus(inputs: _Undecided, config: RecipeConfig) -> _Loss:
    """Return the loss for `auto`: whole logits if there is room for them."""
    if simple := _simple_loss(config):
        return simple
    if inputs.architecture is not None:
        sampled = row_counts.with_sampled_length(config, config.split.micro_batch)
        logits = activations.of_recipe(sampled, inputs.architecture, inputs.precision.weight_bytes).logits
        ranks, host_bytes = inputs.machines.topology.nproc_per_node, inputs.machines.hardware.host_memory_bytes
        if logits * ranks <= _LOGITS_OF_HOST * host_bytes:
            return _Loss("whole", "derived: the full logits fit on the host")
    return _Loss("chunked", "derived: the full logits do not fit on the host")


def _with_loss(config: RecipeConfig, loss: str | None) -> RecipeConfig:
    return config.with_values({"train_cfg.loss": loss}) if loss else config


def _validates_larger_batches(config: RecipeConfig) -> bool:
    """Return whether a validation, which computes the same loss, may hold more logits than training."""
    val = config.val_dataloader
    if val is None or val.batch_size == "auto":
        return False
    # For each token training holds logits, their log-softmax and the gradients of both: twice what a validation holds.
    of_step = config.split.micro_batch * config.train_dataloader.dataset.max_length
    return val.batch_size * val.dataset.max_length > 2 * of_step


def final_config(
    recipe: Recipe,
    document: Document,
    batch: Batch,
    precision: Precision,
    machines: RunMachines,
    buckets: Buckets | None = None,
) -> FinalConfig:
    """Return the DeepSpeed config of a run with this split, as `zero.merge.merge` does with the model's shapes.

    Raises:
        DeepSpeedConfigError, MachineError: as `merge`.
        RecipeError: as `_refuse_compiled_chunks`.
    """
    config, architecture, buffer = recipe.config, recipe.config.architecture, None
    if architecture is not None and has_formula(architecture):
        buffer = swap_buffer(config, architecture, machines.topology.world_size)
    final = merge(recipe, document, batch, precision, machines.hardware, buckets, buffer)
    _refuse_compiled_chunks(recipe, final)
    return final


def _refuse_compiled_chunks(recipe: Recipe, final: FinalConfig) -> None:
    """Refuse the loss in chunks in a compiled model at ZeRO-3, which gathers weights again for the backward pass.

    Measured, torch 2.13 and DeepSpeed 0.19.8: the head's weight "has been modified by an inplace operation".
    """
    train_cfg, key = recipe.config.train_cfg, "train_cfg.loss"
    if train_cfg.torch_compile and train_cfg.loss == "chunked" and stage(final.config) == 3:
        message = "torch.compile with the loss in chunks does not work at ZeRO stage 3"
        fix = f"Use {Key('train_cfg.loss', 'whole')}, {Key('torch_compile', False)}, or {Option('deepspeed', 'zero2')}."
        raise RecipeError(message, where=f"{key} ({recipe.origins[key].text})", fix=fix)
