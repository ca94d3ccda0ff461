"""What an earlier run has measured, for the plan of the next one: `tuner plan --from RUN`.

A step is scaled by what the plan says of both runs where it times both, and by their FLOPs where it times none, as on
CPUs. Rows that are not packed count as long as those of the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tuner.errors import Option, RunDirectoryError, UsageError
from tuner.files import dump_json, load_json, read_json_object
from tuner.fit import gpu_catalog
from tuner.fit.gpu_catalog import KnownGpu
from tuner.fit.operations import model_flops
from tuner.launch.machines import MachineFlags, RunMachines
from tuner.launch.planning import Plan
from tuner.launch.promised import tokens_of_row
from tuner.machine.hardware import Hardware
from tuner.machine.topology import planned
from tuner.recipes.schema import RecipeConfig, resolved_document
from tuner.recipes.schema.long_context import tokens_per_sample
from tuner.runs import ledger, metrics
from tuner.runs.directory import RunDirectory
from tuner.runs.records import Planned, RunRecord

_FROM = "--from"
_FIX = "Name a run of the same model on the same machine that has taken some steps."


class Rates(NamedTuple):
    """The steps of a plan, at the rates of an earlier run.

    Args:
        run: The earlier run's directory.
        ratio: How many times its planned step was measured; None: its plan had no seconds, and FLOPs were compared.
        measured_step_s: The mean step of the earlier run.
        hours: Of all steps; None: their number is not known.
    """

    run: str
    measured_step_s: float
    ratio: float | None
    step_s: float
    tokens_per_second: float
    hours: float | None

    def __str__(self) -> str:
        way = f"{self.ratio:.2f} times what was planned for it" if self.ratio else "scaled by tokens and FLOPs"
        hours = f"; all steps take {self.hours:.2f} h" if self.hours is not None else ""
        return (
            f"Measured in {self.run}: {self.measured_step_s:.2f} s a step. At that rate ({way}), a step of this plan "
            f"takes {self.step_s:.2f} s, {self.tokens_per_second:,.0f} tokens/s{hours}."
        )


def cpus_of(folder: Path, flags: MachineFlags) -> RunMachines | None:
    """Return the machines of a run without GPUs, where no flag names GPUs to plan for; otherwise None.

    Raises:
        RunDirectoryError: it is no run.
    """
    record = RunDirectory(folder).read_run()
    if record.hardware.gpus or flags.gpu or flags.gpu_memory:
        return None
    node = Hardware(num_cpus=record.hardware.num_cpus or 1)
    ranks = planned(record.num_nodes, record.world_size // record.num_nodes)
    return RunMachines.of(node, ranks)._replace(name=f"{ranks.world_size} ranks on CPUs, as in {folder}")


def of(plan: Plan, folder: Path) -> Rates:
    """Return the steps of a plan at the rates that a run has measured.

    Raises:
        RunDirectoryError: it is no run, or has measured nothing.
        UsageError: it trained another model, or on other machines.
    """
    run_dir = RunDirectory(folder)
    record, of_run = run_dir.read_run(), ledger.read_ledger(run_dir)
    config = plan.recipe.config
    _refuse_other_model(run_dir, config)
    _refuse_other_machines(record, plan)
    measured_s, began = of_run.seconds_per_step, of_run.attempts[0].began
    tokens = of_run.tokens
    if not measured_s or not tokens:
        raise RunDirectoryError("the run has not measured a step", where=folder, fix=_FIX)
    a_row = tokens_of_row(config)
    num_steps = metrics.latest(run_dir)["step"] - began
    per_step = plan.batch.global_batch * (a_row or tokens / num_steps / record.batch.global_batch)
    promised, taken = record.planned or Planned(), plan.report.taken if plan.report else None
    planned_step_s = taken.time.total_s if taken and taken.time else None
    if promised.step_s and planned_step_s and a_row == tokens_per_sample(config):
        ratio: float | None = measured_s / promised.step_s
        step_s = planned_step_s * measured_s / promised.step_s
    else:
        ratio = None
        a_token_s = of_run.seconds["useful"] / tokens
        step_s = a_token_s * per_step * _flops_ratio(promised, config) * record.batch.ranks / plan.batch.ranks
    steps = plan.steps.left
    hours = steps * step_s / 3600 if steps is not None else None
    return Rates(str(folder), measured_s, ratio, step_s, per_step / step_s, hours)


def _flops_ratio(promised: Planned, config: RecipeConfig) -> float:
    """Return the FLOPs of a token of this plan, in those of the earlier run; 1 if either is not known."""
    if not promised.flops_per_token or config.architecture is None:
        return 1.0
    return model_flops(config, config.architecture) / promised.flops_per_token


def _refuse_other_model(run_dir: RunDirectory, config: RecipeConfig) -> None:
    trained = read_json_object(run_dir.resolved_recipe).get("recipe") or {}
    planned_recipe = load_json(dump_json(resolved_document(config)))["recipe"]
    if any(trained.get(key) != planned_recipe[key] for key in ("architecture", "quantization")):
        raise UsageError("the run trained another model", where=_FROM, fix=_FIX)


def _refuse_other_machines(record: RunRecord, plan: Plan) -> None:
    measured = {_product(gpu.name, (gpu.model_extra or {}).get("memory_bytes", 0)) for gpu in record.hardware.gpus}
    planned_gpus = {_product(gpu.name, gpu.memory_bytes) for gpu in plan.gpus}
    if measured != planned_gpus:
        on = ", ".join(sorted({gpu.name for gpu in record.hardware.gpus})) or "a CPU"
        fix = f"Plan for the same GPUs ({Option('gpu', 'NAME')}), or name a run on those of the plan."
        raise UsageError(f"the run was measured on {on}", where=_FROM, fix=fix)


def _product(name: str, memory_bytes: object) -> KnownGpu | str:
    return gpu_catalog.like(name, memory_bytes if isinstance(memory_bytes, int) else 0) or name
