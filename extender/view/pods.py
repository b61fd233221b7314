"""Pods on nodes: devices they ask for, and which of them run for which group (pure).

Only pods that count are kept: those that ask for managed devices, and those of a group. A pod
that has ended gives its devices back; one that is terminating keeps them until it is gone.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from nearkv.extender.model import Role
from nearkv.kube.objects import Pod, requested_devices

_MOST_DEVICES = 1 << 20
_TERMINATING = float("inf")
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRules:
    """How pods are read: the managed resources, and the labels that name group and role.

    Of several labels the first that a pod has counts.
    """

    resources: tuple[str, ...] = ("nvidia.com/gpu",)
    group_labels: tuple[str, ...] = ("nearkv.io/group",)
    role_labels: tuple[str, ...] = ("nearkv.io/role", "llm-d.ai/role")


@dataclass(frozen=True, slots=True)
class PodFacts:
    """A pod that is bound to a node and has not ended; ``group`` is empty for other pods.

    ``running`` says that its engine can be counted on: it runs, and nobody asked it to go.
    """

    uid: str
    node: str
    devices: int
    group: str
    role: Role
    running: bool
    terminating: bool


def read_group(labels: Mapping[str, str], keys: Iterable[str]) -> str:
    """Return the group that labels name, empty for a pod that is not ours."""
    return next((labels[key] for key in keys if labels.get(key)), "")


def read_role(labels: Mapping[str, str], keys: Iterable[str]) -> Role:
    """Return the role that labels give; other words mean an engine that does both."""
    said = next((labels[key] for key in keys if labels.get(key)), "")
    return Role(said) if said in {role.value for role in Role} else Role.BOTH


def read_pod(pod: Pod, rules: PodRules) -> PodFacts | None:
    """Return what is kept of a pod, ``None`` for one that takes nothing of any node.

    Raises ``ValueError`` where a count is no quantity.
    """
    if not pod.node_name or pod.has_ended:
        return None
    labels = pod.labels
    group = read_group(labels, rules.group_labels)
    devices = min(requested_devices(pod, rules.resources), _MOST_DEVICES)
    if not devices and not group:
        return None
    return PodFacts(
        uid=pod.uid,
        node=pod.node_name,
        devices=devices,
        group=group,
        role=read_role(labels, rules.role_labels),
        running=pod.phase == "Running" and not pod.is_terminating,
        terminating=pod.is_terminating,
    )


@dataclass(slots=True)
class NodePods:
    """The pods of one node, added up; ``left_at`` as in the snapshot."""

    requested: int = 0
    terminating: int = 0
    pods: int = 0
    ended_at: float = _NEVER
    running: Counter[tuple[str, Role]] = field(default_factory=Counter)

    @property
    def left_at(self) -> float:
        """When a pod with devices last left; +inf while one is terminating, -inf for never."""
        return _TERMINATING if self.terminating else self.ended_at


@dataclass(slots=True)
class PodChanges:
    """What a change of pods means: nodes and groups to update, pods bound and gone by UID.

    ``bound`` holds the node of each pod that now counts there and did not before.
    """

    nodes: set[str] = field(default_factory=set)
    groups: set[tuple[str, str]] = field(default_factory=set)
    bound: dict[str, str] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)


class PodStore:
    """Pods by UID, and their sums by node, kept in step with each change."""

    def __init__(self) -> None:
        self._pods: dict[str, PodFacts] = {}
        self._nodes: dict[str, NodePods] = {}

    def __len__(self) -> int:
        return len(self._pods)

    def __iter__(self) -> Iterator[PodFacts]:
        return iter(self._pods.values())

    @property
    def nodes(self) -> int:
        """Nodes that have pods, or had some."""
        return len(self._nodes)

    def on_node(self, node: str) -> NodePods:
        """Return the sums of a node; a node without pods has empty ones."""
        return self._nodes.get(node) or NodePods()

    def put(self, facts: PodFacts, now: float, changes: PodChanges) -> None:
        """Add or replace a pod."""
        known = self._pods.get(facts.uid)
        if known == facts:
            return
        if known is not None:
            self._take_off(known, now, changes, left=known.node != facts.node)
        self._pods[facts.uid] = facts
        self._put_on(facts, changes)
        if known is None or known.node != facts.node:
            changes.bound[facts.uid] = facts.node

    def drop(self, uid: str, now: float, changes: PodChanges) -> None:
        """Forget a pod that is gone or has ended."""
        known = self._pods.pop(uid, None)
        if known is not None:
            self._take_off(known, now, changes, left=True)
        changes.gone.append(uid)

    def missing_from(self, listed: Collection[str]) -> list[str]:
        """Return the UIDs of pods that a complete list of UIDs does not hold."""
        return [uid for uid in self._pods if uid not in listed]

    def forget_node(self, node: str) -> None:
        """Forget when pods left a node that is gone itself; pods still said to be there stay."""
        sums = self._nodes.get(node)
        if sums is not None and not sums.pods:
            del self._nodes[node]

    def _put_on(self, facts: PodFacts, changes: PodChanges) -> None:
        sums = self._nodes.setdefault(facts.node, NodePods())
        sums.pods += 1
        sums.requested += facts.devices
        sums.terminating += facts.terminating and facts.devices > 0
        changes.nodes.add(facts.node)
        if facts.group:
            sums.running[facts.group, facts.role] += facts.running
            changes.groups.add((facts.group, facts.node))

    def _take_off(self, facts: PodFacts, now: float, changes: PodChanges, *, left: bool) -> None:
        sums = self._nodes[facts.node]
        sums.pods -= 1
        sums.requested -= facts.devices
        sums.terminating -= facts.terminating and facts.devices > 0
        if left and facts.devices:
            sums.ended_at = now
        changes.nodes.add(facts.node)
        if facts.group:
            key = (facts.group, facts.role)
            sums.running[key] -= facts.running
            if sums.running[key] <= 0:
                del sums.running[key]
            changes.groups.add((facts.group, facts.node))
