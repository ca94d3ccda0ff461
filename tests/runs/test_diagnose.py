from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.runs.made_records import RECORD, run_json
from tuner.errors import DeepSpeedConfigError, ModelError, RecipeError, RewardError, TunerError, UsageError
from tuner.runs import causes
from tuner.runs.creation import create
from tuner.runs.diagnose import Diagnosis, Evidence, OtherNode, Watched, diagnose
from tuner.runs.directory import RunDirectory
from tuner.runs.ending import gather
from tuner.runs.records import RankReport

LOGS = Path(__file__).parent / "logs"
OOM = "Traceback:\n  ...\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
LOST = "Traceback (most recent call last):\n  ...\nRuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.1]:7\n"
WAITED = "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete\n"
UNKNOWN = "Traceback (most recent call last):\n  ...\nKeyError: 'labels'\n"
COMMANDS = {"again": "tuner train mine.py --resume auto", "gpu-out-of-memory": "tuner train mine.py --set batch_size=1"}
FOLDER = Path("/runs/my run")


def _report(rank: int, message: str, code: int = 1, **facts: Any) -> RankReport:
    told = {"what": message.partition(": ")[2]} if "cause" in facts else {}
    return RankReport(rank=rank, exit_code=code, message=message, **told, **facts)


def _found(*reports: RankReport, world: int = 2, **more: Any) -> Diagnosis:
    run = RECORD.model_copy(update={"next": COMMANDS, "world_size": world})
    return diagnose(Evidence(FOLDER, reports, record=run, **more))


def _ends(rank: int, code: int, other: int = -15) -> list[tuple[int, int]]:
    """Return how a rank ended, and then the other one."""
    return [(rank, code), (1 - rank, other)]


def test_a_failure_is_told_in_three_lines() -> None:
    found = _found(_report(1, OOM, step=17))

    assert found.lines == [
        "error[gpu-out-of-memory]: a GPU ran out of memory: "
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "On rank 1, in step 17. More: tuner explain gpu-out-of-memory. Logs: /runs/my run/ranks",
        "Next: tuner train mine.py --set batch_size=1",
    ]
    assert found.text == "\n".join(found.lines)
    assert found.exit_code == 1


def test_a_diagnosis_is_json_for_status() -> None:
    found = json.loads(json.dumps(_found(_report(1, OOM, step=17)).record.to_json()))

    assert found == {
        "cause": "gpu-out-of-memory",
        "what": found["what"],
        "rank": 1,
        "step": 17,
        "next_command": "tuner train mine.py --set batch_size=1",
    }


# The first cause among many

HANG = "hang: no rank made progress for 5 s"
NAN = "training-failed: loss is nan at step 3. Lower it."
ECC = "fine\nCUDA error: uncorrectable ECC error encountered\n"
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]] = {
    "who lost another is not the cause though it reported first": (
        [_report(0, LOST, step=3), _report(1, OOM, step=3)],
        {},
        {"cause": "gpu-out-of-memory", "rank": 1},
    ),
    "an error of its own comes before a wait in vain": (
        [_report(0, WAITED), _report(2, LOST), _report(1, UNKNOWN)],
        {},
        {"cause": "bug", "rank": 1},
    ),
    "of two errors the earlier": (
        [_report(3, OOM), _report(0, UNKNOWN)],
        {},
        {"cause": "gpu-out-of-memory", "rank": 3},
    ),
    "where all lost somebody": ([_report(0, LOST), _report(1, LOST)], {}, {"cause": "lost-peer", "rank": 0}),
    "where all waited": ([_report(0, WAITED), _report(1, WAITED)], {}, {"cause": "collective-timeout", "rank": 0}),
    "an error explains that the others stood still": (
        [_report(0, HANG, 124, cause="hang"), _report(1, OOM)],
        {"counts": {0: 7, 1: 6}},
        {"cause": "gpu-out-of-memory", "rank": 1},
    ),
    "a loss that is no number": (
        [_report(0, NAN, cause="training-failed", step=3)],
        {},
        {"cause": "not-a-number", "step": 3},
    ),
    "a full disk has its exit code": (
        [_report(0, "OSError: [Errno 28] No space left on device")],
        {},
        {"cause": "disk", "exit_code": 74},
    ),
    "an error that is not known has 1": ([_report(0, UNKNOWN)], {}, {"cause": "bug", "exit_code": 1}),
    "a killed rank before errors that are not known": (
        [_report(0, UNKNOWN, step=4)],
        {"exits": _ends(1, -9)},
        {"cause": "killed", "rank": 1, "step": 4, "exit_code": 137},
    ),
    "a killed rank is the peer that another lost": (
        [_report(1, LOST, step=3)],
        {"exits": _ends(1, 1, -9)},
        {"cause": "killed", "rank": 0, "exit_code": 137},
    ),
    "who was told to end": ([_report(1, UNKNOWN)], {"exits": _ends(1, 1)}, {"cause": "bug", "rank": 1}),
    "who was killed after the failure": (
        [_report(1, UNKNOWN)],
        {"exits": _ends(1, 1, -9)},
        {"cause": "bug", "rank": 1},
    ),
    "who ended by SIGTERM": ([_report(1, LOST)], {"exits": _ends(1, 1, -15)}, {"cause": "lost-peer", "rank": 1}),
    "who ended with its code": ([_report(1, LOST)], {"exits": _ends(1, 1, 143)}, {"cause": "lost-peer", "rank": 1}),
    "a bus error": ([], {"exits": _ends(1, -7)}, {"cause": "shared-memory", "rank": 1, "exit_code": 135}),
    "a segmentation fault": ([], {"exits": _ends(1, -11)}, {"cause": "crashed", "rank": 1, "exit_code": 139}),
    "an abort": ([], {"exits": _ends(1, -6)}, {"cause": "crashed", "rank": 1, "exit_code": 134}),
    "an abort whose log tells why": (
        [],
        {"exits": _ends(1, -6), "logs": {1: ECC}},
        {"cause": "gpu-hardware", "rank": 1},
    ),
    "an end in silence": ([], {"exits": _ends(1, 3)}, {"cause": "unknown", "rank": 1, "exit_code": 3}),
}


