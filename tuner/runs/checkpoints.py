"""Checkpoints and their manifests of sizes and hashes. The manifest is written last; it makes a checkpoint valid.

checkpoints/
    checkpoint-STEP   whole: it gets this name when its manifest is on the disk; recipe.py in it is that of its run
    unfinished/       what is being written or removed; after a kill `put_back` gives what is whole there its place
    latest            the name of the newest one, for people and scripts; here it only shows that there was one

This module handles folders and bytes. The worker knows what is inside a checkpoint.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import NamedTuple

from tuner.errors import DiskError, Option, RunDirectoryError
from tuner.files import copy, disk_errors, flush, load_json, read_text, write_json, write_text, xxh3_128
from tuner.progress import shown
from tuner.runs import rank_files
from tuner.runs.directory import RunDirectory, is_run
from tuner.runs.records import Manifest, ManifestFacts, ManifestFile

MANIFEST = "manifest.json"
LATEST = "latest"
"""A file of this name is also in each checkpoint: DeepSpeed's, with the folder of its states."""
RECIPE = "recipe.py"
_UNFINISHED = "unfinished"
_REPLACED, _REMOVED = "replaced ", "removed "
"""Before the name of what stands in `unfinished` because a newer one takes its place, or to be removed."""
_RENAMES = (
    "Use a disk, or a shared file system such as NFS, Lustre or EFS; copy the result to an object store at the end."
)
_MAX_NAME = 255
_NAME = re.compile(r"checkpoint-(\d+)")


class Checkpoint(NamedTuple):
    """A checkpoint folder as its manifest describes it, which was read once.

    Args:
        step: The optimizer step at which it was saved; without a readable manifest, that of its name.
        facts: What was true of the run that saved it.
        problem: What is wrong with it, naming the file; None: it is valid.
    """

    path: Path
    step: int
    facts: ManifestFacts = ManifestFacts()
    problem: str | None = None

    @property
    def recipe(self) -> Path:
        """The recipe of the run that saved it."""
        return self.path / RECIPE


def unfinished(folder: Path) -> Path:
    """Return where a run's checkpoints are written before they are whole."""
    return folder / _UNFINISHED


def clear_unfinished(folder: Path) -> None:
    """Remove the files that a killed or failed save left behind; what is whole gets its place."""
    put_back(folder)
    if not _homeless(folder):
        shutil.rmtree(unfinished(folder), ignore_errors=True)


def put_back(folder: Path) -> None:
    """Give what is whole in `unfinished(folder)` the place that a kill, before its last rename, left empty.

    No run may be at work there. Several processes may do it at once.
    """
    for place, path in _homeless(folder).items():
        with suppress(OSError):  # another process has done it; or it stays where it is
            path.rename(place)
            if newest := newest_first(folder):
                write_text(folder / LATEST, f"{newest[0][1].name}\n")


def _homeless(folder: Path) -> dict[Path, Path]:
    """Return the empty places of what is whole in `unfinished(folder)`: of the newer one, else of what it replaced."""
    path_of_place: dict[Path, Path] = {}
    for path in _left_in(unfinished(folder)):
        name = path.name.removeprefix(_REPLACED)
        is_checkpoint = bool(_NAME.fullmatch(name))
        place = folder / name if is_checkpoint else RunDirectory(folder.parent).final
        if place.name != name or place in path_of_place or os.path.lexists(place):
            continue
        if read_checkpoint(path).problem is None if is_checkpoint else path.name != name:  # a result has no manifest
            path_of_place[place] = path
    return path_of_place


def never_finished(folder: Path) -> list[Path]:
    """Return what killed and failed saves left in a run's checkpoints and is of no use: all but what is whole.

    Of a run at work it may be what is being written. A link, which may lead to files of another run, is passed over.
    """
    whole_paths = {*_homeless(folder).values()}
    return [path for path in _left_in(unfinished(folder)) if path not in whole_paths and not folder.is_symlink()]


def _left_in(home: Path) -> list[Path]:
    """Return what stands in `unfinished`, of two with one name the newer first; no links, and nothing behind one."""
    return sorted(path for path in home.glob("*") if not (path.is_symlink() or home.is_symlink()))


def require_renames(folder: Path) -> None:
    """Rename a folder in `folder`, as a save does: object stores that are mounted as a folder may refuse it."""
    before, after = (folder / f".{name}-{os.getpid()}" for name in ("rename", "renamed"))
    try:
        with disk_errors(folder):
            before.mkdir()
            (before / MANIFEST).touch()
        before.rename(after)
    except OSError as error:
        problem = f"it cannot rename folders ({error.strerror}), and a checkpoint gets its place by that"
        raise DiskError(problem, where=folder, fix=_RENAMES) from error
    finally:
        shutil.rmtree(before, ignore_errors=True)
        shutil.rmtree(after, ignore_errors=True)


