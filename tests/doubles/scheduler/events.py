"""Cluster events that may wake a pod that was rejected (pure)."""

from dataclasses import dataclass
from enum import Enum

from tests.doubles.scheduler.go_json import Json


class EventKind(Enum):
    """What happened."""

    NODE_ADDED = "node added"
    NODE_CHANGED = "node changed"
    NODE_DELETED = "node deleted"
    POD_BOUND = "assigned pod added"
    ASSIGNED_POD_CHANGED = "assigned pod changed"
    POD_GONE = "assigned pod deleted"
    WAITING_POD_CHANGED = "waiting pod changed"


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """An event; ``facets`` name what changed of a node, ``pod_uid`` the pod it is about."""

    kind: EventKind
    facets: frozenset[str] = frozenset()
    pod_uid: str = ""


_WAKES_BUILT_IN = frozenset({EventKind.NODE_ADDED, EventKind.POD_GONE})
_FACETS_FOR_BUILT_IN = frozenset({"labels", "allocatable", "taints"})


def node_facets(old: Json, new: Json) -> frozenset[str]:
    """Return what an update changed of a node as far as the scheduler cares.

    A heartbeat that moves only times is nothing.
    """
    facets = {
        name
        for name, part in (
            ("labels", ("metadata", "labels")),
            ("annotations", ("metadata", "annotations")),
            ("allocatable", ("status", "allocatable")),
        )
        if _part(old, part) != _part(new, part)
    }
    for key in ("taints", "unschedulable"):
        if (_part(old, ("spec", key)) or None) != (_part(new, ("spec", key)) or None):
            facets.add("taints")
    if _conditions(old) != _conditions(new):
        facets.add("conditions")
    return frozenset(facets)


def wakes(event: ClusterEvent, *, pod_uid: str, by_extender: bool) -> bool:
    """Tell whether an event wakes a pod that was found unschedulable.

    A pod that an extender rejected is woken by any event; else only by what could make room. A
    change of a waiting pod concerns that pod alone.
    """
    if event.kind is EventKind.WAITING_POD_CHANGED:
        return event.pod_uid == pod_uid
    if event.kind is EventKind.NODE_CHANGED and not event.facets:
        return False
    if by_extender or event.kind in _WAKES_BUILT_IN:
        return True
    return event.kind is EventKind.NODE_CHANGED and bool(event.facets & _FACETS_FOR_BUILT_IN)


def _part(document: Json, path: tuple[str, str]) -> object:
    return (document.get(path[0]) or {}).get(path[1])


def _conditions(document: Json) -> dict[str, str]:
    conditions = (document.get("status") or {}).get("conditions") or ()
    return {one.get("type", ""): one.get("status", "") for one in conditions}
