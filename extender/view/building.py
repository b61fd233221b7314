"""Builds snapshots: what is known by name, laid out by row (pure; callers pass the time).

Each change writes the rows it concerns when it comes; publishing copies only the columns that
changed since the last snapshot, and shares the others with it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from nearkv.extender.model import Floats, GroupFacts, Snapshot
from nearkv.extender.presets import Level
from nearkv.extender.view.columns import Column
from nearkv.extender.view.groups import GroupPods, GroupTable
from nearkv.extender.view.interning import ValueNumbers
from nearkv.extender.view.links import LinkLimits
from nearkv.extender.view.measured_pairs import MeasuredPairs
from nearkv.extender.view.nodes import NodeFacts
from nearkv.extender.view.pods import NodePods
from nearkv.extender.view.summaries import NodeReport
from nearkv.node_summary import DeviceSummary, GroupSummary

_NEVER = float("-inf")
_UNKNOWN = float("nan")
_UNKNOWN_MARK = -1
_MOST = 2**31 - 1
_HEALTH_MARKS = MappingProxyType({"ok": 1, "failed": 0, "unknown": _UNKNOWN_MARK})

_AnyColumn = Column[np.int32] | Column[np.int8] | Column[np.float64] | Column[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuilderLimits:
    """Bounds of the snapshot: groups beyond ``max_groups`` are left out, and counted."""

    max_groups: int = 512
    links: LinkLimits = field(default_factory=LinkLimits)


class _NodeColumns:
    """The columns of the snapshot."""

    def __init__(self, levels: int) -> None:
        self.labels = Column(np.int32, 0, width=levels)
        self.rdma = Column(np.int8, _UNKNOWN_MARK)
        self.devices = Column(np.int32, 0)
        self.requested = Column(np.int32, 0)
        self.free_ratio = Column(np.float32, _UNKNOWN, width=1)
        self.device_ok = Column(np.int8, _UNKNOWN_MARK, width=1)
        self.reported_at = Column(np.float64, _NEVER)
        self.report_seconds = Column(np.float64, _UNKNOWN)
        self.from_status = Column(np.int8, 0)
        self.left_at = Column(np.float64, _NEVER)

    def __iter__(
        self,
    ) -> Iterator[Column[np.int32] | Column[np.int8] | Column[np.float64] | Column[np.float32]]:
        yield from (self.labels, self.devices, self.requested)
        yield from (self.rdma, self.from_status, self.device_ok)
        yield from (self.reported_at, self.report_seconds, self.left_at)
        yield self.free_ratio


class SnapshotBuilder:
    """Takes what is known of nodes, pods and reports, and publishes it by row.

    Whatever concerns a node that is not there (yet) is passed over: callers tell it again when
    the node comes.
    """

    def __init__(self, levels: Sequence[Level], limits: BuilderLimits | None = None) -> None:
        self._limits = limits or BuilderLimits()
        self._names: list[str] = []
        self._rows: dict[str, int] = {}
        self._facts: dict[str, NodeFacts] = {}
        self._reported_rdma: dict[str, bool] = {}
        self._columns = _NodeColumns(len(levels))
        self._numbers = tuple(ValueNumbers() for _ in levels)
        self._tables: dict[str, GroupTable] = {}
        self._groups_of: dict[str, set[str]] = {}
        self._dirty_groups: set[str] = set()
        self._group_facts: dict[str, GroupFacts] = {}
        self._pairs = MeasuredPairs(
            self._limits.links,
            row_of=self._rows.get,
            labels_of=lambda row: self._columns.labels.values[row],
            rdma=lambda: self._columns.rdma.values,
            without_rdma=[cls for cls, level in enumerate(levels, start=1) if not level.needs_rdma],
        )
        self._snapshot = _empty_snapshot(len(levels))
        self._changed = False
        self._moved = False
        self.groups_left_out = 0

    @property
    def has_changes(self) -> bool:
        """Whether :meth:`publish` would make another snapshot."""
        return self._changed

    @property
    def measured_pairs(self) -> int:
        """Pairs of nodes whose measurements are kept."""
        return len(self._pairs)

    # -- Nodes ---------------------------------------------------------------------------

    def put_node(self, facts: NodeFacts) -> bool:
        """Add or change a node; True where it is new, so that its pods and report are needed."""
        row = self._rows.get(facts.name)
        is_new = row is None
        if row is None:
            row = self._rows[facts.name] = len(self._names)
            self._names.append(facts.name)
            for column in self._columns:
                column.clear(row)
            self._moved = True
        self._write_labels(row, facts)
        self._columns.devices.put(row, min(facts.devices, _MOST))
        self._facts[facts.name] = facts
        self._write_rdma(facts.name, row)
        self._pairs.place_node(facts.name)
        self._changed = True
        return is_new

    def drop_node(self, name: str) -> None:
        """Remove a node; the last row takes its place."""
        if name not in self._rows:
            return
        self._pairs.drop_node(name)
        for group in tuple(self._groups_of.get(name, ())):
            self._leave_group(group, name)
        for numbers, value in zip(self._numbers, self._facts.pop(name).levels, strict=True):
            numbers.release(value)
        self._reported_rdma.pop(name, None)
        row = self._rows.pop(name)
        last = self._names.pop()
        if last != name:
            self._move_row(last, len(self._names), row)
        self._changed = self._moved = True

    def _move_row(self, name: str, source: int, target: int) -> None:
        self._names[target] = name
        self._rows[name] = target
        for column in self._columns:
            column.move(source, target)
        for group in self._groups_of.get(name, ()):
            self._tables[group].put_row(name, target)
        self._pairs.place_node(name)

    def _write_labels(self, row: int, facts: NodeFacts) -> None:
        before = self._facts.get(facts.name)
        if before is not None and before.levels == facts.levels:
            return
        taken = [
            numbers.take(value) for numbers, value in zip(self._numbers, facts.levels, strict=True)
        ]
        if before is not None:
            for numbers, value in zip(self._numbers, before.levels, strict=True):
                numbers.release(value)
        self._columns.labels.put_row(row, np.array(taken, np.int32))

    def _write_rdma(self, name: str, row: int) -> None:
        """Write what the agent found, which knows better than labels, or else the labels."""
        reported = self._reported_rdma.get(name)
        self._columns.rdma.put(row, self._facts[name].rdma if reported is None else int(reported))

    # -- Pods ----------------------------------------------------------------------------

    def put_pods(self, node: str, pods: NodePods) -> None:
        """Note what the pods of a node ask for, and when one last left."""
        row = self._rows.get(node)
        if row is not None:
            self._columns.requested.put(row, min(pods.requested, _MOST))
            self._columns.left_at.put(row, pods.left_at)
            self._changed = True

    def put_group_pods(self, group: str, node: str, pods: GroupPods) -> None:
        """Note the pods of a group that run on a node."""
        row = self._rows.get(node)
        if row is None:
            return
        joined = group in self._groups_of.get(node, ())
        if not pods and not joined:
            return
        table = self._table(group, has_pods=bool(pods))
        if table is not None:
            table.put_pods(node, row, pods)
            self._keep_in_group(group, node, table)

    # -- Reports -------------------------------------------------------------------------

    def put_report(self, report: NodeReport) -> None:
        """Write all that a report says."""
        node = report.summary.node
        row = self._rows.get(node)
        if row is None:
            return
        self.put_receipt(report)
        self._write_devices(row, report.summary.devices or ())
        if report.summary.rdma is None:
            self._reported_rdma.pop(node, None)
        else:
            self._reported_rdma[node] = report.summary.rdma
        self._write_rdma(node, row)
        self._write_groups(node, row, report.summary.groups)
        self._pairs.observe(report)

    def put_receipt(self, report: NodeReport) -> None:
        """Write only when a report was received, and what it promised: it says nothing new."""
        row = self._rows.get(report.summary.node)
        if row is None:
            return
        self._columns.reported_at.put(row, report.received_at)
        self._columns.report_seconds.put(row, report.promised_seconds)
        self._columns.from_status.put(row, int(report.from_status))
        self._dirty_groups |= self._groups_of.get(report.summary.node, set())
        self._changed = True

    def drop_report(self, node: str) -> None:
        """Make what a node reported unknown again; measured links fade by themselves."""
        row = self._rows.get(node)
        if row is None:
            return
        self._columns.reported_at.put(row, _NEVER)
        self._columns.report_seconds.put(row, _UNKNOWN)
        self._columns.from_status.put(row, 0)
        self._write_devices(row, ())
        self._reported_rdma.pop(node, None)
        self._write_rdma(node, row)
        self._write_groups(node, row, ())
        self._changed = True

    def _write_devices(self, row: int, devices: tuple[DeviceSummary, ...] | tuple[()]) -> None:
        free = np.array([_free_ratio(device) for device in devices], np.float32)
        marks = np.array([_HEALTH_MARKS[device.health] for device in devices], np.int8)
        self._columns.free_ratio.put_row(row, free)
        self._columns.device_ok.put_row(row, marks)

    def _write_groups(self, node: str, row: int, groups: tuple[GroupSummary, ...]) -> None:
        said = {group.group: group for group in groups}
        for group in said.keys() | self._groups_of.get(node, set()):
            table = self._table(group, has_pods=False)
            if table is not None:
                table.put_report(node, row, said.get(group))
                self._keep_in_group(group, node, table)

    # -- Groups --------------------------------------------------------------------------

    def _table(self, group: str, *, has_pods: bool) -> GroupTable | None:
        """Return a group's table; where there are too many, one without pods makes room."""
        table = self._tables.get(group)
        if table is None:
            if len(self._tables) >= self._limits.max_groups:
                self.groups_left_out += 1
                idle = (name for name, table in self._tables.items() if not table.pods)
                leaving = next(idle, None) if has_pods else None
                if leaving is None:
                    return None
                for node in tuple(self._tables[leaving].nodes):
                    self._leave_group(leaving, node)
            table = self._tables[group] = GroupTable()
        return table

    def _keep_in_group(self, group: str, node: str, table: GroupTable) -> None:
        """Keep a node in a group as long as it has something to say there."""
        self._groups_of.setdefault(node, set()).add(group)
        if table.has_nothing(node):
            self._leave_group(group, node)
        self._dirty_groups.add(group)
        self._changed = True

    def _leave_group(self, group: str, node: str) -> None:
        table = self._tables[group]
        table.drop(node)
        if not len(table):
            del self._tables[group]
        groups = self._groups_of[node]
        groups.discard(group)
        if not groups:
            del self._groups_of[node]
        self._dirty_groups.add(group)

    # -- Publishing ----------------------------------------------------------------------

    def settle_links(self, now: float) -> None:
        """Make the medians of measured links anew where they changed; once a second is enough."""
        self._changed |= self._pairs.settle(now)

    def publish(self) -> Snapshot:
        """Return a snapshot of this moment, the last one where nothing has changed since."""
        if not self._changed:
            return self._snapshot
        columns, size = self._columns, len(self._names)
        before = self._snapshot
        reported_at = columns.reported_at.publish(size)
        self._refresh_groups(reported_at, size)
        self._snapshot = Snapshot(
            version=before.version + 1,
            names=tuple(self._names) if self._moved else before.names,
            rows=MappingProxyType(self._rows.copy()) if self._moved else before.rows,
            labels=columns.labels.publish(size),
            rdma=columns.rdma.publish(size),
            devices=columns.devices.publish(size),
            requested=columns.requested.publish(size),
            free_ratio=columns.free_ratio.publish(size),
            device_ok=columns.device_ok.publish(size),
            reported_at=reported_at,
            report_seconds=columns.report_seconds.publish(size),
            from_status=columns.from_status.publish(size),
            left_at=columns.left_at.publish(size),
            groups=MappingProxyType(self._group_facts.copy()),
            links=self._pairs.links,
            pairs=self._pairs.by_row(),
        )
        self._changed = self._moved = False
        return self._snapshot

    def _refresh_groups(self, reported_at: Floats, size: int) -> None:
        nothing_known = np.full(size, _UNKNOWN)
        nothing_known.flags.writeable = False
        every = self._tables.keys() | self._group_facts.keys()
        for group in every if self._moved else self._dirty_groups:
            table = self._tables.get(group)
            if table is None:
                self._group_facts.pop(group, None)
            else:
                self._group_facts[group] = table.facts(reported_at, nothing_known)
        self._dirty_groups = set()


def _free_ratio(device: DeviceSummary) -> float:
    if not device.total_bytes or device.used_bytes is None:
        return _UNKNOWN
    return max(0.0, 1.0 - device.used_bytes / device.total_bytes)


def _empty_snapshot(levels: int) -> Snapshot:
    columns = _NodeColumns(levels)
    return Snapshot(
        version=0,
        names=(),
        rows=MappingProxyType({}),
        labels=columns.labels.publish(0),
        rdma=columns.rdma.publish(0),
        devices=columns.devices.publish(0),
        requested=columns.requested.publish(0),
        free_ratio=columns.free_ratio.publish(0),
        device_ok=columns.device_ok.publish(0),
        reported_at=columns.reported_at.publish(0),
        report_seconds=columns.report_seconds.publish(0),
        from_status=columns.from_status.publish(0),
        left_at=columns.left_at.publish(0),
        groups=MappingProxyType({}),
        links=MappingProxyType({}),
        pairs=MappingProxyType({}),
    )
