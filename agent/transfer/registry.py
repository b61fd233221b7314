"""Who is registered: engines by id, each with one scheduler and a worker per rank (pure).

An engine is *complete*, and only then can move KV, while its scheduler and all its workers are
registered. Descriptors are numbers here: those that must be closed come back from the calls,
and the shell closes them once no mover needs them any more.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from nearkv.agent.movers.jobs import EngineMemory
from nearkv.agent.movers.messages import HOST_MEMORY, MemoryForm
from nearkv.agent.transfer.compatibility import digest_compatibility
from nearkv.agent.transfer.leasing import EngineLeases, LeaseLimits
from nearkv.agent.transfer.memory_forms import read_form
from nearkv.transfer.errors import LayoutError, Reason, TransferError
from nearkv.transfer.layout import KvMemory
from nearkv.transfer.manifest import Compatibility
from nearkv.transfer.messages import PROTOCOL, MemoryMap, RegisterScheduler, RegisterWorker

MAX_SLOTS = 1 << 20
_MAX_NAME_LENGTH = 512
_MAX_RANKS = 64
_MAX_ENGINES = 256
_REMEMBERED_EPOCHS = 1024


class Owner(Protocol):
    """What a registration lives as long as: its connection."""

    def send(self, message: msgspec.Struct) -> None:
        """Send the engine a message; one that cannot be sent is lost."""
        ...

    def replaced(self) -> None:
        """End: something newer has taken the place."""
        ...


@dataclass(frozen=True, slots=True)
class Worker:
    """One rank of an engine, with the descriptor of its KV memory."""

    owner: Owner
    fd: int
    layout: KvMemory
    compatibility: Compatibility
    form: MemoryForm = HOST_MEMORY


@dataclass(frozen=True, slots=True)
class Scheduler:
    """An engine's scheduler, with the descriptor of its lease slots and its leases."""

    owner: Owner
    slots_fd: int
    slots: int
    leases: EngineLeases


@dataclass(slots=True, eq=False)
class Registration:
    """One boot of one engine; ``memories`` by rank are there while it is complete."""

    engine: str
    epoch: str
    tenant: str = ""
    workers: dict[int, Worker] = field(default_factory=dict)
    scheduler: Scheduler | None = None
    memories: dict[int, EngineMemory] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Tell whether the engine can move KV."""
        return bool(self.memories)

    @property
    def compatibility(self) -> Compatibility:
        """What the engine is, as its first rank; there is one while it is complete."""
        return self.workers[0].compatibility

    @property
    def ranks(self) -> int:
        """How many workers the engine has; 0 while none has registered."""
        first = next(iter(self.workers.values()), None)
        return 0 if first is None else first.compatibility.parallelism.tp_size


@dataclass(slots=True)
class Departure:
    """What left the registry, for the shell to clear away, in this order.

    Pulls of ``memories`` must end and movers let go of them, then ``fds`` may be closed.
    ``leases`` went with the scheduler; ``owners`` are connections that were replaced.
    """

    registration: Registration
    memories: list[EngineMemory] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    owners: list[Owner] = field(default_factory=list)
    leases: EngineLeases | None = None


class Registry:
    """All engines that registered with this agent."""

    def __init__(self, limits: LeaseLimits) -> None:
        self.engines: dict[str, Registration] = {}
        self._limits = limits
        self._replaced: deque[tuple[str, str]] = deque(maxlen=_REMEMBERED_EPOCHS)
        self._serial = 0

    def add_worker(self, message: RegisterWorker, fd: int, owner: Owner) -> list[Departure]:
        """Take a worker's registration, and with it ``fd``; returns what it replaces.

        Raises a :class:`TransferError` with the reason when it cannot be; then nothing has
        changed and ``fd`` is the caller's still.
        """
        _check_names(message.protocol, message.engine, message.epoch, message.tenant)
        form = read_form(message)
        layout = _read_layout(message.memory)
        _check_compatibility(message.compatibility, layout)
        self._check_against_known(message)
        registration, departures = self._boot_of(message.engine, message.epoch)
        rank = message.compatibility.parallelism.tp_rank
        replaced = registration.workers.pop(rank, None)
        if replaced is not None:
            departure = _suspend(registration)
            departure.fds.append(replaced.fd)
            departure.owners.append(replaced.owner)
            departures.append(departure)
        registration.tenant = message.tenant
        registration.workers[rank] = Worker(owner, fd, layout, message.compatibility, form)
        self._complete(registration)
        return departures

    def add_scheduler(self, message: RegisterScheduler, fd: int, owner: Owner) -> list[Departure]:
        """Take a scheduler's registration, and with it ``fd``; as :meth:`add_worker`."""
        _check_names(message.protocol, message.engine, message.epoch)
        if not 0 < message.slots <= MAX_SLOTS:
            raise TransferError(Reason.RANGE, f"slots: {message.slots} is not in 1..{MAX_SLOTS}")
        registration, departures = self._boot_of(message.engine, message.epoch)
        replaced = registration.scheduler
        if replaced is not None:
            departures.append(_drop_scheduler(registration, replaced))
            departures[-1].owners.append(replaced.owner)
        leases = EngineLeases(
            message.engine, message.epoch, slots=message.slots, limits=self._limits
        )
        registration.scheduler = Scheduler(owner, fd, message.slots, leases)
        self._complete(registration)
        return departures

    def remove(self, owner: Owner) -> Departure | None:
        """End what was registered on a connection; ``None`` when nothing is any more."""
        for registration in self.engines.values():
            departure = _leave(registration, owner)
            if departure is not None:
                if not registration.workers and registration.scheduler is None:
                    del self.engines[registration.engine]
                return departure
        return None

    def find(self, engine: str, epoch: str) -> Registration:
        """Return a complete engine; raises :class:`TransferError` with the reason."""
        registration = self.engines.get(engine)
        if registration is None:
            raise TransferError(Reason.NO_SOURCE, f"engine {engine!r} is not registered here")
        if registration.epoch != epoch:
            raise TransferError(Reason.EPOCH, f"epoch: engine {engine!r} has started anew")
        if not registration.is_complete:
            raise TransferError(Reason.NO_SOURCE, f"engine {engine!r} is not complete")
        return registration

    def _check_against_known(self, message: RegisterWorker) -> None:
        """Make sure that all ranks of one boot are of one kind."""
        known = self.engines.get(message.engine)
        if known is None or known.epoch != message.epoch or not known.workers:
            return
        other = next(iter(known.workers.values())).compatibility
        if digest_compatibility(other) != digest_compatibility(message.compatibility):
            raise TransferError(Reason.TOPOLOGY, "compatibility: another rank's differs")
        if known.tenant != message.tenant:
            raise TransferError(Reason.TENANT, "tenant: another rank's differs")

    def _boot_of(self, engine: str, epoch: str) -> tuple[Registration, list[Departure]]:
        """Return the registration of a boot; an older boot's goes."""
        known = self.engines.get(engine)
        if known is not None and known.epoch == epoch:
            return known, []
        if (engine, epoch) in self._replaced:
            raise TransferError(Reason.EPOCH, f"epoch: a newer boot of {engine!r} is registered")
        if known is None and len(self.engines) >= _MAX_ENGINES:
            raise TransferError(Reason.BUSY, f"{_MAX_ENGINES} engines are registered already")
        departures = []
        if known is not None:
            self._replaced.append((engine, known.epoch))
            departures.append(_drop(known))
        registration = self.engines[engine] = Registration(engine, epoch)
        return registration, departures

    def _complete(self, registration: Registration) -> None:
        """Give every rank its memory's name once all have come; a name is never used twice."""
        scheduler = registration.scheduler
        if scheduler is None or len(registration.workers) != registration.ranks:
            return
        self._serial += 1
        registration.memories = {
            rank: EngineMemory(
                key=f"{registration.engine}:{registration.epoch}:{rank}:{self._serial}",
                fd=worker.fd,
                layout=worker.layout,
                slots_fd=scheduler.slots_fd,
                slots=scheduler.slots,
                form=worker.form,
            )
            for rank, worker in registration.workers.items()
        }


