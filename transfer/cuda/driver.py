"""The calls of the CUDA driver that are used, each one checked.

The library is an argument: the real one comes from :func:`load_driver`, tests bring their own.
Arguments are ctypes objects throughout, so that nothing has to be declared on the library.
Calls do not hold the GIL. Those that work on "the current context" say so; see
:class:`~nearkv.transfer.cuda.context.DeviceContext`.
"""

import ctypes
from typing import Any

from nearkv.transfer.cuda.abi import (
    ERROR_NAMES,
    EVENT_WITHOUT_TIMING,
    GRANULARITY_RECOMMENDED,
    HANDLE_POSIX_DESCRIPTOR,
    IPC_LAZY_PEER_ACCESS,
    NOT_READY,
    STREAM_NON_BLOCKING,
    SUCCESS,
    Access,
    AccessDescription,
    Attribute,
    IpcHandle,
    Uuid,
    device_location,
    shareable_on,
)
from nearkv.transfer.errors import PullError, Reason

LIBRARY = "libcuda.so.1"
_NAME_BYTES = 128

Library = Any
"""The driver's library, or what takes its place: calls by name that return a ``CUresult``."""

_Pointer = ctypes.c_void_p
_Address = ctypes.c_uint64
_Handle = ctypes.c_uint64
_Size = ctypes.c_size_t


class CudaError(PullError):
    """A call of the driver failed. ``call`` is its name, ``code`` the ``CUresult``.

    The reason is ``MEMORY`` for calls about memory and ``NO_PATH`` for all others.
    """

    def __init__(self, reason: Reason, call: str, code: int) -> None:
        super().__init__(reason, f"{call}: CUDA error {code} ({ERROR_NAMES.get(code, 'unnamed')})")
        self.call = call
        self.code = code


def load_driver(name: str = LIBRARY) -> "Driver":
    """Load and initialise the driver; raises :class:`PullError` (``NO_PATH``) where it is not."""
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise PullError(Reason.NO_PATH, f"no CUDA driver here: {error}") from error
    driver = Driver(library)
    driver.initialise()
    return driver


