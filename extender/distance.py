"""Distance between nodes: classes from labels, and what each class costs (pure).

A class is a number: 0 is the same node, 1 to n are the configured levels from near to far, n + 1
is beyond all of them, and n + 2 is unknown. Two nodes are in the class of the first level at
which their values are equal and not missing. Where none is equal, a missing value on either side
makes the pair unknown: it gets a configured cost, neither zero nor infinite.

Measurements take the place of the configured costs as far as they can be trusted. Trust fades in
a few steps rather than smoothly, so that a result holds until a known moment and can be kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nearkv.extender.model import Floats, Ints, Marks, MeasuredLink
from nearkv.extender.presets import (
    BEYOND_COST,
    PRESETS,
    SAME_NODE_COST,
    UNKNOWN_COST,
    WITHOUT_RDMA_COST,
    Level,
    LinkCost,
)

SAME_NODE = 0
_TRUST_STEPS = 4
_LEAST_MS = 1e-3
_MOST_MS = 1e12
_MOST_LEVELS = 100

Bools = npt.NDArray[np.bool_]
Places = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Fading:
    """How data fades: it counts in full up to one age in seconds, and not at all from another."""

    fresh_seconds: float
    aged_seconds: float

    def __post_init__(self) -> None:
        if not 0 <= self.fresh_seconds < self.aged_seconds < float("inf"):
            raise ValueError("fresh_seconds must be 0 or more, and aged_seconds above it")

    def trust(self, received_at: Floats, now: float) -> tuple[Floats, float]:
        """Return the trust in each datum, 0 to 1, and until when all of that holds.

        NaN counts as never received, a time yet to come as now.
        """
        ages = np.maximum(np.nan_to_num(now - received_at, nan=np.inf, posinf=np.inf), 0.0)
        step_seconds = (self.aged_seconds - self.fresh_seconds) / _TRUST_STEPS
        gone = _TRUST_STEPS + 1
        steps = np.ceil(np.clip((ages - self.fresh_seconds) / step_seconds, 0.0, gone))
        flips_at = received_at + self.fresh_seconds + steps * step_seconds
        return 1.0 - steps / gone, float(flips_at[steps < gone].min(initial=np.inf))


@dataclass(frozen=True, slots=True, kw_only=True)
class DistanceConfig:
    """The levels of distance, what each class costs by default, and how far data is trusted.

    - ``without_rdma``: the least that a pair costs where either node has no RDMA.
    - ``recompute_cap``: nothing costs more than computing the prefix again.
    - ``default_*``: a typical prefix, used where a group's agents do not know better.
    - ``links``, ``pairs``, ``held``: how measured class medians, measured node pairs, and reports
      of held KV fade.
    - ``enough_count``: measurements that stand for themselves; fewer are mixed with the prior.
    - ``holders_weight``: the share of KV holders where a pod has counterparts to fetch from, too.
    - ``max_sources``: sources of one kind that are looked at, those that count most.
    """

    levels: tuple[Level, ...] = PRESETS["generic"]
    same_node: LinkCost = SAME_NODE_COST
    beyond: LinkCost = BEYOND_COST
    unknown: LinkCost = UNKNOWN_COST
    without_rdma: LinkCost = WITHOUT_RDMA_COST
    recompute_cap: bool = True
    default_prefix_tokens: int = 8192
    default_kv_bytes_per_token: float = 131072.0
    default_prefill_tokens_per_second: float = 10_000.0
    links: Fading = Fading(fresh_seconds=900.0, aged_seconds=3600.0)
    pairs: Fading = Fading(fresh_seconds=300.0, aged_seconds=1800.0)
    held: Fading = Fading(fresh_seconds=90.0, aged_seconds=600.0)
    enough_count: int = 5
    holders_weight: float = 0.5
    max_sources: int = 128

    def __post_init__(self) -> None:
        if len(self.levels) > _MOST_LEVELS:
            raise ValueError(f"at most {_MOST_LEVELS} levels of distance")
        if not 0 <= self.holders_weight <= 1:
            raise ValueError("holders_weight must be between 0 and 1")
        for name in (
            "default_prefix_tokens",
            "default_kv_bytes_per_token",
            "default_prefill_tokens_per_second",
            "enough_count",
            "max_sources",
        ):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be above 0")

    @property
    def beyond_class(self) -> int:
        """The class of nodes that differ at every level."""
        return len(self.levels) + 1

    @property
    def unknown_class(self) -> int:
        """The class of nodes of which too little is known."""
        return len(self.levels) + 2

    @property
    def costs(self) -> tuple[LinkCost, ...]:
        """The configured cost of each class."""
        return (
            self.same_node,
            *(level.cost for level in self.levels),
            self.beyond,
            self.unknown,
        )

    @property
    def needs_rdma(self) -> Bools:
        """Whether the cost of a class holds only for nodes with RDMA."""
        levels = (level.needs_rdma for level in self.levels)
        return np.array([False, *levels, True, True])


def class_name(config: DistanceConfig, cls: int) -> str:
    """Return the name of a class of distance."""
    if cls == SAME_NODE:
        return "same-node"
    if 0 < cls <= len(config.levels):
        return config.levels[cls - 1].name
    return "beyond" if cls == config.beyond_class else "unknown"


@dataclass(frozen=True, slots=True, eq=False)
class PlaceTable:
    """Nodes that are at the same distance from everything else: equal labels, equal RDMA.

    Thousands of nodes share some hundred places, which is what makes distances cheap. ``labels``
    and ``lacks_rdma`` have one row for each place; the last place is that of nodes that are not
    known. ``of_row`` is the place of each row of the snapshot, and at its end (which is what the
    row -1 reads) the unknown place.
    """

    labels: Ints
    lacks_rdma: Bools
    of_row: Places

    @classmethod
    def of(cls, labels: Ints, rdma: Marks) -> "PlaceTable":
        """Find the places of a snapshot's nodes."""
        lacks = rdma == 0
        first, place = _distinct([*labels.T, lacks])
        nowhere = np.zeros((1, labels.shape[1]), labels.dtype)
        return cls(
            labels=np.concatenate([labels[first], nowhere]),
            lacks_rdma=np.append(lacks[first], False),
            of_row=np.append(place, len(first)),
        )

    @property
    def unknown(self) -> int:
        """The place of nodes that are not known."""
        return len(self.labels) - 1


