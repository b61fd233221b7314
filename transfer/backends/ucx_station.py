"""A UCX worker with staging memory: what each end of a ``ucx`` connection has.

Bytes go through staging memory at both ends, never straight into or out of engines' memory,
because a receive cannot be taken back (seen with ucxx 0.52 and UCX 1.21):

- once a message has matched it, UCX does not cancel it, and a peer that was stopped may go on
  with it later;
- before that, UCX would, but ucxx's ``cancel_inflight_requests`` leaves it as it is;
- a worker with receives posted lives on unseen, and one whose peer died in the middle of a
  message never returns from its destructor (``drainWorkerTagRecv``).

Into staging memory a peer may write as late as it likes. Copying costs less than it seems: long
messages from huge pages move faster than many short ones from scattered blocks. Ends are made
clean by having everything arrive that was sent (:meth:`Station.settle_receives`); where the peer
no longer takes part, UCX's objects are left alone for good (:class:`Abandoned`).

UCX objects are used by one thread at a time.
"""

import ctypes
import mmap
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from nearkv.transfer.backends.control import SLICE_SECONDS, Control
from nearkv.transfer.backends.native_transport import check_alone, set_defaults
from nearkv.transfer.backends.ucx_path import endpoint_info, path_of
from nearkv.transfer.errors import PullError, Reason

CHUNK_BYTES = 1 << 20
WINDOW = 4
"""Chunks in flight: the next ones travel while one is copied."""

_HUGE_PAGE_BYTES = 2 << 20
_SPINS = 200
"""Looks for progress before sleeping; some 0.1 ms."""

_MAX_ABANDONED = 16
_DEFAULTS = {
    # ucxx sets variables that its UCX then warns about.
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    # Without these, reads over TCP take half the speed.
    "UCX_TCP_TX_SEG_SIZE": "256k",
    "UCX_TCP_RX_SEG_SIZE": "256k",
}


@dataclass(slots=True)
class Native:
    """The two modules of ucxx that are used; see :func:`load`."""

    core: Any
    array: Any


def load() -> Native:
    """Load ucxx, which takes half a second; raises :class:`PullError` (``NO_PATH``).

    With RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true, ucxx takes the system's UCX instead of the
    one from PyPI, which was built without RDMA.
    """
    check_alone("ucx")
    set_defaults(_DEFAULTS)
    try:
        # By name: it is optional, has no types, and its public modules add only asyncio.
        core = import_module("ucxx._lib.libucxx")
        array = import_module("ucxx._lib.arr")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise PullError(Reason.NO_PATH, f"ucxx cannot be loaded: {error}") from error
    return Native(core, array.Array)


def new_context(native: Native) -> Any:  # noqa: ANN401 (ucxx has no types)
    """Return a context for tagged messages; its ``info`` names the transports."""
    feature = native.core.Feature
    try:
        return native.core.UCXContext({}, (feature.TAG, feature.WAKEUP))
    except native.core.UCXError as error:
        raise PullError(Reason.NO_PATH, f"UCX: {error}") from error


