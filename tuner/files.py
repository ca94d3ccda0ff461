"""Writes that are whole or not there at all, reads that end, content hashes; it alone writes files of a run.

It knows nothing of recipes, runs or checkpoints.
"""

from __future__ import annotations

import codecs
import errno
import fcntl
import glob
import json
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, TextIO

from tuner.errors import DiskError, TunerError

if TYPE_CHECKING:
    from io import BufferedReader

JsonObject = dict[str, Any]
"""A JSON object; its values are checked where they are used."""

ReadOnlyJson = Mapping[str, Any]
"""A JSON object that the function does not change."""

DISK_IS_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DISK_ERRORS = {
    *DISK_IS_FULL,
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO),
    *(errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ESTALE),
}
_MAX_WHOLE, _MAX_DIGITS = 1 << 63, 18
MAX_BYTES = 1 << 26
"""Of a whole file that is read as text or JSON; the largest published tokenizer.json has 33 MB."""
_MAX_LINE_BYTES = 1 << 24
_LOCK, _MAX_HOST = ".lock", 32
_WEEK_S = 7 * 24 * 3600.0
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_NOTHING_TO_FLUSH = {errno.EINVAL, errno.ENOTSUP}
"""What network file systems answer that have nothing to flush for a folder."""


def is_disk_error(error: BaseException) -> bool:
    """Return whether the operating system refused a write: no space, quota, permission, an input/output error."""
    return isinstance(error, OSError) and error.errno in _DISK_ERRORS


def remedy(error: OSError, path: Path) -> str | None:
    """Return what helps if a disk is not short of bytes; None if it is, or if nothing more is known."""
    if error.errno == errno.EROFS:
        return "The file system is read-only: write to another one."
    if error.errno in (errno.EACCES, errno.EPERM):
        return "Have the right to write there (ls -ld and lsattr -d show it), or write to another folder."
    if error.errno == errno.ENOSPC:
        with suppress(OSError):
            disk = os.statvfs(next(folder for folder in (path, *path.absolute().parents) if folder.exists()))
            if disk.f_files and not disk.f_favail:
                return "No inode is free there (df -i shows it): remove files, or write to another disk."
    return None


@contextmanager
def disk_errors(path: Path, fix: str = "Free space there, or write to another disk.") -> Iterator[None]:
    """Turn the operating system's disk errors into a `DiskError` that names `path`.

    Args:
        fix: What helps on a full disk.

    Raises:
        DiskError: no space, quota, permission, a read-only file system, an input/output error, or a path that no
            file can have.
    """
    try:
        yield
    except OSError as error:
        if not is_disk_error(error):
            raise
        reason = os.strerror(error.errno or 0)
        raise DiskError(f"cannot write {path}: {reason}", fix=remedy(error, path) or fix) from error


