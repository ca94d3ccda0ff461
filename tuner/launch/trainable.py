"""What machines can train: for models and methods the longest row that fits, and the command for it.

`tuner plan --gpu NAME` without a recipe shows it; the tables of the pages are made of it.
"""

from __future__ import annotations

import fnmatch
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from tuner import progress
from tuner.errors import ModelError, Option, RecipeError, UsageError
from tuner.files import JsonObject
from tuner.fit import summary
from tuner.fit.parameters import num_parameters
from tuner.launch import measured
from tuner.launch.machines import MachineFlags, RunMachines, planned_machines
from tuner.machine import hardware
from tuner.machine.hardware import decide_precision
from tuner.recipes import catalog, loading
from tuner.recipes.recipe import Overrides
from tuner.zero.choice import disk_of

METHODS = ("lora", "qlora", "full")
MODELS = (
    *("qwen3_0_6b", "qwen3_1_7b", "qwen3_4b", "qwen3_8b", "qwen3_14b", "qwen3_30b_a3b", "qwen3_32b"),
    *("qwen3_5_0_8b", "qwen3_5_2b", "qwen3_5_4b", "qwen3_5_9b", "qwen3_5_27b", "qwen3_5_35b_a3b"),
    *("llama3_1_8b_instruct", "llama3_2_1b_instruct", "llama3_2_3b_instruct", "llama3_3_70b_instruct"),
    *("gemma4_e2b_it", "gemma4_e4b_it", "gemma4_26b_a4b_it", "gemma4_31b_it"),
    *("mistral_small_22b_instruct", "mistral_small_24b_instruct", "phi4", "smollm3_3b", "gpt_oss_20b"),
)
"""The chat models that are shown where none is named; larger ones fit on no card, and who has many names them."""
_HOST_PER_GPU = 2
"""The host's memory that is assumed, as a multiple of its GPUs': what most machines have at least."""
_DATA = "custom_e3"
"""The end of a recipe's name for data of one's own."""
_LONGEST = 1 << 25
"""Tokens: no longer row is looked for where a model has no limit."""


class Cell(NamedTuple):
    """One way to train a model: the tokens of the longest row, and what to type.

    Args:
        tokens: 0: not even a short row fits.
        is_limit: The model has no positions for a longer row; the memory would be enough.
        command: None if nothing fits.
    """

    tokens: int
    is_limit: bool
    command: str | None

    def to_json(self) -> JsonObject | None:
        return {"tokens": self.tokens, "is_limit": self.is_limit, "command": self.command} if self.tokens else None


class Row(NamedTuple):
    """A model with the cells of each method: on the GPUs alone, and with states and weights offloaded where needed.

    Args:
        path: The hub's id or a folder.
        context: Tokens that it has positions for; None: no limit is known.
        problems: Why a method cannot train it.
    """

    name: str
    path: str
    parameters: int
    context: int | None
    cells: Mapping[str, tuple[Cell, Cell]]
    problems: Mapping[str, str]

    def to_json(self) -> JsonObject:
        return {
            "model": self.name,
            "path": self.path,
            "parameters": self.parameters,
            "context": self.context,
            "methods": {
                method: {"on_gpus": on_gpus.to_json(), "offloaded": offloaded.to_json()}
                for method, (on_gpus, offloaded) in self.cells.items()
            },
            "problems": dict(self.problems),
        }

    @property
    def fits(self) -> bool:
        """Whether some method trains it here."""
        return any(cell.tokens for pair in self.cells.values() for cell in pair)


class Table(NamedTuple):
    """The rows, and the machines that they are for. `host_is_assumed`: the memory of the nodes is not known."""

    rows: Sequence[Row]
    methods: Sequence[str]
    machines: RunMachines
    host_is_assumed: bool

    def to_json(self) -> JsonObject:
        """Return the table as plain values; sizes are whole bytes, lengths are tokens."""
        node = self.machines.hardware
        return {
            "machines": {
                "nodes": self.machines.topology.num_nodes,
                "gpus_per_node": len(node.gpus),
                "gpu_bytes": node.smallest_gpu_bytes,
                "host_bytes": node.host_memory_bytes,
                "host_is_assumed": self.host_is_assumed,
            },
            "models": [row.to_json() for row in self.rows],
        }


