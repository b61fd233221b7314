"""What the extender knows of the cluster at one moment, and what a pod asks for (pure, immutable).

Arrays are read-only and have one row for each node, in the order of ``names``. Ages are kept as
the monotonic time at which a datum was received, since clocks of other machines are not trusted;
``-inf`` is "never". Missing is never zero: each field says what stands for unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import repeat

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Marks = npt.NDArray[np.int8]

UNKNOWN_NODE = -1
"""The row of a node that is not in the snapshot."""


class Role(StrEnum):
    """What an engine does for its group."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodAsk:
    """What a pod that is to be placed asks for; ``group`` is empty for pods that are not ours.

    ``devices`` counts whole devices of the managed resource. ``memory_ratio`` is the share of a
    device's memory that its engine takes at start (vLLM's ``gpu_memory_utilization``).
    ``prefix_tokens`` is the length of a typical prefix, ``None`` where the configured one holds.
    """

    namespace: str
    name: str
    uid: str
    group: str = ""
    role: Role = Role.BOTH
    devices: int = 0
    memory_ratio: float = 0.9
    prefix_tokens: int | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MeasuredLink:
    """The median of measurements: seconds of set-up, bytes per second, how many and since when."""

    setup_seconds: float
    bytes_per_second: float
    count: int
    received_at: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GroupFacts:
    """Where a group's KV is and where its engines run.

    ``holders`` are rows of nodes whose engines hold KV of the group, ``held_bytes`` how much, and
    ``held_at`` when that was last heard. ``prefill`` and ``decode`` are rows of nodes that run
    such pods (engines that do both are in both), with ``*_pods`` how many on each.
    ``kv_free_bytes`` is room for *traffic*, by row, NaN where unknown; it is never mixed with
    room for pods.
    """

    holders: Ints
    held_bytes: Floats
    held_at: Floats
    prefill: Ints
    prefill_pods: Ints
    decode: Ints
    decode_pods: Ints
    kv_free_bytes: Floats
    kv_bytes_per_token: float | None
    prefill_tokens_per_second: float | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Snapshot:
    """The cluster at one moment; ``version`` grows with every change.

    - ``labels``: for each level of the configured distance list (column 0 is the nearest), a
      number for the label's value; 0 is a missing or empty label.
    - ``rdma``: 1 a usable RDMA device, 0 none, -1 unknown.
    - ``devices``: allocatable devices of the managed resource; ``requested``: how many of them
      pods on the node ask for.
    - ``free_ratio``: for each device (columns; NaN where there is none or it is unknown) the free
      share of its memory by NVML; ``device_ok``: 1 healthy, 0 failed, -1 unknown or none.
    - ``reported_at`` / ``report_seconds``: when the agent's report was received, and how often
      such reports come; ``from_status``: 1 where it came from WorkerStatus instead.
    - ``left_at``: when a pod last left the node (``+inf`` while one is terminating, ``-inf``
      never): its memory may still be on its way back.
    - ``links``: measured medians by class of distance; ``pairs``: by (row of source, row of node).
    """

    version: int
    names: tuple[str, ...]
    rows: Mapping[str, int]
    labels: Ints
    rdma: Marks
    devices: Ints
    requested: Ints
    free_ratio: npt.NDArray[np.float32]
    device_ok: Marks
    reported_at: Floats
    report_seconds: Floats
    from_status: Marks
    left_at: Floats
    groups: Mapping[str, GroupFacts]
    links: Mapping[int, MeasuredLink]
    pairs: Mapping[tuple[int, int], MeasuredLink]

    def rows_of(self, nodes: list[str]) -> Ints:
        """Return the row of each node, ``UNKNOWN_NODE`` for those that are not here."""
        get = self.rows.get
        return np.fromiter(map(get, nodes, repeat(UNKNOWN_NODE)), np.int32, len(nodes))
