"""What the pool is asked, and what it tells (plain data)."""

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from nearkv.agent.movers.handle import Cause
from nearkv.agent.movers.messages import HOST_MEMORY, MemoryForm, StoreSubject
from nearkv.agent.movers.purposes import Kind
from nearkv.transfer.backends.contract import Fence, PullRequest
from nearkv.transfer.layout import KvMemory


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """What a registered engine rank gave; whoever registered it owns and closes the fds.

    ``key`` is unique among what is registered (engine, epoch and rank, say). The descriptors
    must stay open until :meth:`MoverPool.drop` was called with it. ``slots_fd`` holds
    ``slots`` lease slots; without them the memory can be pulled into, but not from. ``form``
    says what kind of memory ``fd`` is of.
    """

    key: str
    fd: int
    layout: KvMemory
    slots_fd: int | None = None
    slots: int = 0
    form: MemoryForm = HOST_MEMORY


@dataclass(frozen=True, slots=True, kw_only=True)
class PullJob:
    """A pull into ``target``; ``deadline_ms`` is absolute, on CLOCK_MONOTONIC.

    From the same node: ``source`` (and a backend that links mapped memories). From another:
    the name of the backend and the ``offer`` that its server made.
    """

    target: EngineMemory
    request: PullRequest
    deadline_ms: int
    source: EngineMemory | None = None
    backend: str = "shm"
    offer: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutJob:
    """A prefix to store, which lies in ``block_ids`` of ``source`` while the fence holds."""

    source: EngineMemory
    subject: StoreSubject
    block_ids: tuple[int, ...]
    fence: Fence
    deadline_ms: int


class MoverStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A mover for ``/v1/status``; without a ``pid`` none runs, but one failed before.

    ``key`` names the engine rank, or the backend of a probe. ``restarts`` and
    ``last_failure`` are those of all movers that served the same purpose.
    """

    kind: str
    key: str
    transport: str = ""
    pid: int | None = None
    state: str
    in_flight: int = 0
    grants: int = 0
    sources: int = 0
    age_seconds: float = 0.0
    restarts: int = 0
    last_failure: str = ""


@dataclass(slots=True)
class MoverCounts:
    """Movers started, by kind, and ended, by kind and cause; only ever counts up."""

    started: Counter[Kind] = field(default_factory=Counter)
    ended: Counter[tuple[Kind, Cause]] = field(default_factory=Counter)
