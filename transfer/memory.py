"""Memory that an engine shares with movers: memfds, sealed, populated, on huge pages.

The engine creates them, the descriptors travel over a Unix socket, a mover maps them. Facts
this rests on (Linux, measured on 6.18):

- A memfd that its owner shrinks kills whoever has it mapped (SIGBUS). The seals SHRINK and
  GROW prevent it, so a reader insists on them before it maps.
- Pages belong to the cgroup that touches them first, and touching them during a copy costs
  nine tenths of its speed: the creator populates.
- ``shmem_enabled`` is "never" by default, but MADV_COLLAPSE makes huge pages all the same
  where the mapping lies on a 2 MiB boundary, and copies of scattered blocks become a quarter
  faster. A page per 2 MiB is enough to collapse it, which is quicker than populating first.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from nearkv.transfer.backends.contract import Region
from nearkv.transfer.errors import PullError, Reason
from nearkv.transfer.layout import KvMemory
from nearkv.transfer.lease import SLOT_BYTES, SlotTable

HUGE_PAGE_BYTES = 2 << 20
_SLICE_BYTES = 256 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
# Not in Python 3.11's mmap module; asm-generic values, the same on x86-64 and arm64.
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25


@dataclass(slots=True)
class Memory:
    """A memfd of this process. ``huge_bytes`` of it are on huge pages."""

    fd: int
    view: memoryview
    huge_bytes: int = field(default=0)

    def close(self) -> None:
        """Unmap and close; what others have mapped stays with them. May be called twice."""
        self.view.release()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def create_memory(size_bytes: int, *, name: str = "nearkv-kv") -> Memory:
    """Create KV memory: populated, on huge pages where that works, sealed against resizing.

    Raises :class:`PullError` (``MEMORY``) when there is not enough of it.
    """
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise PullError(Reason.MEMORY, f"no memfd can be created: {error.strerror}") from error
    try:
        os.ftruncate(fd, size_bytes)
        view = _map(fd, size_bytes, writable=True)
        huge_bytes = _populate(fd, view)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except (OSError, ValueError, OverflowError) as error:
        os.close(fd)
        raise PullError(Reason.MEMORY, f"{size_bytes} bytes of memory: {error}") from error
    return Memory(fd, view, huge_bytes)


def create_slots(count: int) -> Memory:
    """Create memory for ``count`` lease slots; make a ``SlotTable`` of its view."""
    return create_memory(count * SLOT_BYTES, name="nearkv-slots")


def open_region(fd: int, layout: KvMemory, *, writable: bool) -> Region:
    """Map an engine's KV memory; the descriptor stays the caller's and may be closed.

    Sources are mapped for reading only. Releasing the region's view unmaps it. Raises
    :class:`PullError` (``MEMORY``) for memory whose owner could still take it away, or that
    is smaller than its layout.
    """
    return Region(open_memory(fd, layout.size, writable=writable), layout)


def open_slots(fd: int, count: int) -> SlotTable:
    """Map an engine's lease slots for reading; raises :class:`PullError` (``MEMORY``)."""
    return SlotTable(open_memory(fd, count * SLOT_BYTES, writable=False))


def open_memory(fd: int, size_bytes: int, *, writable: bool) -> memoryview:
    """Map sealed memory; raises :class:`PullError` (``MEMORY``). See :func:`open_region`."""
    check_sealed(fd, size_bytes)
    try:
        view = _map(fd, size_bytes, writable=writable)
    except (OSError, ValueError, OverflowError) as error:
        raise PullError(Reason.MEMORY, f"the memory cannot be mapped: {error}") from error
    # Pages are there already; this only spares the copies a fault per page.
    populate = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
    for start, size in _slices(view):
        _advise(start, size, populate)
    return view


def check_sealed(fd: int, size_bytes: int) -> None:
    """Make sure that mapped memory stays there; raises :class:`PullError` (``MEMORY``)."""
    try:
        status = os.fstat(fd)
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        what = "is not a memfd" if error.errno == errno.EINVAL else f"is no use: {error.strerror}"
        raise PullError(Reason.MEMORY, f"the descriptor {what}") from error
    if not stat.S_ISREG(status.st_mode):
        raise PullError(Reason.MEMORY, "the descriptor is not a memfd")
    missing = [
        name
        for name, seal in (("shrink", fcntl.F_SEAL_SHRINK), ("grow", fcntl.F_SEAL_GROW))
        if not seals & seal
    ]
    if missing:
        raise PullError(Reason.MEMORY, f"the memfd is not sealed against: {', '.join(missing)}")
    if status.st_size < size_bytes:
        raise PullError(
            Reason.MEMORY, f"the memfd has {status.st_size} bytes, the layout needs {size_bytes}"
        )


def _map(fd: int, size_bytes: int, *, writable: bool) -> memoryview:
    """Map at a 2 MiB boundary, without which there are no huge pages.

    Python's mmap takes no address: it reserves a range that is a huge page longer and owns it,
    and the memory is mapped over the part that begins on the boundary.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    reserved = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=anonymous, prot=protection)
    whole = memoryview(reserved)
    begin = address_of(whole)
    offset = -begin % HUGE_PAGE_BYTES
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    )  # fmt: skip
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if library.mmap(begin + offset, size_bytes, protection, flags, fd, 0) != begin + offset:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return whole[offset : offset + size_bytes]


def address_of(view: memoryview) -> int:
    """Return where a view begins; it must be kept for as long as the address is used."""
    return int(np.frombuffer(view, np.uint8).ctypes.data) if len(view) else 0


def _populate(fd: int, view: memoryview) -> int:
    """Have all pages there; returns how many bytes are on huge pages."""
    huge_bytes = 0
    collapses = True
    for start, size in _slices(view):
        if collapses and size >= HUGE_PAGE_BYTES:
            whole = size - size % HUGE_PAGE_BYTES
            # First touches may only be made where there is room, or they end in SIGBUS.
            _touch(fd, start - address_of(view), whole)
            collapses = not _advise(start, whole, _MADV_COLLAPSE)
            huge_bytes += whole if collapses else 0
        failed = _advise(start, size, _MADV_POPULATE_WRITE)
        if failed == errno.EINVAL:  # before Linux 5.14
            os.posix_fallocate(fd, start - address_of(view), size)
        elif failed:
            raise OSError(failed, os.strerror(failed))
    return huge_bytes


def _touch(fd: int, begin: int, size: int) -> None:
    """Have one page of each huge page there; unlike a store, this can fail."""
    for offset in range(begin, begin + size, HUGE_PAGE_BYTES):
        os.posix_fallocate(fd, offset, 1)


def _slices(view: memoryview) -> Iterator[tuple[int, int]]:
    """Yield (address, size) of parts that one call may take: a signal gets in between."""
    begin = address_of(view)
    for offset in range(0, len(view), _SLICE_BYTES):
        yield begin + offset, min(_SLICE_BYTES, len(view) - offset)


def _advise(start: int, size: int, advice: int) -> int:
    """Call madvise without the GIL; returns 0 or the error's number."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return ctypes.get_errno() if madvise(start, size, advice) else 0
