"""The own Node, for one of its labels: how far a driver's upgrade has got."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from nearkv.kube.access import ApiAccess
from nearkv.kube.events import ChangeKind
from nearkv.kube.objects import NODES_PATH, ObjectMeta
from nearkv.kube.watching import Watch, WatchLimits

FollowLabel = Callable[[str | None], Awaitable[None]]


class _LabelledNode(msgspec.Struct):
    """All that is read of a Node, which a kubelet changes every few minutes."""

    metadata: ObjectMeta


class OwnNode:
    """Tells each change of one label of one Node, ``None`` where it is not there.

    What is told may take its time; the last value wins. Nothing is told while the API server
    cannot be reached.
    """

    def __init__(
        self,
        access: ApiAccess,
        *,
        node: str,
        label: str,
        follow: FollowLabel,
        limits: WatchLimits,
        count_failure: Callable[[str], None],
    ) -> None:
        self._label = label
        self._follow = follow
        self._value: str | None = None
        self._changed = asyncio.Event()
        decoder = msgspec.json.Decoder(_LabelledNode)
        self.watch = Watch(
            access,
            NODES_PATH,
            decode=decoder.decode,
            on_replace=lambda nodes: self._take(nodes[0] if nodes else None),
            on_change=self._on_change,
            field_selector=f"metadata.name={node}",
            cached=True,
            limits=limits,
            count_failure=count_failure,
        )

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.watch.run())
            await self._tell()

    async def _tell(self) -> None:
        told: str | None = None
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._value != told:
                told = self._value
                await self._follow(told)

    def _on_change(self, kind: ChangeKind, node: _LabelledNode) -> None:
        self._take(None if kind == "DELETED" else node)

    def _take(self, node: _LabelledNode | None) -> None:
        self._value = None if node is None else (node.metadata.labels or {}).get(self._label)
        self._changed.set()