def _distinct(columns: Sequence[npt.NDArray[Any]]) -> tuple[Places, Places]:
    """Return the first row of each distinct tuple, and which of these each row is."""
    key: npt.NDArray[np.int64] = np.zeros(len(columns[0]), np.int64)
    bound = 1
    for column in columns:
        size = int(column.max(initial=0)) + 1
        if bound > (1 << 62) // size:
            distinct, place = np.unique(key, return_inverse=True)
            key = place.astype(np.int64)
            bound = len(distinct)
        key = key * size + column
        bound *= size
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first, inverse


def classes_between(nodes: Ints, sources: Ints, config: DistanceConfig) -> Marks:
    """Return the class of distance between each node and each source, given their labels.

    The same node is not looked for here: equal labels are the nearest level.
    """
    shape = (len(nodes), len(sources))
    classes = np.full(shape, config.beyond_class, np.int8)
    missing = (nodes == 0).any(axis=1)[:, None] | (sources == 0).any(axis=1)[None, :]
    classes[missing] = config.unknown_class
    for level in reversed(range(nodes.shape[1])):
        there = nodes[:, level, None]
        here = sources[None, :, level]
        classes[(there == here) & (there != 0)] = level + 1
    return classes


@dataclass(frozen=True, slots=True, eq=False)
class ClassCosts:
    """What moving a prefix costs by class, in ms, and how far that is measured (0 to 1).

    ``without_rdma_ms`` is the least that it costs between nodes of which one has no RDMA.
    """

    milliseconds: Floats
    measured: Floats
    without_rdma_ms: float
    valid_until: float


