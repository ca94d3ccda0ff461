"""What a plan promises of a run, for its run.json: a run is held to it (`runs.promises`)."""

from __future__ import annotations

from tuner.fit.operations import model_flops
from tuner.fit.parameters import has_formula
from tuner.launch.checks import host
from tuner.launch.resolved_run import ResolvedRun
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.long_context import tokens_per_sample
from tuner.runs.records import OUTSIDE_TENSORS, Planned


def tokens_of_row(config: RecipeConfig) -> int | None:
    """Return the tokens of a packed row, which is full; None: rows are as long as their samples."""
    objective_facts, dataset = config.objective.facts, config.train_dataloader.dataset
    if not objective_facts.packs or not dataset.packing or objective_facts.generates:
        return None
    return dataset.pack_length if isinstance(dataset.pack_length, int) else tokens_per_sample(config)


def of(run: ResolvedRun) -> Planned | None:
    """Return what is promised of a run; None if nothing is.

    Seconds are promised where each row has as many tokens as the plan counts, and no completions are generated.
    """
    config, fit, compared = run.recipe.config, run.fit, run.level_and_split.compared
    architecture, sizes = config.architecture, host.checkpoint_bytes(run)
    time = compared.taken.time if compared else None
    is_full = tokens_of_row(config) == tokens_per_sample(config)
    step_s = time.total_s if time and is_full else None
    tokens = run.batch.global_batch * tokens_per_sample(config)
    steps_left = run.steps.left
    of_tensors = [size for name, size in fit.peak.gpu.items() if name not in OUTSIDE_TENSORS] if fit else []
    planned = Planned(
        peak_bytes=int(sum(of_tensors)) or None,
        step_s=step_s,
        sending_s=time.visible_communication_s if time and is_full else None,
        tokens_per_second=tokens / step_s if step_s else None,
        hours=steps_left * step_s / 3600 if step_s and steps_left else None,
        checkpoint_bytes=int(sizes[0]) if sizes else None,
        result_bytes=int(sizes[1]) if sizes else None,
        num_checkpoints=host.num_checkpoints(run) if sizes else None,
        flops_per_token=model_flops(config, architecture) if architecture and has_formula(architecture) else None,
    )
    return planned if planned != Planned() else None