def commit(
    folder: Path,
    step: int,
    manifest_facts: ManifestFacts,
    recipe: Path | None = None,
    num_ranks: int = 1,
    waits_for: Callable[[str], bool] = lambda _: True,
    tick: Callable[[int], None] = lambda _: None,
) -> int:
    """Make a checkpoint of what the ranks have written; those after rank 0 have declared their files (`rank_files`).

    A kill at any instant leaves the older ones as they are, and this one whole or not there.

    Args:
        recipe: Is copied into it as recipe.py, so that a moved checkpoint still names its recipe.
        waits_for: As of `rank_files.gather`, and so are the errors.
        tick: As of `rank_files.flushed`.

    Returns:
        Its size in bytes.
    """
    name = f"checkpoint-{step}"
    if recipe:
        copy(recipe, unfinished(folder) / name / RECIPE)
    written = rank_files.flushed(unfinished(folder) / name, tick)
    written |= rank_files.gather(unfinished(folder), name, num_ranks, waits_for)
    seal(unfinished(folder) / name, manifest_facts.model_copy(update={"step": step}), written)
    _rename(folder, folder / name)
    write_text(folder / LATEST, f"{name}\n")
    return sum(file.bytes for file in written.values())


def put_in_place(folder: Path, target: Path) -> None:
    """Flush what was written under the same name in `unfinished(folder)`, and let it replace `target`."""
    written = unfinished(folder) / target.name
    with rank_files.in_threads(flush, written.rglob("*")) as done:
        deque(done, maxlen=0)
    _rename(folder, target)


def _rename(folder: Path, target: Path) -> None:
    written = unfinished(folder) / target.name
    flush(written)
    if target.exists():
        target.rename(unfinished(folder) / f"{_REPLACED}{target.name}")
    written.rename(target)
    flush(target.parent)
    clear_unfinished(folder)


def seal(folder: Path, manifest_facts: ManifestFacts, files: Mapping[str, ManifestFile] | None = None) -> None:
    """Write the manifest of a folder, with facts.

    Args:
        files: All that stands there, flushed already; None: everything is flushed and hashed now.
    """
    if files is None:
        files = rank_files.flushed(folder)  # the manifest must not reach the disk before its files
    entries = {path: file for path, file in sorted(files.items()) if path != MANIFEST}
    write_json(folder / MANIFEST, Manifest(facts=manifest_facts, files=entries).to_json())


def read_checkpoint(folder: Path, *, hashes: bool = True) -> Checkpoint:
    """Read a checkpoint's manifest, and compare every size (and hash) with it."""
    match = _NAME.fullmatch(folder.name)
    step = int(match[1]) if match else 0
    try:
        manifest = _manifest(folder)
    except OSError:
        return Checkpoint(folder, step, problem="it has no manifest: the save never finished")
    except RunDirectoryError as error:
        return Checkpoint(folder, step, problem=error.what)
    except ValueError:
        return Checkpoint(folder, step, problem="its manifest cannot be read")
    manifest_facts, saved_at = manifest.facts, step if manifest.facts.step is None else manifest.facts.step
    if match and saved_at != step:  # it was renamed, and a list sorted by names would be wrong
        return Checkpoint(folder, step, manifest_facts, f"it was saved at step {saved_at}")
    try:
        return Checkpoint(folder, saved_at, manifest_facts, _first_difference(folder, manifest.files, hashes))
    except OSError as error:  # a bad disk, or a run that removes this checkpoint while it is looked at
        problem = f"{Path(error.filename or folder).name} cannot be read: {error.strerror}"
        return Checkpoint(folder, saved_at, manifest_facts, problem)


def inspect(folder: Path, *, hashes: bool = True) -> str | None:
    """Return what is wrong with a checkpoint, naming the file, or None when every size (and hash) matches."""
    return read_checkpoint(folder, hashes=hashes).problem


def _first_difference(folder: Path, expected: Mapping[str, ManifestFile], hashes: bool) -> str | None:
    root = folder.resolve()
    # Every place is resolved once: a listing looks at thousands of files, and a name at a time is a third of its time.
    is_inside = cache(lambda path: path.resolve().is_relative_to(root))
    if _leads_out(folder):
        return f"{LATEST} points outside of the checkpoint"
    for name, file in expected.items():
        path = folder / name
        if not os.path.isfile(path):  # noqa: PTH113 (a name too long is no file, and no error)
            return f"{name} is missing"
        if not is_inside(path if path.is_symlink() else path.parent):
            return f"{name} points outside of the checkpoint"
        if path.stat().st_size != file.bytes:
            return f"{name} has {path.stat().st_size} bytes, not {file.bytes}"
    if hashes:
        sizes = sum(file.bytes for file in expected.values())
        with (
            shown(f"checking {folder.name}", "B", sizes) as work,
            rank_files.in_threads(lambda name: xxh3_128(folder / name), expected) as digests,
        ):
            for (name, file), digest in zip(expected.items(), digests, strict=True):
                if digest != file.xxh3_128:
                    return f"{name} has changed (its hash differs)"
                work.advance(file.bytes)
    return None


