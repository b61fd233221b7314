"""Copying runs between two mapped memories, natively where the extension was built.

The extension copies pieces of 8 KiB and more with non-temporal stores: an ordinary store first
reads the line it is going to overwrite, which is a third of all memory traffic. What was
written is then not in the cache, which is right here: the target is read much later, and by
another process. Shorter pieces are copied by ``memcpy``.

Without the extension, ``memmove`` of the C library does the same, a call per piece. The calls
are made by ``deque(map(...), maxlen=0)`` and hold the GIL, the least that Python costs per call.

Either way the copy is over when :meth:`Copier.copy` returns: loads after it are not done
before it (the fence of a lease depends on it), and its stores are seen by every processor.
"""

import ctypes
import threading
from collections import deque
from typing import Protocol

import numpy as np
import numpy.typing as npt

from nearkv.transfer.errors import PullError, Reason
from nearkv.transfer.layout import Offsets, Runs

_Bytes = npt.NDArray[np.uint8]


class CopyRuns(Protocol):
    """The extension's function; see ``_copy.pyi``. ``how`` is for comparisons only."""

    def __call__(
        self,
        target: _Bytes,
        source: _Bytes,
        target_offsets: Offsets,
        source_offsets: Offsets,
        lengths: Offsets,
        how: str | None = None,
    ) -> None:
        """Copy runs without the GIL."""
        ...


def native_copy() -> CopyRuns | None:
    """Return the extension's function, or ``None`` where it was not built (no C compiler, say)."""
    try:
        from nearkv.transfer._copy import (  # noqa: PLC0415 (optional, for movers only)
            copy_runs,
        )
    except ImportError:
        return None
    return copy_runs


class Copier:
    """Copies runs from one memory to another; ``how`` is ``native`` or ``memmove``.

    ``native=False`` forces the fallback, ``native=True`` raises :class:`ImportError` without
    the extension. The memories are kept until :meth:`close`.
    """

    def __init__(
        self, source: memoryview, target: memoryview, *, native: bool | None = None
    ) -> None:
        if target.readonly:
            raise PullError(Reason.MEMORY, "the target's memory is mapped for reading only")
        self._native = native_copy() if native is not False else None
        if native and self._native is None:
            raise ImportError("nearkv's copying extension was not built")
        self._source: _Bytes | None = np.frombuffer(source, np.uint8)
        self._target: _Bytes | None = np.frombuffer(target, np.uint8)

    @property
    def how(self) -> str:
        """``native`` or ``memmove``."""
        return "memmove" if self._native is None else "native"

    def copy(self, runs: Runs) -> None:
        """Copy runs; raises :class:`PullError` (``RANGE``) before anything is written."""
        if self._source is None or self._target is None:
            raise ValueError("the copier is closed")
        check_within(runs.source, runs.length, self._source.size, "source")
        check_within(runs.target, runs.length, self._target.size, "target")
        if self._native is not None:
            self._native(self._target, self._source, runs.target, runs.source, runs.length)
        else:
            _memmove_runs(self._source, self._target, runs)
            order_reads()

    def close(self) -> None:
        """Let go of both memories; may be called twice."""
        self._source = self._target = None


def check_within(offsets: Offsets, lengths: Offsets, size_bytes: int, side: str) -> None:
    """Make sure that runs lie within a memory; raises :class:`PullError` (``RANGE``)."""
    if not offsets.size:
        return
    # Written so that no sum can overflow.
    if int(offsets.min()) < 0 or int(lengths.min()) < 0 or int(lengths.max()) > size_bytes:
        raise PullError(Reason.RANGE, f"a run lies outside the {side}'s {size_bytes} bytes")
    if bool((offsets > size_bytes - lengths).any()):
        raise PullError(Reason.RANGE, f"a run ends behind the {side}'s {size_bytes} bytes")


def order_reads() -> None:
    """Keep loads that follow from being done before loads that came before.

    x86 keeps that order anyway. Elsewhere it takes a barrier, and what Python has is a lock:
    its release comes after all that was done before it, and taking one comes after a release.
    """
    lock = threading.Lock()
    for _ in range(2):
        with lock:
            pass


def _memmove_runs(source: _Bytes, target: _Bytes, runs: Runs) -> None:
    memmove = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
        ("memmove", ctypes.PyDLL(None))
    )
    targets = (runs.target + target.ctypes.data).tolist()
    sources = (runs.source + source.ctypes.data).tolist()
    deque(map(memmove, targets, sources, runs.length.tolist()), maxlen=0)