def class_costs(
    config: DistanceConfig, links: Mapping[int, MeasuredLink], *, size_bytes: float, now: float
) -> ClassCosts:
    """Return the cost of each class: measured as far as that can be trusted, else configured.

    A class that nobody measured learns from those that were: it costs no more than a measured
    class farther away, and no less than a measured one that is nearer. So a fast fabric does not
    make the rack look slow only because no transfer has stayed in a rack yet.
    """
    prior = np.array([cost.milliseconds(size_bytes) for cost in config.costs])
    known = [cls for cls in sorted(links) if 0 <= cls < len(prior) and usable(links[cls])]
    measured = np.zeros(len(prior))
    milliseconds = np.maximum(prior, _LEAST_MS)
    valid_until = float("inf")
    if known:
        table = LinkArrays.of([links[cls] for cls in known])
        trust, valid_until = table.trust(config.links, config.enough_count, now)
        measured[known] = trust
        milliseconds[known] = blend(milliseconds[known], table.milliseconds(size_bytes), trust)
        _learn_from_neighbours(milliseconds, measured, config.beyond_class)
    return ClassCosts(
        milliseconds=milliseconds,
        measured=measured,
        without_rdma_ms=config.without_rdma.milliseconds(size_bytes),
        valid_until=valid_until,
    )


def _learn_from_neighbours(milliseconds: Floats, measured: Floats, beyond: int) -> None:
    """Put unmeasured classes between the measured ones around them."""
    least = 0.0
    # The same node has links of its own kind, which say nothing about the network's.
    for cls in range(1, beyond + 1):
        if measured[cls]:
            least = max(least, milliseconds[cls])
        else:
            milliseconds[cls] = max(milliseconds[cls], least)
    most = np.inf
    for cls in reversed(range(beyond + 1)):
        if measured[cls]:
            most = min(most, milliseconds[cls])
        else:
            milliseconds[cls] = min(milliseconds[cls], most)


@dataclass(frozen=True, slots=True, eq=False)
class LinkArrays:
    """Measured links side by side."""

    setup_seconds: Floats
    bytes_per_second: Floats
    count: Floats
    received_at: Floats

    @classmethod
    def of(cls, links: list[MeasuredLink]) -> "LinkArrays":
        """Lay out links that are usable."""
        return cls(
            setup_seconds=np.array([link.setup_seconds for link in links], np.float64),
            bytes_per_second=np.array([link.bytes_per_second for link in links], np.float64),
            count=np.array([link.count for link in links], np.float64),
            received_at=np.array([link.received_at for link in links], np.float64),
        )

    def trust(self, fading: Fading, enough_count: int, now: float) -> tuple[Floats, float]:
        """Return the trust in each by age and count, and until when it holds."""
        by_age, valid_until = fading.trust(self.received_at, now)
        return by_age * np.clip(self.count / enough_count, 0.0, 1.0), valid_until

    def milliseconds(self, size_bytes: float) -> Floats:
        """Return what moving so many bytes takes over each."""
        with np.errstate(over="ignore"):
            return 1e3 * (self.setup_seconds + size_bytes / self.bytes_per_second)


def blend(prior_ms: Floats, measured_ms: Floats, trust: Floats) -> Floats:
    """Mix two times by trust, in log time since costs span orders of magnitude."""
    measured_ms = np.clip(measured_ms, _LEAST_MS, _MOST_MS)
    prior, measured = np.log(np.maximum(prior_ms, _LEAST_MS)), np.log(measured_ms)
    mixed = np.exp(prior + trust * (measured - prior))
    # To the last bit where trust is full, so that equal times stay equal.
    return np.where(trust >= 1.0, measured_ms, mixed)


def usable(link: MeasuredLink) -> bool:
    """Tell whether a measured link says anything."""
    return 0 <= link.setup_seconds < float("inf") and 0 < link.bytes_per_second < float("inf")
