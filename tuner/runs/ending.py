"""How a run ends before it is done: gather what it left, find the first cause, write status.json, say it.

The supervisor does it, or a rank that has none. status.json is written first: the terminal may be gone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from tuner.errors import DiskError
from tuner.files import JsonObject
from tuner.runs import beats, metrics
from tuner.runs.causes import Role
from tuner.runs.diagnose import Diagnosis, Evidence, Watched, diagnose
from tuner.runs.directory import RunDirectory
from tuner.runs.follow import tail
from tuner.runs.records import RankReport, RunStatus, State
from tuner.runs.resume_advice import resume_advice

Say = Callable[[str], None]
"""Shows a text to the user; an OSError is suppressed."""


def end(
    run_dir: RunDirectory,
    say: Say,
    state: State,
    exit_code: int,
    message: str,
    *,
    signal: int | None = None,
    diagnosis: Diagnosis | None = None,
    node_rank: int | None = None,
    keeps: bool = True,
) -> RunStatus:
    """Write status.json, say how the run has ended, and return what status.json has, or would have.

    Args:
        message: For a stop without how to resume, which is added.
        signal: The signal that the run was told to stop by.
        node_rank: As of `Watched`.
        keeps: Write status.json; of several nodes one does.
        diagnosis: Of a failure; it is said in place of `message`.
    """
    if state == "stopped":
        message = f"{message} Resume: {resume_advice(run_dir.path, node_rank)}"
    reasons = {"signal": signal, "diagnosis": diagnosis and diagnosis.record}
    given_reasons: JsonObject = {key: value for key, value in reasons.items() if value is not None}
    status = RunStatus(state=state, exit_code=exit_code, message=message, **given_reasons)
    with suppress(DiskError, FileNotFoundError):  # neither a full disk nor a removed folder may hide the cause
        if keeps:
            run_dir.write_status(status)
    with suppress(OSError):
        say(diagnosis.text if diagnosis else message)
    return status


def fail(
    run_dir: RunDirectory,
    say: Say,
    watched: Watched,
    *,
    signal: int | None = None,
    own_report: RankReport | None = None,
    keeps: bool = True,
) -> RunStatus:
    """Diagnose a failure, and end the run with the exit code of its first cause, as `end` does.

    Args:
        own_report: What this rank reported, if the disk was too full to keep it.
    """
    evidence = gather(run_dir, watched)
    if own_report and not evidence.reports:
        evidence = replace(evidence, reports=[own_report])
    try:
        diagnosis = diagnose(evidence)
    except BaseException:  # a bug of ours must not hide the failure
        with suppress(OSError):
            say("\n".join(report.message for report in evidence.reports))
        raise
    code, text = diagnosis.exit_code, diagnosis.message
    return end(run_dir, say, "failed", code, text, signal=signal, diagnosis=diagnosis, keeps=keeps)


def has_lost_others(run_dir: RunDirectory, watched: Watched) -> bool:
    """Return whether no rank here says more than that it has lost others, or was told to end."""
    return diagnose(gather(run_dir, watched)).role == Role.LOST


def gather(run_dir: RunDirectory, watched: Watched | None = None) -> Evidence:
    """Read the reports and the ends of all logs of a run; a file that cannot be read is left out."""
    logs = {int(file.stem): tail(file) for file in run_dir.ranks.glob("*.log") if file.stem.isdigit()}
    return Evidence(
        folder=run_dir.path,
        reports=run_dir.failures(),
        logs=logs,
        launcher="\n".join(map(tail, sorted(run_dir.ranks.glob("launcher-*.log")))),
        last_step=_last_step(run_dir),
        free_bytes=_free_bytes(run_dir),
        record=run_dir.run_or_none,  # None on a full disk, or if it was removed: the logs remain
        counts={rank: beat.count for rank, beat in beats.read_beats(run_dir).items()},
        **vars(watched or Watched()),
    )


def _free_bytes(run_dir: RunDirectory) -> int | None:
    try:
        return shutil.disk_usage(run_dir.path).free
    except OSError:  # it was removed, or its file system has gone
        return None


def _last_step(run_dir: RunDirectory) -> int | None:
    """Return the last step that this attempt logged; lines of earlier attempts are in the same file."""
    try:
        if run_dir.metrics.stat().st_mtime_ns < run_dir.run_json.stat().st_mtime_ns:
            return None
    except OSError:
        return None
    return metrics.latest(run_dir).get("step")