@pytest.mark.parametrize("name", CASES)
def test_of_many_failures_the_first_cause_is_told(name: str) -> None:
    reports, seen, expected = CASES[name]

    found = _found(*reports, **seen)

    assert expected.items() <= {**found.record.to_json(), "exit_code": found.exit_code}.items()


def test_what_happened_to_another_node_explains_that_ranks_lost_others() -> None:
    watched = {"other_node": OtherNode("node 1 (b, 10.0.0.2) is gone", "lost-peer", 1)}

    found = _found(_report(0, LOST), **watched)
    assert (found.record.cause, found.record.rank) == ("lost-peer", None)
    assert found.record.what == "node 1 (b, 10.0.0.2) is gone"

    found = _found(_report(0, LOST), other_node=OtherNode("node 1 (b): rank 1 was killed", "killed", 137))
    assert (found.record.cause, found.exit_code) == ("killed", 137)

    assert _found(_report(0, OOM), **watched).record.cause == "gpu-out-of-memory"

    down = OtherNode("a node was lost: n2 is down", "lost-peer", 1, rank=4, is_down=True)
    found = _found(_report(0, OOM), other_node=down)
    assert (found.record.cause, found.record.rank, found.record.what) == ("lost-peer", 4, "a node was lost: n2 is down")


def test_gloos_good_wishes_are_no_part_of_an_error() -> None:
    line = "RuntimeError: [pair.cc:5] Read error [::1]:3: Connection reset by peer"
    advice = "This is typically caused by a remote worker hanging or bugs in the application. Check the logs. GLHF! x"

    assert causes.without_greeting(f"Traceback\n{line}. {advice}\n") == f"Traceback\n{line}.\n"


# Ranks that say nothing


@pytest.mark.parametrize(("kills", "cause"), [(0, "killed"), (1, "host-out-of-memory")])
def test_the_kernels_counter_tells_a_kill_for_memory_from_another_of_a_rank_and_of_what_reads_its_data(
    kills: int, cause: str
) -> None:
    reader = "DataLoader worker (pid 7)"
    of_rank = _found(exits=_ends(1, -9), num_oom_kills=kills, last_step=6)
    of_reader = _found(_report(1, f"RuntimeError: {reader} is killed by signal: Killed."), num_oom_kills=kills)

    assert (of_rank.record.cause, of_rank.record.rank, of_rank.record.step, of_rank.exit_code) == (cause, 1, 6, 137)
    assert (of_reader.record.cause, of_reader.record.rank) == (cause, 1)
    assert "rank 1" in of_rank.record.what and reader in of_reader.record.what


def test_a_rank_that_ended_in_silence_shows_the_end_of_its_log() -> None:
    log = "\n".join(f"line {number}" for number in range(100))

    found = _found(exits=_ends(1, 3), logs={0: "other", 1: log})

    assert (found.record.cause, found.exit_code) == ("unknown", 3)
    assert found.detail.splitlines()[0] == "line 70"
    assert found.text.splitlines()[-1] == "Next: tail -n 50 '/runs/my run/ranks/1.log'"


