"""What the extender keeps of each node: places, devices, RDMA (pure)."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from nearkv.kube.objects import Node, Quantities, count_devices
from nearkv.kube.quantities import whole_count

LevelsOf = Callable[[Mapping[str, str]], tuple[str, ...]]
"""Reads a node's value for each level of the distance list; empty where it has none."""

_NONE = 0
_USABLE = 1
_UNKNOWN = -1
_MOST_DEVICES = 1 << 20
_TRUE = frozenset({"true", "1", "yes", "present"})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRules:
    """How nodes are read.

    ``resources`` are the managed ones, whose counts add up. A node has RDMA where one of
    ``rdma_labels`` says so, or it offers a resource under one of ``rdma_resources`` (a name,
    or the part before a ``*``); it has none where all that speak say no; else it is unknown.
    """

    levels_of: LevelsOf
    resources: tuple[str, ...] = ("nvidia.com/gpu",)
    rdma_labels: tuple[str, ...] = (
        "feature.node.kubernetes.io/rdma.available",
        "feature.node.kubernetes.io/rdma.capable",
    )
    rdma_resources: tuple[str, ...] = ("rdma/*",)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node. ``rdma`` is 1, 0, or -1 for unknown; ``host_ip`` is empty where unknown."""

    name: str
    levels: tuple[str, ...]
    devices: int
    rdma: int
    host_ip: str = ""


def read_node(node: Node, rules: NodeRules) -> NodeFacts:
    """Return what is kept of a node; raises ``ValueError`` where a count is no quantity."""
    return NodeFacts(
        name=node.name,
        levels=rules.levels_of(node.labels),
        devices=min(count_devices(node.allocatable, rules.resources), _MOST_DEVICES),
        rdma=_read_rdma(node.labels, node.allocatable, rules),
        host_ip=node.internal_ip,
    )


def _read_rdma(labels: Mapping[str, str], allocatable: Quantities, rules: NodeRules) -> int:
    said = [labels[key].strip().lower() in _TRUE for key in rules.rdma_labels if labels.get(key)]
    said += [
        whole_count(count) > 0
        for resource, count in allocatable.items()
        if any(_matches(resource, pattern) for pattern in rules.rdma_resources)
    ]
    if any(said):
        return _USABLE
    return _NONE if said else _UNKNOWN


def _matches(resource: str, pattern: str) -> bool:
    if pattern.endswith("*"):
        return resource.startswith(pattern[:-1])
    return resource == pattern


class NodeStore:
    """All nodes by name; each change says whether it was one."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeFacts] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[NodeFacts]:
        return iter(self._nodes.values())

    def get(self, name: str) -> NodeFacts | None:
        """Return a node, ``None`` if there is no such node."""
        return self._nodes.get(name)

    def put(self, facts: NodeFacts) -> bool:
        """Add or replace a node; False where nothing that counts has changed."""
        if self._nodes.get(facts.name) == facts:
            return False
        self._nodes[facts.name] = facts
        return True

    def drop(self, name: str) -> bool:
        """Forget a node; False where it was not known."""
        return self._nodes.pop(name, None) is not None

    def replace(self, nodes: Iterable[NodeFacts]) -> tuple[list[NodeFacts], list[str]]:
        """Take a complete list; return the nodes that are new or changed, and those gone."""
        listed = {facts.name: facts for facts in nodes}
        gone = [name for name in self._nodes if name not in listed]
        changed = [facts for name, facts in listed.items() if self._nodes.get(name) != facts]
        self._nodes = listed
        return changed, gone
