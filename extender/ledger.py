"""Pods that were scored and are not seen on a node yet (single-threaded; callers pass the time).

Between the answer to the scheduler and the watch's word that a pod was bound, neither the API
server nor NVML tells that devices are about to be taken. The ledger fills that gap: it expects
the pod on the nodes that scored best, for a while. It reserves nothing: an entry is replaced
when the pod is scored again (gang scheduling simulates, and repeats), and is gone once the pod
is bound, seen in a report, deleted, or not heard of for ``ttl_seconds``.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nearkv.extender.model import UNKNOWN_NODE, Floats, Snapshot

MOST_SHARES = 32
"""Nodes that a pod is expected on in parts; over more, no part is worth writing down."""


@dataclass(frozen=True, slots=True)
class _Expectation:
    nodes: tuple[str, ...]
    devices: float
    pods: float
    until: float


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """What is expected by row of the snapshot, with one entry more (0) for unknown nodes."""

    devices: Floats
    pods: Floats


class Ledger:
    """Expected pods by UID, at most ``max_pods``; the oldest go first."""

    def __init__(self, *, ttl_seconds: float = 30.0, max_pods: int = 10_000) -> None:
        if not ttl_seconds > 0 or max_pods < 1:
            raise ValueError("ttl_seconds must be above 0 and max_pods at least 1")
        self._ttl_seconds = ttl_seconds
        self._max_pods = max_pods
        self._pods: OrderedDict[str, _Expectation] = OrderedDict()
        self._on_node: dict[str, dict[str, _Expectation]] = {}
        self._rows: Mapping[str, int] | None = None
        self._by_row = Expected(np.zeros(1), np.zeros(1))
        self._changed: set[str] = set()

    def __len__(self) -> int:
        return len(self._pods)

    def expect(self, uid: str, nodes: Sequence[str], devices: float, now: float) -> None:
        """Expect a pod on one of these nodes, in equal parts; what was expected of it is gone."""
        self.forget(uid)
        distinct = tuple(dict.fromkeys(nodes)) if len(nodes) <= MOST_SHARES else ()
        share = 1.0 / max(len(distinct), 1)
        expectation = _Expectation(
            nodes=distinct,
            devices=max(devices, 0.0) * share,
            pods=share,
            until=now + self._ttl_seconds,
        )
        self._pods[uid] = expectation
        for node in distinct:
            self._on_node.setdefault(node, {})[uid] = expectation
        self._changed.update(distinct)
        while len(self._pods) > self._max_pods:
            self.forget(next(iter(self._pods)))

    def bound(self, uid: str, node: str, now: float) -> bool:
        """Take the watch's word that a pod is bound; tell whether it was expected on this node.

        From now on the pod is counted among those of its node.
        """
        self.expire(now)
        expectation = self._pods.get(uid)
        self.forget(uid)
        return expectation is not None and node in expectation.nodes

    def covered(self, uid: str) -> None:
        """Take it that a node's report already covers a pod's devices."""
        self.forget(uid)

    def forget(self, uid: str) -> None:
        """Expect a pod no longer; one that is not expected is fine."""
        expectation = self._pods.pop(uid, None)
        if expectation is None:
            return
        for node in expectation.nodes:
            pods = self._on_node[node]
            del pods[uid]
            if not pods:
                del self._on_node[node]
        self._changed.update(expectation.nodes)

    def expire(self, now: float) -> None:
        """Forget pods that were not heard of for too long."""
        while self._pods:
            uid = next(iter(self._pods))
            if self._pods[uid].until > now:
                return
            self.forget(uid)

    def expected(self, snapshot: Snapshot, now: float) -> Expected:
        """Return the devices and pods that are expected, by row."""
        self.expire(now)
        if self._rows is not snapshot.rows:
            count = len(snapshot.names) + 1
            self._rows, self._by_row = snapshot.rows, Expected(np.zeros(count), np.zeros(count))
            self._changed = set(self._on_node)
        for node in self._changed:
            row = snapshot.rows.get(node, UNKNOWN_NODE)
            if row != UNKNOWN_NODE:
                # Summed anew each time: adding and taking away would leave rounding errors.
                pods = self._on_node.get(node, {}).values()
                self._by_row.devices[row] = sum(entry.devices for entry in pods)
                self._by_row.pods[row] = sum(entry.pods for entry in pods)
        self._changed.clear()
        return Expected(self._by_row.devices.copy(), self._by_row.pods.copy())

    def taken(self, snapshot: Snapshot, now: float) -> Floats:
        """Return the devices that are expected to be taken, by row."""
        return self.expected(snapshot, now).devices
