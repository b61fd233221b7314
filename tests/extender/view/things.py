"""Nodes, pods and reports for tests of the view, in few words."""

from typing import Any

import msgspec

from nearkv.extender.model import Role
from nearkv.extender.presets import Level, LinkCost
from nearkv.extender.view.nodes import NodeFacts
from nearkv.extender.view.pods import PodFacts
from nearkv.extender.view.summaries import NodeReport
from nearkv.kube.objects import Node, Pod
from nearkv.node_summary import DeviceSummary, GroupSummary, NodeSummary, PathSummary

COST = LinkCost(0.001, 1e9)
LEVELS = (Level("rack", ("rack",), COST), Level("zone", ("zone",), COST))
GB = 10**9


def facts(name: str, rack: str = "", zone: str = "", *, devices: int = 8, rdma: int = -1):
    return NodeFacts(name, (rack, zone), devices, rdma)


def pod(
    uid: str,
    node: str = "n1",
    *,
    devices: int = 1,
    group: str = "",
    role: Role = Role.BOTH,
    running: bool = True,
    terminating: bool = False,
) -> PodFacts:
    return PodFacts(uid, node, devices, group, role, running, terminating)


def device(number: int = 0, used_ratio: float | None = 0.0, **fields: Any) -> DeviceSummary:
    used = None if used_ratio is None else round(80 * GB * used_ratio)
    return DeviceSummary(
        id=f"GPU-{number}",
        total_bytes=80 * GB,
        used_bytes=used,
        **{"health": "ok", **fields},
    )


def path(source: str, bytes_per_second: float = 1e9, **fields: Any) -> PathSummary:
    return PathSummary(
        source=source,
        transport="tcp",
        bytes_per_second=bytes_per_second,
        **{"setup_seconds": 0.001, "count": 10, **fields},
    )


def summary(node: str = "n1", *, boot: str = "b", seq: int = 1, **fields: Any) -> NodeSummary:
    return NodeSummary(node=node, boot=boot, seq=seq, **{"interval_seconds": 5.0, **fields})


def group(name: str = "g", held: int | None = None, **fields: Any) -> GroupSummary:
    return GroupSummary(group=name, held_bytes=held, engines=1, **fields)


def report(
    node: str = "n1",
    *,
    at: float = 0.0,
    source: str = "http://agent",
    promised: float = 30.0,
    **fields: Any,
) -> NodeReport:
    return NodeReport(
        summary=summary(node, **fields), source=source, received_at=at, promised_seconds=promised
    )


def as_node(value: dict[str, Any]) -> Node:
    return msgspec.convert(value, Node)


def as_pod(value: dict[str, Any]) -> Pod:
    return msgspec.convert(value, Pod)
