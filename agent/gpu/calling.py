"""Calls that are marked before they are made, and left out where they did not come back."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from nearkv.agent.gpu.errors import NvmlError
from nearkv.agent.gpu.mark import NO_DEVICE
from nearkv.agent.gpu.messages import LeftOut
from nearkv.agent.gpu.model import Reasons
from nearkv.agent.gpu.raw import Raw
from nearkv.agent.gpu.reasons import Missing, Reason

GONE = (Reason.GPU_LOST, Reason.ABSENT)
"""Reasons that are about the whole device: it need not be asked anything else."""
_TRY_OLDER = (Reason.MISSING_SYMBOL, Reason.VERSION_MISMATCH)
EVERY_CALL = "*"

T = TypeVar("T")


class Library(Protocol):
    """NVML's calls by name; see :class:`~nearkv.agent.gpu.nvml.Nvml`."""

    def call(self, name: str, *arguments: Raw) -> Raw:
        """Make a call; raises :class:`NvmlError`."""
        ...


class Marker(Protocol):
    """Where it is noted which call is under way."""

    def enter(self, device_index: int, call: str, now_ns: int) -> None:
        """Note that a call begins."""
        ...

    def leave(self) -> None:
        """Note that it has returned."""
        ...


class DeviceLostError(Exception):
    """The device is gone; ``missing`` says how that was seen."""

    def __init__(self, missing: Missing) -> None:
        super().__init__(str(missing))
        self.missing = missing


class Calls:
    """Makes NVML's calls, one at a time."""

    def __init__(self, library: Library, mark: Marker, left_out: Iterable[LeftOut] = ()) -> None:
        self._library = library
        self._mark = mark
        self._left_out = {(entry.device_index, entry.call): entry.reason for entry in left_out}

    def make(self, name: str, *arguments: Raw, device_index: int = NO_DEVICE) -> Raw:
        """Make a call; raises :class:`NvmlError`."""
        for call in (name, EVERY_CALL):
            reason = self._left_out.get((device_index, call))
            if reason is not None:
                raise NvmlError(Missing(reason, f"{name} is left out"))
        self._mark.enter(device_index, name, time.monotonic_ns())
        try:
            return self._library.call(name, *arguments)
        finally:
            self._mark.leave()

    def first(self, names: Sequence[str], *arguments: Raw, device_index: int = NO_DEVICE) -> Raw:
        """Make the first call that this driver has, newest first; raises :class:`NvmlError`."""
        for name in names[:-1]:
            try:
                return self.make(name, *arguments, device_index=device_index)
            except NvmlError as error:
                if error.missing.reason not in _TRY_OLDER:
                    raise
        return self.make(names[-1], *arguments, device_index=device_index)


class Field:
    """Collects values of one device (or link, pair, instance), and why others are missing."""

    def __init__(self, calls: Calls, device_index: int) -> None:
        self._calls = calls
        self._device_index = device_index
        self.reasons: Reasons = {}

    def read(
        self, field: str, names: Sequence[str], decode: Callable[[Any], T], *arguments: Raw
    ) -> T | None:
        """Return a value, or ``None`` with its reason noted; raises :class:`DeviceLostError`."""
        try:
            raw = self._calls.first(names, *arguments, device_index=self._device_index)
        except NvmlError as error:
            if error.missing.reason in GONE:
                raise DeviceLostError(error.missing) from error
            self.reasons[field] = error.missing
            return None
        try:
            return decode(raw)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            detail = f"{type(error).__name__}: {error}"
            self.reasons[field] = Missing(Reason.UNREADABLE, detail)
            return None