def _leads_out(folder: Path) -> bool:
    """Return whether DeepSpeed's file `latest`, which names the folder of its states, names one outside."""
    file = folder / LATEST
    if not file.is_file():
        return False
    try:
        name = read_text(file, _MAX_NAME).strip()
    except (OSError, ValueError):
        return True
    return name in ("", ".", "..") or bool({"/", "\0"} & set(name))


def facts(folder: Path) -> ManifestFacts:
    """Return the facts in a folder's manifest: those of a checkpoint have a step, those of an export have none.

    Raises:
        OSError, ValueError: there is no manifest, or it is not JSON.
        RunDirectoryError: it is damaged, or of a later version.
    """
    return _manifest(folder).facts


def _manifest(folder: Path) -> Manifest:
    content = load_json(read_text(folder / MANIFEST))
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    return Manifest.of(content, folder / MANIFEST)


def listed(folder: Path) -> list[Checkpoint]:
    """Return every checkpoint of a run, newest first, judged by the sizes of its files alone."""
    return [read_checkpoint(path, hashes=False) for _, path in newest_first(folder)]


def newest_valid(folder: Path, *, hashes: bool = True) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest valid checkpoint, and a line for each newer one that was passed over; no older one is read."""
    passed_over: list[str] = []
    for _, path in newest_first(folder):
        checkpoint = read_checkpoint(path, hashes=hashes)
        if checkpoint.problem is None:
            return checkpoint, passed_over
        passed_over.append(f"{path.name} is skipped: {checkpoint.problem}")
    return None, passed_over


def prune(folder: Path, keep: int, step: int, protected: int | None = None) -> None:
    """Remove checkpoints that are older than the `keep` newest whole ones up to `step`, the one just saved.

    Whole means that every size matches: hashing all of them after each save would cost as much as the save. Later
    steps are those of another attempt, and neither count nor go; the one of step `protected` stays whatever its age.
    """
    num_whole = 0
    for at, path in newest_first(folder):
        if at > step or not (path / MANIFEST).is_file():
            continue
        if num_whole < keep:
            num_whole += read_checkpoint(path, hashes=False).problem is None
            continue
        if at == protected:
            continue
        # A kill in the middle leaves nothing that looks like a checkpoint.
        unfinished(folder).mkdir(exist_ok=True)
        path.rename(unfinished(folder) / f"{_REMOVED}{path.name}")
    clear_unfinished(folder)


def set_aside(folder: Path, attempt: int) -> None:
    """Rename a run's checkpoints to `checkpoints of attempt N`, where they are kept and nothing resumes from them.

    N is `attempt`, or the next number that is free: attempts are counted anew each time that a run is resumed.
    """
    clear_unfinished(folder)
    places = (folder.with_name(f"{folder.name} of attempt {number}") for number in count(attempt))
    with disk_errors(folder):
        folder.rename(next(folder for folder in places if not folder.exists()))


def set_later_aside(folder: Path, step: int, target: Path) -> None:
    """Move the checkpoints after `step` to the folder `target`, where nothing resumes from them."""
    for at, path in newest_first(folder):
        if at > step:
            target.mkdir(parents=True, exist_ok=True)
            path.rename(target / path.name)


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, valid or not: one of a run, or one that was moved with its manifest."""
    if _NAME.fullmatch(folder.name) and os.path.isdir(folder) and is_run(folder.absolute().parent.parent):  # noqa: PTH112
        return True
    if not os.path.isfile(folder / MANIFEST):  # noqa: PTH113 (a name too long is no file, and no error)
        return False
    try:
        return facts(folder).step is not None  # an export has a manifest without a step; users may edit its files
    except (ValueError, RunDirectoryError):
        return True


def newest_first(folder: Path) -> list[tuple[int, Path]]:
    """Return the step and the folder of every checkpoint of a run, by their names alone."""
    steps_and_paths = (
        (int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))
    )
    return sorted(steps_and_paths, reverse=True)


def require_valid(folder: Path, *, hashes: bool = True) -> Checkpoint:
    """Return the checkpoint in `folder`, which must be valid.

    Raises:
        RunDirectoryError: it is not there, or its manifest does not hold.
    """
    if not os.path.isdir(folder):  # noqa: PTH112 (a name too long is no folder, and no error)
        raise RunDirectoryError(f"no checkpoint {folder}", where=Option("resume"), fix="Give a checkpoint-STEP folder.")
    if not (_NAME.fullmatch(folder.name) or (folder / MANIFEST).is_file()):
        fix = "Give a run directory, or a checkpoint-STEP folder in its checkpoints."
        raise RunDirectoryError(
            f"{folder} is neither a run directory nor a checkpoint", where=Option("resume"), fix=fix
        )
    checkpoint = read_checkpoint(folder, hashes=hashes)
    if checkpoint.problem:
        fix = "Use an older checkpoint, or give the run directory to use its newest valid one."
        raise RunDirectoryError(
            f"{folder} is not a valid checkpoint: {checkpoint.problem}", where=Option("resume"), fix=fix
        )
    return checkpoint
