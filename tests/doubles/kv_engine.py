"""An engine's side of KV transfer without an engine: real memfds, the real socket protocol.

A :class:`FakeEngine` registers its workers and its scheduler with an agent, fills blocks with
bytes that can be told apart, opens leases on them, looks leases up and pulls from them::

    async with FakeEngine(socket_path, "p") as p, FakeEngine(socket_path, "d") as d:
        p.fill([3, 4])
        address = await p.open_lease(tokens, [3, 4])
        found = await d.lookup(address, tokens)
        done = await d.pull(address, [0, 1])
        assert d.read(0) == p.read(3)
"""

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np

from nearkv.transfer.lease import SlotTable
from nearkv.transfer.manifest import (
    BlockLayout,
    Compatibility,
    ModelIdentity,
    Numerics,
    Parallelism,
    Prefix,
)
from nearkv.transfer.memory import Memory, create_memory, create_slots
from nearkv.transfer.messages import (
    PROTOCOL,
    CancelPull,
    LeaseAddress,
    LeaseClosed,
    Lookup,
    LookupDone,
    MemoryMap,
    OpenLease,
    PullDone,
    Refused,
    Registered,
    RegisterScheduler,
    RegisterWorker,
    ReleaseLease,
    RenewLease,
    StartPull,
)
from tests.doubles.agent_line import ANSWER_SECONDS, Line


class RegistrationRefused(Exception):  # noqa: N818 (an answer, not an error of the double)
    """The agent does not take a registration."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(f"{refused.reason}: {refused.message}")
        self.reason = refused.reason
        self.message = refused.message


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """What an engine is; two engines with equal shapes can use each other's KV."""

    model: str = "tiny"
    config_hash: str = "c0ffee"
    kv_dtype: str = "bfloat16"
    layout: str = "LBNHC"
    layers: int = 2
    blocks: int = 64
    block_size: int = 4
    block_bytes: int = 1024
    tp_size: int = 1

    @property
    def memory(self) -> MemoryMap:
        """Where one rank's blocks lie: layer after layer."""
        layer_stride = self.blocks * self.block_bytes
        return MemoryMap(
            size=self.layers * layer_stride,
            layers=self.layers,
            blocks=self.blocks,
            layer_stride=layer_stride,
            block_stride=self.block_bytes,
            block_bytes=self.block_bytes,
        )

    def compatibility(self, rank: int = 0) -> Compatibility:
        """What another engine's must equal."""
        return Compatibility(
            model=ModelIdentity(name=self.model, config_hash=self.config_hash),
            numerics=Numerics(kv_dtype=self.kv_dtype),
            parallelism=Parallelism(tp_size=self.tp_size, tp_rank=rank),
            layout=BlockLayout(
                name=self.layout,
                block_size=self.block_size,
                layers=self.layers,
                layer_stride=0,
                block_stride=0,
                block_bytes=self.block_bytes,
            ),
        )


def pack(tokens: Sequence[int]) -> bytes:
    """Return token ids as they travel."""
    return np.asarray(tokens, dtype="<u4").tobytes()


def deadline_ms(seconds: float) -> int:
    """Return a deadline this far away."""
    return int((time.monotonic() + seconds) * 1000)


@dataclass(slots=True)
class _Held:
    slot: int
    generation: int
    message: OpenLease


@dataclass(slots=True)
class _Waiting:
    lookups: dict[int, asyncio.Future[LookupDone]] = field(default_factory=dict)
    pulls: dict[tuple[int, int], asyncio.Future[PullDone]] = field(default_factory=dict)


