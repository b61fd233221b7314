"""All that is known of the cluster, kept in step with what is seen of it (pure).

Node, pods and report of one node may come in any order; each is kept by name and laid out by row
as soon as the node is there. What is seen of pods goes on to the ledger of expected pods only
together with the snapshot that counts them, so that none is counted twice or not at all.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol, TypeVar

from nearkv.extender.model import Role, Snapshot
from nearkv.extender.presets import Level
from nearkv.extender.view.building import BuilderLimits, SnapshotBuilder
from nearkv.extender.view.groups import GroupPods
from nearkv.extender.view.nodes import NodeFacts, NodeStore
from nearkv.extender.view.pods import PodChanges, PodFacts, PodStore
from nearkv.extender.view.statuses import SeenStatus, StatusStore
from nearkv.extender.view.summaries import (
    NodeReport,
    SummaryRefusedError,
    SummaryStore,
    pods_newly_covered,
)
from nearkv.node_summary import NodeSummary

_PODS_AT_ONCE = 500
"""Pods taken before others get their turn: some milliseconds."""

T = TypeVar("T")

WORKER_STATUS = "WorkerStatus"
"""The source of reports that came from WorkerStatus objects."""


class PodLedger(Protocol):
    """What learns what became of pods that were placed; times are monotonic seconds."""

    def bound(self, uid: str, node: str, now: float) -> object:
        """Take note that a pod is on a node, and that the snapshot counts it there."""

    def covered(self, uid: str) -> None:
        """Take note that the report of the pod's node covers it."""

    def forget(self, uid: str) -> None:
        """Take note that a pod is gone."""


@dataclass(frozen=True, slots=True)
class SeenPod:
    """A pod as it was seen; ``facts`` is ``None`` where it takes nothing of any node."""

    uid: str
    facts: PodFacts | None
    is_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLimits:
    """Bounds and times in seconds.

    Reports that nobody renewed for ``forget_report_seconds`` are dropped, WorkerStatus stands in
    for agents silent for ``hold_seconds``, and medians of measured links are made anew once in
    ``settle_seconds``.
    """

    forget_report_seconds: float = 900.0
    settle_seconds: float = 5.0
    hold_seconds: float = 30.0
    building: BuilderLimits = field(default_factory=BuilderLimits)


@dataclass(slots=True)
class _LedgerNews:
    bound: dict[str, str] = field(default_factory=dict)
    covered: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)


