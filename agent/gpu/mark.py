"""A mark in shared memory that says which call of NVML is under way.

The process that reads writes it before each call; the agent looks at it when no answer comes.
So a call that never returns, or that ends the process, is known by name although nobody is
left to tell. Both ends map the same anonymous file.
"""

import mmap
import os
import struct
from dataclasses import dataclass

_LAYOUT = struct.Struct("=qqi60s")
"""Count of changes (odd inside of a call), start in ns of CLOCK_MONOTONIC, device, call."""
MARK_BYTES = mmap.PAGESIZE
NO_DEVICE = -1


@dataclass(frozen=True, slots=True)
class MarkedCall:
    """A call that has not returned. ``device_index`` is -1 where it is about no device."""

    device_index: int
    call: str
    started_ns: int


def create_mark_file() -> int:
    """Return a descriptor of a new mark, for :class:`Mark` here and in the reading process."""
    fd = os.memfd_create("nearkv-gpu-mark", os.MFD_CLOEXEC)
    os.ftruncate(fd, MARK_BYTES)
    return fd


class Mark:
    """The mark behind a descriptor, which is not kept."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, MARK_BYTES)
        self._count = 0

    def enter(self, device_index: int, call: str, now_ns: int) -> None:
        """Say that a call begins."""
        self._count += 1
        name = call.encode()[:60]
        _LAYOUT.pack_into(self._map, 0, self._count, now_ns, device_index, name)

    def leave(self) -> None:
        """Say that it has returned."""
        self._count += 1
        struct.pack_into("=q", self._map, 0, self._count)

    def current(self) -> MarkedCall | None:
        """Return the call that is under way, ``None`` between calls."""
        count, started_ns, device_index, name = _LAYOUT.unpack_from(self._map, 0)
        if count % 2 == 0:
            return None
        return MarkedCall(device_index, name.rstrip(b"\0").decode(errors="replace"), started_ns)

    def close(self) -> None:
        """Unmap it."""
        self._map.close()
