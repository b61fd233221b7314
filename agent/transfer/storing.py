"""The shared store, as this node's engines use it: what is put there, asked of it, taken from it.

Puts begin with leases. A put never makes a lease last longer than its expiry: it reads under
the lease's fence, has a deadline of its own, and only a reader's word that it is done with the
lease waits for the put's end. Everything is bounded, and what is over a bound is skipped and
counted; movers do the work.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import structlog

from nearkv.agent.movers.backends import STORE
from nearkv.agent.movers.jobs import PullJob, PutJob
from nearkv.agent.movers.messages import StoreSubject
from nearkv.agent.movers.pool import MoverPool
from nearkv.agent.transfer.metrics import (
    DONE,
    FAILED,
    FOUND,
    NOTHING,
    PARTLY,
    SKIPPED,
    TransferMetrics,
)
from nearkv.agent.transfer.peer_messages import LeaseName
from nearkv.agent.transfer.pull_orders import PullOrder
from nearkv.agent.transfer.registry import Registration
from nearkv.agent.transfer.store_health import StoreHealth
from nearkv.block_keys import TOKEN_BYTES
from nearkv.transfer.backends.contract import Fence, PullRequest
from nearkv.transfer.errors import PullError, Reason, TransferError
from nearkv.transfer.manifest import Prefix, Source
from nearkv.transfer.messages import Lookup, OpenLease
from nearkv.transfer.store.contract import StoreReport

STORED = "stored"
_LEASED, _ALL = "leased", "all"
_FIGURES = (
    *("hits", "misses", "lookups_failed", "pulls", "pulls_failed"),
    *("puts", "puts_failed", "puts_skipped", "put_bytes"),
)
_PROBE_SECONDS = 5.0
_LOOK_SECONDS = 0.25
_LEAST_SECONDS = 0.05
"""Nobody is asked within less: a store that does not answer so soon may be well."""
_NO_FENCE = Fence(0, 0)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRules:
    """How the store is used; ``tier`` and ``url`` are for people."""

    node: str
    tier: str
    url: str
    write: Literal["leased", "all", "none"] = "leased"
    min_tokens: int = 512
    lookup_seconds: float = 0.5
    put_seconds: float = 5.0
    max_puts: int = 16
    allow_cross_tenant: bool = False


class StoreDesk:
    """Puts what leases hold into the store, and answers what is there.

    ``release`` ends a lease that is needed no more; it is called for leases that only the
    store needed, and for those whose reader was done before the store was.
    """

    def __init__(
        self,
        pool: MoverPool,
        rules: StoreRules,
        metrics: TransferMetrics,
        health: StoreHealth,
        *,
        release: Callable[[LeaseName, str], object],
    ) -> None:
        self._pool = pool
        self._rules = rules
        self._metrics = metrics
        self._health = health
        self._release = release
        # Leases that puts need, and what is to be said of them once they do not.
        self._needed: dict[LeaseName, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()

    # -- For people ----------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return the store as plain JSON types; ``usable`` is null until it was tried."""
        rules, health = self._rules, self._health
        return {
            "tier": rules.tier,
            "url": rules.url,
            "write": rules.write,
            "min_tokens": rules.min_tokens,
            "usable": health.usable,
            "why": health.why,
            "puts_under_way": len(self._needed),
            **{name: self._counts[name] for name in _FIGURES},
        }

    def problems(self) -> list[str]:
        """Return what is wrong with it, in words for people."""
        if self._health.usable is not False:
            return []
        return [f"transfer: the store {self._rules.url} does not work ({self._health.why})"]

    async def keep_trying(self) -> None:
        """Try the store until it works, at the beginning and whenever it has failed; for ever."""
        while True:
            try:
                if self._health.is_due(time.monotonic()):
                    await self.probe()
            except Exception:
                log.exception("store_probe_is_defect")
            await asyncio.sleep(_LOOK_SECONDS)

    async def probe(self) -> None:
        """Find out whether the store works; a small value goes there and back."""
        before = self._health.usable
        try:
            probe = await self._pool.probe_store(_in_ms(_PROBE_SECONDS))
        except TransferError as error:
            self._failed(error)
        else:
            if probe.usable:
                self._health.worked()
            else:
                self._failed(PullError(Reason.NO_PATH, probe.detail))
        health = self._health
        if health.usable is not before:
            log.info("store_tried", tier=self._rules.tier, usable=health.usable, why=health.why)

    # -- For readers ---------------------------------------------------------------------

    @property
    def lookup_seconds(self) -> float:
        """The longest that a lookup takes."""
        return self._rules.lookup_seconds

    async def find(
        self, reader: Registration, message: Lookup, *, seconds: float
    ) -> tuple[int, StoreSubject]:
        """Return how many leading blocks of a request the store has, and what of.

        Raises :class:`TransferError` (``NOT_STORED``, and why it could not be found out).
        """
        layout = reader.compatibility.layout
        subject = self._subject(reader, 0, message.token_ids, message.cache_salt, message.lora)
        num_tokens = len(message.token_ids) // TOKEN_BYTES
        if num_tokens < self._rules.min_tokens:
            raise PullError(Reason.NOT_STORED, f"{num_tokens} tokens: too few for the store")
        first_block = max(0, message.first_block)
        try:
            self._admit(seconds)
        except PullError as error:
            self._metrics.store_asked(SKIPPED, error.reason)
            raise
        deadline_ms = _in_ms(min(seconds, self._rules.lookup_seconds))
        try:
            blocks = await self._pool.ask_store(subject, first_block, deadline_ms)
        except TransferError as error:
            self._failed(error)
            self._counts["lookups_failed"] += 1
            self._metrics.store_asked(FAILED, error.reason)
            raise
        self._health.worked()
        self._counts["hits" if blocks else "misses"] += 1
        self._metrics.store_asked(FOUND if blocks else NOTHING)
        if not blocks:
            raise PullError(Reason.NOT_STORED, "the store has nothing of the request")
        return min(blocks, num_tokens // layout.block_size), subject

    def _admit(self, seconds: float) -> None:
        if seconds < _LEAST_SECONDS:
            raise PullError(Reason.DEADLINE, "no time is left for the store")
        self._health.check()

    def pull_job(self, order: PullOrder) -> PullJob:
        """Return an order as movers take it; raises :class:`PullError`."""
        subject = order.known.stored
        worker = order.reader.workers.get(order.rank)
        if subject is None or worker is None:
            raise PullError(Reason.UNKNOWN_LEASE, "it was not looked up in the store")
        offer = msgspec.structs.replace(subject, own=worker.compatibility)
        return PullJob(
            target=order.target,
            request=PullRequest(
                ticket=b"",
                first_block=order.first_block,
                source_blocks=(),
                source_layout=order.target.layout,
                target_blocks=order.target_blocks,
                fence=_NO_FENCE,
            ),
            deadline_ms=order.deadline_ms,
            backend=STORE,
            offer=msgspec.msgpack.encode(offer),
        )

    @contextmanager
    def pulling(self, order: PullOrder) -> Iterator[None]:
        """Learn from how a pull goes."""
        try:
            yield
        except TransferError as error:
            if order.reader.memories.get(order.rank) is order.target:
                self._failed(error)
            self._counts["pulls_failed"] += 1
            raise
        self._health.worked(moved=True)
        self._counts["pulls"] += 1

    # -- For leases ----------------------------------------------------------------------

    def lease_opened(self, registration: Registration, message: OpenLease) -> None:
        """Have a lease's blocks stored, where that is wanted and there is room for it."""
        name = LeaseName(engine=registration.engine, epoch=registration.epoch, lease=message.lease)
        wanted = (_ALL,) if message.for_store else (_ALL, _LEASED)
        try:
            if self._rules.write in wanted and self._is_long(message.prefix):
                self._begin(registration, message, name)
                return
        except TransferError as error:
            self._counts["puts_skipped"] += 1
            self._metrics.store_put(SKIPPED, error.reason)
        if message.for_store:
            self._release(name, "unused")

    def keeps(self, name: LeaseName, why: str) -> bool:
        """Tell whether a put needs a lease still; it is released at the put's end."""
        if name not in self._needed:
            return False
        self._needed[name] = why
        return True

    async def close(self) -> None:
        """End all puts, and let go of what only they needed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _is_long(self, prefix: Prefix) -> bool:
        return prefix.num_tokens >= self._rules.min_tokens

    def _begin(self, registration: Registration, message: OpenLease, name: LeaseName) -> None:
        if len(self._needed) >= self._rules.max_puts:
            raise PullError(Reason.BUSY, f"{self._rules.max_puts} prefixes are being stored")
        self._health.check()
        jobs = self._jobs(registration, message)
        self._needed[name] = STORED if message.for_store else ""
        task = asyncio.create_task(self._store(registration, jobs, name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _jobs(self, registration: Registration, message: OpenLease) -> list[PutJob]:
        """Return a put for each rank; raises :class:`PullError` when there are none yet."""
        if not registration.is_complete:
            raise PullError(Reason.NO_SOURCE, "not all workers of this engine have registered")
        prefix = message.prefix
        deadline_ms = min(_in_ms(self._rules.put_seconds), message.expires_at_ms)
        return [
            PutJob(
                source=memory,
                subject=self._subject(
                    registration, rank, prefix.token_ids, prefix.cache_salt, prefix.lora
                ),
                block_ids=message.block_ids,
                fence=Fence(message.slot, message.generation),
                deadline_ms=deadline_ms,
            )
            for rank, memory in sorted(registration.memories.items())
        ]

    async def _store(
        self, registration: Registration, jobs: Sequence[PutJob], name: LeaseName
    ) -> None:
        """Put all ranks' shares; releases the lease if nobody else needs it any more."""
        memories = [job.source for job in jobs]
        try:
            results = await asyncio.gather(
                *(self._pool.put(job) for job in jobs), return_exceptions=True
            )
            is_there = all(memory in registration.memories.values() for memory in memories)
            self._count([_report(result, is_there=is_there) for result in results])
        finally:
            why = self._needed.pop(name)
            if why:
                with contextlib.suppress(TransferError):
                    self._release(name, why)

    def _count(self, reports: Sequence[tuple[StoreReport | None, TransferError | None]]) -> None:
        size_bytes = sum(report.size_bytes for report, _ in reports if report is not None)
        error = next((error for _, error in reports if error is not None), None)
        self._counts["put_bytes"] += size_bytes
        if error is None:
            self._health.worked(moved=size_bytes > 0)
            self._counts["puts"] += 1
            self._metrics.store_put(DONE, size_bytes=size_bytes)
            return
        # A put that was cut short says nothing of the store: it may be large, the lease short.
        if error.reason is not Reason.DEADLINE:
            self._failed(error)
        self._counts["puts_failed"] += 1
        outcome = PARTLY if size_bytes else FAILED
        self._metrics.store_put(outcome, error.reason, size_bytes=size_bytes)
        log.info("store_put_failed", reason=error.reason, error=str(error))

    def _failed(self, error: TransferError) -> None:
        self._health.failed(error.reason, str(error), now=time.monotonic())

    def _subject(
        self, engine: Registration, rank: int, token_ids: bytes, cache_salt: str, lora: str
    ) -> StoreSubject:
        return StoreSubject(
            own=engine.workers[rank].compatibility,
            source=Source(engine=engine.engine, epoch=engine.epoch, node=self._rules.node),
            token_ids=token_ids,
            tenant="" if self._rules.allow_cross_tenant else engine.tenant,
            cache_salt=cache_salt,
            lora=lora,
        )


def _report(
    result: StoreReport | BaseException, *, is_there: bool
) -> tuple[StoreReport | None, TransferError | None]:
    """Return how one rank's put went, and why not all of it is stored."""
    if not is_there and isinstance(result, TransferError):
        return None, PullError(Reason.NO_SOURCE, "the engine is gone")
    if isinstance(result, TransferError):
        return None, result
    if isinstance(result, BaseException):
        log.error("store_put_is_defect", exc_info=result)
        return None, PullError(Reason.INTERNAL, repr(result))
    if result.reason is None:
        return result, None
    return result, PullError(result.reason, result.detail)


def _in_ms(seconds: float) -> int:
    return int((time.monotonic() + seconds) * 1000)
