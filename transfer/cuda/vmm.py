"""Device memory that travels as a descriptor: CUDA's virtual memory management.

The physical memory, its address range, the mapping of one onto the other and the right to use
it are four things, made in this order and undone in the opposite one. The memory itself lives
until every handle, every mapping and every descriptor of it is gone, in whatever process: an
engine that was killed leaves its memory with whoever has it mapped, or holds its descriptor.
"""

import os
from contextlib import ExitStack
from dataclasses import dataclass, field

from nearkv.transfer.cuda.abi import INVALID_VALUE, NOT_SUPPORTED, Access
from nearkv.transfer.cuda.context import DeviceContext
from nearkv.transfer.cuda.driver import CudaError, Driver
from nearkv.transfer.errors import PullError, Reason


@dataclass(slots=True, eq=False)
class VmmMemory:
    """Memory mapped in this process at ``address``; ``size_bytes`` is what was asked for.

    ``fd`` is the creator's descriptor of it, to be sent to others; -1 where it was imported.
    ``access`` is what its device may do here.
    """

    context: DeviceContext
    address: int
    size_bytes: int
    mapped_bytes: int
    access: Access
    fd: int = -1
    _undo: ExitStack = field(default_factory=ExitStack, repr=False)

    def allow(self, device: int) -> None:
        """Let another device use the mapping, too; raises :class:`PullError` where it cannot."""
        with self.context.use() as driver:
            try:
                driver.set_access(self.address, self.mapped_bytes, device, self.access)
            except CudaError as error:
                raise PullError(
                    Reason.NO_PATH, f"one device cannot reach the other's memory: {error}"
                ) from error

    def close(self) -> None:
        """Unmap, and let go of the descriptor and the context; may be called twice.

        Whatever of it fails, the rest is done, and the last failure is raised.
        """
        self._undo.close()
        self.fd = -1


def create_vmm(driver: Driver, ordinal: int, size_bytes: int) -> VmmMemory:
    """Allocate zeroed memory that can be shared, and its descriptor.

    Raises :class:`PullError` with nothing left behind.
    """
    with ExitStack() as undo:
        context = DeviceContext(driver, ordinal)
        undo.callback(context.close)
        with context.use():
            mapped_bytes = _round_up(context, size_bytes)
            handle = driver.create_memory(context.device, mapped_bytes)
            undo.callback(context.run, driver.release_memory, handle)
            address = _map(context, handle, mapped_bytes, undo)
            driver.set_access(address, mapped_bytes, context.device, Access.READ_WRITE)
            driver.fill(address, 0, mapped_bytes)
            driver.synchronise(0)  # others may look as soon as they have the descriptor
            fd = driver.export_memory(handle)
            undo.callback(os.close, fd)
            os.set_inheritable(fd, False)  # noqa: FBT003 (the standard library's signature)
        return VmmMemory(
            context, address, size_bytes, mapped_bytes, Access.READ_WRITE, fd, undo.pop_all()
        )


def import_vmm(
    driver: Driver, ordinal: int, fd: int, size_bytes: int, *, writable: bool
) -> VmmMemory:
    """Map another process's memory; ``fd`` stays the caller's.

    The creator rounded the size up as is done here: a mapping that is longer than the memory
    is refused by the driver. Raises :class:`PullError` with nothing left behind.
    """
    with ExitStack() as undo:
        context = DeviceContext(driver, ordinal)
        undo.callback(context.close)
        with context.use():
            mapped_bytes = _round_up(context, size_bytes)
            handle = driver.import_memory(fd)
            undo.callback(context.run, driver.release_memory, handle)
            address = _map(context, handle, mapped_bytes, undo)
            access = _open_up(context, address, mapped_bytes, writable=writable)
        return VmmMemory(context, address, size_bytes, mapped_bytes, access, _undo=undo.pop_all())


def _round_up(context: DeviceContext, size_bytes: int) -> int:
    if size_bytes <= 0:
        raise PullError(Reason.MEMORY, f"{size_bytes} bytes of device memory")
    granularity = context.driver.granularity_bytes(context.device)
    return -(-size_bytes // granularity) * granularity


def _map(context: DeviceContext, handle: int, mapped_bytes: int, undo: ExitStack) -> int:
    driver = context.driver
    address = driver.reserve_addresses(mapped_bytes)
    undo.callback(context.run, driver.free_addresses, address, mapped_bytes)
    driver.map_memory(address, mapped_bytes, handle)
    undo.callback(context.run, driver.unmap_memory, address, mapped_bytes)
    return address


def _open_up(context: DeviceContext, address: int, mapped_bytes: int, *, writable: bool) -> Access:
    """Give the device its right; a driver that knows no read-only device memory gives both."""
    driver = context.driver
    if not writable:
        try:
            driver.set_access(address, mapped_bytes, context.device, Access.READ)
        except CudaError as error:
            if error.code not in (INVALID_VALUE, NOT_SUPPORTED):
                raise
        else:
            return Access.READ
    driver.set_access(address, mapped_bytes, context.device, Access.READ_WRITE)
    return Access.READ_WRITE
