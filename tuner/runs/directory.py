"""The run directory: its files, and what ranks report in it.

`RunDirectory` names each file and says what is in it; the table of docs/runs.md is made from it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path

from tuner.errors import Option, RunDirectoryError, Stopped
from tuner.files import (
    JsonObject,
    ReadOnlyJson,
    append_line,
    load_json,
    read_json_object,
    read_text,
    write_json,
    write_text,
)
from tuner.progress import say
from tuner.runs.records import RankReport, RanksPace, RunData, RunRecord, RunStatus

_TOLD_S = 30.0
LOCK, JOB = "lock", "job"
MEETING = "meeting"
"""The file with the secret by which the nodes of a run know each other."""

_ENDED = ("state", "exit_code", "message", "step", "max_steps", "loss", "seconds", "verdict", "pushed")
"""The keys of status.json that say how a run ended."""


class File:
    """A file or folder of a run: its name (a folder's ends with a slash), and what is in it."""

    def __init__(self, name: str, content: str) -> None:
        self.name, self.content = name, content

    def __get__(self, run_dir: RunDirectory, _: object) -> Path:
        return run_dir.path / self.name


@dataclass(frozen=True)
class RunDirectory:
    """One run's files."""

    path: Path
    recipe = File("recipe.py", "the recipe with every value, for people; `tuner train RUN/recipe.py` runs it again")
    resolved_recipe = File("recipe.json", "the same values, checked and resolved: what the ranks read")
    deepspeed = File("deepspeed.json", "the config that DeepSpeed received, byte for byte")
    run_json = File("run.json", "versions, command, hardware, seed, and what the ranks have to know beside the recipe")
    requeues = File("requeues.json", "under Slurm: the attempts after which the job put itself back into the queue")
    status = File("status.json", "running, done, failed or stopped, with the exit code and the diagnosis of a failure")
    metrics = File("metrics.jsonl", "one line for each logged step and each validation")
    answers = File("answers.jsonl", "with `log.generate`: the answers to validation prompts at each validation")
    samples = File("samples.jsonl", "with `log.num_samples`: validation prompts with the model's answers at the end")
    completions = File(
        "completions.jsonl",
        "with an objective that generates: completions of the training prompts, with their rewards, by step",
    )
    reward_failures = File("reward_failures.jsonl", "one line for each completion on which a reward failed")
    tool_failures = File("tool_failures.jsonl", "one line for each call of a tool that failed")
    data = File("data.json", "counts of rows and tokens, and of samples that are not trained on as they are, by reason")
    data_report = File(
        "data_report.jsonl", "one line for each of those samples: file, line, what happened, reason, tokens"
    )
    stream = File("stream/", "while a run streams its data: the rows of the current and the next steps")
    ranks = File(
        "ranks/",
        "`N.log` for all that a rank prints, `N.beat` for its last sign of life, `N.json` for one that ended badly; "
        "`launcher-NODE.log` for what came before those, `build-N.log` for compilers, `notify.log` for `log.notify`",
    )
    pace = File("ranks/pace.json", "how fast each rank is by itself")
    warnings = File("ranks/warnings.jsonl", "what rank 0 warned of")
    measurements = File(
        "deepspeed/", "what DeepSpeed measures if its JSON asks for it (wall clock, FLOPs, communication, memory, CSV)"
    )
    attempts = File(
        "attempts/", "`N/` for what an earlier attempt left, with metrics and checkpoints of steps that ran again"
    )
    lock_file = File(LOCK, "while a run is at work: its process")
    meeting = File(MEETING, "while a run of several nodes is at work: the secret that each node must see")
    script = File("submit.sh", "the batch script of `tuner submit`; beside it Slurm's `slurm-JOB.out`")
    job = File(JOB, "the number of that job")
    checkpoints = File(
        "checkpoints/",
        "checkpoints, each with its recipe and a manifest of hashes; `latest` names the newest for scripts. "
        "`checkpoints of attempt N/` has those that `--on-oom retry` could not load: nothing resumes from them",
    )
    universal = File(
        "universal/", "the checkpoint that the run resumed from, converted for other ranks, until the next save"
    )
    final = File("final/", "the result: weights or adapter, tokenizer, chat template, generation config")
    report = File("report.html", "the report, which needs no network")

    @classmethod
    def files(cls) -> list[File]:
        """Return every file and folder that a run may have."""
        return [value for value in vars(cls).values() if isinstance(value, File)]

    def log_of(self, rank: int) -> Path:
        """Return the file with all that a rank prints."""
        return self.ranks / f"{rank}.log"

    def launcher_log(self, node_rank: int) -> Path:
        """Return the file with what a node's processes print before they are ranks."""
        return self.ranks / f"launcher-{node_rank}.log"

    def earlier_attempts(self) -> dict[int, Path]:
        """Return the folders of the earlier attempts by their numbers, the oldest first; some may have been removed."""
        return dict(sorted((int(path.name), path) for path in self.attempts.glob("*") if path.name.isdecimal()))

    def read_json(self, file: Path) -> JsonObject:
        """Read one of the run's JSON files; each holds an object.

        Raises:
            RunDirectoryError: it is missing, not JSON, or no object.
        """
        try:
            value = load_json(read_text(file))
        except (FileNotFoundError, ValueError) as error:
            raise RunDirectoryError(f"{file.name} is missing or is not JSON", where=self.path) from error
        except OSError as error:
            problem = f"{file.name} cannot be read: {error.strerror}"
            raise RunDirectoryError(problem, where=self.path) from error
        if not isinstance(value, dict):
            raise RunDirectoryError(f"{file.name} is not a JSON object", where=self.path)
        return value

    def read_run(self) -> RunRecord:
        """Read run.json.

        Raises:
            RunDirectoryError: it is missing or damaged, or of a later version.
        """
        return RunRecord.of(self.read_json(self.run_json), self.run_json)

    def read_status(self) -> RunStatus:
        """Read status.json. Errors as for `read_run`."""
        return RunStatus.of(self.read_json(self.status), self.status)

    @property
    def run_or_none(self) -> RunRecord | None:
        """run.json, or None if it cannot be read."""
        with contextlib.suppress(RunDirectoryError):
            return self.read_run()
        return None

    @property
    def status_or_none(self) -> RunStatus | None:
        """status.json, or None if it cannot be read."""
        with contextlib.suppress(RunDirectoryError):
            return self.read_status()
        return None

    @property
    def pace_or_none(self) -> RanksPace | None:
        """ranks/pace.json, or None if no ranks were compared."""
        with contextlib.suppress(RunDirectoryError):
            return RanksPace.of(self.read_json(self.pace), self.pace)
        return None

    @property
    def data_or_none(self) -> RunData | None:
        """data.json, or None if it cannot be read, as before the rows are prepared."""
        with contextlib.suppress(RunDirectoryError):
            return RunData.of(self.read_json(self.data), self.data)
        return None

    def recipe_block(self, name: str) -> JsonObject:
        """Return a block of recipe.json, such as "log"; an empty one if the file or the block cannot be read."""
        recipe = read_json_object(self.resolved_recipe).get("recipe")
        block = recipe.get(name) if isinstance(recipe, dict) else None
        return block if isinstance(block, dict) else {}

    @property
    def day(self) -> date | None:
        """The date of the run's first start, which its chat template takes for today; None if run.json has none."""
        record = self.run_or_none
        with contextlib.suppress(ValueError):  # somebody has changed it
            return date.fromisoformat(record.state.date) if record and record.state.date else None
        return None

    def ending(self, exit_code: int) -> JsonObject:
        """Return how the run ended: the last line of `train --json`, and the input of the command in log.notify."""
        record = self.status_or_none
        status = record.to_json() if record else {}
        if record and record.state == "running":  # the disk was too full to write how it ended
            status["state"] = "stopped" if exit_code == Stopped.exit_code else "failed" if exit_code else "done"
        ended = {key: status[key] for key in _ENDED if key in status}
        return {"run": str(self.path), **ended, "exit_code": exit_code}

    def write_status(self, status: RunStatus) -> None:
        """Write status.json, with this process's id, and the time if it says how the run ended."""
        ended = {} if status.state == "running" else {"ended": datetime.now().astimezone().isoformat()}
        write_json(self.status, status.model_copy(update={"pid": os.getpid(), **ended}).to_json())

    def report_failure(self, report: RankReport) -> None:
        """Report to the supervisor how a rank ended."""
        self.ranks.mkdir(parents=True, exist_ok=True)  # the run directory may have been removed
        write_json(self.ranks / f"{report.rank}.json", report.to_json())

    def failures(self) -> list[RankReport]:
        """Return what ranks reported, the earliest report first."""
        files = sorted(self.ranks.glob("[0-9]*.json"), key=lambda file: file.stat().st_mtime_ns)
        return [RankReport.of(self.read_json(file), file) for file in files]

    def write_data(self, data: RunData, changed: Iterable[ReadOnlyJson]) -> None:
        """Write data.json, and a line for each sample that is not trained on as it is."""
        write_json(self.data, data.to_json())
        write_text(self.data_report, "".join(f"{json.dumps(line)}\n" for line in changed))

    def add_to_data_report(self, changed: Iterable[ReadOnlyJson]) -> None:
        """Append lines of more rows."""
        if lines := [json.dumps(line) for line in changed]:
            append_line(self.data_report, "\n".join(lines))

    def log_warning(self, text: str) -> None:
        """Append a warning of rank 0 to ranks/warnings.jsonl."""
        self.ranks.mkdir(exist_ok=True)
        append_line(self.warnings, json.dumps({"warning": text}))

    def log_measured(self, name: str, line: JsonObject) -> None:
        """Append one line to a file of deepspeed/."""
        self.measurements.mkdir(exist_ok=True)
        append_line(self.measurements / name, json.dumps(line))

    def log_metrics(self, metrics: JsonObject) -> None:
        """Append one line to metrics.jsonl."""
        append_line(self.metrics, json.dumps(metrics, allow_nan=False))


def resume_command(path: Path) -> str:
    """Return the command that resumes the run in a directory: `tuner train RUN/recipe.py --resume RUN`."""
    return shlex.join(("tuner", "train", str(path / "recipe.py"), "--resume", str(path)))


def is_run(path: Path) -> bool:
    """Return whether a folder is a run directory."""
    run_dir = RunDirectory(path)
    return all(map(os.path.isfile, (run_dir.run_json, run_dir.recipe)))  # a name too long is no run, and no error


def wait_for(path: Path, launch_id: str, limit_s: float, tell: Callable[[str], object] = say) -> RunDirectory:
    """Wait until rank 0 has written the directory of this launch: it may read every byte of a checkpoint first.

    Args:
        tell: Shows a line to the user, after half a minute and with growing pauses.

    Raises:
        RunDirectoryError: it did not within the limit, in seconds.
    """
    run_dir, began_s, pause_s = RunDirectory(path), time.monotonic(), _TOLD_S
    told_s = began_s
    while (now_s := time.monotonic()) < began_s + limit_s:
        if (record := run_dir.run_or_none) and record.launch_id == launch_id:
            return run_dir
        if now_s >= told_s + pause_s:
            tell(f"waiting for rank 0 to write {path} since {now_s - began_s:.0f} s (for {limit_s:.0f} s at most)")
            told_s, pause_s = now_s, 2 * pause_s
        time.sleep(0.1)
    raise RunDirectoryError(
        f"rank 0 did not write {path} within {limit_s:.0f} s",
        where=Option("work_dir"),
        fix="All nodes must share this folder. Read rank 0's message first.",
    )


def newest_run(folder: Path) -> Path | None:
    """Return the newest run below `folder` by the time of its run.json, or None."""
    runs: Iterable[Path] = (path for path in folder.glob("*") if is_run(path)) if folder.is_dir() else ()
    return max(runs, key=lambda path: (path / "run.json").stat().st_mtime_ns, default=None)
