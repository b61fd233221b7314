"""Room in a folder of values: what is there, and what goes first."""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from nearkv.transfer.errors import PullError, Reason

VALUE = ".kvsp"
PART = ".part"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True, order=True)
class _Entry:
    used_ns: int
    shard: str
    name: str
    size_bytes: int


def failure(error: OSError) -> PullError:
    """Return what an error of the file system means for a store."""
    reason = Reason.STORE_FULL if error.errno in _FULL else Reason.NO_PATH
    return PullError(reason, f"the store's files: {error.strerror or error}")


def make_room(folder: int, size_bytes: int, max_bytes: int) -> None:
    """Remove the least recently used values until ``size_bytes`` fit under ``max_bytes``.

    Files that a dead writer left behind go, too. Call it under the folder's lock. Raises
    :class:`PullError` (``STORE_FULL``) when what others are writing leaves no room.
    """
    entries = sorted(_entries(folder))
    used = sum(entry.size_bytes for entry in entries)
    values = (entry for entry in entries if entry.name.endswith(VALUE))
    for entry in (entry for entry in entries if entry.name.endswith(PART)):
        if _is_orphan(folder, entry):
            used -= _unlink(folder, entry)
    while used + size_bytes > max_bytes:
        oldest = next(values, None)
        if oldest is None:
            raise PullError(Reason.STORE_FULL, f"{size_bytes} bytes find no room under {max_bytes}")
        used -= _unlink(folder, oldest)


def _entries(folder: int) -> Iterator[_Entry]:
    """Yield our own files; what else lies in the folder is neither counted nor touched."""
    for shard in os.listdir(folder):
        if len(shard) != 2 or not _HEX.issuperset(shard):  # noqa: PLR2004 (two hex digits)
            continue
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            yield from _files(folder, shard)


def _files(folder: int, shard: str) -> Iterator[_Entry]:
    opened = os.open(shard, os.O_RDONLY | os.O_DIRECTORY | _OPEN, dir_fd=folder)
    try:
        with os.scandir(opened) as files:
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    facts = file.stat(follow_symlinks=False)
                    if stat.S_ISREG(facts.st_mode) and file.name.endswith((VALUE, PART)):
                        yield _Entry(facts.st_mtime_ns, shard, file.name, facts.st_size)
    finally:
        os.close(opened)


def _is_orphan(folder: int, entry: _Entry) -> bool:
    """Say whether nobody holds the lock of a file that is being written."""
    try:
        file = os.open(f"{entry.shard}/{entry.name}", os.O_RDONLY | _OPEN, dir_fd=folder)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


def _unlink(folder: int, entry: _Entry) -> int:
    """Remove a file; returns how many bytes are free for it."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{entry.shard}/{entry.name}", dir_fd=folder)
    return entry.size_bytes
