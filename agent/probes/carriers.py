"""Moving a probe's bytes, by the same backends that pulls use.

``tcp`` is plain sockets: it runs on threads of the agent itself, between buffers of its own,
since starting a mover costs forty times what a probe does. Libraries with code of their own run
in movers, like everything that could take its process with it.
"""

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from nearkv.agent.movers.jobs import EngineMemory, PullJob
from nearkv.agent.movers.pool import MoverPool
from nearkv.agent.movers.securing import tcp_backend
from nearkv.agent.probes.budget import PROBE_BYTES, SMALL_BYTES, SMALL_PULLS
from nearkv.transfer.backends.contract import (
    Backend,
    Fence,
    Grant,
    Path,
    PullReport,
    PullRequest,
    Region,
    Server,
    Source,
    Stop,
    monotonic_ms,
)
from nearkv.transfer.errors import PullError, Reason
from nearkv.transfer.layout import KvMemory
from nearkv.transfer.lease import SLOT_BYTES, SlotTable
from nearkv.transfer.memory import Memory, create_memory, create_slots

BLOCKS = PROBE_BYTES // SMALL_BYTES
_SOURCE_BLOCKS = 256
_NEVER_MS = 1 << 62
_SLOT = 0
_MAX_READERS = 4
_FILLING = b"\x5a"
_SOURCE_KEY, _TARGET_KEY = "probes/source", "probes/target"


def _layout(blocks: int) -> KvMemory:
    size = blocks * SMALL_BYTES
    return KvMemory(
        size=size,
        layers=1,
        blocks=blocks,
        layer_stride=size,
        block_stride=SMALL_BYTES,
        block_bytes=SMALL_BYTES,
    )


SOURCE, TARGET = _layout(_SOURCE_BLOCKS), _layout(BLOCKS)
GRANTED = tuple(block % _SOURCE_BLOCKS for block in range(BLOCKS))
"""A megabyte, four times: sending it again costs the network what sending others would."""


@dataclass(frozen=True, slots=True)
class Way:
    """Where the bytes are to be had: as the peer answered."""

    backend: str
    offer: bytes
    ticket: bytes
    fence: Fence


@dataclass(frozen=True, slots=True)
class Timing:
    """How long the quickest small pull took, and the large one, and what they went over.

    With ``is_bound`` the large one did not end in time: it takes longer than this.
    """

    small_seconds: float
    large_seconds: float
    path: Path
    is_bound: bool = False


class Carrier(Protocol):
    """Both ends of a probe over some backends."""

    async def offer(self, backend: str, grant: Grant) -> bytes:
        """Admit a reader; raises ``TransferError``."""
        ...

    async def withdraw(self, ticket: bytes) -> None:
        """End a reader's admission."""
        ...

    async def measure(self, way: Way, deadline_ms: int) -> Timing:
        """Pull; raises ``TransferError``. When this ends, however it does, nothing goes on."""
        ...

    async def close(self) -> None:
        """Let go of everything."""
        ...


def request(way: Way, blocks: int) -> PullRequest:
    """Return the pull of the first so many blocks."""
    return PullRequest(
        ticket=way.ticket,
        first_block=0,
        source_blocks=GRANTED[:blocks],
        source_layout=SOURCE,
        target_blocks=tuple(range(blocks)),
        fence=way.fence,
    )


def _open_slot(view: bytearray | memoryview) -> tuple[SlotTable, int]:
    """Return slots with one that never closes, and its generation."""
    slots = SlotTable(view)
    return slots, slots.open(_SLOT, expiry_ms=_NEVER_MS)


class AgentCarrier:
    """Probes by ``tcp``, on threads of the agent."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._backend: Backend | None = None
        self._server: Server | None = None

    async def offer(self, backend: str, grant: Grant) -> bytes:  # noqa: ARG002 (as promised)
        """Admit a reader; listens from the first on."""
        if self._server is None:
            slots, _ = _open_slot(bytearray(SLOT_BYTES))
            region = Region(memoryview(_FILLING * SOURCE.size), SOURCE)
            self._server = self._get().serve(Source(region, slots))
        return self._server.offer(grant)

    async def withdraw(self, ticket: bytes) -> None:
        """End a reader's admission."""
        if self._server is not None:
            self._server.withdraw(ticket)

    async def measure(self, way: Way, deadline_ms: int) -> Timing:
        """Pull on a thread; cancelling this stops it, and waits until it has."""
        stop = Stop(deadline_ms)
        backend = self._get()
        thread = _Thread(lambda: _pull_all(backend, way, stop))
        try:
            return await asyncio.shield(thread.result)
        except asyncio.CancelledError:
            stop.cancel()
            await asyncio.wait({thread.result})
            if not thread.result.cancelled():
                thread.result.exception()  # looked at, so that nobody misses it
            raise

    async def close(self) -> None:
        """Stop listening."""
        server, self._server = self._server, None
        if server is not None:
            await _Thread(server.close).result

    def _get(self) -> Backend:
        if self._backend is None:
            self._backend = tcp_backend(
                **{**self._options, "lanes": 1, "max_connections": _MAX_READERS}
            )
        return self._backend


