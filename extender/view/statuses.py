"""WorkerStatus objects as a stand-in for an agent that cannot be reached (pure).

They come rarely and are written for people and other tools too, so they are read tolerantly:
names in camelCase or snake_case, and a field that makes no sense is left out, not the others.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from nearkv.extender.view.summaries import SummaryRefusedError, check_summary
from nearkv.kube.objects import WorkerStatus
from nearkv.node_summary import DeviceSummary, GroupSummary, NodeSummary, PathSummary

_DEFAULT_INTERVAL_SECONDS = 300.0
_BOOT = "WorkerStatus"
_CAMEL = re.compile(r"(?<=[a-z0-9])([A-Z])")
_FIELDS: Mapping[str, Any] = MappingProxyType(
    {
        "devices": tuple[DeviceSummary, ...] | None,
        "groups": tuple[GroupSummary, ...],
        "paths": tuple[PathSummary, ...],
        "rdma": bool | None,
        "pods": tuple[str, ...] | None,
        "interval_seconds": float,
    }
)


@dataclass(frozen=True, slots=True)
class SeenStatus:
    """A WorkerStatus by its key; ``summary`` is ``None`` where its status says nothing usable."""

    key: tuple[str, str]
    summary: NodeSummary | None


def read_status(found: WorkerStatus) -> SeenStatus:
    """Return what a WorkerStatus says of its node; never raises for what it holds."""
    key = (found.namespace, found.name)
    try:
        status = _snake(msgspec.json.decode(found.status))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return SeenStatus(key, None)
    node = status.get("node") or status.get("node_name") if isinstance(status, dict) else None
    if not isinstance(node, str):
        return SeenStatus(key, None)
    fields: dict[str, Any] = {"interval_seconds": _DEFAULT_INTERVAL_SECONDS}
    for name, kind in _FIELDS.items():
        if name in status:
            try:
                fields[name] = msgspec.convert(status[name], kind, strict=False)
            except msgspec.ValidationError:
                continue
    summary = NodeSummary(node=node, boot=_BOOT, seq=0, **fields)
    try:
        check_summary(summary)
    except SummaryRefusedError:
        return SeenStatus(key, None)
    return SeenStatus(key, summary)


def _snake(value: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return JSON with the names of its fields in snake_case."""
    if isinstance(value, dict):
        return {_CAMEL.sub(r"_\1", name).lower(): _snake(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_snake(each) for each in value]
    return value


class StatusStore:
    """WorkerStatus objects, and the sum of those that speak of one node."""

    def __init__(self) -> None:
        self._statuses: dict[tuple[str, str], tuple[NodeSummary, float]] = {}
        self._keys_of: dict[str, set[tuple[str, str]]] = {}

    def __len__(self) -> int:
        return len(self._statuses)

    @property
    def nodes(self) -> Iterable[str]:
        """The nodes that are spoken of."""
        return self._keys_of.keys()

    def put(self, seen: SeenStatus, now: float) -> None:
        """Add or replace an object; one that says nothing usable is as good as gone."""
        self.drop(seen.key)
        if seen.summary is not None:
            self._statuses[seen.key] = (seen.summary, now)
            self._keys_of.setdefault(seen.summary.node, set()).add(seen.key)

    def drop(self, key: tuple[str, str]) -> None:
        """Forget an object."""
        known = self._statuses.pop(key, None)
        if known is not None:
            node = known[0].node
            self._keys_of[node].discard(key)
            if not self._keys_of[node]:
                del self._keys_of[node]

    def replace(self, statuses: Iterable[SeenStatus], now: float) -> None:
        """Take a complete list; what did not change keeps the time at which it was received."""
        listed = {seen.key: seen for seen in statuses}
        for key in [key for key in self._statuses if key not in listed]:
            self.drop(key)
        for key, seen in listed.items():
            known = self._statuses.get(key)
            if known is None or known[0] != seen.summary:
                self.put(seen, now)

    def of_node(self, node: str) -> tuple[NodeSummary, float] | None:
        """Return what all objects of a node say together, and when the oldest part came.

        Devices, RDMA and paths are the node's, so the newest object that has them counts.
        """
        keys = self._keys_of.get(node)
        if not keys:
            return None
        parts = sorted((self._statuses[key] for key in sorted(keys)), key=lambda part: -part[1])
        summaries = [summary for summary, _ in parts]
        with_devices = next((each for each in summaries if each.devices is not None), summaries[0])
        merged = msgspec.structs.replace(
            with_devices,
            groups=_add_up(group for summary in summaries for group in summary.groups),
            interval_seconds=max(summary.interval_seconds for summary in summaries),
        )
        return merged, parts[-1][1]


def _add_up(groups: Iterable[GroupSummary]) -> tuple[GroupSummary, ...]:
    """Add up engines of the same group that different objects speak of."""
    sums: dict[str, GroupSummary] = {}
    for group in groups:
        before = sums.get(group.group)
        if before is not None:
            group = msgspec.structs.replace(  # noqa: PLW2901 (the sum takes its place)
                before,
                engines=before.engines + group.engines,
                held_bytes=_sum(before.held_bytes, group.held_bytes),
                free_bytes=_sum(before.free_bytes, group.free_bytes),
            )
        sums[group.group] = group
    return tuple(sums.values())


def _sum(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return one if other is None else other
    return one + other
