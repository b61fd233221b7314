"""Watching one engine: who it is, how it does, what it holds, until cancelled."""

import asyncio
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import structlog
import zmq.asyncio

from nearkv.agent.discovering import EngineSpec
from nearkv.agent.engine_metrics import EngineReading, RankReading
from nearkv.agent.engine_tracking import EngineIdentity, EngineTracker
from nearkv.agent.errors import EngineProbeError
from nearkv.agent.event_sources import EventSource
from nearkv.agent.node_state import NodeState
from nearkv.agent.probing import EngineProbe, ModelCard
from nearkv.agent.subscribing import EventSubscription, Notifications

_FIRST_RETRY_SECONDS = 5.0
_LONGEST_RETRY_SECONDS = 300.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """Timing and bounds of watching an engine.

    A watch that failed begins anew after ``retry_seconds``, twice as long after each further
    time, up to five minutes. Every ``adapters_seconds`` the engine is asked which LoRA adapters
    it has: they come and go without a restart.
    """

    scrape_interval_seconds: float
    table_limit_bytes: int
    secret: bytes = b""
    adapters_seconds: float = 10.0
    retry_seconds: float = _FIRST_RETRY_SECONDS


@dataclass(frozen=True, slots=True)
class _Identity:
    """What an engine says of itself; another answer means another engine."""

    cards: list[ModelCard]
    version: str | None
    sources: Mapping[int, EventSource]


class EngineWatch:
    """Probes an engine, then scrapes it and follows the events of each of its ranks."""

    def __init__(
        self,
        spec: EngineSpec,
        probe: EngineProbe,
        state: NodeState,
        *,
        node: str,
        context: zmq.asyncio.Context,
        limits: WatchLimits,
    ) -> None:
        self._spec = spec
        self._probe = probe
        self._state = state
        self._node = node
        self._context = context
        self._limits = limits
        self._trackers: dict[int, EngineTracker] = {}
        self._subscriptions: dict[int, EventSubscription] = {}
        self._probe_now = asyncio.Event()
        self._looked = asyncio.Event()
        self._admitted = True
        self._draining = False
        self._log = log.bind(engine=spec.id, url=spec.url)

    async def run(self) -> None:
        """Watch until cancelled; an engine that does not answer is asked again for ever.

        An engine that comes back as something else (another model, version or event port)
        is watched anew from the start. So is one that made the watch fail, which is a defect, but
        must not take the engine out of the state for good.
        """
        failures = 0
        while True:
            try:
                identity = await self._until_identified()
                self._start_tracking(identity)
                await self._follow(identity)
            except Exception as error:  # noqa: BLE001 (a supervisor: see above)
                self._log.exception("engine_watch_failed")
                failures += 1
                why = f"watching it failed: {_first_of(error)!r}"[:500]
            else:
                why = ""
            finally:
                self._stop_tracking()
            if why:
                self._state.watch_failures += 1
                self._state.problems[self._spec.id] = why
                self._looked.set()
                await self._pause_after(failures)

    async def first_look(self) -> None:
        """Return once the engine was asked for the first time, whether it answered or not."""
        await self._looked.wait()

    def admit(self, *, admitted: bool) -> None:
        """Say whether the engine may get requests, apart from what it says itself."""
        self._admitted = admitted
        for tracker in self._trackers.values():
            tracker.admit(admitted=admitted)
        self._state.changed()

    def drain(self) -> None:
        """Say that the engine is about to go; there is no way back."""
        if self._draining:
            return
        self._draining = True
        for tracker in self._trackers.values():
            tracker.drain()
        self._state.changed()

    async def _until_identified(self) -> _Identity:
        while True:
            try:
                identity = await self._identify()
            except EngineProbeError as error:
                if self._spec.id not in self._state.problems:
                    self._log.warning("engine_not_answering", error=str(error))
                self._state.problems[self._spec.id] = str(error)
                self._looked.set()
                await self._pause()
            else:
                self._state.problems.pop(self._spec.id, None)
                return identity

    async def _identify(self) -> _Identity:
        return _Identity(
            cards=await self._probe.models(),
            version=await self._probe.version(),
            sources=await self._event_sources(),
        )

    async def _event_sources(self) -> Mapping[int, EventSource]:
        """Return where events come from: as configured, completed by what the engine says."""
        configured = self._spec.event_sources()
        if configured and all(source.replay_endpoint for source in configured.values()):
            return configured
        told = await self._probe.event_sources() or {}
        return {
            rank: replace(source, replay_endpoint=told[rank].replay_endpoint)
            if rank in told
            else source
            for rank, source in configured.items()
        } or told

    async def _follow(self, identity: _Identity) -> None:
        """Follow events and scrapes until the engine turns out to be another one."""
        async with asyncio.TaskGroup() as tasks:
            beside = [
                tasks.create_task(subscription.run())
                for subscription in self._subscriptions.values()
            ]
            beside.append(tasks.create_task(self._follow_adapters()))
            await self._scrape_while(identity)
            for task in beside:
                task.cancel()

    async def _follow_adapters(self) -> None:
        """Ask again and again which adapters there are; what cannot be asked stays as it was."""
        while True:
            jitter = random.uniform(0.9, 1.1)  # noqa: S311 (spreads load, guards nothing)
            await asyncio.sleep(self._limits.adapters_seconds * jitter)
            try:
                self._take_adapters(await self._probe.models())
            except EngineProbeError as error:
                self._log.debug("adapters_not_told", error=str(error))

    def _take_adapters(self, cards: Iterable[ModelCard]) -> None:
        adapters = adapters_in(cards)
        for tracker in self._trackers.values():
            tracker.serve_adapters(adapters)
        self._state.changed()

    def _start_tracking(self, known: _Identity) -> None:
        cards, version, sources = known.cards, known.version, known.sources
        ranks = sorted(sources) or list(range(self._spec.dp_size))
        for rank in ranks:
            identity = describe_engine(
                self._spec, cards, version, node=self._node, dp_rank=rank, ranks=len(ranks)
            )
            tracker = EngineTracker(
                identity,
                self._state.log,
                secret=self._limits.secret,
                table_limit_bytes=self._limits.table_limit_bytes,
            )
            self._trackers[rank] = tracker
            tracker.admit(admitted=self._admitted)
            if self._draining:
                tracker.drain()
            self._state.add(tracker)
            if rank in sources:
                self._subscriptions[rank] = EventSubscription(
                    sources[rank],
                    tracker,
                    context=self._context,
                    notify=Notifications(
                        now=self._state.now,
                        changed=self._state.changed,
                        suspect=self._probe_now.set,
                    ),
                )
        self._log.info(
            "engine_found", ranks=len(ranks), version=version, events=bool(self._subscriptions)
        )

    def _stop_tracking(self) -> None:
        for tracker in self._trackers.values():
            self._state.drop(tracker.identity.id)
        self._trackers.clear()
        self._subscriptions.clear()
        self._state.problems.pop(self._spec.id, None)

    async def _scrape_while(self, identity: _Identity) -> None:
        """Scrape until a restarted engine turns out to be another one."""
        new_process = False
        while True:
            try:
                new_process |= self._take_reading(await self._probe.reading())
                if new_process:
                    found = await self._identify()
                    new_process = False
                    if found != identity:
                        self._log.info("engine_replaced", version=found.version)
                        return
                    self._take_adapters(found.cards)
            except EngineProbeError as error:
                self._log.debug("scrape_failed", error=str(error))
                self._state.problems[self._spec.id] = str(error)
                for tracker in self._trackers.values():
                    tracker.on_unreachable(nobody_listens=error.nobody_listens)
            else:
                self._state.problems.pop(self._spec.id, None)
            self._state.changed()
            self._looked.set()
            await self._pause()

    def _take_reading(self, reading: EngineReading) -> bool:
        """Hand a scrape to the trackers; True when it shows a new process."""
        single = len(self._trackers) == 1
        any_restarted = False
        for rank, tracker in self._trackers.items():
            restarted = tracker.on_reading(
                rank_reading(reading.ranks, rank, single=single),
                start_time_seconds=reading.start_time_seconds,
                boot=self._state.boot,
                now=self._state.now(),
            )
            if restarted:
                any_restarted = True
                self._log.info("engine_restarted", incarnation=tracker.incarnation)
                if rank in self._subscriptions:
                    self._subscriptions[rank].request_replay()
        return any_restarted

    async def _pause_after(self, failures: int) -> None:
        longest = _LONGEST_RETRY_SECONDS
        seconds = min(self._limits.retry_seconds * 2.0 ** min(failures - 1, 16), longest)
        await asyncio.sleep(seconds * random.uniform(0.75, 1.25))  # noqa: S311 (spreads load)

    async def _pause(self) -> None:
        """Wait for the next scrape, or until the event stream hints at trouble."""
        jitter = random.uniform(0.9, 1.1)  # noqa: S311 (spreads load, guards nothing)
        try:
            async with asyncio.timeout(self._limits.scrape_interval_seconds * jitter):
                await self._probe_now.wait()
        except TimeoutError:
            return
        self._probe_now.clear()
        # The hint came with a connection that just broke: give the port a moment to close.
        await asyncio.sleep(min(0.05, self._limits.scrape_interval_seconds))