class _Thread:
    """A call on a daemon thread: one that hangs must not keep the agent from ending."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self._call = call
        self.result: asyncio.Future[Any] = self._loop.create_future()
        threading.Thread(target=self._run, name="nearkv-probe", daemon=True).start()

    def _run(self) -> None:
        value, failure = None, None
        try:
            value = self._call()
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            failure = error
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._finish, value, failure)

    def _finish(self, value: object, failure: Exception | None) -> None:
        if self.result.done():
            return
        if failure is None:
            self.result.set_result(value)
        else:
            self.result.set_exception(failure)


def _pull_all(backend: Backend, way: Way, stop: Stop) -> Timing:
    # Filled, so that no page is touched for the first time while the clock runs.
    target = Region(memoryview(bytearray(_FILLING) * TARGET.size), TARGET)
    link = backend.connect(way.offer, target, stop)
    try:
        small = [link.pull(request(way, 1), stop) for _ in range(SMALL_PULLS)]
        quickest = min(report.seconds for report in small)
        began = time.monotonic()
        try:
            large = link.pull(request(way, BLOCKS), stop)
        except PullError as error:
            return _bound(error, quickest, began, link.path)
        return Timing(quickest, large.seconds, large.path)
    finally:
        link.close()


def _bound(error: PullError, small_seconds: float, began: float, path: Path) -> Timing:
    """Return what a large pull says that was too slow: small ones came, so there is a path."""
    if error.reason is not Reason.DEADLINE:
        raise error
    return Timing(small_seconds, time.monotonic() - began, path, is_bound=True)


class MoverCarrier:
    """Probes by libraries with native code, each end in a mover.

    It ends with the probe: one that waits for the next would take memory, and some of these
    libraries poll. Movers that are dropped count as those of an engine that is gone.
    """

    def __init__(self, pool: MoverPool) -> None:
        self._pool = pool
        self._kept: list[Memory] = []
        self._source: EngineMemory | None = None
        self._target: EngineMemory | None = None

    async def offer(self, backend: str, grant: Grant) -> bytes:
        """Admit a reader; raises ``TransferError``."""
        return await self._pool.offer(self._the_source(), backend, grant)

    async def withdraw(self, ticket: bytes) -> None:
        """End a reader's admission."""
        await self._pool.withdraw(_SOURCE_KEY, ticket)
        await self._pool.drop(_SOURCE_KEY)

    async def measure(self, way: Way, deadline_ms: int) -> Timing:
        """Pull in a mover; cancelling this cancels the pull there."""
        try:
            return await self._pull_all(way, deadline_ms)
        finally:
            await self._pool.drop(_TARGET_KEY)

    async def close(self) -> None:
        """Have no mover map the memory any more, and let go of it."""
        if self._kept:
            await self._pool.drop(_TARGET_KEY)
            await self._pool.drop(_SOURCE_KEY)
        self._source = self._target = None
        while self._kept:
            self._kept.pop().close()

    async def _pull_all(self, way: Way, deadline_ms: int) -> Timing:
        small = [await self._pull(way, 1, deadline_ms) for _ in range(SMALL_PULLS)]
        quickest = min(report.seconds for report in small)
        began = time.monotonic()
        try:
            large = await self._pull(way, BLOCKS, deadline_ms)
        except PullError as error:
            return _bound(error, quickest, began, small[0].path)
        return Timing(quickest, large.seconds, large.path)

    def _pull(self, way: Way, blocks: int, deadline_ms: int) -> Awaitable[PullReport]:
        job = PullJob(
            target=self._the_target(),
            request=request(way, blocks),
            deadline_ms=deadline_ms,
            backend=way.backend,
            offer=way.offer,
        )
        return self._pool.pull(job)

    def _the_source(self) -> EngineMemory:
        if self._source is None:
            memory, slots = self._keep(create_memory(SOURCE.size)), self._keep(create_slots(1))
            memory.view[:] = _FILLING * SOURCE.size
            _open_slot(slots.view)
            # The agent keeps descriptors only; movers map what they name.
            memory.view.release()
            slots.view.release()
            self._source = EngineMemory(_SOURCE_KEY, memory.fd, SOURCE, slots_fd=slots.fd, slots=1)
        return self._source

    def _the_target(self) -> EngineMemory:
        if self._target is None:
            memory = self._keep(create_memory(TARGET.size))
            memory.view.release()
            self._target = EngineMemory(_TARGET_KEY, memory.fd, TARGET)
        return self._target

    def _keep(self, memory: Memory) -> Memory:
        self._kept.append(memory)
        return memory


class Carriers:
    """The carrier of each backend. ``options`` are those of the backends, by name."""

    def __init__(self, pool: MoverPool, options: Mapping[str, Mapping[str, Any]]) -> None:
        self._in_agent = AgentCarrier(options.get("tcp", {}))
        self._in_movers = MoverCarrier(pool)

    def of(self, backend: str) -> Carrier:
        """Return what carries a probe over a backend."""
        return self._in_agent if backend == "tcp" else self._in_movers

    async def close(self) -> None:
        """Let go of everything."""
        await self._in_agent.close()
        await self._in_movers.close()


def new_grant(seconds: float) -> Grant:
    """Return the admission of a reader for so long."""
    return Grant(
        ticket=os.urandom(32),
        block_ids=GRANTED,
        fence=FENCE,
        expires_at_ms=monotonic_ms() + int(seconds * 1000),
    )


FENCE = Fence(_SLOT, 0)
"""The one slot of the bytes that are probed with: it is opened once, and never closed."""