@dataclass(slots=True)
class Abandoned:
    """Counts what UCX did not let go of; it stays as it is until the process ends.

    Nobody makes UCX go on with it, so that it does nothing any more.
    """

    count: int = field(default=0)

    def take(self, *held: object) -> None:
        """Keep objects for good, so that no destructor waits for a peer that is gone."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
        self.count += 1

    def check_room(self) -> None:
        """Raise :class:`PullError` (``NO_PATH``) when it has become too much."""
        if self.count >= _MAX_ABANDONED:
            raise PullError(
                Reason.NO_PATH,
                f"UCX still holds what {self.count} lost peers left unfinished: "
                "the mover must be started anew",
            )


class Station:
    """A worker, its staging memory, and the messages under way. Belongs to one connection."""

    def __init__(self, native: Native, *, chunk_bytes: int, window: int) -> None:
        self._native = native
        self.chunk_bytes = chunk_bytes
        self.window = window
        self.staging = _huge_memory(chunk_bytes * window)
        self._bytes = np.frombuffer(self.staging, np.uint8)
        self._context = new_context(native)
        self._worker = native.core.UCXWorker(
            self._context, enable_delayed_submission=False, enable_python_future=False
        )
        self._worker.init_blocking_progress_mode()
        self._poller = select.poll()
        self._poller.register(self._worker.epoll_file_descriptor, select.POLLIN)
        self._endpoint: Any = None
        self._under_way: dict[int, Any] = {}
        self.messages = 0
        """How many messages there were, the ones under way included: the next one's tag."""

    @property
    def address(self) -> bytes:
        """Where this worker is reached: all of its transports, in UCX's own form."""
        return bytes(self._worker.address.tobytes())

    def watch(self, control: Control) -> None:
        """Have :meth:`wait` wake up for messages on a connection, too."""
        self._poller.register(control, select.POLLIN)

    def connect(self, address: bytes) -> None:
        """Connect to a worker, without UCX's error handling: that would rule out shared memory.

        UCX trusts what it reads here, so the address must come from somebody admitted.
        """
        core = self._native.core
        try:
            there = core.UCXAddress.create_from_buffer(np.frombuffer(bytearray(address), np.uint8))
            self._endpoint = core.UCXEndpoint.create_from_worker_address(
                self._worker, there, endpoint_error_handling=False
            )
        except (core.UCXError, RuntimeError, ValueError) as error:
            raise PullError(Reason.NO_PATH, f"UCX: {error}") from error

    def path(self) -> tuple[bool, str]:
        """Return (rdma, detail) of what the endpoint really uses."""
        path = path_of(endpoint_info(self._endpoint.handle))
        return path.rdma, path.detail

    def offset(self, number: int) -> int:
        """Return where a message lies in staging memory."""
        return number % self.window * self.chunk_bytes

    def part(self, number: int, size_bytes: int) -> memoryview:
        """Return a message's part of staging memory."""
        start = self.offset(number)
        return self.staging[start : start + size_bytes]

    def post_receive(self, number: int, size_bytes: int) -> None:
        """Have the message of this number received into its place."""
        self._post(number, size_bytes, self._worker.tag_recv)

    def post_send(self, number: int, size_bytes: int) -> None:
        """Send the message of this number from its place."""
        self._post(number, size_bytes, self._endpoint.tag_send)

    def _post(self, number: int, size_bytes: int, call: Callable[..., Any]) -> None:
        start = self.offset(number)
        array = self._native.array(self._bytes[start : start + size_bytes])
        self._under_way[number] = call(array, self._native.core.UCXXTag(number))
        self.messages = max(self.messages, number + 1)

    def finish(self, number: int, look: Callable[[], None]) -> None:
        """Wait until a message has arrived, or was sent; raises what ``look`` raises.

        ``look`` is called again and again; :class:`PullError` (``NO_PATH``) is UCX's own refusal.
        """
        # No request in a local variable: a traceback would keep it, and with it the worker.
        self.wait(lambda: bool(self._under_way[number].completed), look)
        try:
            self._under_way.pop(number).check_error()
        except self._native.core.UCXError as error:
            look()  # knows better if the peer is gone
            raise PullError(Reason.NO_PATH, f"UCX: {type(error).__name__}: {error}") from error

    def wait(self, done: Callable[[], bool], look: Callable[[], None]) -> None:
        """Let UCX work until ``done``."""
        spins = looks = 0
        while not done():
            spins = 0 if self._worker.progress_once() else spins + 1
            looks += 1
            if spins < _SPINS and looks < 16 * _SPINS:
                continue
            look()
            # What was waited for may just have been seen: nobody would wake us then.
            if spins >= _SPINS and not done() and self._worker.arm():
                self._poller.poll(SLICE_SECONDS * 1000)
            spins = looks = 0

    def settle_sends(self, *, patience_seconds: float) -> bool:
        """Have all that was sent arrive; says whether it did."""
        return self._settle(time.monotonic() + patience_seconds)

    def settle_receives(self, sent: int | None, *, patience_seconds: float) -> bool:
        """Have nothing posted any more; says whether that is so.

        ``sent`` is how many messages the peer has sent, where it could still say so; it must
        send no more. They are received; for receives that are left then there is a message
        from this worker to itself.
        """
        end = time.monotonic() + patience_seconds
        if sent is not None:
            for number in range(self.messages, min(sent, self.messages + self.window)):
                self.post_receive(number, self.chunk_bytes)
            while not self._done(lambda number: number < sent) and time.monotonic() < end:
                self._worker.progress_once()
        if not self._done() and not self._fill_receives():
            return False
        return self._settle(end) and not self._is_message_left()

    def _fill_receives(self) -> bool:
        core = self._native.core
        try:
            self._endpoint = core.UCXEndpoint.create_from_worker_address(
                self._worker, self._worker.address, endpoint_error_handling=False
            )
        except (core.UCXError, RuntimeError):
            return False
        for number in [number for number, held in self._under_way.items() if not held.completed]:
            blank = self._native.array(np.zeros(1, np.uint8))
            self._under_way[-1 - number] = self._endpoint.tag_send(blank, core.UCXXTag(number))
        return True

    def _settle(self, end: float) -> bool:
        while not self._done() and time.monotonic() < end:
            self._worker.progress_once()
        return self._done()

    def _done(self, which: Callable[[int], bool] = lambda _: True) -> bool:
        return all(held.completed for number, held in self._under_way.items() if which(number))

    def _is_message_left(self) -> bool:
        core = self._native.core
        return bool(self._worker.tag_probe(core.UCXXTag(0), core.UCXXTagMask(0)).matched)

    def close(self, abandoned: Abandoned, *, settled: bool) -> None:
        """Let UCX's objects go, or leave them alone if they are not ``settled``."""
        if self._worker is None:
            return
        if self._endpoint is not None:
            # Not waited for: it would wait for all that was sent to arrive.
            self._endpoint.close()
        if not settled:
            abandoned.take(
                self._context, self._worker, self._endpoint, self._under_way, self.staging
            )
        self._under_way = {}
        # In this order: each holds the one after it.
        self._endpoint = self._worker = self._context = None


def _huge_memory(size_bytes: int) -> memoryview:
    """Return memory on huge pages where there are some: CMA reads those three times as fast."""
    # Private: without that it is shared memory, which gets huge pages only where shmem_enabled.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size_bytes + _HUGE_PAGE_BYTES, flags=private)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    start = -int(np.frombuffer(view, np.uint8).ctypes.data) % _HUGE_PAGE_BYTES
    return view[start : start + size_bytes]
