"""NVML's calls by ctypes alone, with layouts taken from ``nvml.h``: a second opinion.

It shares nothing with the agent's own way through ``nvidia-ml-py``, so a layout or a meaning
that is wrong there shows as a difference here.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
OK, INSUFFICIENT_SIZE = 0, 7
_UINT, _ULL, _INT, _UCHAR = ctypes.c_uint, ctypes.c_ulonglong, ctypes.c_int, ctypes.c_ubyte


class MemoryV2(ctypes.Structure):
    _fields_ = (
        ("version", _UINT),
        *((name, _ULL) for name in ("total", "reserved", "free", "used")),
    )


class Utilisation(ctypes.Structure):
    _fields_ = (("gpu", _UINT), ("memory", _UINT))


class Pci(ctypes.Structure):
    _fields_ = (
        ("legacy", ctypes.c_char * 16),
        *((name, _UINT) for name in ("domain", "bus", "device", "id", "subsystem")),
        ("bus_id", ctypes.c_char * 32),
    )


class FabricV3(ctypes.Structure):
    """With a state of one byte, as in ``nvml.h``; ``nvidia-ml-py`` declares four."""

    _fields_ = (
        ("version", _UINT),
        ("cluster", _UCHAR * 16),
        ("status", _UINT),
        ("clique", _UINT),
        ("state", _UCHAR),
        ("mask", _UINT),
        ("summary", _UCHAR),
    )


def versioned(kind: type[ctypes.Structure], version: int) -> Any:
    """Return a structure that says which version it is, as NVML wants it."""
    return kind(version=ctypes.sizeof(kind) | version << 24)


class RawNvml:
    """The driver's library, opened; raises ``OSError`` where it is not, or does not open."""

    def __init__(self, path: str = LIBRARY) -> None:
        self._library = ctypes.CDLL(path)
        if code := self._library.nvmlInitWithFlags(0):
            raise OSError(f"nvmlInitWithFlags: {code}")

    def close(self) -> None:
        """Close NVML."""
        self._library.nvmlShutdown()

    def call(self, name: str, *arguments: Any) -> int:
        """Make a call; returns its ``nvmlReturn_t``, 13 where the library lacks it."""
        function = getattr(self._library, name, None)
        return 13 if function is None else int(function(*arguments))

    def handle(self, index: int) -> ctypes.c_void_p:
        """Return a device; raises ``OSError``."""
        handle = ctypes.c_void_p()
        if code := self.call("nvmlDeviceGetHandleByIndex_v2", _UINT(index), ctypes.byref(handle)):
            raise OSError(f"device {index}: {code}")
        return handle


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """What a call returned, and what its results mean; ``None`` unless it succeeded."""

    call: str
    code: int
    value: Any = None

    def __str__(self) -> str:
        return f"{self.call} = {self.value if self.code == OK else f'error {self.code}'}"


RawCall = Callable[[RawNvml, ctypes.c_void_p], RawAnswer]


def numbers(name: str, *kinds: Any, first: tuple[Any, ...] = ()) -> RawCall:
    """Return a call that gives numbers by pointers, one or a tuple of them."""

    def make(nvml: RawNvml, handle: ctypes.c_void_p) -> RawAnswer:
        results = [kind() for kind in kinds]
        code = nvml.call(name, handle, *first, *map(ctypes.byref, results))
        values = tuple(result.value for result in results)
        shown = f"{name}{tuple(getattr(one, 'value', one) for one in first) or ''}"
        return RawAnswer(shown, code, values[0] if len(values) == 1 else values)

    return make


def number(name: str, kind: Any = _UINT, *first: Any) -> RawCall:
    """Return a call that gives one number."""
    return numbers(name, kind, first=first)


def text(name: str) -> RawCall:
    """Return a call that gives a text."""

    def make(nvml: RawNvml, handle: ctypes.c_void_p) -> RawAnswer:
        buffer = ctypes.create_string_buffer(128)
        code = nvml.call(name, handle, buffer, _UINT(len(buffer)))
        return RawAnswer(name, code, buffer.value.decode(errors="replace"))

    return make


def structure(name: str, make_empty: Callable[[], Any], read: Callable[[Any], Any]) -> RawCall:
    """Return a call that fills a structure."""

    def make(nvml: RawNvml, handle: ctypes.c_void_p) -> RawAnswer:
        filled = make_empty()
        code = nvml.call(name, handle, ctypes.byref(filled))
        return RawAnswer(name, code, read(filled))

    return make


def process_count(nvml: RawNvml, handle: ctypes.c_void_p) -> RawAnswer:
    """Ask for no processes at all, to be told how many there are."""
    name = "nvmlDeviceGetComputeRunningProcesses_v3"
    count = _UINT(0)
    code = nvml.call(name, handle, ctypes.byref(count), None)
    return RawAnswer(name, OK if code == INSUFFICIENT_SIZE else code, count.value)


def active_nvlinks(nvml: RawNvml, handle: ctypes.c_void_p) -> RawAnswer:
    """Count the NVLinks that are up."""
    name = "nvmlDeviceGetNvLinkState"
    active, first = [], None
    for link in range(36):
        state = _UINT()
        code = nvml.call(name, handle, _UINT(link), ctypes.byref(state))
        first = code if first is None else first
        if code == OK and state.value:
            active.append(link)
    return RawAnswer(f"{name}(0..35)", first or OK, len(active))
