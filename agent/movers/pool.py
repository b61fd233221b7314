"""The movers of this agent: one per engine rank and purpose, started when first needed.

All methods run on the event loop's thread. Nothing here maps memory or loads a transport.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from nearkv.agent.movers.backends import STORE
from nearkv.agent.movers.handle import Cause, Mover, MoverPlan
from nearkv.agent.movers.jobs import EngineMemory, MoverCounts, MoverStatus, PullJob, PutJob
from nearkv.agent.movers.limits import DEFAULT_LIMITS, MoverLimits
from nearkv.agent.movers.messages import (
    AddSource,
    AddTarget,
    AskStore,
    Cancel,
    FromMover,
    MakeOffer,
    Offered,
    Probed,
    Pull,
    PullFinished,
    PutFinished,
    PutPrefix,
    RunProbe,
    Setup,
    StoreAnswered,
    StoreSubject,
    Withdraw,
)
from nearkv.agent.movers.process import MOVER_COMMAND
from nearkv.agent.movers.purposes import Kind, Purpose, purpose_of
from nearkv.agent.movers.roster import Call, Roster
from nearkv.agent.movers.undisturbed import undisturbed
from nearkv.transfer.backends.contract import Grant, Probe, PullReport
from nearkv.transfer.errors import PullError, Reason
from nearkv.transfer.messages import MOVER_GRACE_MS
from nearkv.transfer.store.contract import StoreReport

Answer = asyncio.Future[FromMover | None]


class MoverPool:
    """Starts, uses and ends movers.

    ``options`` are keyword arguments for backends, by name. ``command`` starts a mover.
    ``now`` is CLOCK_MONOTONIC in seconds: deadlines are compared with it.
    """

    def __init__(
        self,
        limits: MoverLimits = DEFAULT_LIMITS,
        *,
        options: Mapping[str, dict[str, Any]] | None = None,
        command: Sequence[str] = MOVER_COMMAND,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._now = now
        setup = Setup(
            threads=limits.threads, max_links=limits.max_links, options=dict(options or {})
        )
        self._roster = Roster(MoverPlan(command, setup, limits), now=now)
        self._probing = asyncio.Lock()

    @property
    def counts(self) -> MoverCounts:
        """Movers started and ended so far."""
        return self._roster.counts

    async def pull(self, job: PullJob) -> PullReport:
        """Bring blocks; raises :class:`TransferError` with the reason when they do not count.

        Cancelling this cancels the pull. However it ends, when it has ended nobody writes
        into the target blocks any more.
        """
        self._check_time(job)
        if job.source is not None and job.source.slots_fd is None:
            raise PullError(Reason.NO_SOURCE, "the source has no lease slots")
        mover = self._roster.get(purpose_of(Kind.PULL, job.target.key, job.backend))
        if mover.users >= self._limits.max_queued:
            raise PullError(Reason.BUSY, f"{mover.users} pulls wait for this engine's mover")
        keys = {job.target.key} | ({job.source.key} if job.source else set())
        with self._roster.using(mover, keys) as call:
            await mover.started(timeout_seconds=self._seconds_to(job.deadline_ms))
            self._check_time(job)
            if call.lost or not mover.ready:
                raise self._loss(mover, call, job)
            _introduce(mover, job.target, job.source)
            number, answer = mover.ask(
                lambda number: Pull(
                    id=number,
                    request=job.request,
                    deadline_ms=job.deadline_ms,
                    backend=job.backend,
                    source_key=job.source.key if job.source else "",
                    offer=job.offer,
                ),
                deadline_ms=job.deadline_ms,
            )
            finished = await self._pull_to_its_end(mover, number, answer, job)
            return self._report(finished, mover, call, job)

    async def offer(self, source: EngineMemory, backend: str, grant: Grant) -> bytes:
        """Admit a reader of another node; returns what its pull job needs as ``offer``.

        Raises :class:`TransferError`. The serving mover stays until its grants have expired
        or were withdrawn, and it was idle for a while.
        """
        if source.slots_fd is None:
            raise PullError(Reason.NO_SOURCE, "the source has no lease slots")
        mover = self._roster.get(purpose_of(Kind.SERVE, source.key, backend))
        with self._roster.using(mover, {source.key}) as call:
            await mover.started(timeout_seconds=self._limits.start_seconds)
            if call.lost or not mover.ready:
                raise self._loss(mover, call, None)
            _introduce(mover, None, source)
            _, answer = mover.ask(
                lambda number: MakeOffer(id=number, key=source.key, backend=backend, grant=grant)
            )
            try:
                await asyncio.wait({answer}, timeout=self._limits.offer_seconds)
            except asyncio.CancelledError:
                mover.send(Withdraw(ticket=grant.ticket))
                raise
            if not answer.done():
                self._roster.kill(mover, Cause.KILLED)
                await mover.ended()
                raise PullError(Reason.DEADLINE, f"the {backend} server did not start in time")
            return self._offered(answer.result(), mover, call, grant)

    async def withdraw(self, source_key: str, ticket: bytes) -> None:
        """End a grant; unknown ones are passed over."""
        for mover in self._roster.serving(source_key):
            if mover.grants.pop(ticket, None) is not None:
                mover.send(Withdraw(ticket=ticket))

    async def put(self, job: PutJob) -> StoreReport:
        """Store blocks; raises :class:`TransferError` where nothing was even tried.

        When the deadline passes, or this is cancelled, it is not waited for any longer: it
        reads under a fence, and the mover ends by itself.
        """
        if job.source.slots_fd is None:
            raise PullError(Reason.NO_SOURCE, "the source has no lease slots")
        finished = await self._errand(
            Purpose(Kind.STORE, job.source.key),
            job.source,
            lambda number: PutPrefix(
                id=number,
                key=job.source.key,
                subject=job.subject,
                block_ids=job.block_ids,
                fence=job.fence,
                deadline_ms=job.deadline_ms,
            ),
            job.deadline_ms,
        )
        if not isinstance(finished, PutFinished):
            raise PullError(Reason.INTERNAL, "the mover answered something else")
        if finished.report is None:
            raise PullError(Reason(finished.reason), finished.message)
        return finished.report

    async def ask_store(self, subject: StoreSubject, first_block: int, deadline_ms: int) -> int:
        """Return how many leading blocks the store has; 0 for none beyond ``first_block``.

        Raises :class:`TransferError` when it did not say so by the deadline.
        """
        answered = await self._errand(
            Purpose(Kind.STORE, ""),
            None,
            lambda number: AskStore(
                id=number, subject=subject, first_block=first_block, deadline_ms=deadline_ms
            ),
            deadline_ms,
        )
        if not isinstance(answered, StoreAnswered):
            raise PullError(Reason.INTERNAL, "the mover answered something else")
        if answered.reason:
            raise PullError(Reason(answered.reason), answered.message)
        return answered.blocks

    async def probe_store(self, deadline_ms: int) -> Probe:
        """Find out whether the store works, in the mover that will be asked.

        Raises :class:`TransferError` when it did not say so by the deadline.
        """
        probed = await self._errand(
            Purpose(Kind.STORE, ""),
            None,
            lambda number: RunProbe(id=number, backend=STORE),
            deadline_ms,
        )
        if not isinstance(probed, Probed):
            raise PullError(Reason.INTERNAL, "the mover answered something else")
        return probed.probe

    async def drop(self, key: str) -> None:
        """Have nobody map the memory of an engine rank that is gone.

        Its own movers are killed; those that only read from it unmap it, or are killed when
        they do not say at once that they have. Pulls that depend on it end as ``PEER_LOST``.
        """
        await undisturbed(self._roster.drop(key))

    async def close(self) -> None:
        """End all movers; pulls under way end as ``CANCELLED``, later ones as ``AGENT_LOST``."""
        await undisturbed(self._roster.close())

    async def probe(self, backend: str) -> Probe:
        """Find out in a throw-away mover whether a backend can be used here; never raises."""
        async with self._probing:
            try:
                return await self._probe(backend)
            except PullError as error:
                return Probe(name=backend, usable=False, detail=str(error))

    def describe(self) -> list[MoverStatus]:
        """Return the state of all movers, and of those that failed and were not replaced."""
        return self._roster.describe()

    # -- Pulls --------------------------------------------------------------------------

    async def _pull_to_its_end(
        self, mover: Mover, number: int, answer: Answer, job: PullJob
    ) -> PullFinished | None:
        """Wait for a pull and see to its end; ``None`` when its mover ended without a word."""
        try:
            await asyncio.wait({answer}, timeout=self._seconds_to(job.deadline_ms))
        except asyncio.CancelledError:
            seconds = min(
                self._limits.cancel_seconds, self._seconds_to(job.deadline_ms + MOVER_GRACE_MS)
            )
            await undisturbed(self._stop_pull(mover, number, answer, seconds, Cause.KILLED))
            raise
        if not answer.done():
            seconds = self._seconds_to(job.deadline_ms + MOVER_GRACE_MS)
            await undisturbed(self._stop_pull(mover, number, answer, seconds, Cause.OVERDUE))
        finished = answer.result() if answer.done() else None
        return finished if isinstance(finished, PullFinished) else None

    async def _stop_pull(
        self, mover: Mover, number: int, answer: Answer, seconds: float, cause: Cause
    ) -> None:
        """Cancel a pull; a mover that does not acknowledge it in time is killed and reaped."""
        try:
            mover.send(Cancel(id=number))
            await asyncio.wait({answer}, timeout=seconds)
            if not answer.done():
                self._roster.kill(mover, cause)
                await mover.ended()
        except asyncio.CancelledError:
            # The event loop itself ends: there is no time left to ask.
            self._roster.kill(mover, cause)
            raise

    def _report(
        self, finished: PullFinished | None, mover: Mover, call: Call, job: PullJob
    ) -> PullReport:
        """Return how a pull went; raises ``PullError`` when it did not go well."""
        if finished is None:
            raise self._loss(mover, call, job)
        if finished.report is not None:
            self._roster.history.succeeded(mover.purpose)
            return finished.report
        reason = Reason(finished.reason)
        if reason == Reason.CANCELLED:
            # Nobody but this pool cancels, and it does so when the time is up.
            raise PullError(Reason.DEADLINE, "the pull's deadline has passed")
        raise PullError(reason, finished.message)

    def _loss(self, mover: Mover, call: Call, job: PullJob | None) -> PullError:
        """Return why something failed whose mover has ended, or never came to start."""
        if call.lost or mover.cause == Cause.ENGINE_GONE:
            return PullError(Reason.PEER_LOST, "the engine is gone")
        if mover.cause == Cause.CLOSED:
            return PullError(Reason.CANCELLED, "the agent is shutting down")
        if job is not None and self._now_ms() >= job.deadline_ms:
            return PullError(Reason.DEADLINE, "the pull's deadline has passed")
        return PullError(Reason.MOVER_LOST, f"the mover died: {mover.exit_text or 'not started'}")

    # -- The store ----------------------------------------------------------------------

    async def _errand(
        self,
        purpose: Purpose,
        source: EngineMemory | None,
        make: Callable[[int], msgspec.Struct],
        deadline_ms: int,
    ) -> FromMover:
        """Ask a mover something, and wait for its answer until the deadline and no longer."""
        mover = self._roster.get(purpose)
        if mover.users >= self._limits.max_queued:
            raise PullError(Reason.BUSY, f"{mover.users} wait for the store already")
        with self._roster.using(mover, {source.key} if source else set()) as call:
            await mover.started(timeout_seconds=self._seconds_to(deadline_ms))
            if call.lost or not mover.ready:
                raise self._store_loss(mover, call, deadline_ms)
            _introduce(mover, None, source)
            _, answer = mover.ask(make, deadline_ms=deadline_ms)
            await asyncio.wait({answer}, timeout=self._seconds_to(deadline_ms))
            if not answer.done():
                seconds = self._limits.hanging_seconds
                loop = asyncio.get_running_loop()
                loop.call_later(seconds, self._kill_if_silent, mover, answer)
            found = answer.result() if answer.done() else None
            if found is None:
                raise self._store_loss(mover, call, deadline_ms)
            self._roster.history.succeeded(purpose)
            return found

    def _kill_if_silent(self, mover: Mover, answer: Answer) -> None:
        """Kill a mover that hangs: on a dead network disk, say, or because it was stopped."""
        if not answer.done():
            self._roster.kill(mover, Cause.KILLED)

    def _store_loss(self, mover: Mover, call: Call, deadline_ms: int) -> PullError:
        if mover.cause is None and not mover.ready:
            # No fault of the store's; the next one will find it ready.
            return PullError(Reason.BUSY, "the store's mover is still starting")
        if mover.cause is None and self._now_ms() >= deadline_ms:
            return PullError(Reason.DEADLINE, "the store did not answer in time")
        return self._loss(mover, call, None)

    # -- Serving and probing ------------------------------------------------------------

    def _offered(self, offered: FromMover | None, mover: Mover, call: Call, grant: Grant) -> bytes:
        if not isinstance(offered, Offered):
            raise self._loss(mover, call, None)
        if offered.reason:
            raise PullError(Reason(offered.reason), offered.message)
        mover.grants[grant.ticket] = grant.expires_at_ms
        self._roster.history.succeeded(mover.purpose)
        return offered.offer

    async def _probe(self, backend: str) -> Probe:
        mover = self._roster.start(Purpose(Kind.PROBE, backend))
        try:
            await mover.started(timeout_seconds=self._limits.start_seconds)
            _, answer = mover.ask(lambda number: RunProbe(id=number, backend=backend))
            await asyncio.wait({answer}, timeout=self._limits.probe_seconds)
            if not answer.done():
                mover.end(Cause.KILLED)
                raise PullError(Reason.DEADLINE, "the probe did not come to an end")
            probed = answer.result()
            if not isinstance(probed, Probed):
                raise self._loss(mover, Call(frozenset()), None)
            return probed.probe
        finally:
            mover.end(Cause.DONE)
            await undisturbed(mover.ended())

    def _check_time(self, job: PullJob) -> None:
        if self._now_ms() >= job.deadline_ms:
            raise PullError(Reason.DEADLINE, "the pull's deadline has passed")

    def _now_ms(self) -> int:
        return int(self._now() * 1000)

    def _seconds_to(self, deadline_ms: int) -> float:
        return max(0.0, deadline_ms / 1000 - self._now())


def _introduce(mover: Mover, target: EngineMemory | None, source: EngineMemory | None) -> None:
    """Hand a mover the descriptors that it does not have yet; raises ``PullError``."""
    try:
        if target is not None and not mover.has_target:
            mover.send(AddTarget(layout=target.layout, form=target.form), (target.fd,))
            mover.has_target = True
        if source is not None and source.key not in mover.sources:
            slots_fd = -1 if source.slots_fd is None else source.slots_fd
            mover.send(
                AddSource(
                    key=source.key,
                    layout=source.layout,
                    slots=source.slots,
                    form=source.form,
                    for_store=mover.kind is Kind.STORE,
                ),
                (source.fd, slots_fd),
            )
            mover.sources.add(source.key)
    except OSError as error:
        raise PullError(Reason.MEMORY, f"a descriptor is no use: {error.strerror}") from error