def _check_names(protocol: int, engine: str, epoch: str, tenant: str = "") -> None:
    if protocol != PROTOCOL:
        raise TransferError(Reason.VERSION, f"protocol: {protocol}, the agent speaks {PROTOCOL}")
    for name, text in (("engine", engine), ("epoch", epoch)):
        if not text:
            raise TransferError(Reason.MALFORMED, f"{name}: is empty")
    if max(map(len, (engine, epoch, tenant))) > _MAX_NAME_LENGTH:
        raise TransferError(
            Reason.MALFORMED, f"engine, epoch, tenant: at most {_MAX_NAME_LENGTH} characters"
        )


def _read_layout(memory: MemoryMap) -> KvMemory:
    return KvMemory(**msgspec.structs.asdict(memory))


def _check_compatibility(compatibility: Compatibility, memory: KvMemory) -> None:
    shares, layout = compatibility.parallelism, compatibility.layout
    if (shares.pp_size, shares.pp_rank) != (1, 0):
        raise TransferError(Reason.TOPOLOGY, "pp_size: pipeline stages are not supported")
    if not (0 < shares.tp_size <= _MAX_RANKS and 0 <= shares.tp_rank < shares.tp_size):
        raise TransferError(
            Reason.TOPOLOGY, f"tp_rank: {shares.tp_rank} of {shares.tp_size} cannot be"
        )
    if layout.block_size <= 0:
        raise LayoutError("block_size: must be positive")
    for name in ("layers", "block_bytes"):
        told, real = getattr(layout, name), getattr(memory, name)
        if told != real:
            raise LayoutError(f"{name}: compatibility says {told}, the memory {real}")


def _suspend(registration: Registration) -> Departure:
    """Take away an engine's memories: it is not complete any more."""
    memories, registration.memories = registration.memories, {}
    return Departure(registration, memories=list(memories.values()))


def _drop_scheduler(registration: Registration, scheduler: Scheduler) -> Departure:
    departure = _suspend(registration)
    registration.scheduler = None
    departure.fds.append(scheduler.slots_fd)
    departure.leases = scheduler.leases
    return departure


def _drop(registration: Registration) -> Departure:
    """Take an engine apart; all its connections go."""
    departure = _suspend(registration)
    departure.owners = [worker.owner for worker in registration.workers.values()]
    departure.fds = [worker.fd for worker in registration.workers.values()]
    registration.workers = {}
    scheduler, registration.scheduler = registration.scheduler, None
    if scheduler is not None:
        departure.owners.append(scheduler.owner)
        departure.fds.append(scheduler.slots_fd)
        departure.leases = scheduler.leases
    return departure


def _leave(registration: Registration, owner: Owner) -> Departure | None:
    scheduler = registration.scheduler
    if scheduler is not None and scheduler.owner == owner:
        return _drop_scheduler(registration, scheduler)
    for rank, worker in registration.workers.items():
        if worker.owner == owner:
            del registration.workers[rank]
            departure = _suspend(registration)
            departure.fds.append(worker.fd)
            return departure
    return None