def make_folder(path: Path) -> None:
    """Make a folder and those above it, unless it is there.

    Raises:
        DiskError: it cannot be made, or a file or a link to nothing is in its place.
    """
    with disk_errors(path, "Choose another folder, or have the right to write there."):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            problem = f"cannot make the folder {path}: a file or a broken link is at {error.filename}"
            raise DiskError(problem, fix="Remove it, or name another folder.") from error


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a new folder in `parent`, removed at the end; first remove those that killed processes left.

    A file in it is locked while its process lives. Of another machine only a folder that is a week old is removed: a
    network file system may keep its locks to one machine. Where a file system has no locks, nothing is removed.

    Raises:
        OSError: `parent` takes no folder.
    """
    import tempfile  # 3 ms for its random names

    of_host = f"{prefix}{re.sub('[^a-zA-Z0-9]', '-', os.uname().nodename)[:_MAX_HOST]}."
    _remove_left(parent, prefix, of_host)
    with ExitStack() as stack:
        lock = None
        while lock is None:  # until its lock is held, another process may take it for one that was left
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parent, prefix=of_host)))
            lock = _locked(folder / _LOCK)
        stack.callback(os.close, lock)  # the kernel lets go of it when the process ends
        yield folder


def _remove_left(parent: Path, prefix: str, of_host: str) -> None:
    for folder in parent.glob(f"{glob.escape(prefix)}*"):
        with suppress(OSError):  # it is gone, cannot be read, or nothing can be locked there
            status = folder.lstat()
            is_old = folder.name.startswith(of_host) or time.time() - status.st_mtime > _WEEK_S
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and is_old:
                lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)


def _locked(file: Path) -> int | None:
    """Return the descriptor of a new file that is locked, if there are locks; None if another process removes it."""
    try:
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError:
        return lock
    if file.exists():
        return lock
    os.close(lock)
    return None


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, as `replaced` does; its errors are the same."""
    with replaced(path) as stream:
        stream.write(text.encode())


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """Yield a stream that replaces a file at the end: a reader sees either the old bytes or the new ones.

    Raises:
        DiskError: the file cannot be written. After any error what was there before is untouched.
    """
    with disk_errors(path):
        temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
        try:
            with temporary.open("xb") as stream:  # readable to whom the umask says
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
            flush(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def flush(path: Path) -> None:
    """Bring a file's content, or a folder's list of names, onto the disk, so that it outlives a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NOTHING_TO_FLUSH:
            raise
    finally:
        os.close(handle)


def write_new_text(path: Path, text: str) -> None:
    """Write `text` to a file that must not exist yet.

    Raises:
        FileExistsError: it exists; it is untouched.
        DiskError: it cannot be written; nothing is left of it.
    """
    with disk_errors(path):
        try:
            stream = path.open("x", encoding="utf-8", newline="\n")
        except FileNotFoundError as error:  # /proc and its like are folders in which no file can be made
            problem = f"cannot write {path}: its folder does not take new files"
            raise DiskError(problem, fix="Choose another folder.") from error
        try:
            with stream:
                stream.write(text)
        except BaseException:
            path.unlink()  # half a recipe would be taken for a whole one
            raise


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented strict JSON (no NaN, no Infinity), atomically."""
    write_text(path, dump_json(value))


JSON_VERSION = 1
"""The version of what commands print with --json, errors too. Raise it when a key changes its meaning."""


def dump_json(value: object) -> str:
    """Return `value` as the text that `write_json` writes."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def load_json(text: str | bytes) -> Any:
    """Return the value of strict JSON, as `dump_json` writes it.

    Raises:
        ValueError: not strict JSON: NaN, infinity, a whole number beyond 64 bits, or nested deeper than Python reads.
    """
    try:
        return json.loads(text, parse_constant=_refuse, parse_int=_whole, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def open_regular(path: Path | str) -> BufferedReader:
    """Open a regular file for reading. A pipe, which may never answer, and a device, which may never end, are refused.

    Raises:
        OSError: it is missing, cannot be read, or is not a regular file.
    """
    return os.fdopen(_regular(path, os.O_RDONLY), "rb")


def require_regular(path: Path) -> None:
    """Check that a file can be opened for reading, for libraries that open it themselves. Errors as `open_regular`."""
    os.close(_regular(path, os.O_RDONLY))


def open_to_change(path: Path, *, makes: bool = True) -> TextIO:
    """Open a regular file for reading and for writing at its end; `makes` it if it is missing.

    Raises:
        DiskError: it is a link, which may lead to a file of another folder, or not a regular file.
        OSError: it cannot be opened.
    """
    return os.fdopen(_for_writing(path, os.O_RDWR | (os.O_CREAT if makes else 0)), "a+", encoding="utf-8")


def _for_writing(path: Path, flags: int) -> int:
    try:
        return _regular(path, flags | os.O_APPEND | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EINVAL, errno.ENXIO):  # ENXIO: a pipe without a reader
            raise
        kind = "a link" if error.errno == errno.ELOOP else "not a regular file"
        raise DiskError(f"cannot write {path}: it is {kind}", fix="Remove it, or choose another folder.") from error


def _regular(path: Path | str, flags: int) -> int:
    """Return the descriptor of a regular file, opened. Errors as `open_regular`."""
    # Without O_NONBLOCK a pipe waits for its other end.
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    mode = os.fstat(handle).st_mode  # of what was opened: what is at the path may be another file by now
    if stat.S_ISREG(mode) or (stat.S_ISCHR(mode) and flags & os.O_WRONLY):
        return handle
    os.close(handle)
    kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
    raise OSError(errno.EINVAL, f"it is {kind}", str(path))


def copy(source: Path, target: Path) -> None:
    """Copy the bytes of a regular file.

    Raises:
        DiskError: it is no regular file.
        OSError: it cannot be read, or `target` cannot be written.
    """
    try:
        stream = open_regular(source)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise DiskError(f"cannot copy {source}: {error.strerror}", fix="Remove it.") from error
    with stream, target.open("wb") as out:
        shutil.copyfileobj(stream, out)


def read_bytes(path: Path | str, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: as for `open_regular`, or it is larger than `max_bytes`.
    """
    with open_regular(path) as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes:,} bytes", str(path))
    return content


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a regular file.

    Raises:
        OSError: as for `read_bytes`.
        ValueError: it is not UTF-8.
    """
    return read_bytes(path, max_bytes).decode("utf-8")


def text_part(path: Path, start: int = 0, max_bytes: int = -1) -> str:
    """Return a part of a file's text; an empty text if it cannot be read.

    Args:
        start: The first byte; below 0: counted from the end.
        max_bytes: The length; -1: up to the end.
    """
    try:
        with open_regular(path) as stream:
            stream.seek(start if start >= 0 else max(0, path.stat().st_size + start))
            return stream.read(max_bytes).decode("utf-8", errors="replace")
    except (OSError, ValueError):
        return ""


def raw_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, however large; parts of 16 MiB of a line without an end. Errors as `open_regular`."""
    with open_regular(path) as stream:
        while line := stream.readline(_MAX_LINE_BYTES):
            yield line


