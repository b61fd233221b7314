"""Finding the other nodes' agents: a list of their Service's EndpointSlices, now and then.

Not a watch: while 5,000 agents are replaced each of them would get 5,000 changes. And not of
pods, which are twenty times as large. The more agents there are, the rarer each one asks, so that
the API server answers at most three such lists a second, from its cache.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from nearkv.agent.kubernetes.peer_slices import peers_of
from nearkv.agent.probes.neighbours import ZONE_LABEL, Neighbours, near_on_the_ring
from nearkv.agent.probes.peers import Peer
from nearkv.agent.probes.service import why_off
from nearkv.agent.settings import AgentSettings
from nearkv.health import Readiness
from nearkv.kube.access import ApiAccess
from nearkv.kube.endpoint_slices import SERVICE_LABEL, EndpointSlice, slices_path
from nearkv.kube.errors import ApiError
from nearkv.kube.events import EventReader
from nearkv.kube.listing import Lister, ListLimits, Selection
from nearkv.supervising import Job, supervised

LISTED, EMPTY, UNREADABLE = "listed", "empty", "unreadable"
"""Outcomes of a list, beside the troubles of requests."""

_CHECK = "peer_listing"
_KEPT_PER_CLASS = 4
_LONGEST_PAUSE_SECONDS = 1800.0
_MAX_DOUBLINGS = 8
_LIMITS = ListLimits(page_bytes=16 << 20, total_seconds=60.0)

log = structlog.get_logger(__name__)


class _NoPeersError(Exception):
    """A list that cannot be true: the own agent is not in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPace:
    """How seldom is listed: ``least_seconds`` apart, and more the more agents there are.

    All of them together ask once in ``seconds_per_agent``.
    """

    least_seconds: float = 60.0
    seconds_per_agent: float = 0.36

    def pause_seconds(self, agents: int, draw: float) -> float:
        """Return how long to wait after a list of so many agents; ``draw`` is from 0 to 1."""
        return max(self.least_seconds, agents * self.seconds_per_agent) * (0.75 + 0.5 * draw)

    def retry_seconds(self, failures: int, agents: int, draw: float) -> float:
        """Return how long to wait after so many failures in a row."""
        usual = max(self.least_seconds, agents * self.seconds_per_agent)
        doubled = usual * 2.0 ** min(failures - 1, _MAX_DOUBLINGS)
        return min(doubled, max(_LONGEST_PAUSE_SECONDS, usual)) * (0.75 + 0.5 * draw)


class PeerListing:
    """Lists while :meth:`running`, and tells ``neighbours``. What is known stays while it fails."""

    def __init__(
        self,
        settings: AgentSettings,
        neighbours: Neighbours,
        *,
        now: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        probes = settings.transfer.probes
        self._node = settings.node
        self._settings = probes
        self._scheme = "http" if settings.transfer.peer_tls is None else "https"
        self._neighbours = neighbours
        self._pace = ListPace(least_seconds=probes.refresh_seconds)
        self._now = now
        self._draw = draw
        self._agents = 0
        self._listed_at: float | None = None
        self._decoder = msgspec.json.Decoder(EndpointSlice)
        self.outcomes: Counter[str] = Counter()
        """Lists by outcome."""
        self.problem = ""
        self.is_on = bool(
            settings.kubernetes.is_on
            and settings.transfer.socket_dir is not None
            and probes.service
            and not why_off(settings.transfer)
        )

    @asynccontextmanager
    async def running(self, access: ApiAccess, readiness: Readiness) -> AsyncIterator[None]:
        """List while in the block."""
        jobs = [Job(_CHECK, lambda: self._run(access))] if self.is_on else []
        async with supervised(jobs, readiness, check=_CHECK):
            yield

    def describe(self) -> dict[str, Any]:
        """Return the section of the status, as plain JSON types."""
        at = self._listed_at
        return {
            "enabled": self.is_on,
            "agents": None if at is None else self._agents,
            "age_seconds": None if at is None else round(self._now() - at, 3),
        }

    def problems(self) -> list[str]:
        """Return why agents are not found; empty where they are."""
        return [f"other agents: {self.problem}"] if self.problem else []

    async def _run(self, access: ApiAccess) -> None:
        failures = 0
        pause_seconds = self._draw() * self._pace.least_seconds
        while True:
            await asyncio.sleep(pause_seconds)
            try:
                await self._list(access)
            except (ApiError, _NoPeersError) as error:
                failures += 1
                pause_seconds = self._failed(error, failures)
            else:
                failures = 0
                pause_seconds = self._pace.pause_seconds(self._agents, self._draw())

    async def _list(self, access: ApiAccess) -> None:
        own = self._settings
        slices: list[EndpointSlice] = []

        async def take(items: list[msgspec.Raw]) -> None:
            for raw in items:
                try:
                    slices.append(self._decoder.decode(raw))
                except msgspec.DecodeError:
                    self.outcomes[UNREADABLE] += 1
                await asyncio.sleep(0)

        selection = Selection(
            path=slices_path(own.namespace),
            label_selector=f"{SERVICE_LABEL}={own.service}",
            cached=True,
        )
        lister = Lister(access, selection, limits=_LIMITS, reader=EventReader())
        await lister.pages(take, at_least="0")
        self._take(peers_of(slices, port_name=own.port_name, scheme=self._scheme))

    def _take(self, peers: list[Peer]) -> None:
        own = next((peer for peer in peers if peer.node == self._node), None)
        if own is None:
            raise _NoPeersError(
                f"Service {self._settings.namespace}/{self._settings.service}: this agent is not "
                f"among its {len(peers)} endpoints with a port named {self._settings.port_name}"
            )
        zone = self._neighbours.labels.get(ZONE_LABEL) or own.labels.get(ZONE_LABEL, "")
        most = _KEPT_PER_CLASS * self._settings.peers_per_class
        kept = near_on_the_ring(peers, node=self._node, zone=zone, most=most)
        if self._listed_at is None:
            log.info("peers_listed", agents=len(peers), kept=len(kept))
        self._neighbours.peers = kept
        self._agents, self._listed_at = len(peers), self._now()
        self.outcomes[LISTED] += 1
        self.problem = ""

    def _failed(self, error: ApiError | _NoPeersError, failures: int) -> float:
        outcome, wished_seconds = EMPTY, 0.0
        if isinstance(error, ApiError):
            outcome, wished_seconds = str(error.trouble), error.retry_after_seconds or 0.0
        self.outcomes[outcome] += 1
        # Once for each trouble: an API server may be away for long.
        level = log.debug if self.problem == str(error) else log.warning
        self.problem = str(error)
        level("peers_not_listed", error=str(error))
        pause_seconds = self._pace.retry_seconds(failures, self._agents, self._draw())
        return max(pause_seconds, wished_seconds * (1.0 + self._draw() / 5))
