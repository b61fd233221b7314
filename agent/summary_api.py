"""``GET /v1/summary``: the node's summary, held back until there is news (long poll)."""

import asyncio
from collections.abc import Callable

import msgspec
from aiohttp import web

from nearkv.agent.node_state import NodeState
from nearkv.agent.summary import HardwareReader, SummaryBuilder, SummarySequence, SummaryTiming
from nearkv.health import Readiness
from nearkv.node_summary import SUMMARY_PATH, NodeSummary

_LONGEST_WAIT_SECONDS = 600.0


class SummaryService:
    """Keeps the summary up to date while :meth:`run` runs, and serves it.

    ``max_waiting`` bounds the requests that are held back at once.
    """

    def __init__(  # noqa: PLR0913 (keyword-only, and two have a default)
        self,
        state: NodeState,
        readiness: Readiness,
        *,
        node: str,
        timing: SummaryTiming,
        hardware: HardwareReader,
        max_waiting: int = 64,
        count: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Make a service; ``count`` takes the outcome of each request."""
        self._count = count
        self._state = state
        self._readiness = readiness
        self._timing = timing
        self._hardware = hardware
        self._max_waiting = max_waiting
        self._builder = SummaryBuilder(state, node=node, interval_seconds=timing.interval_seconds)
        self._sequence = SummarySequence(timing)
        self._news = asyncio.Event()
        self.waiting = 0

    def add_routes(self, app: web.Application) -> None:
        """Add the route to an application."""
        app.router.add_get(SUMMARY_PATH, self.summary)

    def refresh(self) -> NodeSummary:
        """Make the summary anew, wake who waits if it is news, and return it.

        What has not moved enough to be news goes under the number of the last news: whoever asks
        gets the newest figures, but nobody is woken for them.
        """
        built = self._builder.build(self._hardware())
        if self._sequence.offer(built, self._state.now()):
            news, self._news = self._news, asyncio.Event()
            news.set()
        return msgspec.structs.replace(built, seq=self._sequence.seq)

    async def run(self) -> None:
        """Refresh until cancelled."""
        while True:
            self.refresh()
            await asyncio.sleep(self._timing.interval_seconds)

    async def summary(self, request: web.Request) -> web.Response:
        """Answer the summary, or 304 if none after ``?after=`` comes in time.

        ``?wait_seconds=`` is how long to hold the request back.
        """
        known = request.query.get("after") or request.headers.get("If-None-Match", "").strip('"')
        wait_seconds = _wait_seconds(request)
        current = self.refresh()
        if known == _cursor(current) and wait_seconds:
            await self._wait(wait_seconds)
            current = self.refresh()
        headers = {"ETag": f'"{_cursor(current)}"', "Cache-Control": "no-store"}
        if known == _cursor(current):
            self._count("not_modified")
            return web.Response(status=304, headers=headers)
        self._count("answered")
        return web.Response(
            body=msgspec.json.encode(current), content_type="application/json", headers=headers
        )

    async def _wait(self, wait_seconds: float) -> None:
        """Return when there is news, when the time is up, or when the agent is to stop."""
        if self.waiting >= self._max_waiting:
            self._count("too_many_waiting")
            raise web.HTTPServiceUnavailable(
                text=f"too many requests are waiting (limit {self._max_waiting})",
                headers={"Retry-After": "5"},
            )
        self.waiting += 1
        waits = [
            asyncio.create_task(self._news.wait()),
            asyncio.create_task(self._readiness.wait_until_draining()),
        ]
        try:
            await asyncio.wait(waits, timeout=wait_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.waiting -= 1
            for task in waits:
                task.cancel()


def _cursor(summary: NodeSummary) -> str:
    return f"{summary.boot}:{summary.seq}"


def _wait_seconds(request: web.Request) -> float:
    text = request.query.get("wait_seconds", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _LONGEST_WAIT_SECONDS:
        raise web.HTTPBadRequest(
            text=f"wait_seconds: expected 0 to {_LONGEST_WAIT_SECONDS:g}, got {text[:80]!r}"
        )
    return seconds
