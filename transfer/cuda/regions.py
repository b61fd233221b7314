"""A device's KV memory as movers know it: opened from what an engine registered."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from nearkv.transfer.backends.contract import Region
from nearkv.transfer.backends.stream_plan import Chunk
from nearkv.transfer.cuda.context import DeviceContext, find_device
from nearkv.transfer.cuda.driver import Driver
from nearkv.transfer.cuda.ipc import open_ipc
from nearkv.transfer.cuda.staging import StagedChunks, StagingShelf
from nearkv.transfer.cuda.vmm import import_vmm
from nearkv.transfer.errors import PullError, Reason
from nearkv.transfer.layout import KvMemory
from nearkv.transfer.messages import CUDA_IPC, CUDA_VMM


class DeviceMemory(Protocol):
    """Memory of a device with an address in this process."""

    context: DeviceContext
    address: int
    size_bytes: int

    def allow(self, device: int) -> None:
        """Let another device use it, too; raises ``PullError`` (``NO_PATH``)."""
        ...

    def close(self) -> None:
        """Let go of it; may be called twice."""
        ...


class DeviceRegion(Region):
    """An engine's KV memory on a device, opened here.

    It has no ``view``: a transport that does not know devices refuses it by asking for one.
    Those that move bytes through host memory use :meth:`reads` and :meth:`writes`.
    """

    __slots__ = ("_shelf", "memory", "writable")

    def __init__(self, memory: DeviceMemory, layout: KvMemory, *, writable: bool) -> None:
        self.memory = memory
        self.layout = layout
        self.writable = writable
        self._shelf = StagingShelf(memory.context)

    def __repr__(self) -> str:
        return f"DeviceRegion({self.memory!r}, {self.layout!r})"

    @property
    def view(self) -> memoryview:  # type: ignore[override] # there is none, and none can be set
        """Refuse: host code cannot look at device memory."""
        raise PullError(
            Reason.NO_PATH, "the KV lies on a device, and this transport moves host memory only"
        )

    def reads(
        self, chunks: Iterable[Chunk], chunk_bytes: int
    ) -> AbstractContextManager[StagedChunks]:
        """Bring chunks of at most ``chunk_bytes`` to the host; see ``staging``."""
        return self._shelf.reads(self.memory, chunks, chunk_bytes)

    def writes(
        self, chunks: Iterable[Chunk], chunk_bytes: int
    ) -> AbstractContextManager[StagedChunks]:
        """Take chunks of at most ``chunk_bytes`` from the host; see ``staging``."""
        if not self.writable:
            raise PullError(Reason.MEMORY, "the memory is mapped for reading only")
        return self._shelf.writes(self.memory, chunks, chunk_bytes)

    def close(self) -> None:
        """Unmap it; may be called twice."""
        self._shelf.close()
        self.memory.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHandle:
    """What an engine registered of its device memory, and what a mover opens it by.

    ``kind`` is ``cuda_vmm`` with a descriptor ``fd``, or ``cuda_ipc`` with 64 bytes ``handle``.
    """

    kind: str
    device: str
    fd: int = -1
    handle: bytes = b""


def open_device_region(
    driver: Driver, handle: DeviceHandle, layout: KvMemory, *, writable: bool
) -> DeviceRegion:
    """Open an engine's device memory; the descriptor stays the caller's and may be closed.

    Raises :class:`PullError`: ``NO_PATH`` where its device is not visible, ``MEMORY`` where it
    cannot be opened or is smaller than its layout.
    """
    ordinal = find_device(driver, handle.device)
    memory: DeviceMemory
    if handle.kind == CUDA_VMM:
        memory = import_vmm(driver, ordinal, handle.fd, layout.size, writable=writable)
    elif handle.kind == CUDA_IPC:
        memory = open_ipc(driver, ordinal, handle.handle, layout.size)
    else:
        raise PullError(Reason.MEMORY, f"memory_kind: {handle.kind!r} is no device memory")
    return DeviceRegion(memory, layout, writable=writable)