class Driver:
    """The driver's calls; raises :class:`CudaError` for every one that fails."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def _result(self, reason: Reason, name: str, arguments: tuple[object, ...]) -> int:
        try:
            call = getattr(self._library, name)
        except AttributeError as error:
            raise PullError(reason, f"{name}: this CUDA driver does not have it") from error
        return int(call(*arguments))

    def _call(self, name: str, *arguments: object) -> None:
        code = self._result(Reason.NO_PATH, name, arguments)
        if code != SUCCESS:
            raise CudaError(Reason.NO_PATH, name, code)

    def _memory_call(self, name: str, *arguments: object) -> None:
        code = self._result(Reason.MEMORY, name, arguments)
        if code != SUCCESS:
            raise CudaError(Reason.MEMORY, name, code)

    # -- Devices and contexts ----------------------------------------------------------

    def initialise(self) -> None:
        """Initialise the driver in this process; again does no harm."""
        self._call("cuInit", ctypes.c_uint(0))

    def version(self) -> str:
        """Return the CUDA version that the driver supports, such as ``12.8``."""
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    def device_count(self) -> int:
        """Return how many devices this process sees."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def device(self, ordinal: int) -> int:
        """Return the device with a number, counted among those that this process sees."""
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        return device.value

    def device_name(self, device: int) -> str:
        """Return what a device is called."""
        name = ctypes.create_string_buffer(_NAME_BYTES)
        self._call("cuDeviceGetName", name, ctypes.c_int(_NAME_BYTES), ctypes.c_int(device))
        return name.value.decode(errors="replace")

    def device_uuid(self, device: int) -> str:
        """Return a device's UUID as NVML writes it: the same in every process and container.

        Of a MIG instance it is the instance's own.
        """
        uuid = Uuid()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), ctypes.c_int(device))
        digits = bytes(uuid.bytes).hex()
        parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
        return f"GPU-{'-'.join(parts)}"

    def attribute(self, device: int, attribute: Attribute) -> int:
        """Return an attribute of a device."""
        value = ctypes.c_int()
        self._call(
            "cuDeviceGetAttribute",
            ctypes.byref(value),
            ctypes.c_int(attribute),
            ctypes.c_int(device),
        )
        return value.value

    def retain_primary(self, device: int) -> int:
        """Return a device's primary context, made where there is none; counted."""
        context = _Pointer()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device))
        return context.value or 0

    def release_primary(self, device: int) -> None:
        """Undo :meth:`retain_primary` once."""
        self._call("cuDevicePrimaryCtxRelease_v2", ctypes.c_int(device))

    def push_context(self, context: int) -> None:
        """Make a context this thread's current one."""
        self._call("cuCtxPushCurrent_v2", _Pointer(context))

    def pop_context(self) -> None:
        """Give this thread back the context that it had before."""
        context = _Pointer()
        self._call("cuCtxPopCurrent_v2", ctypes.byref(context))

    def free_bytes(self) -> int:
        """Return the free memory of the current context's device, of all processes."""
        free, total = _Size(), _Size()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    # -- Virtual memory: physical memory, addresses, mappings --------------------------

    def granularity_bytes(self, device: int) -> int:
        """Return what sizes of shareable memory on a device must be multiples of."""
        size = _Size()
        self._memory_call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(size),
            ctypes.byref(shareable_on(device)),
            ctypes.c_int(GRANULARITY_RECOMMENDED),
        )
        return size.value

    def create_memory(self, device: int, size_bytes: int) -> int:
        """Return a handle of new shareable memory; it has no address yet."""
        handle = _Handle()
        self._memory_call(
            "cuMemCreate",
            ctypes.byref(handle),
            _Size(size_bytes),
            ctypes.byref(shareable_on(device)),
            ctypes.c_ulonglong(0),
        )
        return handle.value

    def release_memory(self, handle: int) -> None:
        """Let go of a handle; the memory stays while it is mapped or exported anywhere."""
        self._memory_call("cuMemRelease", _Handle(handle))

    def export_memory(self, handle: int) -> int:
        """Return a descriptor of memory, which is the caller's to close."""
        fd = ctypes.c_int(-1)
        self._memory_call(
            "cuMemExportToShareableHandle",
            ctypes.byref(fd),
            _Handle(handle),
            ctypes.c_int(HANDLE_POSIX_DESCRIPTOR),
            ctypes.c_ulonglong(0),
        )
        return fd.value

    def import_memory(self, fd: int) -> int:
        """Return a handle of the memory behind a descriptor, which stays the caller's."""
        handle = _Handle()
        self._memory_call(
            "cuMemImportFromShareableHandle",
            ctypes.byref(handle),
            _Pointer(fd),  # the descriptor itself, where a pointer is declared
            ctypes.c_int(HANDLE_POSIX_DESCRIPTOR),
        )
        return handle.value

    def reserve_addresses(self, size_bytes: int) -> int:
        """Return the first of a range of addresses that nothing else gets."""
        address = _Address()
        self._memory_call(
            "cuMemAddressReserve",
            ctypes.byref(address),
            _Size(size_bytes),
            _Size(0),
            _Address(0),
            ctypes.c_ulonglong(0),
        )
        return address.value

    def free_addresses(self, address: int, size_bytes: int) -> None:
        """Give a range of addresses back."""
        self._memory_call("cuMemAddressFree", _Address(address), _Size(size_bytes))

    def map_memory(self, address: int, size_bytes: int, handle: int) -> None:
        """Put memory at reserved addresses; nobody may use it there yet."""
        self._memory_call(
            "cuMemMap",
            _Address(address),
            _Size(size_bytes),
            _Size(0),
            _Handle(handle),
            ctypes.c_ulonglong(0),
        )

    def unmap_memory(self, address: int, size_bytes: int) -> None:
        """Take memory away from its addresses."""
        self._memory_call("cuMemUnmap", _Address(address), _Size(size_bytes))

    def set_access(self, address: int, size_bytes: int, device: int, access: Access) -> None:
        """Say what a device may do with mapped memory."""
        description = AccessDescription(location=device_location(device), access=access)
        self._memory_call(
            "cuMemSetAccess",
            _Address(address),
            _Size(size_bytes),
            ctypes.byref(description),
            _Size(1),
        )

    # -- Plain allocations and their legacy handles (current context) -------------------

    def allocate(self, size_bytes: int) -> int:
        """Return the address of new memory."""
        address = _Address()
        self._memory_call("cuMemAlloc_v2", ctypes.byref(address), _Size(size_bytes))
        return address.value

    def free(self, address: int) -> None:
        """Free what :meth:`allocate` returned."""
        self._memory_call("cuMemFree_v2", _Address(address))

    def ipc_handle(self, address: int) -> bytes:
        """Return the 64 bytes by which another process opens an allocation."""
        handle = IpcHandle()
        self._memory_call("cuIpcGetMemHandle", ctypes.byref(handle), _Address(address))
        return bytes(handle.reserved)

    def open_ipc(self, handle: bytes) -> int:
        """Return where another process's allocation now lies in this one."""
        address = _Address()
        self._memory_call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            IpcHandle.from_buffer_copy(handle),
            ctypes.c_uint(IPC_LAZY_PEER_ACCESS),
        )
        return address.value

    def close_ipc(self, address: int) -> None:
        """Undo :meth:`open_ipc`."""
        self._memory_call("cuIpcCloseMemHandle", _Address(address))

    def allocation_bytes(self, address: int) -> int:
        """Return how long the allocation is that an address lies in."""
        base, size = _Address(), _Size()
        self._memory_call(
            "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), _Address(address)
        )
        return size.value

    # -- Host memory that devices reach by themselves (current context) -----------------

    def allocate_host(self, size_bytes: int) -> int:
        """Return the address of new pinned memory."""
        pointer = _Pointer()
        self._memory_call("cuMemAllocHost_v2", ctypes.byref(pointer), _Size(size_bytes))
        return pointer.value or 0

    def free_host(self, pointer: int) -> None:
        """Free pinned memory."""
        self._memory_call("cuMemFreeHost", _Pointer(pointer))

    def pin(self, pointer: int, size_bytes: int) -> None:
        """Pin memory that is there already; what ``cudaHostRegister`` does."""
        self._memory_call(
            "cuMemHostRegister_v2", _Pointer(pointer), _Size(size_bytes), ctypes.c_uint(0)
        )

    def unpin(self, pointer: int) -> None:
        """Undo :meth:`pin`."""
        self._memory_call("cuMemHostUnregister", _Pointer(pointer))

    # -- Streams, events, copies (current context) --------------------------------------

    def create_stream(self) -> int:
        """Return a stream that waits for no other."""
        stream = _Pointer()
        self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(STREAM_NON_BLOCKING))
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream; work that is still in it goes on."""
        self._call("cuStreamDestroy_v2", _Pointer(stream))

    def synchronise(self, stream: int) -> None:
        """Wait until all work of a stream is done."""
        self._call("cuStreamSynchronize", _Pointer(stream))

    def create_event(self) -> int:
        """Return an event."""
        event = _Pointer()
        self._call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(EVENT_WITHOUT_TIMING))
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        """Destroy an event."""
        self._call("cuEventDestroy_v2", _Pointer(event))

    def record(self, event: int, stream: int) -> None:
        """Have an event happen when the stream has got here."""
        self._call("cuEventRecord", _Pointer(event), _Pointer(stream))

    def has_happened(self, event: int) -> bool:
        """Tell whether all work before a recorded event is done; raises what that work raised."""
        code = self._result(Reason.NO_PATH, "cuEventQuery", (_Pointer(event),))
        if code not in (SUCCESS, NOT_READY):
            raise CudaError(Reason.NO_PATH, "cuEventQuery", code)
        return code == SUCCESS

    def fill(self, address: int, value: int, size_bytes: int) -> None:
        """Fill device memory with a byte; may return before it is done."""
        self._memory_call(
            "cuMemsetD8_v2", _Address(address), ctypes.c_ubyte(value), _Size(size_bytes)
        )

    def copy_on_device(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Copy from device memory to device memory, later."""
        self._call(
            "cuMemcpyDtoDAsync_v2",
            _Address(target),
            _Address(source),
            _Size(size_bytes),
            _Pointer(stream),
        )

    def copy_to_host(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Copy from device memory to (pinned) host memory, later."""
        self._call(
            "cuMemcpyDtoHAsync_v2",
            _Pointer(target),
            _Address(source),
            _Size(size_bytes),
            _Pointer(stream),
        )

    def copy_to_device(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Copy from (pinned) host memory to device memory, later."""
        self._call(
            "cuMemcpyHtoDAsync_v2",
            _Address(target),
            _Pointer(source),
            _Size(size_bytes),
            _Pointer(stream),
        )
