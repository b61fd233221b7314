"""A tier of files: a folder on a local disk, or on one that several nodes mount.

::

    <folder>/lock                 held while room is made, and for renames
    <folder>/ab/abcd....kvsp      a value
    <folder>/ab/abcd....<random>.part    one being written; its writer holds a lock on it

Names are opened relative to their folder and never through symbolic links; only plain files of
our own user count. A value appears by a rename when all of it is there. It is not forced to
disk: a value that a crash of the machine damaged does not have its digests, and is dropped.

The bound holds at every moment, for all processes that use the folder together: a writer
reserves its room under the lock before it writes, and removes the least recently used values
for it. A call may outlast its deadline by what one read or write of a few MiB takes; a dead
network disk can hold it for longer.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from nearkv.transfer.backends.contract import Stop
from nearkv.transfer.errors import PullError, Reason
from nearkv.transfer.store.contract import Bytes
from nearkv.transfer.store.file_room import PART, VALUE, failure, make_room

_PIECE_BYTES = 4 << 20
_LOCK_POLL_SECONDS = 0.002
_KEY = re.compile(r"[0-9a-f]{16,128}")
# Nothing, a symbolic link, something else where a folder should be, a socket.
_NOT_THERE = frozenset({errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO})
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FileTier:
    """Values in a folder, at most ``max_bytes`` of them.

    The folder is made when it is missing, for our user only. Raises :class:`PullError`
    (``NO_PATH``) when it cannot be used, or others may write into it.
    """

    name = "files"

    def __init__(self, folder: Path, *, max_bytes: int, max_value_bytes: int | None = None) -> None:
        if max_bytes <= 0:
            raise ValueError("max_bytes must be positive")
        self._max_bytes = max_bytes
        self._max_value_bytes = min(max_value_bytes or max_bytes, max_bytes)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = os.open(folder, _OPEN_FOLDER)
        except OSError as error:
            raise PullError(Reason.NO_PATH, f"{folder} cannot be used: {error}") from error
        facts = os.fstat(self._folder)
        if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            self.close()
            raise PullError(Reason.NO_PATH, f"{folder}: others own it or may write into it")

    @property
    def max_value_bytes(self) -> int:
        """The largest value that is taken."""
        return self._max_value_bytes

    def close(self) -> None:
        """Let go of the folder; may be called twice."""
        if self._folder >= 0:
            os.close(self._folder)
        self._folder = -1

    def present(self, keys: Sequence[str], stop: Stop) -> list[bool]:
        """Say of each key whether it has a value."""
        found = []
        for key in keys:
            stop.check()
            with _named_failures(), self._open(key) as file:
                found.append(file is not None)
        return found

    def touch(self, key: str, stop: Stop) -> bool:
        """Say whether a key has a value, and make that one the most recently used."""
        stop.check()
        with _named_failures(), self._open(key) as file:
            if file is None:
                return False
            os.utime(file)
            return True

    def get(self, key: str, limit_bytes: int, stop: Stop) -> Bytes | None:
        """Return a value, and make it the most recently used."""
        stop.check()
        with _named_failures(), self._open(key) as file:
            if file is None:
                return None
            size = os.fstat(file).st_size
            if size > limit_bytes:
                raise PullError(Reason.TOO_LARGE, f"{size} bytes where at most {limit_bytes} fit")
            value = _read(file, size, stop)
            # What the owner of a full quota or a read-only disk cannot set stays as it is.
            with contextlib.suppress(OSError):
                os.utime(file)
            return value

    def put(self, key: str, parts: Sequence[Bytes], stop: Stop) -> None:
        """Keep a value; room is made by removing the least recently used ones."""
        stop.check()
        size = sum(len(part) for part in parts)
        if size > self._max_value_bytes:
            raise PullError(
                Reason.TOO_LARGE, f"{size} bytes are over the limit of {self._max_value_bytes}"
            )
        with _named_failures(), self._shard(key, make=True) as shard:
            part_name = f"{key}.{secrets.token_hex(8)}{PART}"
            file = -1
            try:
                file = self._reserve(shard, part_name, size, stop)
                _write(file, parts, stop)
                # A scan that a rename overtakes may see the file under neither name.
                with self._lock(stop):
                    os.replace(part_name, _value(key), src_dir_fd=shard, dst_dir_fd=shard)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part_name, dir_fd=shard)
                raise
            finally:
                if file >= 0:
                    os.close(file)

    def remove(self, key: str, stop: Stop) -> None:
        """Drop a value."""
        stop.check()
        with _named_failures(), contextlib.suppress(FileNotFoundError), self._shard(key) as shard:
            os.unlink(_value(key), dir_fd=shard)

    def _reserve(self, shard: int, name: str, size: int, stop: Stop) -> int:
        """Make a file with room for ``size`` bytes; returns its descriptor, which is locked."""
        with self._lock(stop):
            make_room(self._folder, size, self._max_bytes)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN_FILE
            file = os.open(name, flags, 0o600, dir_fd=shard)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                os.posix_fallocate(file, 0, size)
            except BaseException:
                os.close(file)
                raise
            return file

    @contextlib.contextmanager
    def _lock(self, stop: Stop) -> Iterator[None]:
        """Hold the folder's lock; waits for it as long as ``stop`` allows."""
        file = os.open("lock", os.O_RDWR | os.O_CREAT | _OPEN_FILE, 0o600, dir_fd=self._folder)
        try:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    stop.check()
                    time.sleep(_LOCK_POLL_SECONDS)
            yield
        finally:
            os.close(file)

    @contextlib.contextmanager
    def _shard(self, key: str, *, make: bool = False) -> Iterator[int]:
        """Open the folder that a key's value is in; without it there is no value."""
        if not _KEY.fullmatch(key):
            raise ValueError("a key is 16 to 128 hex digits")
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(key[:2], 0o700, dir_fd=self._folder)
        shard = os.open(key[:2], _OPEN_FOLDER, dir_fd=self._folder)
        try:
            yield shard
        finally:
            os.close(shard)

    @contextlib.contextmanager
    def _open(self, key: str) -> Iterator[int | None]:
        """Open a value for reading; ``None`` where there is none, or no plain file of ours."""
        file = -1
        try:
            with self._shard(key) as shard:
                file = os.open(_value(key), os.O_RDONLY | _OPEN_FILE, dir_fd=shard)
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise
        try:
            yield file if file >= 0 and _is_ours(os.fstat(file)) else None
        finally:
            if file >= 0:
                os.close(file)


def _value(key: str) -> str:
    return key + VALUE


def _is_ours(facts: os.stat_result) -> bool:
    return stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid()


def _read(file: int, size: int, stop: Stop) -> bytearray:
    """Read a file; a shorter one gives fewer bytes, which the packet's head tells."""
    value = bytearray(size)
    view = memoryview(value)
    at = 0
    while at < size:
        stop.check()
        count = os.preadv(file, [view[at : at + _PIECE_BYTES]], at)
        if not count:
            break
        at += count
    view.release()
    del value[at:]
    return value


def _write(file: int, parts: Sequence[Bytes], stop: Stop) -> None:
    at = 0
    for part in parts:
        view = memoryview(part)
        done = 0
        while done < len(view):
            stop.check()
            count = os.pwrite(file, view[done : done + _PIECE_BYTES], at)
            done += count
            at += count


@contextlib.contextmanager
def _named_failures() -> Iterator[None]:
    """Turn what the file system says into a reason."""
    try:
        yield
    except OSError as error:
        raise failure(error) from error
