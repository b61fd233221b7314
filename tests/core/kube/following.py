"""A watch on the double with what it has told so far; for tests."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from nearkv.kube.access import ApiAccess
from nearkv.kube.listing import ListLimits
from nearkv.kube.objects import NODES_PATH, Node
from nearkv.kube.resuming import PauseLimits
from nearkv.kube.watching import Watch, WatchLimits
from tests.doubles.api_server import ApiServerDouble

QUICK = WatchLimits(
    watch_seconds=60,
    silence_seconds=1.5,
    listing=ListLimits(page_objects=3, silence_seconds=1.5, page_seconds=3, total_seconds=8),
    pauses=PauseLimits(
        first_pause_seconds=0.01,
        longest_pause_seconds=0.05,
        relist_jitter_seconds=0.02,
        short_watch_seconds=0,
        quiet_watches_in_a_row=2,
    ),
)


class Followed:
    """Objects by name, every event, and how often all were replaced."""

    def __init__(self, api: ApiServerDouble) -> None:
        self.api = api
        self.objects: dict[str, Any] = {}
        self.events: list[tuple[str, str]] = []
        self.replaced: list[list[str]] = []
        self.counted: list[str] = []
        self.watch: Watch[Any]
        self.task: asyncio.Task[None]

    @property
    def names(self) -> set[str]:
        return set(self.objects)

    def on_replace(self, objects: list[Any]) -> None:
        self.replaced.append([item.name for item in objects])
        self.objects = {item.name: item for item in objects}

    def on_change(self, kind: str, item: Any) -> None:
        self.events.append((kind, item.name))
        if kind == "DELETED":
            self.objects.pop(item.name, None)
        else:
            self.objects[item.name] = item

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition; end at once when the watch has failed."""

        def holds() -> bool:
            if self.task.done():
                self.task.result()
            return condition()

        await self.api.wait_until(holds)

    async def until_in_step(self, kind: str = "Node") -> None:
        """Wait until everything is known as the API server has it, by version."""

        def holds() -> bool:
            theirs = {
                item["metadata"]["name"]: item["metadata"]["resourceVersion"]
                for item in self.api.all(kind)
            }
            ours = {name: item.metadata.resource_version for name, item in self.objects.items()}
            return ours == theirs

        await self.until(holds)


@asynccontextmanager
async def following(
    api: ApiServerDouble,
    path: str = NODES_PATH,
    kind: type = Node,
    *,
    access: ApiAccess | None = None,
    synced: bool = True,
    **options: Any,
) -> AsyncIterator[Followed]:
    """Follow a collection of the double, and wait until it is known and watched."""
    async with access or ApiAccess.plain(api.url) as opened:
        followed = Followed(api)
        options.setdefault("limits", QUICK)
        options.setdefault("decode", msgspec.json.Decoder(kind).decode)
        followed.watch = Watch(
            opened,
            path,
            on_replace=followed.on_replace,
            on_change=followed.on_change,
            count_failure=followed.counted.append,
            **options,
        )
        followed.task = asyncio.create_task(followed.watch.run())
        try:
            if synced:
                await followed.until(lambda: followed.watch.synced and api.open_watches > 0)
            yield followed
        finally:
            followed.task.cancel()
            await asyncio.gather(followed.task, return_exceptions=True)
