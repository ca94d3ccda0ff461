"""`tuner.Run`: what a run logged and saved, and how it failed. It only reads, except that it may write a report."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tuner.errors import Stopped, TunerError
from tuner.files import JsonObject
from tuner.machine.hardware import detect
from tuner.report import page
from tuner.runs import checkpoints, listing, metrics
from tuner.runs.checkpoints import Checkpoint
from tuner.runs.directory import RunDirectory
from tuner.runs.states import State
from tuner.worker.quiet import quiet


class Run:
    """A run directory, in any state, also of a run that another program started. `os.fspath` returns its path.

    Raises:
        RunDirectoryError: `path` is not a run directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = listing.require_run(path)
        self._files = RunDirectory(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def state(self) -> State:
        """ "running", "done", "failed", "stopped", "died" (its process is gone) or "damaged": the current state."""
        return listing.look(self.path, self.path.name).state

    @property
    def status(self) -> JsonObject:
        """The content of status.json: state, exit_code, and after a failure its message and diagnosis.

        Raises:
            RunDirectoryError: it cannot be read.
        """
        return self._files.read_status().to_json()

    @property
    def verdict(self) -> JsonObject | None:
        """Whether a finished run has learned: `outcome`, `measure`, `before`, `after`, `steps`, `advice`, `line`.

        None if the run is not done, or has logged fewer than two losses. Errors as for `status`.
        """
        verdict = self._files.read_status().verdict
        return verdict.for_python() if verdict else None

    @property
    def metrics(self) -> list[JsonObject]:
        """A dict for each line of metrics.jsonl, the earliest first: `pandas.DataFrame(run.metrics)` is a table."""
        return metrics.every_line(self._files)

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The complete checkpoints, the earliest first, each with `path` and `step`; only file sizes are checked."""
        return [
            checkpoint
            for checkpoint in reversed(checkpoints.listed(self._files.checkpoints))
            if checkpoint.problem is None
        ]

    @property
    def report(self) -> Path:
        """The report of the run, one HTML file; it is written first if it does not exist."""
        if not self._files.report.exists():
            page.write([self.path], self._files.report)
        return self._files.report

    @quiet()
    def model(self, *, bits: int | None = None, trust_remote_code: bool = False) -> Any:
        """Load the result, or the newest checkpoint, onto the GPUs of this machine or the CPU, for inference only.

        Args:
            bits: 16, 8 or 4 bits per weight. None: as in training, or 16.
            trust_remote_code: Run the code that comes with the model.

        Returns:
            The transformers model, or the PEFT model around it, in eval mode.

        Raises:
            TunerError: there is nothing to load, or it cannot be loaded.
        """
        from tuner.results.loaded_model import load, spec_of  # torch, which a look at the metrics does not need

        spec = spec_of(str(self.path), None, trust_remote_code=trust_remote_code)
        return load(spec, detect(os.environ), bits).model  # effect: as the command line

    @quiet()
    def tokenizer(self, *, trust_remote_code: bool = False) -> Any:
        """Load the tokenizer with the chat template of the training. Argument and errors as for `model`."""
        from tuner.results.loaded_model import encoder_of, spec_of

        return encoder_of(spec_of(str(self.path), None, trust_remote_code=trust_remote_code)).library_object


class RunFailed(TunerError):
    """A run that was started has failed, or was stopped.

    Attributes:
        diagnosis: `cause`, `what`, `rank`, `step` and `next_command` of a failure; empty if the run was stopped.
        code: The cause; `tuner explain` explains it.
        exit_code: The exit code that `tuner train` would have had.
    """

    def __init__(self, run: Run, exit_code: int) -> None:
        status = RunDirectory(run.path).read_status()
        diagnosis = status.diagnosis
        self.run, self.diagnosis = run, diagnosis.to_json() if diagnosis else {}
        problem, fix = status.message or f"the ranks ended with code {exit_code}", None
        if diagnosis:
            self.code, problem = diagnosis.cause, diagnosis.what
            fix = f"Next: `{diagnosis.next_command}`"
        elif exit_code == Stopped.exit_code:
            self.code, problem = Stopped.code, "the run was stopped and saved a checkpoint"
            fix = 'Resume with the same call: work_dir=..., resume="auto"'
        super().__init__(problem.rstrip("."), where=run.path, fix=fix)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.run, self.exit_code)


def require_done(run: Run, exit_code: int) -> None:
    """Raise the error of a run that has ended, if any; send the signal that stopped it to this program.

    Raises:
        RunFailed: the run failed or was stopped.
        KeyboardInterrupt: the run was interrupted.
    """
    failure = RunFailed(run, exit_code) if exit_code else None
    number = RunDirectory(run.path).read_status().signal
    if number == signal.SIGINT:
        raise KeyboardInterrupt(f"{run.path}: {run.state}") from failure
    if number:
        signal.raise_signal(number)  # the program's own handler is installed again; without one, the program ends here
    if failure:
        raise failure
