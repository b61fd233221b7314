"""Measured costs between nodes: the last of many pairs, and medians by class of distance (pure).

All pairs of 15,000 nodes cannot be kept, nor would they be measured: what is kept are the pairs
measured last, and for each class of distance the median over the pairs in it. Measurements fade:
in a median each counts half as much with every ``half_life_seconds`` of age, and after
``forget_seconds`` it is gone.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from nearkv.extender.model import Floats, Ints, MeasuredLink
from nearkv.node_summary import PathSummary

Pair = tuple[str, str]
"""The node that KV comes from, and the node that it comes to, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """How many pairs are kept, and how they fade."""

    max_pairs: int = 4096
    half_life_seconds: float = 600.0
    forget_seconds: float = 3600.0


class LinkTable:
    """Measured pairs, the one measured longest ago first."""

    def __init__(self, limits: LinkLimits) -> None:
        self._limits = limits
        self._pairs: OrderedDict[Pair, MeasuredLink] = OrderedDict()
        self._pairs_of: dict[str, set[Pair]] = {}

    def __len__(self) -> int:
        return len(self._pairs)

    def get(self, pair: Pair) -> MeasuredLink | None:
        """Return what was measured of a pair."""
        return self._pairs.get(pair)

    def pairs_of(self, node: str) -> Iterable[Pair]:
        """Return the pairs that begin or end at a node."""
        return tuple(self._pairs_of.get(node, ()))

    def observe(self, node: str, paths: Iterable[PathSummary], received_at: float) -> set[Pair]:
        """Take the paths to a node that it reported; return the pairs that changed.

        Of several transports the one measured last counts.
        """
        changed: set[Pair] = set()
        for path in sorted(paths, key=lambda path: -path.age_seconds):
            pair = (path.source, node)
            link = MeasuredLink(
                setup_seconds=path.setup_seconds,
                bytes_per_second=path.bytes_per_second,
                count=path.count,
                received_at=received_at - path.age_seconds,
            )
            known = self._pairs.get(pair)
            if known is not None and known.received_at > link.received_at:
                continue
            if received_at - link.received_at < self._limits.forget_seconds:
                self._put(pair, link)
                changed.add(pair)
        while len(self._pairs) > self._limits.max_pairs:
            changed.add(self._drop_oldest())
        return changed

    def fade(self, now: float) -> set[Pair]:
        """Forget what was measured too long ago; return the pairs that are gone."""
        gone = {
            pair
            for pair, link in self._pairs.items()
            if now - link.received_at >= self._limits.forget_seconds
        }
        for pair in gone:
            self._drop(pair)
        return gone

    def drop_node(self, node: str) -> None:
        """Forget all pairs of a node that is gone."""
        for pair in self.pairs_of(node):
            self._drop(pair)

    def _put(self, pair: Pair, link: MeasuredLink) -> None:
        self._pairs[pair] = link
        self._pairs.move_to_end(pair)
        for node in pair:
            self._pairs_of.setdefault(node, set()).add(pair)

    def _drop_oldest(self) -> Pair:
        pair = next(iter(self._pairs))
        self._drop(pair)
        return pair

    def _drop(self, pair: Pair) -> None:
        self._pairs.pop(pair, None)
        for node in set(pair):
            pairs = self._pairs_of.get(node)
            if pairs is not None:
                pairs.discard(pair)
                if not pairs:
                    del self._pairs_of[node]


def class_medians(
    classes: Ints, figures: Floats, *, now: float, half_life_seconds: float
) -> dict[int, MeasuredLink]:
    """Return the median over the measurements of each class; ``count`` adds up theirs.

    Each row of ``figures`` is set-up seconds, bytes per second, time of receipt and count.
    ``classes`` has the class of each; negative ones are left out.
    """
    setup, speed, at, count = figures.T
    weights = np.exp2((at - now) / half_life_seconds)
    medians = {}
    for cls in np.unique(classes[classes >= 0]).tolist():
        mine = classes == cls
        medians[cls] = MeasuredLink(
            setup_seconds=_weighted_median(setup[mine], weights[mine]),
            bytes_per_second=_weighted_median(speed[mine], weights[mine]),
            count=int(count[mine].sum()),
            received_at=float(at[mine].max()),
        )
    return medians


def _weighted_median(values: Floats, weights: Floats) -> float:
    """Return the value at which half of the weight is reached."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(reached, reached[-1] / 2)]])
