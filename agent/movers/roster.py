"""Which movers there are: starting, ending and counting them."""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from nearkv.agent.movers.handle import Cause, Mover, MoverPlan
from nearkv.agent.movers.history import Fate, History
from nearkv.agent.movers.jobs import MoverCounts, MoverStatus
from nearkv.agent.movers.messages import Forget, Forgotten
from nearkv.agent.movers.purposes import Kind, Purpose
from nearkv.transfer.errors import PullError, Reason

log = structlog.get_logger(__name__)

_FAILURES = frozenset({Cause.CRASHED, Cause.KILLED, Cause.OVERDUE})


@dataclass(slots=True, eq=False)
class Call:
    """Something under way that depends on these engine ranks; ``lost`` when one is gone."""

    keys: frozenset[str]
    lost: bool = False


class Roster:
    """The movers of a pool; ``now`` is CLOCK_MONOTONIC in seconds."""

    def __init__(self, plan: MoverPlan, *, now: Callable[[], float]) -> None:
        self.counts = MoverCounts()
        self.history = History(
            plan.limits.backoff_seconds,
            plan.limits.backoff_limit_seconds,
            lambda: random.uniform(0.5, 1.0),  # noqa: S311 - spreads load, guards nothing
        )
        self._plan = plan
        self._limits = plan.limits
        self._now = now
        self._movers: dict[Purpose, Mover] = {}
        self._alive: set[Mover] = set()
        self._calls: set[Call] = set()
        self._closed = False

    def find(self, purpose: Purpose) -> Mover | None:
        """Return the mover for a purpose that is not about to end, if there is one."""
        mover = self._movers.get(purpose)
        return None if mover is None or mover.cause is not None else mover

    def serving(self, key: str) -> list[Mover]:
        """Return the movers that serve an engine rank's memory."""
        return [mover for mover in self._alive if mover.key == key and mover.kind == Kind.SERVE]

    def get(self, purpose: Purpose) -> Mover:
        """Return the mover for a purpose, started if there is none; raises ``PullError``."""
        mover = self.find(purpose)
        if mover is not None and not self._closed:
            return mover
        wait_seconds = self.history.wait_seconds(purpose, now=self._now())
        if wait_seconds:
            raise PullError(
                Reason.MOVER_LOST, f"its movers keep dying: none is started for {wait_seconds:.1f}s"
            )
        self._make_room()
        mover = self._movers[purpose] = self.start(purpose)
        return mover

    def start(self, purpose: Purpose) -> Mover:
        """Start a mover for the caller alone; raises ``PullError``."""
        if self._closed:
            raise PullError(Reason.AGENT_LOST, "the agent is shutting down")
        try:
            mover = Mover(purpose, self._plan, on_exit=self._on_exit)
        except OSError as error:
            self.history.failed(purpose, str(error), now=self._now())
            log.exception("mover_not_started", **purpose.labels)
            raise PullError(Reason.MOVER_LOST, f"no mover can be started: {error}") from error
        self._alive.add(mover)
        self.counts.started[purpose.kind] += 1
        log.info("mover_started", mover=mover.pid, **purpose.labels)
        return mover

    @contextmanager
    def using(self, mover: Mover, keys: set[str]) -> Iterator[Call]:
        """Keep a mover from being idle; what depends on engines that go is told so."""
        call = Call(frozenset(keys))
        self._calls.add(call)
        mover.users += 1
        try:
            yield call
        finally:
            mover.users -= 1
            self._calls.discard(call)
            if not mover.users:
                self._look_again(mover)

    def kill(self, mover: Mover, cause: Cause) -> None:
        """Kill a mover at once; whoever comes next gets another."""
        if self._movers.get(mover.purpose) is mover:
            del self._movers[mover.purpose]
        mover.end(cause)

    async def drop(self, key: str) -> None:
        """Have nobody map an engine rank's memory; see ``MoverPool.drop``."""
        for call in self._calls:
            call.lost = call.lost or key in call.keys
        self.history.drop(key)
        doomed = [mover for mover in self._alive if mover.key == key and mover.kind != Kind.PROBE]
        readers = [mover for mover in self._alive if key in mover.sources and mover.key != key]
        for mover in doomed:
            self.kill(mover, Cause.ENGINE_GONE)
        await asyncio.gather(
            *(mover.ended() for mover in doomed),
            *(self._forget(mover, key) for mover in readers),
        )

    async def close(self) -> None:
        """End all movers; those in use at once, the others in good order."""
        self._closed = True
        ending = list(self._alive)
        for mover in ending:
            if mover.users:
                self.kill(mover, Cause.CLOSED)
            else:
                self._retire(mover, Cause.CLOSED)
        await asyncio.gather(*(mover.ended() for mover in ending))

    def describe(self) -> list[MoverStatus]:
        """Return the state of all movers, and of those that failed and were not replaced."""
        running = [self._status(mover) for mover in self._alive]
        purposes = {mover.purpose for mover in self._alive}
        failed = [
            MoverStatus(
                kind=purpose.kind,
                key=purpose.key,
                transport=purpose.transport,
                state="failed",
                restarts=fate.restarts,
                last_failure=fate.last_failure,
            )
            for purpose, fate in self.history.fates.items()
            if purpose not in purposes
        ]
        return sorted(running + failed, key=lambda status: (status.key, status.kind))

    def _make_room(self) -> None:
        """End an idle mover, if there are too many; raises when all are busy."""
        if len(self._movers) < self._limits.max_movers:
            return
        for mover in self._movers.values():
            if mover.idle(self._now_ms()):
                self._retire(mover, Cause.IDLE)
                return
        raise PullError(Reason.BUSY, f"all {self._limits.max_movers} movers are busy")

    def _retire(self, mover: Mover, cause: Cause) -> None:
        """End an unused mover in good order; whoever comes next gets another."""
        if self._movers.get(mover.purpose) is mover:
            del self._movers[mover.purpose]
        mover.quit(cause)

    def _on_exit(self, mover: Mover) -> None:
        self._alive.discard(mover)
        if self._movers.get(mover.purpose) is mover:
            del self._movers[mover.purpose]
        cause = mover.cause or Cause.CRASHED
        self.counts.ended[mover.kind, cause] += 1
        facts = {"mover": mover.pid, **mover.purpose.labels, "cause": cause.value}
        if cause not in _FAILURES:
            log.info("mover_ended", **facts)
            return
        log.warning("mover_lost", **facts, how=mover.exit_text)
        if mover.kind != Kind.PROBE:
            why = f"{cause.value}: {mover.exit_text}"
            self.history.failed(mover.purpose, why, now=self._now())

    def _look_again(self, mover: Mover) -> None:
        """End a mover later, if nobody has used it until then."""
        mover.idle_checks += 1
        asyncio.get_running_loop().call_later(
            self._limits.idle_seconds, self._end_if_idle, mover, mover.idle_checks
        )

    def _end_if_idle(self, mover: Mover, check: int) -> None:
        if mover.cause is not None or mover.users or check != mover.idle_checks:
            return
        if mover.idle(self._now_ms()):
            self._retire(mover, Cause.IDLE)
        else:
            self._look_again(mover)

    async def _forget(self, mover: Mover, key: str) -> None:
        mover.sources.discard(key)
        if mover.cause is None:
            _, answer = mover.ask(lambda number: Forget(id=number, key=key))
            await asyncio.wait({answer}, timeout=self._limits.forget_seconds)
            done = answer.result() if answer.done() else None
            if isinstance(done, Forgotten) and done.unmapped:
                return
        self.kill(mover, Cause.ENGINE_GONE)
        await mover.ended()

    def _status(self, mover: Mover) -> MoverStatus:
        fate = self.history.fates.get(mover.purpose, Fate())
        state = "ready" if mover.ready else "starting"
        return MoverStatus(
            kind=mover.kind.value,
            key=mover.key,
            transport=mover.purpose.transport,
            pid=mover.pid,
            state=state if mover.cause is None else "ending",
            in_flight=mover.in_flight,
            grants=len(mover.grants),
            sources=len(mover.sources),
            age_seconds=self._now() - mover.started_at,
            restarts=fate.restarts,
            last_failure=fate.last_failure,
        )

    def _now_ms(self) -> int:
        return int(self._now() * 1000)