def test_what_ranks_said_before_they_had_logs_is_told() -> None:
    text = (LOGS / "port-in-use.log").read_text(encoding="utf-8")

    found = _found(launcher=text)

    assert (found.record.cause, found.record.rank, found.exit_code) == ("port-in-use", None, 3)
    assert found.lines[1].startswith("On a rank, before the first step.")


def test_a_rank_that_left_no_other_trace_than_its_end_is_told_by_that() -> None:
    found = _found(child_code=-9)

    assert (found.record.cause, found.exit_code) == ("killed", 137)
    assert found.record.what == "a rank was killed by SIGKILL (out of memory?)"


def test_where_nothing_could_be_written_a_full_disk_is_the_cause() -> None:
    assert _found(free_bytes=4096).record.cause == "disk"
    assert _found(free_bytes=4096).exit_code == 74
    assert _found(free_bytes=1 << 30).record.cause == "unknown"
    assert _found(free_bytes=4096, exits=[(0, 74)]).record.cause == "disk"


def test_a_rank_that_could_not_report_on_a_read_only_disk_is_diagnosed_from_its_log() -> None:
    log = "disk: R/checkpoints: checkpoint-8 (15 MB) could not be written: Read-only file system.\n"

    diagnosis = _found(exits=[(0, 74)], logs={0: log}, free_bytes=1 << 40)

    assert (diagnosis.record.cause, diagnosis.exit_code) == ("disk", 74)
    assert "Read-only file system" in diagnosis.record.what

    on_another = _found(other_node=OtherNode(f"node 1 (h1): {diagnosis.record.what}", "disk", 74))
    assert (on_another.record.cause, on_another.record.next_command) == ("disk", diagnosis.record.next_command)


# A collective that timed out


def test_the_only_rank_that_did_not_wait_lagged() -> None:
    stack = 'File "/v/torch/distributed/distributed_c10d.py", line 3252 in all_reduce\n'

    found = _found(_report(0, WAITED), world=3, logs={1: 'File "/v/my/data.py", line 3 in read\n', 2: stack})

    assert (found.record.cause, found.record.rank, found.exit_code) == ("collective-timeout", 1, 124)
    assert "(rank 1 lagged)" in found.record.what
    assert found.record.next_command.endswith("/1.log'")


def test_the_rank_that_asked_nccl_for_fewer_collectives_lagged() -> None:
    watchdog = next(iter((LOGS / "collective-timeout.log").read_text(encoding="utf-8").split("===")[1:]))

    logs = {rank: watchdog.replace("work: 127", f"work: {number}") for rank, number in ((0, 127), (1, 127), (2, 126))}
    found = _found(exits=_ends(0, -6), world=3, logs=logs)

    assert (found.record.cause, found.record.rank) == ("collective-timeout", 2)


def test_the_rank_that_a_barrier_names_lagged() -> None:
    found = _found(_report(0, "RuntimeError: [Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 3000 ms"), world=4)

    assert found.record.rank == 2
    assert "(ranks 2, 3 lagged)" in found.record.what


# What the rank itself knew


def test_a_mistake_that_a_rank_told_keeps_its_words_and_its_code() -> None:
    found = _found(_report(1, "bad-data: a.jsonl:3: row 3 is torn. Mend it.", 2, cause="bad-data"))

    assert found.lines[0] == "error[bad-data]: a.jsonl:3: row 3 is torn. Mend it."
    assert found.record.next_command == "tuner data '/runs/my run/recipe.py'"
    assert (found.exit_code, found.detail) == (2, "")


def test_an_unknown_error_keeps_its_traceback() -> None:
    found = _found(_report(1, UNKNOWN, step=2))

    assert found.record.cause == "bug"
    assert found.text.startswith("Traceback (most recent call last):")
    assert "KeyError: 'labels'" in found.lines[0]


def test_a_c_library_that_wrote_the_reason_into_the_log_explains_a_report() -> None:
    found = _found(_report(0, UNKNOWN), logs={0: "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."})

    assert found.record.cause == "gpu-hardware"
    assert found.detail.endswith("KeyError: 'labels'"), "the error itself is not hidden by what may explain it"


def test_a_command_that_nobody_planned_is_the_same_again() -> None:
    found = diagnose(Evidence(FOLDER, [_report(0, LOST)]))

    assert found.record.next_command == "tuner train '/runs/my run/recipe.py'"


