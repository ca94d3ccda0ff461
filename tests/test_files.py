"""Writes are whole or not there at all, on a real disk that is full, closed or read by others."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.refused import refused
from tuner import files
from tuner.errors import DiskError
from tuner.files import scratch_folder

LARGE = "x" * 100_000


@contextmanager
def disk_that_holds(num_bytes: int) -> Iterator[None]:
    """Let no file grow beyond `num_bytes`: the write in which it would fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_text_is_written_as_utf8_with_unix_lines(tmp_path: Path) -> None:
    path = tmp_path / "file"

    files.write_text(path, "Größe\n\r\n")

    assert path.read_bytes() == "Größe\n\r\n".encode()
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_who_may_read_a_file_says_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        files.write_text(tmp_path / "file", "text")
    finally:
        os.umask(before)

    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("text", ["NaN", "[-Infinity]", "1e999", "9" * 19, "-" + "9" * 5_000, "[" * 100_000, "{", ""])
def test_what_is_no_strict_json_is_refused_as_one_mistake(text: str) -> None:
    with pytest.raises(ValueError):
        files.load_json(text)


def test_strict_json_is_read_as_it_is_written() -> None:
    value = {"a": [1, -(2**63) + 1, 2**63 - 1, 1.5, 1e300, None, True, "ß"]}

    assert files.load_json(files.dump_json(value)) == value


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    with disk_that_holds(5_000), pytest.raises(DiskError, match=r"cannot write .*/file: File too large"):
        files.write_text(path, LARGE)

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_text_that_utf8_cannot_hold_leaves_nothing(tmp_path: Path) -> None:
    for write in (files.write_text, files.write_new_text):
        with pytest.raises(UnicodeEncodeError):
            write(tmp_path / "file", "\ud800")

    assert list(tmp_path.iterdir()) == []


