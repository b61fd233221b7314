"""Reading links now and then, without ever holding up the agent."""

import asyncio
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from nearkv.agent.links.affinity import Affinity, list_adapters, pair_gpus, unknown_overrides
from nearkv.agent.links.counting import NET_COUNTERS, RDMA_COUNTERS, ErrorHistory
from nearkv.agent.links.judging import RdmaVerdict, judge_rdma
from nearkv.agent.links.model import NodeLinks
from nearkv.agent.links.reading import read_links
from nearkv.agent.links.settings import LinkSettings

_STALE_INTERVALS = 4
_SLOW = "slow"
_FAILED = "failed"

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class LinkCounts:
    """Readings since the agent's start, by outcome; failures by reason."""

    readings: int = 0
    failures: dict[str, int] = field(default_factory=lambda: {_SLOW: 0, _FAILED: 0})


class LinkWatch:
    """Keeps the latest reading of the node's links, and what follows from it."""

    def __init__(
        self,
        settings: LinkSettings,
        *,
        now: Callable[[], float],
        read: Callable[..., NodeLinks] = read_links,
    ) -> None:
        self._settings = settings
        self._now = now
        self._read = read
        self._is_reading = False
        self.errors = ErrorHistory(window_seconds=settings.error_window_seconds)
        self.counts = LinkCounts()
        self.latest: NodeLinks | None = None
        self.read_at: float | None = None
        self.affinities: list[Affinity] = []
        self.unknown_overrides: list[str] = []
        self._verdict = RdmaVerdict(usable=None, reason="not read yet")
        self.problem: str | None = None

    @property
    def age_seconds(self) -> float | None:
        """Age of the latest reading; ``None`` before the first."""
        return None if self.read_at is None else self._now() - self.read_at

    @property
    def rdma(self) -> RdmaVerdict:
        """Whether RDMA is usable, by the latest reading; not known where that is too old."""
        age_seconds = self.age_seconds
        limit = _STALE_INTERVALS * self._settings.interval_seconds + self._settings.timeout_seconds
        if age_seconds is not None and age_seconds > limit:
            return RdmaVerdict(usable=None, reason=f"stale: {self.problem or 'not read again'}")
        return self._verdict

    async def run(self) -> None:
        """Read until cancelled; a reading that fails is one that is tried again."""
        while True:
            await self.look()
            jitter = random.uniform(0.9, 1.1)  # noqa: S311 (spreads load, guards nothing)
            await asyncio.sleep(self._settings.interval_seconds * jitter)

    async def look(self) -> None:
        """Read once, within the deadline."""
        if self._is_reading:
            self._fail(_SLOW, "sysfs still does not answer")
            return
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                links = await self._read_in_thread()
        except TimeoutError:
            self._fail(_SLOW, f"sysfs took over {self._settings.timeout_seconds:g} s")
        except Exception as error:  # noqa: BLE001 (whatever a driver makes of it, the agent goes on)
            self._fail(_FAILED, f"reading links failed: {error!r}")
        else:
            self.take(links)

    def take(self, links: NodeLinks) -> None:
        """Take a reading: counters, nearness and the verdict follow from it."""
        settings = self._settings
        self.latest = links
        self.read_at = self._now()
        self.counts.readings += 1
        self.problem = None
        self._count_errors(links, self.read_at)
        adapters = list_adapters(links, settings.rdma_devices)
        self.affinities = pair_gpus(links.gpus, adapters, settings.adapter_of_gpu)
        self.unknown_overrides = unknown_overrides(links.gpus, adapters, settings.adapter_of_gpu)
        verdict = judge_rdma(links, settings.rdma_devices)
        if verdict != self._verdict:
            log.info("rdma_verdict", usable=verdict.usable, reason=verdict.reason)
        self._verdict = verdict

    def _count_errors(self, links: NodeLinks, now: float) -> None:
        for name, device, port in links.rdma_links():
            self.errors.observe(
                name,
                identity=device.identity,
                counters=port.counters,
                kinds=RDMA_COUNTERS,
                now=now,
            )
        for net in links.nets:
            self.errors.observe(
                net.name,
                identity=net.identity,
                counters=net.counters,
                kinds=NET_COUNTERS,
                now=now,
            )
        names = {name for name, _, _ in links.rdma_links()} | {net.name for net in links.nets}
        self.errors.keep_only(names)

    def _fail(self, reason: str, text: str) -> None:
        self.counts.failures[reason] += 1
        if self.problem is None:
            log.warning("links_not_read", reason=reason, error=text)
        self.problem = text

    async def _read_in_thread(self) -> NodeLinks:
        """Read in a thread of its own.

        One that hangs in a driver is waited for by nobody: not by the next reading, and, unlike
        a pool's, not by the agent's end.
        """
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[NodeLinks] = loop.create_future()

        def finish(links: NodeLinks | None, error: Exception | None) -> None:
            self._is_reading = False
            if outcome.done():
                return  # too late: nobody waits any more
            if links is not None:
                outcome.set_result(links)
            elif error is not None:
                outcome.set_exception(error)

        def read() -> None:
            links = failure = None
            try:
                links = self._read(
                    self._settings.root,
                    self._settings.device_dir,
                    max_devices=self._settings.max_devices,
                )
            except Exception as error:  # noqa: BLE001 (handed to the one who waits)
                failure = error
            with suppress(RuntimeError):  # the loop is closed: the agent has ended
                loop.call_soon_threadsafe(finish, links, failure)

        threading.Thread(target=read, name="links", daemon=True).start()
        self._is_reading = True  # finish() comes by the loop, so later than this
        return await outcome