@pytest.mark.parametrize("message", [OOM, LOST])
def test_each_node_is_told_to_start_itself_again(message: str) -> None:
    run = RECORD.model_copy(update={"next": COMMANDS, "world_size": 2, "node_flags": ["--nnodes=2"]})

    found = diagnose(Evidence(FOLDER, [_report(1, message)], record=run, node_rank=1))

    assert found.record.next_command in [f"{command} --node-rank=1" for command in COMMANDS.values()]


# Who held the others up


WAITS = 'File "/x/torch/distributed/distributed_c10d.py", line 1 in barrier'


@pytest.mark.parametrize(
    ("evidence", "rank", "how"),
    [
        ({"counts": {0: 7, 1: 6, 2: 7}}, 1, "rank 1 lagged"),
        ({"counts": {0: 7, 2: 7}}, 1, "rank 1 lagged"),
        ({"counts": {0: 7, 1: 7, 2: 7}, "logs": {0: WAITS, 1: WAITS}}, 2, "rank 2 lagged"),
        ({"counts": {0: 7, 1: 6, 2: 7}, "overdue": [2]}, 2, "rank 2 did not end at SIGTERM"),
        ({"counts": {0: 7, 1: 6, 2: 7}, "overdue": [0, 1, 2]}, 1, "rank 1 lagged"),
        ({"counts": {0: 7, 1: 6, 2: 7}, "frozen": [2]}, 2, "rank 2 was suspended: state T, as after SIGSTOP"),
    ],
)
def test_a_hang_names_the_rank_that_the_others_waited_for(evidence: dict[str, Any], rank: int, how: str) -> None:
    found = _found(_report(0, HANG, 124, cause="hang", step=3), world=3, **evidence)

    assert (found.record.cause, found.record.rank, found.exit_code) == ("hang", rank, 124)
    assert found.record.what.endswith(f"({how})")
    assert found.record.next_command == f"tail -n 50 '/runs/my run/ranks/{rank}.log'"


def test_ranks_that_had_to_be_killed_are_a_cause_where_nobody_failed() -> None:
    found = _found(overdue=[0, 1], overdue_s=300.4, logs={0: WAITS}, counts={0: 7, 1: 7}, last_step=6)

    assert (found.record.cause, found.record.rank, found.exit_code) == ("did-not-stop", 1, 137)
    assert found.record.what == "2 ranks did not stop within 300 s of SIGTERM: killed by SIGKILL (rank 1 lagged)"


# What is gathered


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create(tmp_path / "run", {"recipe.py": "", "run.json": run_json(world_size=2)}, resume=False)


def test_the_ends_of_logs_are_read_by_rank(run: RunDirectory) -> None:
    run.report_failure(RankReport(rank=1, exit_code=1, message="failed", step=2))
    (run.ranks / "1.log").write_text("x" * 100_000 + "\nlast")
    (run.ranks / "10.log").write_bytes(b"\xff torn")
    (run.ranks / "launcher-0.log").write_text("agent")

    found = gather(run, Watched(num_oom_kills=1))

    assert found.reports[0].step == 2
    assert found.logs[1].endswith("\nlast") and len(found.logs[1]) < 70_000
    assert "torn" in found.logs[10]
    assert (found.launcher, found.num_oom_kills, found.record and found.record.world_size) == ("agent", 1, 2)
    assert found.free_bytes and found.free_bytes > 0


def test_the_last_step_is_this_attempts(run: RunDirectory) -> None:
    run.log_metrics({"step": 7})
    run.metrics.write_text(run.metrics.read_text() + '{"step": 8')  # torn
    assert gather(run).last_step == 7

    later = run.metrics.stat().st_mtime_ns + 10**9
    os.utime(run.run_json, ns=(later, later))
    assert gather(run).last_step is None


def test_a_run_whose_files_are_gone_still_has_evidence(run: RunDirectory) -> None:
    shutil.rmtree(run.path)

    found = gather(run)

    assert (found.reports, found.logs, found.record) == ([], {}, None)


@pytest.mark.parametrize("error", [UsageError, RecipeError, DeepSpeedConfigError, ModelError, RewardError, TunerError])
def test_after_a_mistake_the_command_that_failed_is_not_proposed_again(error: type[TunerError]) -> None:
    mistake = error("a wrong value", where="objective", fix="Change it.")

    found = _found(_report(1, str(mistake), mistake.exit_code, cause=mistake.code))

    assert found.record.cause == mistake.code
    assert COMMANDS["again"] not in found.record.next_command
    assert found.record.next_command.endswith("/ranks/1.log'")