def test_a_reader_sees_the_old_text_or_the_new_one_and_never_a_part(tmp_path: Path) -> None:
    path, texts, done = tmp_path / "file", {"a" * 300_000, "b" * 300_000}, threading.Event()
    files.write_text(path, "a" * 300_000)
    seen: set[str] = set()

    def read() -> None:
        while not done.is_set():
            seen.add(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    for text in sorted(texts) * 10:
        files.write_text(path, text)
    done.set()
    reader.join()

    assert seen
    assert seen <= texts


def test_a_new_file_is_never_written_over_another(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write_new_text(path, "first")

    with pytest.raises(FileExistsError):
        files.write_new_text(path, "second")

    assert path.read_text() == "first"


def test_half_of_a_new_file_is_not_kept(tmp_path: Path) -> None:
    with disk_that_holds(5_000), pytest.raises(DiskError):
        files.write_new_text(tmp_path / "file", LARGE)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("write", [files.write_text, files.write_new_text, files.append_line])
@pytest.mark.parametrize("name", ["n" * 300, "file/inside"])
def test_a_path_that_no_file_can_have_is_a_disk_error(
    write: Callable[[Path, str], None], name: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")

    with refused(DiskError, None, tmp_path):
        write(tmp_path / name, "text")


def test_a_full_device_is_a_disk_error_with_what_to_do() -> None:
    with pytest.raises(DiskError, match=r"No space left on device.*Free space"):
        files.append_line(Path("/dev/full"), "line")


def test_other_errors_of_the_system_stay_bugs(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.write_text(tmp_path / "no" / "file", "text")
    with pytest.raises(ConnectionError), files.disk_errors(tmp_path):
        raise ConnectionError(errno.ECONNREFUSED, "refused")


def test_lines_are_appended_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = json.dumps({"text": "ä" * 1_000}, ensure_ascii=False)

    threads = [threading.Thread(target=files.append_line, args=(path, line)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert path.read_text(encoding="utf-8") == f"{line}\n" * 16


def test_json_is_strict_and_readable(tmp_path: Path) -> None:
    files.write_json(tmp_path / "file", {"größe": [1, None]})

    assert (tmp_path / "file").read_text(encoding="utf-8") == '{\n  "größe": [\n    1,\n    null\n  ]\n}\n'
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            files.write_json(tmp_path / "file", {"x": number})
    assert "größe" in (tmp_path / "file").read_text(encoding="utf-8")


def test_a_hash_is_that_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")

    assert files.sha256(b"content") == files.sha256(tmp_path / "file") == hashlib.sha256(b"content").hexdigest()


def test_a_folder_in_whose_place_a_link_to_nothing_is_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")

    for folder in (tmp_path / "link", tmp_path / "link" / "below"):
        with pytest.raises(DiskError, match=f"a file or a broken link is at {tmp_path}/link"):
            files.make_folder(folder)
    files.make_folder(tmp_path / "new" / "below")
    assert (tmp_path / "new" / "below").is_dir()


def test_a_folder_that_takes_no_files_is_told() -> None:
    with pytest.raises(DiskError, match="does not take new files"):
        files.write_new_text(Path("/proc/mine.py"), "first")


def test_a_folder_of_another_machine_is_left_to_it_for_a_week(tmp_path: Path) -> None:
    new, old = tmp_path / "making-elsewhere.new00", tmp_path / "making-elsewhere.old00"
    for folder in (new, old):
        folder.mkdir()
    os.utime(old, (time.time() - 8 * 24 * 3600,) * 2)

    with scratch_folder(tmp_path, "making-"):
        assert new.exists() and not old.exists()


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_folder_is_taken_that_no_other_process_has_removed_before_it_was_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_locks: bool
) -> None:
    """Another process sees each of the first two folders before it is locked, and removes it."""
    locked = iter([BlockingIOError(), None, None if has_locks else OSError(errno.ENOLCK, "no locks")])

    def flock(descriptor: int, _: int) -> None:
        file = Path(f"/proc/self/fd/{descriptor}").readlink()
        error = next(locked)
        if len(made := list(tmp_path.iterdir())) and len(seen) < 2:
            seen.append(made[0].name)
            shutil.rmtree(file.parent)
        if error:
            raise error

    seen: list[str] = []
    monkeypatch.setattr(files.fcntl, "flock", flock)
    with scratch_folder(tmp_path, "making-") as folder:
        assert folder.is_dir() and folder.name not in seen
        assert len(set(seen)) == 2


def test_a_link_or_a_file_with_the_name_of_a_left_folder_is_not_followed(tmp_path: Path) -> None:
    with scratch_folder(tmp_path, "making-") as folder:
        of_host = folder.name.rpartition(".")[0]
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    (tmp_path / f"{of_host}.link").symlink_to(kept)
    (tmp_path / f"{of_host}.file").touch()

    with scratch_folder(tmp_path, "making-"):
        pass

    assert (kept / "file").exists() and (tmp_path / f"{of_host}.file").exists()


HOLDS = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from tuner.files import scratch_folder
with scratch_folder(Path(sys.argv[1]), "making-") as folder:
    (folder / "rows").write_bytes(bytes(1 << 20))
    print(folder, flush=True)
    time.sleep(600)
"""


def test_what_a_killed_process_left_is_removed_by_the_next_one_and_what_a_live_one_holds_stays(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    held = Path(process.stdout.readline().strip())
    with scratch_folder(tmp_path, "making-"):
        assert (held / "rows").is_file()

    process.kill()
    process.wait()
    process.stdout.close()
    assert (held / "rows").is_file()
    with scratch_folder(tmp_path, "making-"):
        assert not held.exists()


@pytest.mark.parametrize(
    ("number", "free_inodes", "is_about_space"),
    [
        (errno.ENOSPC, 9, True),
        (errno.EDQUOT, 9, True),
        (errno.ENOSPC, 0, False),
        (errno.EPERM, 9, False),  # chattr +i
        (errno.EACCES, 9, False),
        (errno.EROFS, 9, False),
    ],
)
def test_only_a_disk_that_is_short_of_bytes_is_to_be_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, free_inodes: int, is_about_space: bool
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_files=9, f_favail=free_inodes))

    with pytest.raises(DiskError) as caught, files.disk_errors(tmp_path / "new" / "file", "free space"):
        raise OSError(number, os.strerror(number))

    assert (caught.value.fix == "free space") == is_about_space
