"""`tuner plan`: whether a recipe fits, at every ZeRO level, on machines that need not be here."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tuner.cli.help import Command
from tuner.cli.options import OptionValue, overrides, recipe_options, taken_out
from tuner.cli.say import say, say_json, say_table, wrapped
from tuner.errors import Option, Text, UsageError
from tuner.files import sized
from tuner.fit import advice, summary
from tuner.fit.candidates import Candidate
from tuner.fit.levels import Fit, Machines
from tuner.fit.summary import UNIT, Longest, PlanReport, Step
from tuner.machine.hardware import decide_precision
from tuner.recipes import catalog, loading
from tuner.recipes.names import Name, NameKind, identify
from tuner.recipes.recipe import Overrides, Recipe
from tuner.runs.directory import RunDirectory
from tuner.zero.choice import disk_of

if TYPE_CHECKING:
    from tuner.launch.planning import Plan
    from tuner.launch.trainable import Cell, Row, Table

_PARTS = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer_states", "step"),
    "activations": ("activations",),
    "logits": ("logits",),
    "buffers": ("buckets", "gathered_weights", "loading"),
    "context": ("context", "fragmentation"),
    "vllm": ("vllm",),
    "rewards": ("rewards",),
}
_OF_SOME = ("vllm", "rewards")
"""Parts that are shown only where there is one."""
_ESTIMATES = (
    "Estimates: model states by the published formulas, activations as transformers saves them; "
    "see docs/plan.md for what was measured."
)
_OF_ONE_ROW = "Estimates for one row per micro-batch, recomputed activations, flash attention and the loss in chunks."
_NONE = "-"
_LIMIT = "*"
_FEW = 3
"""The most models that get a line each; for more of them an example shows how to get such lines."""


@click.command(
    cls=Command,
    examples=(
        "tuner plan qwen3_8b_full_alpaca_e1 --gpu h100 --gpus 8",
        "tuner plan --model ./my-model --data my.jsonl",
        "tuner plan --gpu rtx4090",
        "tuner plan 'qwen3*' --gpu h100 --gpus 2",
    ),
    json_keys={
        "tuner plan --gpu NAME --json": "`machines`, `models`: [what each holds](../gpus.md#for-programs)",
        "tuner plan RECIPE --json": (
            "`recommended`, `presets`, `split`, `batch`, `parameters`, `machines`, `tokens_per_step`, `step_s`, "
            "`chosen`, `changes`, `notes`, `warnings`"
        ),
    },
    uses={
        "what a GPU can train, before you choose a model": (
            "`tuner plan --gpu rtx4090 --json`; `tuner plan MODEL --gpu rtx4090`"
        ),
        "less memory after `gpu-out-of-memory`": (
            "`tuner plan RECIPE`, then its line; or `tuner train RECIPE --on-oom retry`"
        ),
    },
)
@recipe_options("recipe", machines=True)
@click.option("--gpu-memory", metavar="SIZE", help="Memory per GPU, such as 80GB, instead of --gpu.")
@click.option("--host-memory", metavar="SIZE", help="RAM per node, such as 512GB.")
@click.option(
    "--interconnect", metavar="RATE", help="Network per node, such as 8x400Gb/s: also estimate the seconds per step."
)
@click.option(
    "--utilisation", type=float, help="Fraction of the GPU's peak FLOPs that training reaches; computed without it."
)
@click.option(
    "--max-context", is_flag=True, help="Show the longest sequence length that fits, for each sequence-parallel size."
)
@click.option(
    "--from",
    "measured_in",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Plan with the rates that this run has measured; without RECIPE, its own recipe again.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def command(
    recipe: Name | None,
    deepspeed: str | None,
    max_context: bool,
    measured_in: Path | None,
    as_json: bool,
    allow_code: bool,
    **changes: OptionValue,
) -> None:
    """Estimate the memory that RECIPE needs at every ZeRO level, and which level fits.

    Without RECIPE, show what the GPUs can train: the longest row of each model, by method. RECIPE may also be a model
    of the catalog, or a pattern such as 'qwen3*'.

    The GPUs need not be here: --gpus, --gpu and --nodes name others. With --deepspeed or --ds, the table also shows
    that config.
    """
    from tuner.launch import level_and_split, measured, measured_rates, planning, trainable
    from tuner.launch.machines import MachineFlags, planned_machines

    flags = MachineFlags(**taken_out(MachineFlags._fields, changes))
    changed = overrides(**changes)
    if measured_in and recipe is None and changed.model is None:
        recipe = identify(str(RunDirectory(measured_in).recipe))
    parts = trainable.named(recipe.text) if recipe and recipe.kind is NameKind.UNKNOWN else ()
    if parts or (recipe is None and changed.model is None and changed.adapter is None):
        _refuse_levels(deepspeed, changed, shows="the table")
        table = trainable.table(flags, os.environ, parts, changed, allow_code=allow_code)
        if as_json:
            say_json(table.to_json())
        else:
            _show_table(table)
        return
    loaded = loading.load(recipe, changed, allow_code=allow_code)
    if max_context:
        _refuse_levels(deepspeed, changed, shows="--max-context")
        machines = planned_machines(flags, os.environ)
        precision = decide_precision(loaded.config.optim_wrapper.dtype, machines.hardware)
        loaded = measured.with_measured_model(loaded)
        refused = level_and_split.refused(loaded, machines, precision)
        _show_longest(loaded, machines.to_fit(precision, disk_of(loaded)), machines.name, refused, as_json=as_json)
        return
    on_cpus = measured_rates.cpus_of(measured_in, flags) if measured_in else None
    plan = planning.make(loaded, flags, os.environ, deepspeed, on_cpus)
    rates = measured_rates.of(plan, measured_in) if measured_in else None
    if as_json:
        say_json(plan.to_json() | ({"measured": rates._asdict()} if rates else {}))
        return
    if plan.report:
        _print(plan.report, plan)
    else:
        _print_head(plan)
    if rates:
        say(wrapped(str(rates)))


def _refuse_levels(deepspeed: str | None, changed: Overrides, *, shows: str) -> None:
    if deepspeed or changed.ds:
        fix = "Remove one of them; every level is tried."
        raise UsageError("both choose levels", where=f"{shows} and --deepspeed", fix=fix)


def _show_longest(
    loaded: Recipe, machines: Machines, machine_name: str, refused: Collection[str], *, as_json: bool
) -> None:
    """Print the longest rows that fit: with the recipe as it is, and with all that makes room for longer ones."""
    architecture = summary.known_architecture(loaded.config)
    flags = " ".join(f"--set {name}=True" for name in summary.settings(architecture))
    roomiest_config = summary.with_everything(loaded.config, architecture)
    longest = {"as_it_is": summary.longest(loaded.config, architecture, machines, refused)}
    if roomiest_config != loaded.config:
        longest["with_everything"] = summary.longest(roomiest_config, architecture, machines, refused)
    if as_json:
        values = {name: [vars(row) for row in rows] for name, rows in longest.items()}
        say_json({"recipe": loaded.name, "max_context": values, "notes": loaded.notes})
        return
    title = "the longest row in units of 1,024 tokens, by the number of ranks that share it"
    say(wrapped(f"{loaded.name} on {machine_name}: {title}"))
    for name, rows in longest.items():
        click.secho(flags if name == "with_everything" else "Recipe unchanged", italic=True)
        say_table(_longest_rows(rows), gap=2)
    positions = "Whether the model handles such positions is not checked."
    say(wrapped(f"{_OF_ONE_ROW} {positions} See docs/long-context.md."), dim=True)


def _longest_rows(rows: list[Longest]) -> Iterator[list[str]]:
    sizes = sorted({row.sequence_parallel_size for row in rows})
    yield ["sequence_parallel_size", *map(str, sizes)]
    for level in dict.fromkeys(row.level for row in rows):
        tokens = [row.tokens for row in rows if row.level == level]
        yield [catalog.short_name(level), *(f"{count // 1024:,}" if count else "-" for count in tokens)]


def _print_head(plan: Plan, *lines: str) -> None:
    from tuner.launch.announcement import of_recipe

    for line in (*of_recipe(plan.recipe, plan.steps, plan.batch), f"machines: {plan.on}", *lines, *plan.recipe.notes):
        say(wrapped(line, "  "))
    for warning in plan.warnings:
        say(wrapped(f"WARNING: {warning}"), fg="yellow")


def _print(report: PlanReport, plan: Plan) -> None:
    from tuner.launch.steps import packs

    _print_head(plan)
    click.secho("Peak memory (GiB): per GPU, and per node (row 'host')", italic=True)
    names = [level.level for level in report.levels]
    bold = names.index(report.recommended.level) + 1 if report.recommended else None
    say_table(_memory_rows(report, plan.chosen), bold=bold)
    if plan.chosen:
        say(wrapped(f"chosen: {plan.chosen.fit.level}, {plan.chosen.split}"))
    for line in (*_refusals(report), *_advice(report)):
        say(wrapped(line))
    if price := report.price:
        say(
            wrapped(
                f"The update and what ranks send take {price.part:.0%} of a step of {report.tokens_per_step:,} tokens. "
                f"With {price.larger_tokens:,} tokens a step, {price.gain:.0%} more tokens a second are trained on."
            )
        )
    if report.machines.world_size == 1:
        for step in report.steps:
            say(wrapped(_time_of_one_gpu(report, step)))
    elif report.steps:
        click.secho("Sent by each rank in one step", italic=True)
        say_table(_traffic_rows(report), gap=2)
    if packs(report.config) and report.choice and report.choice.taken.operations.attention.startswith("flash"):
        say(wrapped(_of_packed_rows(report)))
    if plan.recipe.config.objective.facts.generates:
        say(wrapped("Times and traffic are without the generation of completions."))
    say(wrapped(_ESTIMATES), dim=True)


def _refusals(report: PlanReport) -> Iterator[str]:
    """Yield why a run at some levels would be refused, whether they fit or not."""
    for reason in dict.fromkeys(error.what for error in report.refused.values()):
        names = [catalog.short_name(level) for level, error in report.refused.items() if error.what == reason]
        yield f"{', '.join(names)} would be refused: {reason}."


def _advice(report: PlanReport) -> Iterator[str]:
    """Yield the level to use, or the changes that make a level fit."""
    choice, best = report.choice, report.recommended
    if best and best.offloads and report.changes:
        yield advice.WITHOUT_OFFLOADING
        yield from _numbered(report)
    if choice and best:
        level = "no ZeRO (--deepspeed none)" if best.level == "none" else best.level
        use = "Unchanged, use" if best.offloads and report.changes else "Use"
        yield f"{use} {level}: {choice.describe()}. It leaves {sized(best.spare_gpu_bytes)} to spare on each GPU."
        if folder := advice.folder(best.level, best.machines):
            yield f"A run names the folder to swap to: {folder}."
        if not report.machines.host_bytes:
            yield f"Each host then needs {sized(best.peak.host_bytes)}; set --host-memory to check that too."
        return
    yield "Nothing fits. " + ("Each of these changes does:" if report.changes else "No change tried here makes it fit.")
    yield from _numbered(report)


def _numbered(report: PlanReport) -> Iterator[str]:
    for number, change in enumerate(report.changes, 1):
        yield f"  {number}. {change.text}"


def _memory_rows(report: PlanReport, chosen: Candidate | None) -> Iterator[list[str]]:
    """Yield a column for each level: six levels and their longest line stand in 80 columns, eleven sizes do not."""
    fits = [*(level.fit for level in report.levels), *([chosen.fit] if chosen else [])]
    splits = [*(level.split for level in report.levels), *([chosen.split] if chosen else [])]
    names = [catalog.short_name(level.level) for level in report.levels]
    yield ["", *names, *(["chosen"] if chosen else [])]
    yield ["split", *(f"{split.micro_batch}x{split.accumulation}" for split in splits)]
    words = {"all": "yes", "none": "no"}
    yield ["recompute", *(words.get(split.recomputes, split.recomputes) for split in splits)]
    for title, keys in _PARTS.items():
        sizes = [sum(fit.peak.gpu.get(key, 0.0) for key in keys) for fit in fits]
        if title in _OF_SOME and not any(sizes):
            continue
        yield [title, *(f"{size / 2**30:.2f}" for size in sizes)]
    for title, totals in (
        ("total", [fit.peak.gpu_bytes for fit in fits]),
        ("spare", [fit.spare_gpu_bytes for fit in fits]),
        ("host", [fit.peak.host_bytes for fit in fits]),
    ):
        yield [title, *(f"{size / 2**30:.1f}" for size in totals)]
    of_levels = [_fit_word(level.fit, refused=level.level in report.refused) for level in report.levels]
    yield ["fits", *of_levels, *([_fit_word(chosen.fit)] if chosen else [])]


def _fit_word(fit: Fit, *, refused: bool = False) -> str:
    if refused:
        return "refused"
    if fit.fits:
        return "yes"
    return "no" if fit.spare_gpu_bytes < 0 else "no: host"


def _time_of_one_gpu(report: PlanReport, step: Step) -> str:
    assert step.time is not None
    line = f"one step: about {step.time.total_s:.2f} s, {report.tokens_per_step / step.time.total_s:,.0f} tokens/s"
    if step.range_s is None:
        return f"{line}, with offloading"
    return "{}; usually {:.2f} to {:.2f} s".format(line, *step.range_s)


def _of_packed_rows(report: PlanReport) -> str:
    if report.sample_tokens is None:
        return "Attention counts as if each packed row were one sample: its samples are not counted here."
    return f"Attention counts as in packed samples of {report.sample_tokens:,.0f} tokens, the mean over all tokens."


def _traffic_rows(report: PlanReport) -> Iterator[list[str]]:
    timed = ("compute s", "update s", "sending s", "exposed s", "step s", "tokens/s")
    yield ["level", "GB", *(timed if any(step.time for step in report.steps) else ())]
    for step in report.steps:
        cells = [catalog.short_name(step.level), f"{step.traffic.total_bytes / 1e9:.1f}"]
        if time := step.time:
            parts = time.compute_s, time.update_s, time.communication_s, time.visible_communication_s, time.total_s
            cells += [*(f"{value:.2f}" for value in parts), f"{report.tokens_per_step / time.total_s:,.0f}"]
        yield cells


# Without a recipe


def _show_table(table: Table) -> None:
    """Print the table, what does not fit, and the lines to type."""
    fitting = [row for row in table.rows if row.fits]
    assumed = Text(f" (assumed: {Option('host_memory')} names another)") if table.host_is_assumed else ""
    host = sized(table.machines.hardware.host_memory_bytes)
    say(wrapped(f"What {table.machines.name} can train, with {host} of host memory{assumed}"))
    if fitting:
        click.secho(wrapped(f"Tokens of the longest row, k = {UNIT:,}: on the GPU / with offloading"), italic=True)
        say_table([("", *table.methods), *map(_line, fitting)], gap=3)
    if any(cell.is_limit for row in fitting for pair in row.cells.values() for cell in pair):
        say(wrapped(f"{_LIMIT} The model has positions for no more; the memory would be enough."))
    if absent := [row.name for row in table.rows if not row.fits]:
        say(wrapped(f"Nothing fits: {', '.join(absent)}."))
    for problem in dict.fromkeys(text for row in table.rows for text in row.problems.values()):
        say(wrapped(problem))
    for line in _commands(fitting) if len(table.rows) <= _FEW else _example(fitting):
        say(wrapped(line, "  "))
    say(wrapped(f"{_OF_ONE_ROW} See docs/gpus.md."), dim=True)


def _line(row: Row) -> tuple[str, ...]:
    return (row.name, *(cell_text(*pair) for pair in row.cells.values()))


def cell_text(on_gpus: Cell, offloaded: Cell) -> str:
    """Return a cell's two lengths, or the one that both are."""
    first, second = _length(on_gpus), _length(offloaded)
    return first if first == second else f"{first} / {second}"


def _length(cell: Cell) -> str:
    return f"{cell.tokens // UNIT:,}k{_LIMIT if cell.is_limit else ''}" if cell.tokens else _NONE


def _commands(rows: list[Row]) -> Iterator[str]:
    for row in rows:
        for method, pair in row.cells.items():
            on_gpus, offloaded = pair
            if on_gpus.command:
                yield f"{method}: {on_gpus.command}"
            if offloaded.command and offloaded.tokens > on_gpus.tokens:
                yield f"{method} with offloading: {offloaded.command}"


def _example(rows: list[Row]) -> Iterator[str]:
    shown = next((row for row in rows if any(pair[0].command for pair in row.cells.values())), None)
    if shown is None:
        return
    method = next(method for method in reversed([*shown.cells]) if shown.cells[method][0].command)
    yield f"The lines of a model: tuner plan {shown.name}, with the same options. Its {method}, for example:"
    yield f"  {shown.cells[method][0].command}"
