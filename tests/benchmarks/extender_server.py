"""The extender over a cluster that is made up, for the benchmark.

The snapshot is replaced ten times a second, as often as the view publishes at most, so that
answers made from a snapshot just arrived are among those measured.
"""

import asyncio
import dataclasses
import sys
import time

from aiohttp import web
from aiohttp.typedefs import Handler

from nearkv.extender.app import TRANSPORT, build_app
from nearkv.extender.model import Snapshot
from nearkv.extender.settings import ExtenderSettings
from nearkv.extender.view.cluster import ViewStats
from nearkv.logs import configure_logging
from nearkv.serving import run, running
from nearkv.settings import Address
from nearkv.starting import spare_the_garbage_collector
from tests.extender.snapshots import make_cluster

_TIMINGS_PATH = "/bench/timings"
_PUBLISH_SECONDS = 0.1
_LEVELS = [
    {"name": name, "labels": [name], "setup_seconds": setup, "bytes_per_second": speed}
    for name, setup, speed in (
        ("rack", 0.001, 45e9),
        ("block", 0.0015, 35e9),
        ("zone", 0.003, 11e9),
        ("region", 0.005, 2.5e9),
    )
]


class MovingView:
    """A view whose snapshot is a new one all the time."""

    def __init__(self, count: int) -> None:
        self._now = asyncio.get_running_loop().time()
        self._snapshot = dataclasses.replace(
            (made := make_cluster(count)), reported_at=made.reported_at + self._now
        )

    def snapshot(self) -> Snapshot | None:
        """Return the newest snapshot."""
        return self._snapshot

    def stats(self) -> ViewStats | None:
        """Return nothing."""
        return None

    async def wait_until_synced(self) -> None:
        """Return at once."""

    async def run(self) -> None:
        """Publish as the view does."""
        while True:
            await asyncio.sleep(_PUBLISH_SECONDS)
            self._snapshot = dataclasses.replace(
                self._snapshot,
                version=self._snapshot.version + 1,
                requested=self._snapshot.requested.copy(),
            )


class Timings:
    """Server-side time of each request: from its head to the last byte of its answer."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    @web.middleware
    async def measure(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Time a request."""
        began = time.perf_counter()
        try:
            return await handler(request)
        finally:
            if request.path != _TIMINGS_PATH:
                self._seconds.append(time.perf_counter() - began)

    async def take(self, _request: web.Request) -> web.Response:
        """Answer the times since the last call, in seconds."""
        taken, self._seconds = self._seconds, []
        return web.json_response(taken)


async def _serve(count: int) -> None:
    settings = ExtenderSettings.model_validate({"distance": {"levels": _LEVELS}})
    app = build_app(settings, view=MovingView(count))
    timings = Timings()
    app.middlewares.append(timings.measure)
    app.router.add_post(_TIMINGS_PATH, timings.take)
    spare_the_garbage_collector()
    async with running(app, Address("127.0.0.1", 0), transport=app[TRANSPORT]) as address:
        sys.stdout.write(address.url + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    configure_logging(component="extender", level="error")
    run(_serve(int(sys.argv[1])))