def lines(path: Path) -> Iterator[str]:
    """Yield the lines of `raw_lines` as text to be shown: what is not UTF-8 is replaced. Errors as there."""
    return (line.decode("utf-8", errors="replace") for line in raw_lines(path))


def read_named_text(path: Path, error: type[TunerError], *, max_bytes: int, fix: str, name: str) -> str:
    """Return the text of a file that a user named.

    Args:
        fix: What to do if the file cannot be used.
        name: What messages call it.

    Raises:
        TunerError: of the class `error`: there is no such file, it is not a regular one, cannot be read, is too large
            or not UTF-8.
    """
    try:
        content = read_bytes(path, max_bytes)
    except FileNotFoundError:
        raise error(f"there is no file {name!r}", fix=fix) from None
    except (OSError, ValueError) as reason:  # ValueError: a NUL in the path
        if isinstance(reason, OSError) and reason.errno == errno.EFBIG:
            raise error(f"the file is larger than {max_bytes:,} bytes", where=name, fix=fix) from None
        problem = f"{name!r} cannot be read: {getattr(reason, 'strerror', None) or reason}"
        raise error(problem, fix=fix) from reason
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as reason:
        line, column = content.count(b"\n", 0, reason.start) + 1, reason.start - content.rfind(b"\n", 0, reason.start)
        is_wide = content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        content_start = "UTF-16" if is_wide else f"byte 0x{content[reason.start]:02x}"
        where = f"{name}:{line}:{column}"
        raise error(f"the file is not UTF-8 ({content_start})", where=where, fix="Save it as UTF-8.") from None


def read_json_object(path: Path) -> JsonObject:
    """Return the object in a JSON file of another program; an empty one if the file is missing or not readable."""
    try:
        value = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text[:40]} is no number of JSON")


def _whole(text: str) -> int:
    fits = len(text) < _MAX_DIGITS or -_MAX_WHOLE <= int(text[: 2 * _MAX_DIGITS]) < _MAX_WHOLE
    return int(text) if fits else _refuse(text)


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def append_line(path: Path, line: str) -> None:
    """Append one line; a single write, so that concurrent readers never see half of it for lines below 4 KiB."""
    with disk_errors(path):
        handle = _for_writing(path, os.O_WRONLY | os.O_CREAT)
        with os.fdopen(handle, "a", encoding="utf-8") as stream:
            stream.write(line + "\n")


def sha256(data: bytes | Path) -> str:
    """Return the hex SHA-256 of bytes or of a file's content."""
    import hashlib  # OpenSSL: 3 ms, and most commands hash nothing

    if isinstance(data, Path):
        with open_regular(data) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    return hashlib.sha256(data).hexdigest()


def xxh3_128(path: Path) -> str:
    """Return the hex XXH3 (128 bits) of a file's content: at a tenth of SHA-256's cost it finds damage, no forgery."""
    from hashlib import file_digest

    from xxhash import xxh3_128

    with open_regular(path) as stream:
        return file_digest(stream, xxh3_128).hexdigest()


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    num_bytes = 0
    for file in (path, *path.rglob("*")):
        with suppress(OSError):  # somebody else removes it
            num_bytes += 0 if file.is_dir() else file.lstat().st_size
    return num_bytes


def sized(num_bytes: float) -> str:
    """Return a size in the unit that has a digit to tell: '13.1 GiB', '41.0 MiB' or '0.4 KiB'."""
    unit, divisor = next((unit for unit in _UNITS if abs(num_bytes) >= unit[1]), _UNITS[-1])
    return f"{num_bytes / divisor:.1f} {unit}"


def is_writable(text: str) -> bool:
    """Say whether `text` can stand in a UTF-8 file and be a path: no lone surrogate, no NUL."""
    is_whole = text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)
    return is_whole and "\0" not in text
