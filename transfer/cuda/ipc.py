"""Device memory by a legacy IPC handle: the second choice, where descriptors do not work.

A handle is 64 bytes that anybody may copy, names a whole ordinary allocation, and is opened
by another process than its own only. Whether it crosses PID namespaces is disputed: sources of
UCX say no, others say yes; ``make check-gpu`` finds out. The exporting process must not free the
memory while others have it open.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field

from nearkv.transfer.cuda.abi import IPC_HANDLE_BYTES
from nearkv.transfer.cuda.context import DeviceContext
from nearkv.transfer.cuda.driver import Driver
from nearkv.transfer.errors import PullError, Reason


@dataclass(slots=True, eq=False)
class IpcMemory:
    """Memory of this process, or opened in it. ``handle`` is the creator's, for others."""

    context: DeviceContext
    address: int
    size_bytes: int
    handle: bytes = b""
    _undo: ExitStack = field(default_factory=ExitStack, repr=False)

    def allow(self, device: int) -> None:  # noqa: ARG002 (the form of ``VmmMemory``)
        """Refuse: a handle is opened for one device."""
        raise PullError(Reason.NO_PATH, "legacy IPC memory is used on its own device only")

    def close(self) -> None:
        """Free or close it, and let go of the context; may be called twice."""
        self._undo.close()


def create_ipc(driver: Driver, ordinal: int, size_bytes: int) -> IpcMemory:
    """Allocate zeroed memory and its handle; raises :class:`PullError`, leaving nothing."""
    if size_bytes <= 0:
        raise PullError(Reason.MEMORY, f"{size_bytes} bytes of device memory")
    with ExitStack() as undo:
        context = DeviceContext(driver, ordinal)
        undo.callback(context.close)
        with context.use():
            address = driver.allocate(size_bytes)
            undo.callback(context.run, driver.free, address)
            driver.fill(address, 0, size_bytes)
            driver.synchronise(0)
            handle = driver.ipc_handle(address)
        return IpcMemory(context, address, size_bytes, handle, undo.pop_all())


def open_ipc(driver: Driver, ordinal: int, handle: bytes, size_bytes: int) -> IpcMemory:
    """Open another process's memory.

    Raises :class:`PullError`, also for memory that is smaller than expected (``MEMORY``).
    """
    if len(handle) != IPC_HANDLE_BYTES:
        raise PullError(
            Reason.MEMORY, f"an IPC handle has {IPC_HANDLE_BYTES} bytes, this one {len(handle)}"
        )
    with ExitStack() as undo:
        context = DeviceContext(driver, ordinal)
        undo.callback(context.close)
        with context.use():
            address = driver.open_ipc(handle)
            undo.callback(context.run, driver.close_ipc, address)
            real_bytes = driver.allocation_bytes(address)
        if real_bytes < size_bytes:
            raise PullError(
                Reason.MEMORY, f"the memory has {real_bytes} bytes, the layout needs {size_bytes}"
            )
        return IpcMemory(context, address, size_bytes, _undo=undo.pop_all())