class FakeEngine:
    """One boot of an engine. ``obeys`` says whether it closes leases when it is told to."""

    def __init__(
        self,
        path: Path,
        engine: str = "p",
        *,
        epoch: str | None = None,
        shape: KvShape | None = None,
        tenant: str = "",
        slots: int = 64,
    ) -> None:
        self.engine = engine
        self.epoch = epoch or secrets.token_hex(4)
        self.shape = shape or KvShape()
        self.tenant = tenant
        self.path = path
        self.obeys = True
        self.greeting: Registered | None = None
        self.releases: list[ReleaseLease] = []
        self.renewals: list[RenewLease] = []
        self.memories: list[Memory] = [
            create_memory(self.shape.memory.size) for _ in range(self.shape.tp_size)
        ]
        self._slots_memory = create_slots(slots)
        self.slots = SlotTable(self._slots_memory.view)
        self._free = list(range(slots))
        self.leases: dict[str, _Held] = {}
        self.scheduler = Line(path)
        self.workers = [Line(path) for _ in range(self.shape.tp_size)]
        self._waiting = _Waiting()
        self._ids = itertools.count(1)
        self._last_lookups: dict[str, int] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Register."""
        try:
            await self.register()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """End all connections and let go of the memory."""
        await self.close()

    # -- Registration --------------------------------------------------------------------

    async def register(self) -> None:
        """Register all workers and the scheduler; raises :class:`RegistrationRefused`."""
        for rank in range(self.shape.tp_size):
            await self.register_worker(rank)
        await self.register_scheduler()

    async def register_worker(self, rank: int = 0) -> None:
        """Register one worker on its line."""
        line = self.workers[rank]
        line.connect()
        line.send(self.worker_hello(rank), [self.memories[rank].fd])
        await self._greeted(line)
        self._tasks.append(asyncio.create_task(self._serve_worker(rank, line)))

    async def register_scheduler(self) -> None:
        """Register the scheduler, with the leases still open."""
        self.scheduler.connect()
        self.scheduler.send(self.scheduler_hello(), [self._slots_memory.fd])
        await self._greeted(self.scheduler)
        self._tasks.append(asyncio.create_task(self._serve_scheduler(self.scheduler)))

    def worker_hello(self, rank: int = 0) -> RegisterWorker:
        """Return what a worker says first."""
        return RegisterWorker(
            protocol=PROTOCOL,
            engine=self.engine,
            epoch=self.epoch,
            compatibility=self.shape.compatibility(rank),
            memory=self.shape.memory,
            tenant=self.tenant,
        )

    def scheduler_hello(self) -> RegisterScheduler:
        """Return what a scheduler says first."""
        return RegisterScheduler(
            protocol=PROTOCOL,
            engine=self.engine,
            epoch=self.epoch,
            slots=len(self.slots),
            leases=tuple(held.message for held in self.leases.values()),
        )

    @property
    def slots_fd(self) -> int:
        """The descriptor of the lease slots."""
        return self._slots_memory.fd

    async def reconnect(self) -> None:
        """Register again on new connections, as an engine does whose agent was restarted."""
        await self.disconnect()
        self.scheduler = Line(self.path)
        self.workers = [Line(self.path) for _ in range(self.shape.tp_size)]
        await self.register()

    async def disconnect(self) -> None:
        """End all connections: to the agent, the engine has died."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for line in (self.scheduler, *self.workers):
            await line.close()

    async def close(self) -> None:
        """End all connections and let go of the memory."""
        await self.disconnect()
        for memory in (self._slots_memory, *self.memories):
            with contextlib.suppress(BufferError):  # a test may hold a part of it
                memory.close()

    async def _greeted(self, line: Line) -> None:
        answer = await line.next()
        if isinstance(answer, Refused):
            raise RegistrationRefused(answer)
        assert isinstance(answer, Registered)
        self.greeting = answer

    # -- Memory --------------------------------------------------------------------------

    def fill(self, blocks: Sequence[int], *, seed: int = 1) -> None:
        """Fill blocks, on all ranks and layers, each with bytes of its own."""
        for rank, layer, block in itertools.product(
            range(self.shape.tp_size), range(self.shape.layers), blocks
        ):
            noise = np.random.default_rng((seed, rank, layer, block))
            self._block(rank, layer, block)[:] = noise.bytes(self.shape.block_bytes)

    def read(self, block: int, *, rank: int = 0) -> bytes:
        """Return a block's bytes, layer after layer."""
        return b"".join(
            bytes(self._block(rank, layer, block)) for layer in range(self.shape.layers)
        )

    def _block(self, rank: int, layer: int, block: int) -> memoryview:
        memory = self.shape.memory
        start = layer * memory.layer_stride + block * memory.block_stride
        return self.memories[rank].view[start : start + memory.block_bytes]

    # -- Leases of its own ---------------------------------------------------------------

    def lease(
        self,
        tokens: Sequence[int],
        blocks: Sequence[int],
        *,
        ttl_seconds: float = 30.0,
        cache_salt: str = "",
        lora: str = "",
        for_store: bool = False,
    ) -> OpenLease:
        """Open a slot for blocks that hold the leading tokens; the agent is not told."""
        expires_at_ms = deadline_ms(ttl_seconds)
        slot = self._free.pop()
        generation = self.slots.open(slot, expiry_ms=expires_at_ms)
        used = list(tokens)[: len(blocks) * self.shape.block_size]
        message = OpenLease(
            lease=secrets.token_hex(8),
            slot=slot,
            generation=generation,
            expires_at_ms=expires_at_ms,
            block_ids=tuple(blocks),
            prefix=Prefix(
                token_ids=pack(used),
                num_tokens=len(used),
                block_keys=b"",
                cache_salt=cache_salt,
                lora=lora,
            ),
            for_store=for_store,
        )
        self.leases[message.lease] = _Held(slot, generation, message)
        return message

    async def open_lease(
        self,
        tokens: Sequence[int],
        blocks: Sequence[int],
        *,
        ttl_seconds: float = 30.0,
        cache_salt: str = "",
        lora: str = "",
        for_store: bool = False,
    ) -> LeaseAddress:
        """Open a lease and tell the agent; returns what P would answer."""
        message = self.lease(
            tokens,
            blocks,
            ttl_seconds=ttl_seconds,
            cache_salt=cache_salt,
            lora=lora,
            for_store=for_store,
        )
        self.scheduler.send(message)
        return self.address(message.lease)

    def address(self, lease: str) -> LeaseAddress:
        """Return how others find a lease of this engine."""
        assert self.greeting is not None
        return LeaseAddress(
            lease=lease,
            engine=self.engine,
            epoch=self.epoch,
            node=self.greeting.node,
            agent=self.greeting.agent,
        )

    def end_lease(self, lease: str) -> None:
        """Close a lease's slot: its blocks may be another's now."""
        held = self.leases.pop(lease)
        self.slots.close(held.slot)
        self._free.append(held.slot)

    # -- Leases of others ----------------------------------------------------------------

    async def lookup(
        self,
        address: LeaseAddress,
        tokens: Sequence[int],
        *,
        cache_salt: str = "",
        lora: str = "",
        seconds: float = 10.0,
        first_block: int = 0,
    ) -> LookupDone:
        """Ask what a lease holds for a request with these tokens."""
        number = next(self._ids)
        answer: asyncio.Future[LookupDone] = asyncio.get_running_loop().create_future()
        self._waiting.lookups[number] = answer
        self._last_lookups[address.lease] = number
        self.scheduler.send(
            Lookup(
                id=number,
                address=address,
                token_ids=pack(tokens),
                cache_salt=cache_salt,
                lora=lora,
                deadline_ms=deadline_ms(seconds),
                first_block=first_block,
            )
        )
        async with asyncio.timeout(ANSWER_SECONDS):
            return await answer

    def start_pull(
        self,
        address: LeaseAddress,
        blocks: Sequence[int],
        *,
        first_block: int = 0,
        rank: int = 0,
        seconds: float = 15.0,
        lookup: int | None = None,
    ) -> tuple[int, asyncio.Future[PullDone]]:
        """Begin a pull; returns its id, and its end to wait for.

        ``lookup`` is the id of the lookup that found the blocks; default: the lease's last.
        """
        number = next(self._ids)
        answer: asyncio.Future[PullDone] = asyncio.get_running_loop().create_future()
        self._waiting.pulls[rank, number] = answer
        self.workers[rank].send(
            StartPull(
                id=number,
                address=address,
                first_block=first_block,
                target_blocks=tuple(blocks),
                deadline_ms=deadline_ms(seconds),
                lookup=self._last_lookups.get(address.lease, 0) if lookup is None else lookup,
            )
        )
        return number, answer

    async def pull(
        self,
        address: LeaseAddress,
        blocks: Sequence[int],
        *,
        first_block: int = 0,
        rank: int = 0,
        seconds: float = 15.0,
        lookup: int | None = None,
    ) -> PullDone:
        """Pull blocks of a lease into blocks of one rank."""
        _, answer = self.start_pull(
            address, blocks, first_block=first_block, rank=rank, seconds=seconds, lookup=lookup
        )
        async with asyncio.timeout(ANSWER_SECONDS):
            return await answer

    def cancel_pull(self, number: int, *, rank: int = 0) -> None:
        """Ask for a pull to end."""
        self.workers[rank].send(CancelPull(id=number))

    def give_back(self, address: LeaseAddress, why: str = "pulled") -> None:
        """Say that a lease of another engine is not needed any more."""
        self.scheduler.send(LeaseClosed(lease=address.lease, why=why))

    # -- Listening -----------------------------------------------------------------------

    async def _serve_worker(self, rank: int, line: Line) -> None:
        while True:
            message = await line.messages.get()
            if isinstance(message, PullDone):
                answer = self._waiting.pulls.pop((rank, message.id), None)
                if answer is not None and not answer.done():
                    answer.set_result(message)

    async def _serve_scheduler(self, line: Line) -> None:
        while True:
            message = await line.messages.get()
            match message:
                case LookupDone():
                    answer = self._waiting.lookups.pop(message.id, None)
                    if answer is not None and not answer.done():
                        answer.set_result(message)
                case ReleaseLease():
                    self.releases.append(message)
                    if self.obeys:
                        self._obey(message)
                case RenewLease():
                    self.renewals.append(message)
                    held = self.leases.get(message.lease)
                    if held is not None:
                        self.slots.extend(
                            held.slot, held.generation, expiry_ms=message.expires_at_ms
                        )

    def _obey(self, message: ReleaseLease) -> None:
        if message.lease in self.leases:
            self.end_lease(message.lease)
        self.scheduler.send(LeaseClosed(lease=message.lease, why=message.why))
