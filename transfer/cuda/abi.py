"""Structures and numbers of the CUDA driver's interface, as far as they are used.

They are fixed by the driver's binary interface (cuda.h): a newer driver keeps them.
"""

import ctypes
from enum import IntEnum

SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NO_DEVICE = 100
INVALID_CONTEXT = 201
INVALID_HANDLE = 400
NOT_READY = 600
NOT_PERMITTED = 800
NOT_SUPPORTED = 801

ERROR_NAMES = {
    INVALID_VALUE: "INVALID_VALUE",
    OUT_OF_MEMORY: "OUT_OF_MEMORY",
    3: "NOT_INITIALIZED",
    4: "DEINITIALIZED",
    46: "DEVICE_UNAVAILABLE",
    NO_DEVICE: "NO_DEVICE",
    101: "INVALID_DEVICE",
    INVALID_CONTEXT: "INVALID_CONTEXT",
    205: "MAP_FAILED",
    214: "ECC_UNCORRECTABLE",
    217: "PEER_ACCESS_UNSUPPORTED",
    304: "OPERATING_SYSTEM",
    INVALID_HANDLE: "INVALID_HANDLE",
    NOT_READY: "NOT_READY",
    700: "ILLEGAL_ADDRESS",
    702: "LAUNCH_TIMEOUT",
    709: "CONTEXT_IS_DESTROYED",
    712: "HOST_MEMORY_ALREADY_REGISTERED",
    719: "LAUNCH_FAILED",
    NOT_PERMITTED: "NOT_PERMITTED",
    NOT_SUPPORTED: "NOT_SUPPORTED",
    802: "SYSTEM_NOT_READY",
    803: "SYSTEM_DRIVER_MISMATCH",
    999: "UNKNOWN",
}
"""Names of results that are likely here; the number is told as well."""


class Attribute(IntEnum):
    """What a device can be asked about."""

    VIRTUAL_MEMORY = 102
    POSIX_DESCRIPTORS = 103


class Access(IntEnum):
    """What a device may do with a mapping."""

    READ = 1
    READ_WRITE = 3


HANDLE_POSIX_DESCRIPTOR = 1
GRANULARITY_RECOMMENDED = 1
IPC_LAZY_PEER_ACCESS = 1
STREAM_NON_BLOCKING = 1
EVENT_WITHOUT_TIMING = 2
IPC_HANDLE_BYTES = 64

_ALLOCATION_PINNED = 1
_LOCATION_DEVICE = 1


class Uuid(ctypes.Structure):
    """``CUuuid``."""

    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


class Location(ctypes.Structure):
    """``CUmemLocation``."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class AllocationProperties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("windows", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    )


class AccessDescription(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", Location), ("access", ctypes.c_int))


class IpcHandle(ctypes.Structure):
    """``CUipcMemHandle``; passed by value when it is opened."""

    _fields_ = (("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES),)


def device_location(device: int) -> Location:
    """Return the location that is a device."""
    return Location(type=_LOCATION_DEVICE, id=device)


def shareable_on(device: int) -> AllocationProperties:
    """Return the properties of memory on a device that can be exported as a descriptor."""
    return AllocationProperties(
        type=_ALLOCATION_PINNED,
        handle_types=HANDLE_POSIX_DESCRIPTOR,
        location=device_location(device),
    )
