from __future__ import annotations

import errno
import json
import random
import shutil
from pathlib import Path

import pytest
import xxhash

from tests.runs.made_records import STATE
from tuner.errors import DiskError, RunDirectoryError
from tuner.files import xxh3_128
from tuner.runs import checkpoints, rank_files
from tuner.runs.checkpoints import (
    LATEST,
    MANIFEST,
    Checkpoint,
    clear_unfinished,
    commit,
    facts,
    inspect,
    listed,
    newest_valid,
    prune,
    require_valid,
    seal,
    set_aside,
    unfinished,
)
from tuner.runs.records import ManifestFacts

CONTENT = {
    "model.safetensors": bytes(range(256)) * 4,
    "trainer_state.json": b'{"step": 1}',
    "global_step1/rank_0.pt": b"optimizer of rank 0",
    "global_step1/manifest.json": b"not ours",
    "latest": b"global_step1",
    "empty": b"",
    "größe mit leerzeichen": b"x",
}


def _save(folder: Path, *steps: int, sealed: bool = True) -> Path:
    """Write checkpoints, and return the last one."""
    for step in steps:
        path = folder / f"checkpoint-{step}"
        for name, content in CONTENT.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
        if sealed:
            seal(path, ManifestFacts(step=step, state=STATE))
    return path


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def _left(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.iterdir())


# One checkpoint


@pytest.mark.parametrize("name", ["../elsewhere", "/tmp", "..", ".", "", "a/../../b", "x" * 300])
def test_a_checkpoint_whose_latest_names_a_folder_outside_is_not_valid(tmp_path: Path, name: str) -> None:
    path = _save(tmp_path, 1, sealed=False)
    (path / "latest").write_text(name)
    seal(path, ManifestFacts(step=1))

    assert inspect(path) == "latest points outside of the checkpoint"


def test_a_sealed_checkpoint_is_valid_and_tells_its_facts(tmp_path: Path) -> None:
    path = _save(tmp_path, 7)

    assert inspect(path) is None
    assert require_valid(path) == Checkpoint(path, 7, facts(path))
    assert facts(path) == ManifestFacts(step=7, state=STATE)


def test_the_manifest_holds_the_size_and_hash_of_every_file(tmp_path: Path) -> None:
    path = _save(tmp_path, 7)

    files = json.loads((path / MANIFEST).read_text())["files"]

    assert files == {
        name: {"bytes": len(content), "xxh3_128": xxhash.xxh3_128(content).hexdigest()}
        for name, content in CONTENT.items()
    }


def test_every_file_and_folder_is_on_the_disk_before_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _save(tmp_path, 7, sealed=False)
    flushed: list[Path] = []
    monkeypatch.setattr(rank_files, "flush", flushed.append)
    monkeypatch.setattr(checkpoints, "write_json", lambda manifest, value: flushed.append(manifest))

    seal(path, ManifestFacts())

    assert set(flushed[:-1]) == {path, path / "global_step1", *(path / name for name in CONTENT)}
    assert flushed[-1] == path / MANIFEST


