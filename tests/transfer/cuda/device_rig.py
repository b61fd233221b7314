"""The contract suite's rig with both memories on devices: two engines and a mover."""

import numpy as np

from nearkv.transfer.backends.contract import Source
from nearkv.transfer.backends.tcp import TcpBackend
from nearkv.transfer.cuda.allocation import allocate_kv
from nearkv.transfer.cuda.device_backend import CudaBackend
from nearkv.transfer.cuda.driver import Driver
from nearkv.transfer.cuda.regions import DeviceHandle, open_device_region
from nearkv.transfer.lease import SLOT_BYTES, SlotTable
from nearkv.transfer.memory import create_slots, open_memory
from tests.transfer.backends.kinds import CHUNK_BYTES
from tests.transfer.backends.rig import UNTOUCHED, Rig, WatchedSlots


class BrokenError(Exception):
    """Instead of the end of the process."""


def raise_broken(error):
    raise BrokenError(str(error))


class Engine:
    """A process with KV memory on a device; ``bytes`` are what lies there now."""

    def __init__(self, machine, size, ordinal=0):
        self.library = machine.process()
        driver = Driver(self.library)
        driver.initialise()
        self.kv = allocate_kv(ordinal, size, load=lambda: driver)
        self.bytes = np.frombuffer(self.library.bytes_at(self.kv.address, size), np.uint8)

    def open(self, driver, layout, *, writable):
        """Open the memory in another process, by what is registered."""
        (fd,) = self.kv.fds or (-1,)
        handle = DeviceHandle(
            kind=self.kv.kind, device=self.kv.device, fd=fd, handle=self.kv.handle
        )
        return open_device_region(driver, handle, layout, writable=writable)

    def close(self):
        self.bytes = None
        self.kv.close()


class CudaKind:
    """As ``kinds.Kind``, on a machine."""

    name = path_name = "cuda"
    handed_over = True
    rdma = False

    def __init__(self, machine):
        self.machine = machine
        self.library = machine.process()
        self.driver = Driver(self.library)
        self.driver.initialise()

    def make(self):
        return CudaBackend(chunk_bytes=CHUNK_BYTES, load=lambda: self.driver, broken=raise_broken)


class TcpKind(CudaKind):
    """TCP between devices: the bytes go through pinned memory at either end."""

    path_name = "tcp"
    handed_over = False

    def make(self):
        return TcpBackend(lanes=2, chunk_bytes=CHUNK_BYTES, buffer_bytes=CHUNK_BYTES)


class DeviceRig(Rig):
    """As ``Rig``; ``engines`` are the source's and the target's process."""

    def __init__(self, kind, source_layout, target_layout=None, *, ordinals=(0, 0)):
        target_layout = target_layout or source_layout
        self.kind = kind
        self.backend = kind.make()
        self.engines = [
            Engine(kind.machine, source_layout.size, ordinals[0]),
            Engine(kind.machine, target_layout.size, ordinals[1]),
        ]
        self.source_bytes, self.target_bytes = (engine.bytes for engine in self.engines)
        self.source_bytes[:] = np.random.default_rng(7).integers(
            0, 256, source_layout.size, dtype=np.uint8
        )
        self.target_bytes[:] = UNTOUCHED
        self._slots = create_slots(8)
        self.engine_slots = SlotTable(self._slots.view)
        self.source = Source(
            self.engines[0].open(kind.driver, source_layout, writable=False),
            WatchedSlots(open_memory(self._slots.fd, 8 * SLOT_BYTES, writable=False)),
        )
        self.target = self.engines[1].open(kind.driver, target_layout, writable=True)
        self.server = None if kind.handed_over else self.backend.serve(self.source)
        self._offers = {}
        self._links = []

    def close(self):
        for link in self._links:
            link.close()
        if self.server is not None:
            self.server.close()
        self.source.region.close()
        self.target.close()
        self.source_bytes = self.target_bytes = None
        for engine in self.engines:
            engine.close()
        del self.source, self.engine_slots
        self._slots.close()