class ClusterState:
    """Takes what is seen of nodes, pods and reports; publishes snapshots."""

    def __init__(
        self, levels: Sequence[Level], ledger: PodLedger, limits: StateLimits | None = None
    ) -> None:
        self._limits = limits or StateLimits()
        self._builder = SnapshotBuilder(levels, self._limits.building)
        self._ledger = ledger
        self._news = _LedgerNews()
        self.nodes = NodeStore()
        self.pods = PodStore()
        self.summaries = SummaryStore(hold_seconds=self._limits.hold_seconds)
        self.statuses = StatusStore()
        self._settled_at = float("-inf")
        self.refused: Counter[str] = Counter()

    @property
    def has_changes(self) -> bool:
        """Whether a new snapshot, or the ledger, would show anything new."""
        news = self._news
        return self._builder.has_changes or bool(news.bound or news.covered or news.gone)

    @property
    def measured_pairs(self) -> int:
        """Pairs of nodes whose measurements are kept."""
        return self._builder.measured_pairs

    @property
    def groups_left_out(self) -> int:
        """How often a group found no room in the snapshot."""
        return self._builder.groups_left_out

    # -- Nodes ---------------------------------------------------------------------------

    def nodes_listed(self, nodes: Iterable[NodeFacts]) -> None:
        """Take a complete list of nodes."""
        changed, gone = self.nodes.replace(nodes)
        for name in gone:
            self._node_gone(name)
        for facts in changed:
            self._lay_out_node(facts)

    def node_seen(self, facts: NodeFacts) -> bool:
        """Take a node; False where nothing that counts has changed."""
        changed = self.nodes.put(facts)
        if changed:
            self._lay_out_node(facts)
        return changed

    def node_deleted(self, name: str) -> bool:
        """Take note that a node is gone; False where it was not known."""
        dropped = self.nodes.drop(name)
        if dropped:
            self._node_gone(name)
        return dropped

    def _node_gone(self, name: str) -> None:
        self._builder.drop_node(name)
        self.pods.forget_node(name)

    def _lay_out_node(self, facts: NodeFacts) -> None:
        if not self._builder.put_node(facts):
            return
        pods = self.pods.on_node(facts.name)
        self._builder.put_pods(facts.name, pods)
        for group in {group for group, _ in pods.running}:
            self._lay_out_group(group, facts.name)
        report = self.summaries.get(facts.name)
        if report is not None:
            self._builder.put_report(report)

    # -- Pods ----------------------------------------------------------------------------

    def pods_listed(self, pods: Iterable[SeenPod], now: float) -> None:
        """Take a complete list of pods."""
        for _ in self.listing_pods(pods, now):
            continue

    def listing_pods(self, pods: Iterable[SeenPod], now: float) -> Iterator[None]:
        """Take a complete list of pods, some with each step; no event may come between."""
        listed = {
            pod.facts.uid: pod.facts for pod in pods if pod.facts is not None and not pod.is_over
        }
        changes = PodChanges()
        for uids in _in_parts(self.pods.missing_from(listed)):
            for uid in uids:
                self.pods.drop(uid, now, changes)
            yield
        for part in _in_parts(listed.values()):
            for facts in part:
                self.pods.put(facts, now, changes)
            yield
        yield from self._applying(changes)

    def pod_seen(self, pod: SeenPod, now: float) -> None:
        """Take a pod that is new or has changed; one that is over counts as gone."""
        changes = PodChanges()
        if pod.is_over:
            self.pods.drop(pod.uid, now, changes)
        elif pod.facts is not None:
            self.pods.put(pod.facts, now, changes)
        self._apply(changes)

    def _apply(self, changes: PodChanges) -> None:
        for _ in self._applying(changes):
            continue

    def _applying(self, changes: PodChanges) -> Iterator[None]:
        """Lay out what has changed, some with each step; the ledger learns of it at the end."""
        for nodes in _in_parts(changes.nodes):
            for node in nodes:
                self._builder.put_pods(node, self.pods.on_node(node))
                if self.nodes.get(node) is None:
                    self.pods.forget_node(node)
            yield
        for groups in _in_parts(changes.groups):
            for group, node in groups:
                self._lay_out_group(group, node)
            yield
        self._news.bound |= changes.bound
        for uid in changes.gone:
            self._news.bound.pop(uid, None)
            self._news.gone.add(uid)

    def _lay_out_group(self, group: str, node: str) -> None:
        running = self.pods.on_node(node).running
        both = running[group, Role.BOTH]
        pods = GroupPods(
            prefill=running[group, Role.PREFILL] + both, decode=running[group, Role.DECODE] + both
        )
        self._builder.put_group_pods(group, node, pods)

    # -- Reports -------------------------------------------------------------------------

    def report_arrived(self, report: NodeReport) -> None:
        """Take a node's report; raises :class:`SummaryRefusedError` for one that must not count."""
        try:
            change = self.summaries.take(report)
        except SummaryRefusedError as error:
            self.refused[error.reason] += 1
            raise
        if change.is_news:
            self._builder.put_report(report)
            self._news.covered |= pods_newly_covered(change)
        else:
            self._builder.put_receipt(report)

    def report_holds(self, node: str, source: str, now: float, promised_seconds: float) -> bool:
        """Take an agent's word that nothing has changed; False if there is nothing to hold."""
        held = self.summaries.heard(node, source, now, promised_seconds)
        self._lay_out_receipt(node, changed=held)
        return held

    def agent_lost(self, node: str, source: str) -> None:
        """Take note that an agent cannot be heard."""
        self._lay_out_receipt(node, changed=self.summaries.lost(node, source))

    def _lay_out_receipt(self, node: str, *, changed: bool) -> None:
        report = self.summaries.get(node)
        if changed and report is not None:
            self._builder.put_receipt(report)

    # -- WorkerStatus --------------------------------------------------------------------

    def statuses_listed(self, statuses: Iterable[SeenStatus], now: float) -> None:
        """Take a complete list of WorkerStatus objects."""
        self.statuses.replace(statuses, now)

    def status_seen(self, seen: SeenStatus, now: float) -> None:
        """Take a WorkerStatus that is new or has changed; :meth:`sweep` uses it if it must."""
        self.statuses.put(seen, now)

    def status_deleted(self, seen: SeenStatus) -> None:
        """Take note that a WorkerStatus is gone."""
        self.statuses.drop(seen.key)

    # -- Time ----------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Do what only time makes necessary: fall back, forget, let measurements fade."""
        for node in self.summaries.older_than(now - self._limits.forget_report_seconds):
            self.summaries.drop(node)
            self._builder.drop_report(node)
        for node in self.statuses.nodes:
            self._fall_back(node, now)
        if now >= self._settled_at + self._limits.settle_seconds:
            self._settled_at = now
            self._builder.settle_links(now)

    def _fall_back(self, node: str, now: float) -> None:
        """Use a node's WorkerStatus where its agent is silent and it is newer."""
        known = self.summaries.get(node)
        found = self.statuses.of_node(node) if known is None or not known.live else None
        if found is None:
            return
        summary, received_at = found
        if received_at < now - self._limits.forget_report_seconds:
            return  # it would be dropped with the next sweep, and taken again, for ever
        if known is not None and known.from_status:
            if (known.summary, known.received_at) == (summary, received_at):
                return
        elif known is not None and received_at < known.received_at + self._limits.hold_seconds:
            return
        self._take_status(summary, received_at)

    def _take_status(self, summary: NodeSummary, received_at: float) -> None:
        report = NodeReport(
            summary=summary,
            source=WORKER_STATUS,
            received_at=received_at,
            promised_seconds=summary.interval_seconds,
            live=False,
            from_status=True,
        )
        self._builder.put_report(self.summaries.take(report).report)

    def publish(self, now: float) -> Snapshot:
        """Return a snapshot of this moment, and tell the ledger what it counts.

        The same one is returned where nothing has changed.
        """
        snapshot = self._builder.publish()
        news, self._news = self._news, _LedgerNews()
        for uid, node in news.bound.items():
            self._ledger.bound(uid, node, now)
        for uid in news.covered:
            self._ledger.covered(uid)
        for uid in news.gone:
            self._ledger.forget(uid)
        return snapshot


def _in_parts(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while part := list(islice(rest, _PODS_AT_ONCE)):
        yield part
