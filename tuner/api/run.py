"""A run as Python's callers see it: what it logged, saved and left, and how it failed. It reads and changes nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tuner.errors import Stopped, TunerError
from tuner.recipes.python_calls import in_python
from tuner.runs import checkpoints, listing, metrics
from tuner.runs.checkpoints import Checkpoint
from tuner.runs.directory import RunDirectory


class Run:
    """A run directory, whoever started the run, and in whatever state it is; it stands for its path (`os.fspath`).

    Raises:
        RunDirectoryError: `path` is none.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = listing.require_run(path)
        self._files = RunDirectory(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def state(self) -> listing.State:
        """ "running", "done", "failed", "stopped", "died" (its process is gone) or "damaged", as of now."""
        return listing.look(self.path, self.path.name).state

    @property
    def status(self) -> dict[str, Any]:
        """What status.json holds: state, exit_code, and of a failure its message and diagnosis.

        Raises:
            RunDirectoryError: it cannot be read.
        """
        return self._files.read_json(self._files.status)

    @property
    def verdict(self) -> dict[str, Any] | None:
        """Whether a run that is done has learned: `outcome`, `measure`, `before`, `after`, `steps`, `advice`, `line`.

        None of a run that is not done, or that logged no two losses. Errors as `status`.
        """
        verdict = self.status.get("verdict")
        spoken = {key: in_python(value) for key, value in (verdict or {}).items() if isinstance(value, str)}
        return {**verdict, **spoken} if verdict else None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A dict for each line of metrics.jsonl, the earliest first: `pandas.DataFrame(run.metrics)` is a table."""
        return metrics.every_line(self._files)

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The whole checkpoints, the earliest first, each with `path` and `step`; sizes are compared, not hashes."""
        return [one for one in reversed(checkpoints.listed(self._files.checkpoints)) if one.problem is None]

    @property
    def report(self) -> Path:
        """The report of the run, one HTML file; it is written where the run has not done that yet."""
        if not self._files.report.exists():
            from tuner.report import page

            page.write([self.path], self._files.report)
        return self._files.report

    def model(self, *, bits: int | None = None) -> Any:
        """Load the result, or the newest checkpoint, onto the GPUs that are here or the CPU; it is not to be trained.

        Args:
            bits: 16, 8 or 4 for each weight. None: as the base was trained on, or 16.

        Returns:
            The model of transformers, or that of PEFT around it, in eval mode.

        Raises:
            TunerError: there is nothing to load, or it cannot be loaded.
        """
        from tuner.machine.hardware import detect
        from tuner.results.loaded_model import load, spec_of  # torch, which a look at the metrics does not need

        return load(spec_of(str(self.path), None), detect(os.environ), bits).model  # effect: as the command line

    def tokenizer(self) -> Any:
        """Load the tokenizer, with the chat template that the run was trained with. Errors as `model`."""
        from tuner.results.loaded_model import spec_of, tokenizer_of

        return tokenizer_of(spec_of(str(self.path), None))


class RunFailed(TunerError):
    """A run was started and did not end well: it failed, or was stopped.

    Attributes:
        run: The run.
        diagnosis: `cause`, `what`, `rank`, `step` and `next_command` of a failure; empty where a run was stopped.
        code: The cause, which `tuner explain` knows.
        exit_code: What `tuner train` would have exited with.
    """

    def __init__(self, run: Run, exit_code: int) -> None:
        status = run.status
        self.run, self.diagnosis = run, dict(status.get("diagnosis") or {})
        problem, fix = str(status.get("message") or f"the ranks ended with code {exit_code}"), None
        if self.diagnosis:
            self.code, problem = str(self.diagnosis["cause"]), str(self.diagnosis["what"])
            fix = f"Next: `{self.diagnosis['next_command']}`"
        elif exit_code == Stopped.exit_code:
            self.code, problem = Stopped.code, "the run was stopped and saved a checkpoint"
            fix = 'Resume with the same call: work_dir=..., resume="auto"'
        super().__init__(problem.rstrip("."), where=run.path, fix=fix)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.run, self.exit_code)


def require_done(run: Run, exit_code: int) -> None:
    """Raise what went wrong, and hand the signal that stopped a run to the program that it was sent to.

    Args:
        run: It has ended.
        exit_code: How.

    Raises:
        RunFailed: it did not end well.
        KeyboardInterrupt: it was interrupted.
    """
    failure = RunFailed(run, exit_code) if exit_code else None
    number = run.status.get("signal")
    if number == signal.SIGINT:
        raise KeyboardInterrupt(f"{run.path}: {run.state}") from failure
    if number:
        signal.raise_signal(number)  # the program's own handler is back: without one, it ends here
    if failure:
        raise failure
