"""Run the checks before any process starts, and report every failure with its fix at once.

It chooses which checks of `launch.checks` run, and refuses the run. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tuner.errors import RecipeError, TunerError, together
from tuner.launch import fitting, steps
from tuner.launch.checks import Finding, gpus, host, model_files
from tuner.launch.resolved_run import ResolvedRun
from tuner.zero.recipe_values import is_stage_0

Check = Callable[[ResolvedRun], Iterator[Finding]]
_HIGH_RATE = 1e-2
"""Above it even a small new model rarely learns with Adam."""
_POLYNOMIAL_END = 1e-7
"""The `lr_end` of transformers' polynomial schedule, which raises ValueError for a rate that is not above it (5.23)."""


def few_steps(run: ResolvedRun) -> Iterator[Finding]:
    """Find a run of too few optimizer steps, or of fewer than its warm-up."""
    yield from steps.warnings(run.recipe.config, run.batch, run.steps)


def polynomial(run: ResolvedRun) -> Iterator[Finding]:
    """Find a rate that the polynomial schedule of transformers cannot begin with."""
    config = run.recipe.config
    if config.param_scheduler.type == "polynomial" and config.optim_wrapper.optimizer.lr <= _POLYNOMIAL_END:
        problem = (
            f"the polynomial schedule ends at a rate of {_POLYNOMIAL_END:g}, and lr = "
            f"{config.optim_wrapper.optimizer.lr:g} is not above it"
        )
        fix = "Use another schedule such as param_scheduler.type=linear, or a higher lr."
        yield RecipeError(problem, where="param_scheduler.type", fix=fix)


def high_rate(run: ResolvedRun) -> Iterator[Finding]:
    """Find a learning rate that is likely a slip of the keys: 1e-1 for 1e-4."""
    optimizer = run.recipe.config.optim_wrapper.optimizer
    if "Adam" in optimizer.type and optimizer.lr > _HIGH_RATE:
        yield (
            f"lr = {optimizer.lr:g} is likely to destroy what the model knows: with {optimizer.type}, 2e-4 is usual "
            "for an adapter and 2e-5 for all weights."
        )


def _streamed(run: ResolvedRun) -> Iterator[Finding]:
    if run.recipe.config.train_dataloader.dataset.streaming:
        from tuner.launch.checks import inputs  # few runs stream their data

        yield from inputs.streamed(run)


def _deepspeed(name: str) -> Check:
    """Return a check of the DeepSpeed config; a run at stage 0 needs it only in bf16, of which DeepSpeed had errors."""

    def check(run: ResolvedRun) -> Iterator[Finding]:
        if is_stage_0(run.recipe, run.document) and run.precision.dtype != "bf16":
            return
        from tuner.launch.checks import deepspeed_config  # 700 lines with what it imports

        yield from getattr(deepspeed_config, name)(run)

    return check


def _inputs(run: ResolvedRun) -> Iterator[Finding]:
    from tuner.launch.checks import inputs  # a dry run reads no rows and asks no hub

    yield from _findings(run, inputs.first_rows, inputs.rewards, inputs.reachable, inputs.pushes)


def _local_inputs(run: ResolvedRun) -> Iterator[Finding]:
    from tuner.launch.checks import inputs  # as in `_inputs`

    yield from _findings(run, inputs.first_rows, inputs.rewards)


def _teacher(run: ResolvedRun) -> Iterator[Finding]:
    if run.recipe.config.objective.taught_by:
        from tuner.launch.checks import inputs  # few runs have a teacher

        yield from _findings(run, inputs.teacher, inputs.teachers_tokens)


def _generation(name: str) -> Check:
    """Return a check of the program that generates; few objectives generate, and few of them with vLLM."""

    def check(run: ResolvedRun) -> Iterator[Finding]:
        program = run.recipe.config.objective.generated_by
        if program is None or program.engine == "transformers":
            return
        from tuner.launch.checks import inputs  # as above

        yield from getattr(inputs, name)(run)

    return check


