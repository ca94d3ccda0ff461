"""The typed files of a run: what earlier versions wrote is read, and what cannot be right is refused with its key."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.runs.made_records import RECORD, STATE, made_beat, run_json
from tuner.errors import RunDirectoryError
from tuner.files import dump_json
from tuner.runs import beats, checkpoints, listing
from tuner.runs.beats import Phase
from tuner.runs.directory import RunDirectory
from tuner.runs.records import (
    BatchSettings,
    CheckpointState,
    DataCounts,
    DiagnosisRecord,
    Manifest,
    ManifestFacts,
    RunData,
    RunRecord,
    RunStatus,
    SplitData,
    Total,
    TrainedData,
    Unread,
    Versioned,
)

WITHOUT_VERSION = Path(__file__).with_name("version_1")
"""The files of a run before they had a version: `tuner train tiny_full_sample_e1`."""
LATER = 2
FILES: dict[str, type[Versioned]] = {"run.json": RunRecord, "status.json": RunStatus, "manifest.json": Manifest}


def _old(name: str) -> dict[str, Any]:
    return dict(json.loads((WITHOUT_VERSION / name).read_text()))


@pytest.mark.parametrize("name", FILES)
def test_a_file_without_a_version_is_read_as_version_1_and_written_with_every_key_it_had(name: str) -> None:
    old = _old(name)

    assert FILES[name].of(old, Path(name)).to_json() == {"version": 1, **old}


def test_the_fields_of_old_files_are_those_of_their_keys(tmp_path: Path) -> None:
    run = RunDirectory(Path(shutil.copytree(WITHOUT_VERSION, tmp_path / "run")))
    record, status = run.read_run(), run.read_status()
    settings = BatchSettings(micro_batch=2, accumulation=1)

    assert (record.name, record.world_size, record.batch.global_batch) == ("tiny_full_sample_e1", 1, 2)
    assert (record.next["again"], record.hardware.num_cpus) == (
        "tuner train tiny_full_sample_e1 --work-dir /home/me/run1 --resume auto",
        2,
    )
    assert (status.state, status.step, status.verdict and status.verdict.outcome) == ("done", 396, "learned")
    assert checkpoints.facts(run.path) == ManifestFacts(
        step=396,
        data=TrainedData(rows=792, tokens=199757, sha256=_old("manifest.json")["facts"]["data"]["sha256"]),
        state=CheckpointState(
            world_size=1, global_batch=2, asked_batch=settings, batch=settings, deepspeed="none", stage=0,
            nvme=False, nvme_weights_alone=False, dtype="fp32", optimizer="AdamW", date="2026-11-26",
        ),
    )  # fmt: skip


def test_a_file_without_a_version_stays_of_version_1_when_its_class_has_a_later_one() -> None:
    class LaterStatus(RunStatus):
        version: int = LATER

    assert LaterStatus(state="running").to_json() == {"version": LATER, "state": "running"}
    assert LaterStatus.of(_old("status.json"), Path("status.json")).version == 1


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_a_later_version_is_refused_with_both_versions_whatever_its_keys_mean(name: str) -> None:
    with pytest.raises(RunDirectoryError) as caught:
        FILES[name].of({**_old(name), "version": LATER, "state": 7}, Path("run") / name)

    assert (name in caught.value.what, caught.value.where, bool(caught.value.fix)) == (True, "run", True)
    assert (f"version {LATER}" in caught.value.what, "reads 1" in caught.value.what) == (True, True)


@pytest.mark.parametrize(
    ("name", "change", "key"),
    [
        ("run.json", {"world_size": "2"}, "world_size"),
        ("run.json", {"batch": {"micro_batch": 1}}, "batch.accumulation"),
        ("run.json", {"state": None}, "state"),
        ("run.json", {"warnings": [3]}, "warnings.0"),
        ("run.json", {"resume_as": "a copy"}, "resume_as"),
        ("run.json", {"hardware": {"gpus": [{"memory_bytes": 1}]}}, "hardware.gpus.0.name"),
        ("run.json", {"version": 0}, "version"),
        ("status.json", {"state": "walking"}, "state"),
        ("status.json", {"version": "2"}, "version"),
        ("status.json", {"diagnosis": ["bug"]}, "diagnosis"),
        ("status.json", {"seconds": "\x1b[31m" + "x" * 10_000}, "seconds"),
        ("status.json", {"verdict": {"outcome": "learned"}}, "verdict.measure"),
        ("manifest.json", {"facts": {"step": 1, "stage": 2}}, "facts.state.world_size"),
        ("manifest.json", {"files": {"model": {"bytes": "7"}}}, "files.model.bytes"),
    ],
)
def test_a_key_that_is_missing_or_has_a_wrong_value_is_named(name: str, change: dict[str, Any], key: str) -> None:
    with pytest.raises(RunDirectoryError) as caught:
        FILES[name].of({**_old(name), **change}, Path(name))

    assert f"{name} is damaged: {key} " in caught.value.what
    assert len(str(caught.value)) < 400 and "\x1b" not in str(caught.value)


@pytest.mark.parametrize("name", ["run.json", "status.json"])
def test_a_run_with_a_file_of_a_later_version_is_listed_with_the_reason(name: str, tmp_path: Path) -> None:
    run = Path(shutil.copytree(WITHOUT_VERSION, tmp_path / "run"))
    (run / "recipe.py").touch()
    (run / name).write_text(dump_json({**_old(name), "version": LATER}))

    (row,) = listing.below(tmp_path)

    assert (row.state, f"version {LATER}" in row.why, row.verdict) == ("damaged", True, None)


def test_a_checkpoint_of_a_later_version_is_passed_over_with_the_reason(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}").mkdir()
        checkpoints.seal(tmp_path / f"checkpoint-{step}", ManifestFacts(step=step, state=STATE))
    manifest = tmp_path / "checkpoint-2" / checkpoints.MANIFEST
    manifest.write_text(dump_json({**json.loads(manifest.read_text()), "version": LATER}))

    newest, passed_over = checkpoints.newest_valid(tmp_path)

    assert newest and newest.step == 1
    assert [f"version {LATER}" in line for line in passed_over] == [True]


def test_a_key_that_is_not_known_stays_when_the_file_is_written_again(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    found = {"cause": "bug", "what": "odd", "since": 3}
    run.status.write_text(dump_json({"state": "failed", "exit_code": 1, "diagnosis": found, "colour": "red"}))

    run.write_status(run.read_status().model_copy(update={"signal": 15}))

    written = run.read_json(run.status)
    assert (written["colour"], written["diagnosis"], written["signal"]) == ("red", found, 15)


def test_a_status_has_the_keys_that_were_given_and_no_other(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_status(RunStatus(state="failed", exit_code=1, diagnosis=DiagnosisRecord(cause="bug", what="odd")))

    assert set(run.read_json(run.status)) == {"version", "state", "pid", "exit_code", "ended", "diagnosis"}


def test_what_became_of_the_rows_of_each_split_is_read_as_it_was_written_and_refused_if_damaged(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    counts, total = DataCounts(64, packing=True, read=3, kept=2), Total("bad", "no answer", samples=1, tokens=0)
    split = SplitData(counts=counts, changes=[total], unread=[Unread("turn", "weight", 1, "a:1")])
    run.write_data(RunData(train=split, validation=split), [])

    assert run.data_or_none == RunData(version=1, train=split, validation=split)
    written = run.read_json(run.data)
    assert written["version"] == 1
    wrong_counts = {**written["train"]["counts"], "read": "three"}
    for damage in (
        {"version": LATER},
        {"train": {}},
        {"train": {**written["train"], "changes": [{"samples": 1}]}},
        {"train": {**written["train"], "counts": wrong_counts}},
    ):
        run.data.write_text(dump_json({**written, **damage}))
        assert run.data_or_none is None


@pytest.mark.parametrize(
    "damage", ["", "[]", {"version": LATER}, {"at_s": "now"}, {"saves": [3]}, {"phase": "tea"}, {"rank": None}]
)
def test_a_sign_of_life_that_is_damaged_or_of_a_later_version_is_as_if_it_was_not_there(
    tmp_path: Path, damage: str | dict[str, Any]
) -> None:
    run = RunDirectory(tmp_path)
    beat = made_beat(0, 7, "n1", 3, "in step 2", 1.0, 0.5, phase=Phase.SAVES, seconds={"steps": 9.0}, saves=[(2, 8.5)])
    run.ranks.mkdir()
    file = beats.path_of(run, 0)
    file.write_bytes(beat.to_bytes())

    assert beats.read_beats(run)[0].to_json() == {"version": 1, **beat.to_json()}
    text = damage if isinstance(damage, str) else json.dumps({**json.loads(file.read_text()), **damage})
    file.write_text(text)

    assert (beats.read_beats(run), beats.of_rank(run, 0)) == ({}, None)


def test_the_state_of_a_checkpoint_stands_beside_its_other_facts_in_the_file() -> None:
    flat = ManifestFacts(step=7, state=STATE, of="abc").to_json()

    assert flat == {**STATE.to_json(), "step": 7, "of": "abc"}
    assert ManifestFacts.model_validate(flat) == ManifestFacts(step=7, state=STATE, of="abc")


def test_a_run_json_that_was_made_by_hand_for_tests_is_whole() -> None:
    assert RunRecord.of(json.loads(run_json()), Path("run.json")) == RECORD


def test_the_page_about_runs_lists_every_key_of_a_manifest() -> None:
    page = (Path(__file__).parents[2] / "docs" / "runs.md").read_text(encoding="utf-8")
    keys = {key for model in (Manifest, ManifestFacts, CheckpointState) for key in model.model_fields}

    assert {key for key in keys if f"`{key}`" not in page} == set()


@pytest.mark.parametrize("file", [RunRecord, RunStatus])
def test_the_docstring_of_a_file_says_what_each_of_its_keys_means(file: type[Versioned]) -> None:
    keys = re.findall(r"^        (\w+): ", file.__doc__ or "", re.MULTILINE)

    assert keys == [key for key in file.model_fields if key != "version"]
