"""What is checked before any process starts, every failure with its fix, all of them at once.

It chooses which checks run and ends the run; what can be wrong is known in `launch.checks`. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from tuner.errors import TunerError, together
from tuner.launch import fitting
from tuner.launch.checks import Finding, gpus, hub, model, rows, storage, system, zero
from tuner.launch.resolve import ResolvedRun

_QUICK = (
    rows.few_steps,
    model.architecture,
    model.weights,
    model.context,
    model.packed,
    model.kernels,
    model.chat_template,
    gpus.attention,
    gpus.precision,
    gpus.spread,
    storage.checkpoints,
    storage.conversion,
    storage.shared_memory,
    storage.host_memory,
    system.open_files,
    zero.swap_space,
)
"""Together some milliseconds, and no network: a dry run shows them too."""
_ELSEWHERE = (model.architecture, model.weights, model.context, model.packed)
"""What this machine can tell of a run on others; _QUICK is about the machine that trains."""
_CONFIGURED = (*_ELSEWHERE, model.tokens, gpus.attention, gpus.precision, zero.swap_space)
"""What a recipe and its config ask of this machine, whatever its memory and its data."""
_SLOW = (
    model.tokens,
    rows.first_rows,
    hub.reachable,
    storage.download,
    gpus.driver,
    gpus.busy,
    system.installed,
    system.port,
)


def check(run: ResolvedRun, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Refuse a run that cannot succeed, and return what may go wrong with it.

    Raises:
        TunerError: all that stands in its way.
    """
    checks = [partial(one, run) for one in (*_QUICK, *_SLOW)]
    around = (partial(one, run, environ) for one in (zero.config, system.builds, system.forgotten_srun))
    return _judge((*checks, *around, partial(system.shadows, environ), partial(_fit, run)))


def check_elsewhere(run: ResolvedRun, *, quick: bool) -> tuple[str, ...]:
    """Refuse a run on other machines that cannot succeed, as far as this one knows; return what may go wrong with it.

    Args:
        quick: Leave out what reads data or asks the hub.

    Raises:
        TunerError: as `check`.
    """
    slow = () if quick else (model.tokens, rows.first_rows, hub.reachable)
    return _judge(
        (*(partial(one, run) for one in (*_ELSEWHERE, rows.few_steps, zero.unknown, *slow)), partial(_fit, run))
    )


def inspect(run: ResolvedRun, environ: Mapping[str, str]) -> tuple[Finding, ...]:
    """Return what this machine lacks for a recipe and its config; its memory, the data and the hub are not asked."""
    around = (partial(one, run, environ) for one in (zero.config, system.builds))
    return tuple(_findings((*(partial(one, run) for one in (*_CONFIGURED, system.installed)), *around)))


def inspect_elsewhere(run: ResolvedRun) -> tuple[Finding, ...]:
    """Return what can be told from here of what a recipe and its config ask of other machines."""
    return tuple(_findings(partial(one, run) for one in (*_ELSEWHERE, model.tokens, zero.unknown)))


def _judge(checks: Iterable[Callable[[], Iterator[Finding]]]) -> tuple[str, ...]:
    found = list(_findings(checks))
    errors = [finding for finding in found if isinstance(finding, TunerError)]
    if errors:
        raise together(errors)
    return tuple(finding for finding in found if isinstance(finding, str))


def foresee(run: ResolvedRun, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return what `check` would say, as far as it can be known in milliseconds."""
    found = _findings((*(partial(one, run) for one in _QUICK), partial(zero.config, run, environ)))
    return tuple(one if isinstance(one, str) else f"this run would be refused: {one}" for one in found)


def _fit(run: ResolvedRun) -> Iterator[Finding]:
    if not run.request.ignore_fit:
        fitting.refuse_hopeless(run.fit, run.recipe.config)
    yield from ()


def _findings(checks: Iterable[Callable[[], Iterator[Finding]]]) -> Iterator[Finding]:
    """Yield what every check finds, also after one that raised it."""
    for one in checks:
        try:
            yield from one()
        except TunerError as error:
            yield error
