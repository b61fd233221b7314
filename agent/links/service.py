"""The node's links for the rest of the agent: run it, ask it."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from nearkv.agent.links.describing import describe_links, list_link_problems
from nearkv.agent.links.following import LinkWatch
from nearkv.agent.links.judging import RdmaVerdict
from nearkv.agent.links.settings import LinkSettings
from nearkv.health import Readiness
from nearkv.supervising import Job, supervised

_CHECK = "links"


class LinkService:
    """Reads links while :meth:`running`; use it on the event loop's thread only."""

    def __init__(self, settings: LinkSettings, *, now: Callable[[], float]) -> None:
        self._settings = settings
        self.watch = LinkWatch(settings, now=now)

    @property
    def rdma(self) -> RdmaVerdict:
        """Whether KV can move by RDMA, and why or why not."""
        if not self._settings.enabled:
            return RdmaVerdict(usable=None, reason="links.enabled is off")
        return self.watch.rdma

    def adapter_of(self, gpu: str) -> str | None:
        """Return the adapter that a GPU's KV should leave by, given its PCI address."""
        pairs = {pair.gpu: pair.adapter for pair in self.watch.affinities}
        return pairs.get(gpu)

    @asynccontextmanager
    async def running(self, readiness: Readiness) -> AsyncIterator[None]:
        """Read while in the block; the agent's readiness does not depend on links."""
        jobs = [Job(_CHECK, self.watch.run)] if self._settings.enabled else []
        async with supervised(jobs, readiness, check=_CHECK):
            yield

    def describe(self) -> dict[str, Any]:
        """Return the section of the status, as plain JSON types; unknown values are null."""
        return {"enabled": self._settings.enabled, **describe_links(self.watch, self.rdma)}

    def problems(self) -> list[str]:
        """Return what is wrong with links, a line for each; no RDMA is no problem."""
        return list_link_problems(self.watch)