def _first_of(error: Exception) -> Exception:
    """Return what a group of errors began with."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def rank_reading(readings: Mapping[str, RankReading], rank: int, *, single: bool) -> RankReading:
    """Return the reading of a rank; an engine with one rank may label it anyhow."""
    if str(rank) in readings:
        return readings[str(rank)]
    return next(iter(readings.values())) if single and len(readings) == 1 else RankReading()


def adapters_in(cards: Iterable[ModelCard]) -> tuple[str, ...]:
    """Return the adapters that an engine lists: they have a parent."""
    return tuple(card.id for card in cards if card.parent is not None)


def describe_engine(
    spec: EngineSpec,
    cards: Iterable[ModelCard],
    version: str | None,
    *,
    node: str,
    dp_rank: int,
    ranks: int,
) -> EngineIdentity:
    """Put together what configuration and engine say; the configuration wins."""
    bases = [card for card in cards if card.parent is None]
    model = bases[0].id if bases else ""
    return EngineIdentity(
        id=spec.rank_id(dp_rank, ranks),
        url=spec.url,
        node=node,
        model=model,
        models=tuple(card.id for card in bases),
        adapters=adapters_in(cards),
        role=spec.role,
        group=spec.group or model,
        key_model=spec.key_model or model,
        max_model_len=bases[0].max_model_len if bases else None,
        engine_version=version,
        dp_rank=dp_rank if ranks > 1 else None,
        kv_bytes_per_token=spec.kv_bytes_per_token,
        api_key=spec.api_key,
    )
