"""Following all agents, as they come and go.

An agent that is not listed any more is not followed, but what it said stays: its engines serve
on while its pod is replaced. It is forgotten once another agent speaks for its node, or after a
while.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import aiohttp
import structlog

from nearkv.ingress.fleet import AgentView, Fleet
from nearkv.ingress.following import AgentFollower, FollowLimits

_SWEEP_SECONDS = 0.5
_AFTER_DEFECT_SECONDS = 5.0
_NOT_LISTED = "not listed any more"

log = structlog.get_logger(__name__)


class Followers:
    """Follows the agents that :meth:`follow` names; it may be called at any time."""

    def __init__(
        self,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        *,
        now: Callable[[], float],
        count_error: Callable[[str], None],
        limits: FollowLimits,
        keep_seconds: float,
    ) -> None:
        """Make followers; ``count_error`` takes the reason of each broken stream."""
        self._fleet = fleet
        self._session = session
        self._now = now
        self._count_error = count_error
        self._limits = limits
        self._keep_seconds = keep_seconds
        self._wanted: frozenset[str] = frozenset()
        self._tasks: dict[str, asyncio.Task[NoReturn]] = {}
        self._left_at: dict[str, float] = {}
        self._news = asyncio.Event()

    def follow(self, urls: Iterable[str]) -> None:
        """Follow these agents, and no others."""
        self._wanted = frozenset(urls)
        for url in self._wanted:
            self._fleet.add_agent(url).listed = True
        self._news.set()

    @property
    def listed(self) -> Sequence[AgentView]:
        """The agents that are to be followed, as far as they are known."""
        return [agent for agent in self._fleet.agents.values() if agent.listed]

    async def run(self) -> NoReturn:
        """Follow until cancelled."""
        try:
            while True:
                self._news.clear()
                await self._stop([url for url in self._tasks if url not in self._wanted])
                for url in sorted(self._wanted - self._tasks.keys()):
                    self._left_at.pop(url, None)
                    self._tasks[url] = asyncio.create_task(self._follow_one(url))
                self._forget()
                await self._wait_for_news()
        finally:
            await self._stop(list(self._tasks))

    async def _wait_for_news(self) -> None:
        waiting = asyncio.timeout(_SWEEP_SECONDS if self._left_at else None)
        try:
            async with waiting:
                await self._news.wait()
        except TimeoutError:
            pass

    async def _stop(self, urls: Iterable[str]) -> None:
        tasks = {url: self._tasks.pop(url) for url in urls}
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        for url in tasks:
            self._fleet.connection_lost(url, _NOT_LISTED)
            self._fleet.agents[url].listed = url in self._wanted
            self._left_at[url] = self._now()

    async def _follow_one(self, url: str) -> NoReturn:
        follower = AgentFollower(
            url,
            self._fleet,
            self._session,
            now=self._now,
            count_error=self._count_error,
            limits=self._limits,
        )
        while True:
            try:
                await follower.run()
            except Exception:  # a defect must not end the others
                log.exception("agent_follower_defect", agent=url)
                self._count_error("defect")
                self._fleet.connection_lost(url, "a defect of the ingress")
                self._fleet.agents[url].cursor = None
            await asyncio.sleep(_AFTER_DEFECT_SECONDS)

    def _forget(self) -> None:
        """Forget agents that left, where others speak for their node, or their time is up."""
        spoken_for = {agent.node for agent in self.listed if agent.synced and agent.node}
        for url, left_at in list(self._left_at.items()):
            agent = self._fleet.agents.get(url)
            is_replaced = agent is not None and agent.node in spoken_for
            if is_replaced or self._now() - left_at >= self._keep_seconds:
                del self._left_at[url]
                self._fleet.forget_agent(url)
                log.info("agent_forgotten", agent=url, replaced=is_replaced)
