"""A CUDA driver in Python, strict where the real one is lenient.

``Machine`` is what all processes share: devices with their memory, and exports. ``FakeCuda``
is one process's driver library; it is called as the C library would be, with ctypes objects.
Addresses are made up. Device memory is reached through mappings only, and copies happen when
the queue is looked at, not when they are asked for: whoever does not wait gets old bytes, and
whoever takes memory away from under a copy is found out.

What the real driver would pass over, or answer with undefined behaviour, goes to ``faults``;
``check`` raises them, together with everything that was not let go of.
"""

# Its methods are called as the driver's functions are, and take what those take.
# ruff: noqa: N802, ARG002

import itertools
import os
import stat
import threading

from tests.transfer.cuda.fake_copies import Copies
from tests.transfer.cuda.fake_machine import (
    GRANULARITY,
    INVALID_CONTEXT,
    INVALID_DEVICE,
    INVALID_HANDLE,
    INVALID_VALUE,
    NOT_INITIALIZED,
    NOT_SUPPORTED,
    OK,
    OUT_OF_MEMORY,
    READ,
    READ_WRITE,
    Devices,
    Mapping,
    Physical,
)  # fmt: skip


class FakeCuda(Copies):
    """One process's ``libcuda``. ``polls`` is how often a batch is found unfinished.

    ``fail`` makes a call fail: a code by its name; with ``after`` only from that call on.
    """

    def __init__(self, machine, *, polls=3, read_only=True):
        self.machine = machine
        self.polls = polls
        self.read_only = read_only
        self.fail = {}
        self.faults = []
        self.calls = []
        self.contexts = {}
        self.handles = {}
        self.reserved = {}
        self.mappings = {}
        self.streams = {}
        self.events = {}
        self.pinned = {}
        self._numbers = itertools.count(0x7000)
        self._addresses = itertools.count(0x7F00_0000_0000, 1 << 32)
        self._current = threading.local()
        self._initialised = False
        self._lock = threading.RLock()

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)
        call = getattr(type(self), f"_{name}", None)
        if call is None:
            raise AttributeError(name)

        def checked(*arguments):
            with self._lock:
                self.calls.append(name)
                failing = self.fail.get(name)
                if failing is not None:
                    code = failing() if callable(failing) else failing
                    if code:
                        return code
                if not self._initialised and name != "cuInit":
                    return NOT_INITIALIZED
                return call(self, *arguments)

        return checked

    def check(self):
        """Raise when anything was done wrong, or left behind."""
        assert not self.faults, self.faults
        left = {
            what: len(getattr(self, what))
            for what in (
                "contexts", "handles", "reserved", "mappings", "streams", "events", "pinned",
            )
            if getattr(self, what)
        }  # fmt: skip
        assert not left, f"left behind: {left}"

    def die(self):
        """Let go of everything at once, as the kernel does for a process that was killed."""
        self.streams.clear()
        self.events.clear()
        self.pinned.clear()
        self.contexts.clear()
        for mapping in self.mappings.values():
            self.machine.release(mapping.physical)
        for physical in self.handles.values():
            self.machine.release(physical)
        self.mappings.clear()
        self.handles.clear()
        self.reserved.clear()

    def bytes_at(self, address, size):
        """Return device memory as it is now, for tests to look at and to change."""
        mapping, offset = self._find(address, size)
        return memoryview(mapping.physical.bytes)[offset : offset + size]

    # -- Inside ------------------------------------------------------------------------

    def _fault(self, text, code=INVALID_VALUE):
        self.faults.append(text)
        return code

    @property
    def _stack(self):
        if not hasattr(self._current, "stack"):
            self._current.stack = []
        return self._current.stack

    def _device_now(self):
        return self._stack[-1] - 1 if self._stack else None

    def _find(self, address, size):
        for begin, mapping in self.mappings.items():
            if begin <= address and address + size <= begin + mapping.size:
                return mapping, address - begin
        return None, 0

    def _reach(self, address, size, access):
        """Return memory at an address that the current device may use so."""
        mapping, offset = self._find(address, size)
        if mapping is None:
            return None
        if mapping.access.get(self._device_now(), 0) & access != access:
            return None
        return memoryview(mapping.physical.bytes)[offset : offset + size]

    def _new(self, size, device, **options):
        if self.machine.used(device) + size > self.machine.devices[device].total:
            return None
        physical = Physical(device, size, **options)
        self.machine.memory.append(physical)
        self.machine.acquire(physical)
        return physical

    def _map(self, address, mapping):
        self.machine.acquire(mapping.physical)
        self.mappings[address] = mapping

    def _unmap(self, address):
        mapping = self.mappings.pop(address)
        for work in self.streams.values():
            if any(address <= place < address + mapping.size for job in work for place in job[1]):
                self.faults.append("memory was taken away from under a copy")
        self.machine.release(mapping.physical)

    # -- Devices and contexts ----------------------------------------------------------

    def _cuInit(self, flags):
        self._initialised = True
        return OK if flags.value == 0 else INVALID_VALUE

    def _cuDriverGetVersion(self, version):
        version._obj.value = 12080
        return OK

    def _cuDeviceGetCount(self, count):
        count._obj.value = len(self.machine.devices)
        return OK

    def _cuDeviceGet(self, device, ordinal):
        if not 0 <= ordinal.value < len(self.machine.devices):
            return INVALID_DEVICE
        device._obj.value = ordinal.value
        return OK

    def _cuDeviceGetName(self, name, size, device):
        name.value = f"Fake {device.value}".encode()[: size.value - 1]
        return OK

    def _cuDeviceGetUuid_v2(self, uuid, device):
        uuid._obj.bytes[:] = self.machine.devices[device.value].uuid
        return OK

    def _cuDeviceGetAttribute(self, value, attribute, device):
        known = {102: "virtual_memory", 103: "descriptors"}
        value._obj.value = getattr(self.machine.devices[device.value], known[attribute.value])
        return OK

    def _cuDevicePrimaryCtxRetain(self, context, device):
        self.contexts[device.value] = self.contexts.get(device.value, 0) + 1
        context._obj.value = device.value + 1
        return OK

    def _cuDevicePrimaryCtxRelease_v2(self, device):
        count = self.contexts.get(device.value, 0)
        if not count:
            return self._fault("a context was released too often", INVALID_CONTEXT)
        if count > 1:
            self.contexts[device.value] = count - 1
            return OK
        del self.contexts[device.value]
        if any(
            m.kind != "vmm" and m.physical.device == device.value for m in self.mappings.values()
        ):
            self.faults.append("a context was destroyed with memory in it")
        return OK

    def _cuCtxPushCurrent_v2(self, context):
        if context.value is None or context.value - 1 not in self.contexts:
            return INVALID_CONTEXT
        self._stack.append(context.value)
        return OK

    def _cuCtxPopCurrent_v2(self, context):
        if not self._stack:
            return self._fault("no context to pop", INVALID_CONTEXT)
        context._obj.value = self._stack.pop()
        return OK

    def _cuMemGetInfo_v2(self, free, total):
        device = self._device_now()
        if device is None:
            return INVALID_CONTEXT
        total._obj.value = self.machine.devices[device].total
        free._obj.value = total._obj.value - self.machine.used(device)
        return OK

    # -- Virtual memory ----------------------------------------------------------------

    def _cuMemGetAllocationGranularity(self, size, properties, option):
        size._obj.value = GRANULARITY
        return OK if option.value in (0, 1) else INVALID_VALUE

    def _cuMemCreate(self, handle, size, properties, flags):
        asked = properties._obj
        if asked.type != 1 or asked.location.type != 1 or flags.value or size.value % GRANULARITY:
            return INVALID_VALUE
        physical = self._new(size.value, asked.location.id, exportable=bool(asked.handle_types & 1))
        if physical is None:
            return OUT_OF_MEMORY
        handle._obj.value = next(self._numbers)
        self.handles[handle._obj.value] = physical
        return OK

    def _cuMemRelease(self, handle):
        physical = self.handles.pop(handle.value, None)
        if physical is None:
            return self._fault("a handle was released twice")
        self.machine.release(physical)
        return OK

    def _cuMemExportToShareableHandle(self, fd, handle, kind, flags):
        physical = self.handles.get(handle.value)
        if physical is None or kind.value != 1 or flags.value:
            return INVALID_VALUE
        if not physical.exportable:
            return NOT_SUPPORTED
        number = os.memfd_create("fake-device-memory", 0)  # inheritable, as the real one is
        status = os.fstat(number)
        self.machine.exports[status.st_dev, status.st_ino] = physical
        fd._obj.value = number
        return OK

    def _cuMemImportFromShareableHandle(self, handle, fd, kind):
        try:
            status = os.fstat(fd.value or 0)
        except OSError:
            return INVALID_VALUE
        physical = self.machine.exports.get((status.st_dev, status.st_ino))
        if physical is None or kind.value != 1 or not stat.S_ISREG(status.st_mode):
            return INVALID_VALUE
        if not physical.references:  # a descriptor keeps the memory
            self.machine.memory.append(physical)
        self.machine.acquire(physical)
        handle._obj.value = next(self._numbers)
        self.handles[handle._obj.value] = physical
        return OK

    def _cuMemAddressReserve(self, address, size, alignment, wished, flags):
        if size.value <= 0 or size.value % GRANULARITY:
            return INVALID_VALUE
        address._obj.value = next(self._addresses)
        self.reserved[address._obj.value] = size.value
        return OK

    def _cuMemAddressFree(self, address, size):
        if address.value in self.mappings:
            return self._fault("addresses were freed while memory was mapped there")
        if self.reserved.get(address.value) != size.value:
            return self._fault("other addresses were freed than were reserved")
        del self.reserved[address.value]
        return OK

    def _cuMemMap(self, address, size, offset, handle, flags):
        physical = self.handles.get(handle.value)
        if physical is None or self.reserved.get(address.value) != size.value:
            return INVALID_VALUE
        if address.value in self.mappings or size.value > len(physical.bytes) or offset.value:
            return INVALID_VALUE
        self._map(address.value, Mapping(physical, size.value, "vmm"))
        return OK

    def _cuMemUnmap(self, address, size):
        mapping = self.mappings.get(address.value)
        if mapping is None or mapping.size != size.value:
            return self._fault("other memory was unmapped than was mapped")
        self._unmap(address.value)
        return OK

    def _cuMemSetAccess(self, address, size, description, count):
        mapping = self.mappings.get(address.value)
        if mapping is None or mapping.size != size.value or count.value != 1:
            return INVALID_VALUE
        asked = description._obj
        if asked.access == READ and not self.read_only:
            return NOT_SUPPORTED
        device = asked.location.id
        if device != mapping.physical.device and not self.machine.devices[device].peers:
            return INVALID_DEVICE
        mapping.access[device] = asked.access
        return OK

    # -- Plain allocations -------------------------------------------------------------

    def _cuMemAlloc_v2(self, address, size):
        device = self._device_now()
        if device is None:
            return INVALID_CONTEXT
        physical = self._new(size.value, device, exportable=False)
        if physical is None:
            return OUT_OF_MEMORY
        address._obj.value = next(self._addresses)
        self._map(address._obj.value, Mapping(physical, size.value, "plain", access={device: 3}))
        self.machine.release(physical)
        return OK

    def _cuMemFree_v2(self, address):
        mapping = self.mappings.get(address.value)
        if self._device_now() is None:
            return INVALID_CONTEXT
        if mapping is None or mapping.kind != "plain":
            return self._fault("memory was freed that was not allocated")
        if mapping.physical.references > 1:
            self.faults.append("memory was freed that another process has open")
        self._unmap(address.value)
        return OK

    def _cuIpcGetMemHandle(self, handle, address):
        mapping = self.mappings.get(address.value)
        if mapping is None or mapping.kind != "plain":
            return INVALID_VALUE
        name = os.urandom(64)
        self.machine.ipc[name] = (self, mapping)
        handle._obj.reserved[:] = name
        return OK

    def _cuIpcOpenMemHandle_v2(self, address, handle, flags):
        device = self._device_now()
        if device is None:
            return INVALID_CONTEXT
        owner, mapping = self.machine.ipc.get(bytes(handle.reserved), (None, None))
        if owner is None or owner is self or mapping not in owner.mappings.values():
            return INVALID_HANDLE
        address._obj.value = next(self._addresses)
        self._map(
            address._obj.value,
            Mapping(mapping.physical, mapping.size, "ipc", access={device: READ_WRITE}),
        )
        return OK

    def _cuIpcCloseMemHandle(self, address):
        mapping = self.mappings.get(address.value)
        if mapping is None or mapping.kind != "ipc" or self._device_now() is None:
            return self._fault("memory was closed that was not opened")
        self._unmap(address.value)
        return OK

    def _cuMemGetAddressRange_v2(self, base, size, address):
        for begin, mapping in self.mappings.items():
            if begin <= address.value < begin + mapping.size:
                base._obj.value, size._obj.value = begin, mapping.size
                return OK
        return INVALID_VALUE


class Machine(Devices):
    """Devices and the processes that use them."""

    def process(self, **options):
        """Return the driver's library of one more process."""
        self.processes.append(FakeCuda(self, **options))
        return self.processes[-1]