def test_a_folder_that_cannot_rename_folders_is_refused_and_nothing_is_left_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.require_renames(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")  # as mounted object stores do

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(DiskError):
        checkpoints.require_renames(tmp_path)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", CONTENT)
def test_a_deleted_file_is_named(tmp_path: Path, name: str) -> None:
    path = _save(tmp_path, 7)

    (path / name).unlink()

    assert inspect(path) == f"{name} is missing"


@pytest.mark.parametrize("name", [name for name, content in CONTENT.items() if content])
def test_one_flipped_bit_anywhere_is_found(tmp_path: Path, name: str) -> None:
    path = _save(tmp_path, 7)
    at = random.Random(name).randrange(len(CONTENT[name]))  # noqa: S311

    _flip(path / name, at)

    assert inspect(path) == f"{name} has changed (its hash differs)"


@pytest.mark.parametrize("name", CONTENT)
def test_a_file_of_another_size_is_named_with_both(tmp_path: Path, name: str) -> None:
    path, size = _save(tmp_path, 7), len(CONTENT[name])

    (path / name).write_bytes(CONTENT[name][:-1] if size else b"grown")

    assert inspect(path) == f"{name} has {size - 1 if size else 5} bytes, not {size}"


def test_a_file_that_became_a_folder_is_missing(tmp_path: Path) -> None:
    path = _save(tmp_path, 7)
    (path / "empty").unlink()
    (path / "empty").mkdir()

    assert inspect(path) == "empty is missing"


def test_without_a_manifest_the_save_never_finished(tmp_path: Path) -> None:
    assert inspect(_save(tmp_path, 7, sealed=False)) == "it has no manifest: the save never finished"
    assert inspect(tmp_path / "checkpoint-8") == "it has no manifest: the save never finished"


GARBLED = [
    "",
    "{",
    "null",
    "[]",
    "3",
    '"files"',
    "{}",
    '{"files": null}',
    '{"files": []}',
    '{"files": 3}',
    '{"files": {"empty": {}}}',
    '{"files": {"empty": null}}',
    '{"files": {"empty": [0, "x"]}}',
    '{"files": {"empty": {"bytes": 0}}}',
]


@pytest.mark.parametrize("text", GARBLED)
def test_a_garbled_manifest_is_told_and_nothing_is_raised(tmp_path: Path, text: str) -> None:
    path = _save(tmp_path, 7)

    (path / MANIFEST).write_text(text)

    assert "manifest" in (inspect(path) or "")


def test_any_flipped_bit_of_the_list_of_files_is_found(tmp_path: Path) -> None:
    path = _save(tmp_path, 7)
    whole = (path / MANIFEST).read_bytes()
    start, end = whole.index(b'"files"'), whole.rindex(b"}\n  }")
    for at in range(start, end, 7):
        if whole[at] in b" \n,":  # space for another space is the same JSON
            continue
        _flip(path / MANIFEST, at)

        assert inspect(path) is not None, whole[max(0, at - 20) : at + 20]
        (path / MANIFEST).write_bytes(whole)


def test_a_file_that_came_later_does_no_harm(tmp_path: Path) -> None:
    path = _save(tmp_path, 7)

    (path / "notes.txt").write_text("mine")

    assert inspect(path) is None


@pytest.mark.parametrize("damage", ["missing", "file", "broken"])
def test_a_checkpoint_asked_for_by_name_must_be_valid(tmp_path: Path, damage: str) -> None:
    path = _save(tmp_path, 7)
    if damage != "broken":
        shutil.rmtree(path)
    if damage == "file":
        path.touch()
    if damage == "broken":
        (path / "model.safetensors").unlink()

    with pytest.raises(RunDirectoryError) as caught:
        require_valid(path)

    assert str(path) in str(caught.value)
    assert caught.value.where == "--resume"
    assert ("model.safetensors is missing" in str(caught.value)) is (damage == "broken")


# Several checkpoints


def _newest(folder: Path) -> tuple[Path | None, list[str]]:
    found, passed_over = newest_valid(folder)
    return found and found.path, passed_over


def test_the_newest_is_the_highest_step_and_not_the_last_in_the_alphabet(tmp_path: Path) -> None:
    _save(tmp_path, 9, 10, 100)

    assert _newest(tmp_path) == (tmp_path / "checkpoint-100", [])


def test_invalid_ones_are_passed_over_and_told(tmp_path: Path) -> None:
    _save(tmp_path, 1, 2)
    _flip(_save(tmp_path, 3) / "model.safetensors", 5)
    _save(tmp_path, 4, sealed=False)

    found, passed = _newest(tmp_path)

    assert found == tmp_path / "checkpoint-2"
    assert passed == [
        "checkpoint-4 is skipped: it has no manifest: the save never finished",
        "checkpoint-3 is skipped: model.safetensors has changed (its hash differs)",
    ]


def test_what_is_older_than_the_newest_valid_one_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path, 1, 2, 3)
    hashed: set[Path] = set()
    monkeypatch.setattr(checkpoints, "xxh3_128", lambda path: hashed.add(path) or xxh3_128(path))

    newest_valid(tmp_path)

    assert {path.relative_to(tmp_path).parts[0] for path in hashed} == {"checkpoint-3"}


def test_where_no_checkpoint_is_valid_there_is_none(tmp_path: Path) -> None:
    _save(tmp_path, 1, sealed=False)

    assert newest_valid(tmp_path)[0] is None
    assert newest_valid(tmp_path / "missing") == (None, [])


