"""Measured links by row and by class of distance, in step with the nodes (pure)."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import numpy as np

from nearkv.extender.model import Ints, Marks, MeasuredLink
from nearkv.extender.view.interning import MISSING
from nearkv.extender.view.links import LinkLimits, LinkTable, Pair, class_medians
from nearkv.extender.view.summaries import NodeReport, usable_paths

RowOf = Callable[[str], int | None]
LabelsOf = Callable[[int], Ints]
Rdma = Callable[[], Marks]

SAME_NODE = 0
_PLACED_FIGURES = 7


def class_between(one: Ints, other: Ints) -> int:
    """Return the class of distance of two different nodes with these labels, nearest first.

    ``1..n`` are the levels, ``n + 1`` is beyond all of them, ``n + 2`` is not known, which is
    where no level is equal and one is missing.
    """
    equal = np.flatnonzero((one == other) & (one != MISSING))
    if len(equal):
        return int(equal[0]) + 1
    missing = bool(np.any((one == MISSING) | (other == MISSING)))
    return len(one) + (2 if missing else 1)


class MeasuredPairs:
    """Keeps what was measured by the rows of source and node, and medians by class.

    ``without_rdma`` are the classes whose links need none, apart from the same node.
    """

    def __init__(
        self,
        limits: LinkLimits,
        *,
        row_of: RowOf,
        labels_of: LabelsOf,
        rdma: Rdma,
        without_rdma: Iterable[int] = (),
    ) -> None:
        self._without_rdma = np.array([SAME_NODE, *without_rdma], np.int32)
        self._limits = limits
        self._table = LinkTable(limits)
        self._row_of = row_of
        self._labels_of = labels_of
        self._rdma = rdma
        self._placed: dict[Pair, tuple[int, int, int, float, float, float, int]] = {}
        self._by_row: dict[tuple[int, int], MeasuredLink] = {}
        self._published: Mapping[tuple[int, int], MeasuredLink] | None = None
        self._stale = False
        self.links: Mapping[int, MeasuredLink] = MappingProxyType({})

    def __len__(self) -> int:
        return len(self._table)

    def observe(self, report: NodeReport) -> bool:
        """Take the paths of a report whose ends are known nodes; False where none is news."""
        node = report.summary.node
        paths = [
            path for path in usable_paths(report.summary) if self._row_of(path.source) is not None
        ]
        changed = self._table.observe(node, paths, report.received_at) if paths else ()
        for pair in changed:
            self._place(pair)
        return bool(changed)

    def place_node(self, node: str) -> None:
        """Take a node's row, labels and RDMA anew."""
        for pair in self._table.pairs_of(node):
            self._place(pair)

    def drop_node(self, node: str) -> None:
        """Forget the pairs of a node that is gone, while it still has its row."""
        for pair in self._table.pairs_of(node):
            self._displace(pair)
        self._table.drop_node(node)

    def settle(self, now: float) -> bool:
        """Let measurements fade and make the medians anew; False where nothing has changed.

        Medians shift as measurements fade, but not enough to make them anew without news.
        """
        gone = self._table.fade(now)
        for pair in gone:
            self._displace(pair)
        if not (gone or self._stale):
            return False
        self._stale = False
        placed = np.array(list(self._placed.values()), np.float64).reshape(-1, _PLACED_FIGURES)
        medians = class_medians(
            self._speaking_classes(placed[:, :3].astype(np.int32)),
            placed[:, 3:],
            now=now,
            half_life_seconds=self._limits.half_life_seconds,
        )
        self.links = MappingProxyType(medians)
        return True

    def by_row(self) -> Mapping[tuple[int, int], MeasuredLink]:
        """Return the measured pairs by the rows of source and node, for a snapshot to keep."""
        if self._published is None:
            self._published = MappingProxyType(self._by_row.copy())
        return self._published

    def _speaking_classes(self, places: Ints) -> Ints:
        """Return the class of each placed pair, -1 of those that speak for no others.

        Where some nodes have RDMA, what was measured to or from one without says nothing of
        those that have it. ``places`` are rows of source and node, and classes.
        """
        rdma, classes = self._rdma()[places[:, :2]], places[:, 2]
        if (rdma == 1).all(axis=1).any():
            needs_rdma = ~np.isin(classes, self._without_rdma)
            classes[needs_rdma & (rdma == 0).any(axis=1)] = -1
        return classes

    def _place(self, pair: Pair) -> None:
        self._displace(pair)
        source, node = map(self._row_of, pair)
        link = self._table.get(pair)
        if link is None or source is None or node is None:
            return
        self._by_row[source, node] = link
        cls = (
            SAME_NODE
            if source == node
            else class_between(self._labels_of(source), self._labels_of(node))
        )
        self._placed[pair] = (
            *(source, node, cls),
            *(link.setup_seconds, link.bytes_per_second, link.received_at, link.count),
        )

    def _displace(self, pair: Pair) -> None:
        self._stale = True
        self._published = None
        placed = self._placed.pop(pair, None)
        if placed is not None:
            self._by_row.pop(placed[:2], None)