_ELSEWHERE: tuple[Check, ...] = (
    high_rate,
    polynomial,
    _streamed,
    model_files.remote_code,
    model_files.architecture,
    model_files.images,
    model_files.tower,
    model_files.weights,
    model_files.context,
    model_files.packed,
    model_files.adapted_layers,
    model_files.chat_template,
    _teacher,
)
"""What this machine can check for a run on others; all other checks are about the machine that trains."""
_QUICK: tuple[Check, ...] = (
    few_steps,
    *_ELSEWHERE,
    model_files.kernels,
    gpus.attention,
    gpus.four_bits,
    gpus.liger,
    gpus.offloading,
    gpus.precision,
    gpus.spread,
    _generation("vllm"),
    host.checkpoints,
    host.conversion,
    host.joined_model,
    host.shared_memory,
    host.host_memory,
    host.open_files,
    _deepspeed("swap_space"),
)
"""Checks that take milliseconds together and use no network: a dry run makes them too."""
_SLOW: tuple[Check, ...] = (
    model_files.tokens,
    _inputs,
    _generation("server"),
    host.download,
    gpus.driver,
    gpus.busy,
    host.installed,
    host.notifies,
    host.port,
)
_CONFIGURED: tuple[Check, ...] = (
    *(*_ELSEWHERE, model_files.tokens, gpus.attention, gpus.liger, gpus.offloading, gpus.precision),
    *(_deepspeed("swap_space"), host.installed, host.notifies, _deepspeed("config"), _deepspeed("compiles")),
)
"""What a recipe and its config need of this machine, apart from memory and data."""


def check(run: ResolvedRun) -> tuple[str, ...]:
    """Refuse a run that cannot succeed, and return warnings about it.

    Raises:
        TunerError: everything that is wrong.
    """
    local = (_deepspeed("config"), _deepspeed("swap_disks"), host.forgotten_nodes, host.shadows)
    return _judge(run, *_QUICK, *_SLOW, *local, _fit)


def check_elsewhere(run: ResolvedRun, *, quick: bool) -> tuple[str, ...]:
    """Refuse a run on other machines that cannot succeed, as far as this machine can check; return warnings.

    Args:
        quick: Leave out the checks that read data or ask the hub.

    Raises:
        TunerError: as `check`.
    """
    quick_checks = (*_ELSEWHERE, few_steps, _deepspeed("unknown"))
    if quick:
        return _judge(run, *quick_checks, _fit)
    from tuner.launch.checks import inputs  # as in `_inputs`

    return _judge(run, *quick_checks, model_files.tokens, inputs.first_rows, inputs.reachable, _fit)


def inspect(run: ResolvedRun) -> tuple[Finding, ...]:
    """Return what is wrong with the first rows and rewards, and what this machine lacks for a recipe and its config.

    Memory, and access to the hub, are left out.
    """
    return tuple(_findings(run, *_CONFIGURED, _local_inputs))


def inspect_elsewhere(run: ResolvedRun) -> tuple[Finding, ...]:
    """Return what a recipe and its config need of other machines, as far as this machine can check."""
    return tuple(_findings(run, *_ELSEWHERE, model_files.tokens, _deepspeed("unknown"), _local_inputs))


def foresee(run: ResolvedRun) -> tuple[str, ...]:
    """Return the warnings and errors of `check` that take milliseconds, as texts.

    Raises:
        MachineError: the command of log.notify does not exist: a mistake wherever the run starts.
    """
    _judge(run, host.notifies)
    findings = _findings(run, *_QUICK, _deepspeed("config"), _deepspeed("compiles"))
    return tuple(
        one if isinstance(one, str) else f"tuner train would refuse this run: {one.message}" for one in findings
    )


def _judge(run: ResolvedRun, *checks: Check) -> tuple[str, ...]:
    findings = list(_findings(run, *checks))
    errors = [one for one in findings if isinstance(one, TunerError)]
    if errors:
        raise together(errors)
    return tuple(one for one in findings if isinstance(one, str))


def _findings(run: ResolvedRun, *checks: Check) -> Iterator[Finding]:
    """Yield the findings of every check, also after a check that raised an error."""
    for one in checks:
        try:
            yield from one(run)
        except TunerError as error:
            yield error


def _fit(run: ResolvedRun) -> Iterator[Finding]:
    if not run.request.ignore_fit:
        fitting.refuse_hopeless(run.fit, run.recipe.config)
    yield from ()
