"""Engine memory inside a mover: mapped when a pull or a reader first needs it."""

import gc
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from nearkv.agent.movers.messages import HOST_MEMORY, MemoryForm
from nearkv.transfer.backends.contract import Region, Source
from nearkv.transfer.errors import PullError
from nearkv.transfer.layout import KvMemory
from nearkv.transfer.memory import open_region, open_slots
from nearkv.transfer.messages import MEMFD

T = TypeVar("T")


class _Once(Generic[T]):
    """Opens something on the first thread that wants it; what fails is tried again."""

    def __init__(self, open_it: Callable[[], T]) -> None:
        self._open = open_it
        self._lock = threading.Lock()
        self._opened: T | None = None

    def get(self) -> T:
        with self._lock:
            if self._opened is None:
                # Memory may be short only now: the next pull must not suffer for this one.
                self._opened = self._open()
            return self._opened

    def take(self) -> T | None:
        """Return what is open and let go of it."""
        with self._lock:
            opened, self._opened = self._opened, None
            return opened


class TargetMemory:
    """The memory that a mover writes into; owns ``fd`` until it is mapped."""

    def __init__(self, fd: int, layout: KvMemory, form: MemoryForm = HOST_MEMORY) -> None:
        self._fds = [fd]
        self._layout = layout
        self._form = form
        self._region = _Once(self._map)

    def region(self) -> Region:
        """Return the memory, mapped; raises ``PullError`` (``MEMORY``) where that is not safe."""
        return self._region.get()

    def _map(self) -> Region:
        region = _open(self._fds[0], self._layout, self._form, writable=True)
        _close_all(self._fds)
        return region


class SourceMemory:
    """Memory to read from, with its lease slots; owns the descriptors until they are mapped."""

    def __init__(
        self,
        fd: int,
        slots_fd: int,
        layout: KvMemory,
        slots: int,
        form: MemoryForm = HOST_MEMORY,
    ) -> None:
        self._fds = [fd, slots_fd]
        self._layout = layout
        self._slots = slots
        self._form = form
        self._source = _Once(self._map)

    def source(self) -> Source:
        """Return the memory, mapped; raises ``TransferError`` where that is not safe."""
        return self._source.get()

    def unmap(self) -> bool:
        """Let go of the memory; False when somebody else in this process still holds it."""
        _close_all(self._fds)
        source = self._source.take()
        if source is None:
            return True
        held: list[weakref.ref[Any]] = [weakref.ref(source.slots)]
        if self._form.kind == MEMFD:
            held.append(weakref.ref(source.region.view.obj))
        elif not _close_on_device(source.region):
            return False
        del source
        if any(reference() is not None for reference in held):
            gc.collect()
        return all(reference() is None for reference in held)

    def _map(self) -> Source:
        fd, slots_fd = self._fds
        slots = open_slots(slots_fd, self._slots)
        source = Source(_open(fd, self._layout, self._form, writable=False), slots)
        _close_all(self._fds)
        return source


def _open(fd: int, layout: KvMemory, form: MemoryForm, *, writable: bool) -> Region:
    """Open KV memory of whatever form; raises ``PullError``."""
    if form.kind == MEMFD:
        return open_region(fd, layout, writable=writable)
    # Only movers of engines on devices need the driver.
    from nearkv.transfer.cuda.driver import load_driver  # noqa: PLC0415 (see above)
    from nearkv.transfer.cuda.regions import (  # noqa: PLC0415 (see above)
        DeviceHandle,
        open_device_region,
    )

    handle = DeviceHandle(kind=form.kind, device=form.device, fd=fd, handle=form.handle)
    return open_device_region(load_driver(), handle, layout, writable=writable)


def _close_on_device(region: Region) -> bool:
    """Unmap device memory, which no reference keeps; False when the driver did not let go."""
    from nearkv.transfer.cuda.regions import DeviceRegion  # noqa: PLC0415 (loaded already)

    try:
        if isinstance(region, DeviceRegion):
            region.close()
    except PullError:
        return False
    return True


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