def models() -> tuple[str, ...]:
    """Return the model parts that are shown where none is named: `MODELS`, and those of the user's own."""
    return (*MODELS, *(name for name, file in catalog.files("models").items() if not file.is_ours))


def named(text: str) -> tuple[str, ...]:
    """Return the model parts that a name or a pattern such as 'olmo*' means, or none."""
    return (*fnmatch.filter(catalog.names("models"), text),)


def table(
    flags: MachineFlags,
    environ: Mapping[str, str],
    parts: Sequence[str] = (),
    overrides: Overrides | None = None,
    *,
    allow_code: bool = False,
) -> Table:
    """Work out what machines can train.

    Args:
        parts: Models of the catalog; none: those of `models`.
        overrides: Changes of each recipe; its method, if it has one, is the only one.

    Raises:
        TunerError: no GPU is named and none is here, flags contradict each other, or no size of the models is known.
    """
    if not (flags.gpu or flags.gpu_memory or hardware.detect(environ).gpus):
        missing = "no GPU is" if parts else "neither a recipe nor a GPU is"
        recipe = "" if parts else " For a recipe: tuner plan RECIPE."
        fix = f"For what a GPU can train: {Option('gpu', 'rtx4090')}.{recipe}"
        raise UsageError(f"{missing} given, and this machine has none", where="tuner plan", fix=fix)
    changes = overrides or Overrides()
    methods = (changes.method,) if changes.method else METHODS
    machines = planned_machines(flags, environ)
    node = machines.hardware
    if is_assumed := not node.host_memory_bytes:
        node = node._replace(host_memory_bytes=_HOST_PER_GPU * node.smallest_gpu_bytes * len(node.gpus))
    machines = machines._replace(hardware=node)
    shown = parts or models()
    rows: list[Row] = []
    unknown: list[ModelError] = []
    with progress.shown("planning", "models", len(shown)) as work:
        for part in work.counted(shown):
            try:
                rows.append(_row(part, methods, machines, changes, allow_code=allow_code))
            except ModelError as error:  # nothing is known of its size
                unknown.append(error)
    if not rows:
        raise unknown[0]
    return Table(rows, methods, machines, is_assumed)


def _row(part: str, methods: Sequence[str], machines: RunMachines, changes: Overrides, *, allow_code: bool) -> Row:
    cells, problems = {}, {}
    recipe = None
    for method in methods:
        name = f"{part}_{method}_{_DATA}"
        try:
            recipe = loading.load(name, replace(changes, method=None), allow_code=allow_code)
        except RecipeError as error:  # a method that this model does not support
            problems[method] = error.what
            continue
        recipe = measured.with_measured_model(recipe)
        architecture = summary.known_architecture(recipe.config)
        precision = decide_precision(recipe.config.optim_wrapper.dtype, machines.hardware)
        on = machines.to_fit(precision, disk_of(recipe))
        limit = architecture.max_position_embeddings or _LONGEST
        typed = tuple(word for pair in changes.pairs for word in pair)  # a run needs these changes too
        longest = summary.longest_row(recipe.config, architecture, on, limit)
        on_disk = shlex.split(longest.on_disk)
        on_gpus = _cell(name, longest.on_gpus, limit, typed)
        cells[method] = (on_gpus, _cell(name, longest.offloaded, limit, (*typed, *on_disk)))
    if recipe is None:
        raise RecipeError(next(iter(problems.values())), where=part)
    architecture = summary.known_architecture(recipe.config)
    context = architecture.max_position_embeddings
    return Row(part, catalog.path_of(part), num_parameters(architecture), context, cells, problems)


def _cell(name: str, tokens: int, limit: int, typed: Sequence[str]) -> Cell:
    words = ("tuner", "train", name, "--data", "FILE", "--max-length", str(tokens), *typed)
    return Cell(tokens, tokens == limit, shlex.join(words) if tokens else None)