@pytest.mark.parametrize(
    "name", ["checkpoint-", "checkpoint-x", "checkpoint-5.tmp", "old-checkpoint-5", "checkpoint-5-6"]
)
def test_other_folders_are_no_checkpoints(tmp_path: Path, name: str) -> None:
    shutil.move(_save(tmp_path, 5), tmp_path / name)

    assert listed(tmp_path) == []
    prune(tmp_path, 1, 10)
    assert (tmp_path / name).is_dir()


# Pruning


@pytest.mark.parametrize(
    ("saved", "most", "last_step", "left"),
    [
        ((2, 4, 8, 10), 2, 10, [8, 10]),
        ((2, 4), 3, 10, [2, 4]),  # fewer than to keep
        ((2, 4, 98, 100), 1, 4, [4, 98, 100]),  # of a later step: of another attempt, which neither counts nor goes
    ],
)
def test_the_newest_are_kept(
    tmp_path: Path, saved: tuple[int, ...], most: int, last_step: int, left: list[int]
) -> None:
    _save(tmp_path, *saved)

    prune(tmp_path, most, last_step)

    assert _left(tmp_path) == left
    assert inspect(tmp_path / f"checkpoint-{left[0]}") is None


def test_a_save_that_never_finished_does_not_count_and_is_not_removed(tmp_path: Path) -> None:
    _save(tmp_path, 1, 2, 3)
    _save(tmp_path, 4, 5, sealed=False)

    prune(tmp_path, 2, 10)

    assert _left(tmp_path) == [2, 3, 4, 5]


@pytest.mark.parametrize("damage", ["cut", "deleted", "garbled"])
def test_a_damaged_one_does_not_count_as_kept(tmp_path: Path, damage: str) -> None:
    _save(tmp_path, 1, 2, 3, 4)
    newest = tmp_path / "checkpoint-4"
    if damage == "cut":
        (newest / "model.safetensors").write_bytes(b"")
    if damage == "deleted":
        (newest / "model.safetensors").unlink()
    if damage == "garbled":
        (newest / MANIFEST).write_text('{"files": [')

    prune(tmp_path, 2, 10)

    assert _left(tmp_path) == [2, 3, 4]
    assert _newest(tmp_path)[0] == tmp_path / "checkpoint-3"


def test_where_all_are_damaged_nothing_is_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        (_save(tmp_path, step) / "model.safetensors").unlink()

    prune(tmp_path, 1, 10)

    assert _left(tmp_path) == [1, 2, 3]


