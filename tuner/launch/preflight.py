"""Run the checks before any process starts, and report every failure with its fix at once.

It chooses which checks of `launch.checks` run, and refuses the run. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Literal, NamedTuple

from tuner.errors import Text, TunerError, marked, together
from tuner.launch import memory
from tuner.launch.checks import Finding, deepspeed_config, gpus, host, inputs, model_files, settings
from tuner.launch.resolved_run import ResolvedRun

Need = Literal["here", "elsewhere", "run", "start", "dry", "rows", "code", "slow", "network"]
"""What a check needs of the command that runs it.

- here, elsewhere: this machine trains, or another one;
- run: it is about one run, with its directory, its steps and the memory and disk that it takes, not a recipe alone;
- start: ranks start next, so ports, drivers and what else uses the GPUs matter;
- dry: nothing starts; a start reports the same by itself;
- rows, code, network: it reads rows of data, calls the user's functions, asks the hub or a server;
- slow: it takes longer than the milliseconds in which a dry run answers.
"""
Needs = AbstractSet[Need]


class Check(NamedTuple):
    """A check and what it needs; it runs for each command that has all of that."""

    function: Callable[[ResolvedRun], Iterator[Finding]]
    needs: Needs = frozenset()


CHECKS = (
    Check(settings.held_out, {"run"}),
    Check(settings.few_steps, {"run"}),
    Check(settings.early_stopping, {"run"}),
    Check(settings.high_rate),
    Check(settings.polynomial),
    Check(settings.unread_keys),
    Check(inputs.streamed),
    Check(model_files.remote_code),
    Check(model_files.architecture),
    Check(model_files.images),
    Check(model_files.tower),
    Check(model_files.weights),
    Check(model_files.context),
    Check(model_files.packed),
    Check(model_files.prompts),
    Check(model_files.shared),
    Check(model_files.adapted_layers),
    Check(model_files.chat_template),
    Check(inputs.teacher),
    Check(inputs.teachers_tokens),
    Check(model_files.kernels, {"here"}),
    Check(gpus.attention, {"here"}),
    Check(gpus.four_bits, {"here"}),
    Check(gpus.liger, {"here"}),
    Check(gpus.offloading, {"here"}),
    Check(gpus.precision, {"here"}),
    Check(gpus.spread, {"here"}),
    Check(inputs.vllm, {"here"}),
    Check(inputs.tools),
    Check(host.checkpoints, {"here", "run"}),
    Check(host.conversion, {"here", "run"}),
    Check(host.joined_model, {"here", "run"}),
    Check(host.shared_memory, {"here", "run"}),
    Check(host.host_memory, {"here", "run"}),
    Check(host.open_files, {"here", "run"}),
    Check(deepspeed_config.swap_space, {"here"}),
    Check(deepspeed_config.config, {"here"}),
    Check(deepspeed_config.compiles, {"here", "dry"}),
    Check(deepspeed_config.unknown, {"elsewhere"}),
    Check(model_files.tokens, {"slow"}),
    Check(inputs.first_rows, {"rows"}),
    Check(inputs.rewards, {"rows", "code"}),
    Check(inputs.tool_template, {"slow"}),
    Check(inputs.tool_functions, {"rows", "code"}),
    Check(inputs.reachable, {"network"}),
    Check(inputs.pushes, {"here", "network"}),
    Check(inputs.server, {"start", "network"}),
    Check(inputs.download, {"start"}),
    Check(host.is_well, {"start"}),
    Check(gpus.driver, {"start"}),
    Check(gpus.busy, {"start"}),
    Check(host.installed, {"here", "slow"}),
    Check(host.notifies, {"here"}),
    Check(host.port, {"start"}),
    Check(deepspeed_config.swap_disks, {"start"}),
    Check(host.forgotten_nodes, {"start"}),
    Check(host.lost_hosts, {"start"}),
    Check(host.shadows, {"start"}),
)
"""All checks, in the order in which their findings are shown."""
_OF_ROWS: Needs = frozenset({"rows", "code", "slow"})


def check(run: ResolvedRun) -> tuple[str, ...]:
    """Refuse a run that cannot succeed, and return warnings about it.

    Raises:
        TunerError: everything that is wrong.
    """
    return _checked(run, {"here", "run", "start", "network", *_OF_ROWS})


def check_elsewhere(run: ResolvedRun, *, quick: bool) -> tuple[str, ...]:
    """Refuse a run on other machines that cannot succeed, as far as this machine can check; return warnings.

    Args:
        quick: Leave out the checks that read data or ask the hub.

    Raises:
        TunerError: as `check`.
    """
    return _checked(run, {"elsewhere", "run", *(() if quick else ("rows", "slow", "network"))})


def inspect(run: ResolvedRun, *, elsewhere: bool = False) -> tuple[Finding, ...]:
    """Return what is wrong with the first rows and rewards, and what this machine lacks for a recipe and its config.

    Memory, and access to the hub, are left out. Of machines `elsewhere` it is what can be checked from here.
    """
    machines: Needs = {"elsewhere"} if elsewhere else {"here", "dry"}
    return tuple(_findings(run, _OF_ROWS | machines))


def foresee(run: ResolvedRun) -> tuple[str, ...]:
    """Return the warnings and errors of `check` that take milliseconds, as texts.

    Raises:
        MachineError: the command of log.notify does not exist: a mistake wherever the run starts. Or no level fits.
    """
    _raise([*host.notifies(run), *_no_level(run)])
    return tuple(
        finding if isinstance(finding, str) else Text(f"tuner train would refuse this run: {marked(finding.message)}")
        for finding in _findings(run, {"here", "run", "dry"})
    )


def _checked(run: ResolvedRun, available: Needs) -> tuple[str, ...]:
    """Return the warnings of the checks that need what is `available`; raise all errors, and that nothing fits."""
    _raise(_no_level(run))
    findings = [*_findings(run, available), *_fit(run)]
    _raise(findings)
    return tuple(finding for finding in findings if isinstance(finding, str))


def _raise(findings: Iterable[Finding]) -> None:
    if errors := [finding for finding in findings if isinstance(finding, TunerError)]:
        raise together(errors)


def _findings(run: ResolvedRun, available: Needs) -> Iterator[Finding]:
    """Yield the findings of every check that a command may run, also after a check that raised an error."""
    for check in CHECKS:
        if check.needs <= available:
            try:
                yield from (Text(finding) if isinstance(finding, str) else finding for finding in check.function(run))
            except TunerError as error:
                yield error


def _no_level(run: ResolvedRun) -> Iterator[Finding]:
    """Yield that no level fits, if the user named none: until one does, nothing else is worth a look."""
    if run.level_and_split.level_reason:  # of a level that nobody named
        yield from _fit(run)


def _fit(run: ResolvedRun) -> Iterator[Finding]:
    if not run.request.ignore_fit:
        yield from filter(None, [memory.hopeless(run.level_and_split)])
