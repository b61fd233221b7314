"""The own Node, for its labels: where it is, and how far a driver's upgrade has got."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from nearkv.kube.access import ApiAccess
from nearkv.kube.events import ChangeKind
from nearkv.kube.objects import NODES_PATH, ObjectMeta
from nearkv.kube.watching import Watch, WatchLimits

FollowLabel = Callable[[str | None], Awaitable[None]]
TakeLabels = Callable[[Mapping[str, str]], None]


class _LabelledNode(msgspec.Struct):
    """All that is read of a Node, which a kubelet changes every few minutes."""

    metadata: ObjectMeta


class OwnNode:
    """Tells each change of one label of one Node, ``None`` where it is not there, and all labels.

    What ``follow`` is told may take its time; the last value wins. Nothing is told while the API
    server cannot be reached. The labels of a Node that is gone stay: the node is where it was.
    """

    def __init__(  # noqa: PLR0913 (keyword-only but one)
        self,
        access: ApiAccess,
        *,
        node: str,
        label: str,
        follow: FollowLabel | None,
        take_labels: TakeLabels,
        limits: WatchLimits,
        count_failure: Callable[[str], None],
    ) -> None:
        self._label = label
        self._follow = follow
        self._take_labels = take_labels
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
            if self._follow is not None:
                await self._tell(self._follow)

    async def _tell(self, follow: FollowLabel) -> None:
        told: str | None = None
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._value != told:
                told = self._value
                await follow(told)

    def _on_change(self, kind: ChangeKind, node: _LabelledNode) -> None:
        self._take(None if kind == "DELETED" else node)

    def _take(self, node: _LabelledNode | None) -> None:
        labels = {} if node is None else node.metadata.labels or {}
        if node is not None:
            self._take_labels(labels)
        self._value = labels.get(self._label)
        self._changed.set()