def test_a_kill_while_pruning_leaves_nothing_that_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path, 1, 2)

    def killed(path: Path, **_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            prune(tmp_path, 1, 10)

    assert [found.step for found in listed(tmp_path)] == [2]
    assert (unfinished(tmp_path) / "removed checkpoint-1" / "model.safetensors").exists()
    clear_unfinished(tmp_path)
    assert _left(tmp_path) == [2]


def test_checkpoints_set_aside_by_each_of_several_starts_are_all_kept(tmp_path: Path) -> None:
    for step in (2, 4):
        _save(tmp_path / "checkpoints", step)
        set_aside(tmp_path / "checkpoints", 1)

    kept = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/checkpoint-*"))
    assert kept == ["checkpoints of attempt 1/checkpoint-2", "checkpoints of attempt 2/checkpoint-4"]


# From being written to being one


def test_a_committed_checkpoint_is_in_its_place_and_named_as_the_latest(tmp_path: Path) -> None:
    _save(unfinished(tmp_path), 7, sealed=False)

    num_bytes = commit(tmp_path, 7, ManifestFacts(state=STATE))

    path = tmp_path / "checkpoint-7"
    assert inspect(path) is None
    assert facts(path) == ManifestFacts(step=7, state=STATE)
    assert num_bytes == sum(map(len, CONTENT.values()))
    assert (tmp_path / LATEST).read_text() == "checkpoint-7\n"
    assert {entry.name for entry in tmp_path.iterdir()} == {"checkpoint-7", LATEST}


def test_the_recipe_of_the_run_is_a_part_of_the_checkpoint(tmp_path: Path) -> None:
    recipe = tmp_path / "as it ran.py"
    recipe.write_text("model = dict()")
    _save(unfinished(tmp_path), 7, sealed=False)

    commit(tmp_path, 7, ManifestFacts(), recipe)

    copy = tmp_path / "checkpoint-7" / "recipe.py"
    assert copy.read_text() == "model = dict()"
    copy.write_text("model = None  ")
    assert inspect(copy.parent) == "recipe.py has changed (its hash differs)"


def test_a_save_of_the_same_step_replaces_the_older_one_and_mixes_nothing(tmp_path: Path) -> None:
    (_save(tmp_path, 7) / "of the older one").touch()
    _save(unfinished(tmp_path), 7, sealed=False)

    commit(tmp_path, 7, ManifestFacts())

    assert inspect(tmp_path / "checkpoint-7") is None
    assert not (tmp_path / "checkpoint-7" / "of the older one").exists()


@pytest.mark.parametrize("last", ["seal", "write_json", "flush", "write_text"])
def test_a_kill_at_any_instant_of_a_commit_leaves_the_older_one_or_the_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    _save(tmp_path, 6)
    _save(unfinished(tmp_path), 7, sealed=False)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, last, killed)
    with pytest.raises(KeyboardInterrupt):
        commit(tmp_path, 7, ManifestFacts())

    assert _newest(tmp_path) == (tmp_path / f"checkpoint-{7 if last == 'write_text' else 6}", [])


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("num_renames", [0, 1])
def test_what_is_whole_when_a_kill_comes_between_the_renames_gets_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_renames: int, is_whole: bool
) -> None:
    (_save(tmp_path, 7) / "of the older one").touch()
    _save(unfinished(tmp_path), 7, sealed=False)
    if num_renames == 0:
        shutil.rmtree(tmp_path / "checkpoint-7")
    with monkeypatch.context() as patched:
        rename, done = Path.rename, list[Path]()

        def killed(path: Path, target: Path) -> Path:
            if len(done) == num_renames:
                raise KeyboardInterrupt
            done.append(target)
            return rename(path, target)

        patched.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            commit(tmp_path, 7, ManifestFacts())
    assert listed(tmp_path) == []
    if not is_whole:
        _flip(unfinished(tmp_path) / "checkpoint-7" / "model.safetensors", 3)

    clear_unfinished(tmp_path)

    left = [tmp_path / "checkpoint-7"] if is_whole or num_renames else []
    assert [found.path for found in listed(tmp_path)] == left and all(inspect(path) is None for path in left)
    assert not unfinished(tmp_path).exists()
    assert left == [] or (left[0] / "of the older one").exists() != is_whole
    assert (tmp_path / LATEST).exists() == bool(left)


def test_a_result_that_a_kill_left_beside_its_place_is_put_back(tmp_path: Path) -> None:
    replaced = unfinished(tmp_path / "checkpoints") / "replaced final"
    replaced.mkdir(parents=True)
    (replaced / "model.safetensors").touch()

    clear_unfinished(tmp_path / "checkpoints")

    assert (tmp_path / "final" / "model.safetensors").exists()


@pytest.mark.parametrize("text", [None, "", "checkpoint-1\n", "checkpoint-99\n", "\0\xff"])
def test_the_newest_is_found_whatever_is_written_in_latest(tmp_path: Path, text: str | None) -> None:
    for step in (1, 2):
        _save(unfinished(tmp_path), step, sealed=False)
        commit(tmp_path, step, ManifestFacts())
    (tmp_path / LATEST).unlink()
    if text is not None:
        (tmp_path / LATEST).write_text(text)

    assert _newest(tmp_path) == (tmp_path / "checkpoint-2", [])


def test_a_checkpoint_that_goes_while_it_is_looked_at_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _save(tmp_path, 7)

    def gone(file: Path) -> str:
        shutil.rmtree(path, ignore_errors=True)
        return xxh3_128(file)

    monkeypatch.setattr(checkpoints, "xxh3_128", gone)

    assert "cannot be read: No such file" in str(inspect(path))


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_link_that_leads_out_of_a_checkpoint_makes_it_invalid(tmp_path: Path, what: str) -> None:
    """Sizes and hashes match, but what it leads to is another's, and may be another file when it is loaded."""
    path, outside = _save(tmp_path, 1), tmp_path / "outside"
    inner = path / "global_step1"
    if what == "folder":
        inner.rename(outside)
        inner.symlink_to(outside)
    else:
        (inner / "rank_0.pt").rename(outside)
        (inner / "rank_0.pt").symlink_to(outside)

    assert "points outside of the checkpoint" in str(inspect(path))
    inner_link = _save(tmp_path, 2)
    (inner_link / "model.safetensors").rename(inner_link / "weights")
    (inner_link / "model.safetensors").symlink_to("weights")
    assert inspect(inner_link) is None
