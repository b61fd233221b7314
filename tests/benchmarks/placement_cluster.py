"""A simulated cluster for placement: nodes in four levels, groups with prefill, decode to place.

The scheduler is the double with a kube-scheduler's scores; the extender is ours over HTTP, its
view kept in step with every pod that is bound. All placers start from the same cluster, by seed.
"""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from nearkv.extender.app import SCORER, TRANSPORT, build_app
from nearkv.extender.configuring import distance_config, pod_rules, view_config
from nearkv.extender.fetching import fetch_times
from nearkv.extender.ledger import Ledger
from nearkv.extender.model import PodAsk, Role, Snapshot
from nearkv.extender.settings import ExtenderSettings
from nearkv.extender.view.cluster import ViewStats
from nearkv.extender.view.nodes import read_node
from nearkv.extender.view.pods import read_pod
from nearkv.extender.view.state import ClusterState, SeenPod
from nearkv.extender.view.summaries import NodeReport
from nearkv.kube.objects import Node, Pod
from nearkv.node_summary import DeviceSummary, GroupSummary, NodeSummary
from nearkv.serving import running
from nearkv.settings import Address
from tests.doubles.scheduler import ExtenderConfig, Outcome, SchedulerConfig, SchedulerDouble
from tests.doubles.scheduler.cluster import Cluster
from tests.doubles.scheduler.objects import UNIT, PodInfo

GPU = "nvidia.com/gpu"
ZONE = "topology.kubernetes.io/zone"
_LABELS = ("nearkv.io/rack", "nearkv.io/block", ZONE, "topology.kubernetes.io/region")
_LEVELS = ("rack", "block", "zone", "region")
_LINKS = ((0.001, 45e9), (0.002, 25e9), (0.003, 11e9), (0.005, 2.5e9))
"""Seconds of set-up and bytes per second within each level; 400G, its spine, 100G, 25G."""
_DEVICES = 8
_DEVICE_BYTES = 80 << 30
_HELD_BYTES = 40_000_000_000
_ANY_PORT = Address("127.0.0.1", 0)
_COARSE, _FINE = 10, 100
_COARSE_WEIGHT, _FINE_WEIGHT = 8, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a simulation: ``level_nodes`` is how many nodes a domain of each level has."""

    nodes: int = 1000
    level_nodes: tuple[int, ...] = (10, 50, 250, 500)
    groups: int = 3
    prefill_racks: int = 2
    decode_per_group: int = 40
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Placer:
    """Who places: a stock scheduler, with zone affinity in the pods, or with our extender.

    ``fine`` scores to 100 instead of 10. ``percentage`` is how many nodes are looked at, 0 as
    kube-scheduler chooses by itself.
    """

    name: str
    zone_affinity: bool = False
    extender: bool = False
    equal_costs: bool = False
    fine: bool = False
    percentage: int = 100


@dataclass(slots=True)
class Placed:
    """Where decode pods went, and what each would take to fetch its KV, in ms."""

    nodes: dict[str, str] = field(default_factory=dict)
    milliseconds: dict[str, float] = field(default_factory=dict)

    @property
    def mean_ms(self) -> float:
        """The mean predicted fetch time."""
        return sum(self.milliseconds.values()) / len(self.milliseconds)


def settings_of(placer: Placer) -> ExtenderSettings:
    """Return the extender's settings; with equal costs distance makes no difference at all."""
    setup, bandwidth = _LINKS[0]
    levels = [
        {
            "name": name,
            "labels": [label],
            "setup_seconds": setup if placer.equal_costs else link[0],
            "bytes_per_second": bandwidth if placer.equal_costs else link[1],
        }
        for name, label, link in zip(_LEVELS, _LABELS, _LINKS, strict=True)
    ]
    distance: dict[str, Any] = {"levels": levels}
    if placer.equal_costs:
        for kind in ("same_node", "beyond", "unknown", "without_rdma"):
            distance |= {f"{kind}_setup_seconds": setup, f"{kind}_bytes_per_second": bandwidth}
    score = {"highest": _FINE if placer.fine else _COARSE}
    return ExtenderSettings.model_validate({"distance": distance, "score": score})


def build_cluster(shape: Shape) -> Cluster:
    """Return a cluster whose devices are partly taken, with each group's prefill pods in place."""
    random = Random(shape.seed)
    cluster = Cluster()
    for index in range(shape.nodes):
        name = f"node-{index:04}"
        cluster.set_node(_node(name, index, shape))
        taken = random.randrange(0, _DEVICES)
        if taken:
            cluster.set_pod(_pod(f"training-{index}", devices=taken, node=name))
    for number in range(shape.groups):
        for rack in _prefill_racks(shape, random):
            first = rack * shape.level_nodes[0]
            for index in (first, first + 1):
                node, group = f"node-{index:04}", f"group-{number}"
                cluster.delete_pod(f"uid-training-{index}")
                cluster.delete_pod(f"uid-prefill-{index}")
                cluster.set_pod(
                    _pod(f"prefill-{index}", devices=4, node=node, group=group, role="prefill")
                )
    return cluster


def _prefill_racks(shape: Shape, random: Random) -> list[int]:
    """Return racks for a group's prefill pods: all in one zone, as people deploy them."""
    rack, _, zone, _ = shape.level_nodes
    first = random.randrange(shape.nodes // zone) * (zone // rack)
    return random.sample(range(first, first + zone // rack), shape.prefill_racks)


async def place(shape: Shape, placer: Placer) -> Placed:
    """Place every decode pod; return where they went."""
    cluster = build_cluster(shape)
    settings = settings_of(placer)
    mirror = Mirror(cluster, settings)
    before = mirror.snapshot()
    placed = Placed()
    async with _scheduler(cluster, mirror, settings, placer, shape.seed) as scheduler:
        for number in range(shape.decode_per_group * shape.groups):
            group = f"group-{number % shape.groups}"
            name = f"decode-{number}"
            document = _pod(name, devices=2, group=group, role="decode")
            if placer.zone_affinity:
                document["spec"]["affinity"] = _zone_affinity(group)
            cluster.set_pod(document)
            placement = await scheduler.step()
            if placement is None or placement.outcome is not Outcome.PLACED:
                raise AssertionError(f"{name} found no node")
            placed.nodes[name] = placement.node
            # Judged by the costs of a real network, whatever the placer took them to be.
            placed.milliseconds[name] = _fetch_ms(before, group, placement.node)
            mirror.see(cluster.bound[f"uid-{name}"])
    return placed


class Mirror:
    """The extender's view, kept in step by hand instead of by watches."""

    def __init__(self, cluster: Cluster, settings: ExtenderSettings) -> None:
        self.ledger = Ledger()
        config = view_config(settings, distance_config(settings.distance))
        self._rules = pod_rules(settings)
        self._state = ClusterState(config.levels, self)
        now = time.monotonic()
        self._state.nodes_listed(
            read_node(msgspec.convert(node.document, Node), config.nodes)
            for node in cluster.nodes.values()
        )
        for pod in cluster.bound.values():
            self._put(pod)
        for node in cluster.nodes.values():
            report = _report(node.name, list(node.pods.values()))
            self._state.report_arrived(
                NodeReport(summary=report, source="bench", received_at=now, promised_seconds=600.0)
            )
        self._snapshot = self._state.publish(now)

    def bound(self, uid: str, node: str, now: float) -> object:
        """Pass on to the ledger of the running extender."""
        return self.ledger.bound(uid, node, now)

    def covered(self, uid: str) -> None:
        """Pass on."""
        self.ledger.covered(uid)

    def forget(self, uid: str) -> None:
        """Pass on."""
        self.ledger.forget(uid)

    def see(self, pod: PodInfo) -> None:
        """Take note of a pod that was bound."""
        self._put(pod)
        self._snapshot = self._state.publish(time.monotonic())

    def _put(self, pod: PodInfo) -> None:
        facts = read_pod(msgspec.convert(pod.document, Pod), self._rules)
        self._state.pod_seen(SeenPod(pod.uid, facts), time.monotonic())

    def snapshot(self) -> Snapshot:
        """Return the newest snapshot."""
        return self._snapshot

    def stats(self) -> ViewStats | None:
        """Return nothing."""
        return None

    async def wait_until_synced(self) -> None:
        """Return at once."""

    async def run(self) -> None:
        """Return at once."""


@asynccontextmanager
async def _scheduler(
    cluster: Cluster, mirror: Mirror, settings: ExtenderSettings, placer: Placer, seed: int
) -> AsyncIterator[SchedulerDouble]:
    async with AsyncExitStack() as stack:
        extenders = []
        if placer.extender:
            app = build_app(settings, view=mirror)
            mirror.ledger = app[SCORER]._ledger
            serving = running(app, _ANY_PORT, transport=app[TRANSPORT])
            address = await stack.enter_async_context(serving)
            extenders.append(
                ExtenderConfig(
                    url_prefix=f"{address.url}/v1",
                    filter_verb="filter",
                    prioritize_verb="prioritize",
                    weight=_FINE_WEIGHT if placer.fine else _COARSE_WEIGHT,
                    node_cache_capable=True,
                )
            )
        config = SchedulerConfig(
            extenders=extenders, percentage_of_nodes_to_score=placer.percentage
        )
        scheduler = SchedulerDouble(cluster, config, seed=seed)
        stack.callback(scheduler.close)
        yield scheduler


def _fetch_ms(snapshot: Snapshot, group: str, node: str) -> float:
    ask = PodAsk(
        namespace="default", name="any", uid="any", group=group, role=Role.DECODE, devices=2
    )
    config = distance_config(settings_of(Placer(name="judge")).distance)
    times = fetch_times(snapshot, ask, config, time.monotonic())
    return float(times.milliseconds[snapshot.rows[node]])


def _node(name: str, index: int, shape: Shape) -> dict[str, Any]:
    room = {"cpu": "192", "memory": "2000Gi", "pods": "110", GPU: str(_DEVICES)}
    labels = {
        label: f"{level}-{index // size}"
        for level, label, size in zip(_LEVELS, _LABELS, shape.level_nodes, strict=True)
    }
    labels["feature.node.kubernetes.io/rdma.available"] = "true"
    return {"metadata": {"name": name, "labels": labels}, "status": {"allocatable": room}}


def _pod(
    name: str, *, devices: int, node: str = "", group: str = "", role: str = ""
) -> dict[str, Any]:
    requests = {"cpu": str(8 * devices), "memory": f"{128 * devices}Gi", GPU: str(devices)}
    labels = {"nearkv.io/group": group, "nearkv.io/role": role} if group else {}
    spec: dict[str, Any] = {"containers": [{"resources": {"requests": requests}}]}
    if node:
        spec["nodeName"] = node
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}", "labels": labels}
    phase = "Running" if node else "Pending"
    return {"metadata": metadata, "spec": spec, "status": {"phase": phase}}


def _zone_affinity(group: str) -> Mapping[str, Any]:
    term = {
        "topologyKey": ZONE,
        "labelSelector": {"matchLabels": {"nearkv.io/group": group, "nearkv.io/role": "prefill"}},
    }
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _report(node: str, pods: list[PodInfo]) -> NodeSummary:
    """Return a node's summary: devices that pods have are full, a prefill pod holds KV."""
    owners = [pod.uid for pod in pods for _ in range(pod.requests.get(GPU, 0) // UNIT)]
    devices = [
        DeviceSummary(
            id=f"{node}-{index}",
            total_bytes=_DEVICE_BYTES,
            used_bytes=int(0.9 * _DEVICE_BYTES) if index < len(owners) else 0,
            health="ok",
            pod_uid=owners[index] if index < len(owners) else None,
        )
        for index in range(_DEVICES)
    ]
    groups = [
        GroupSummary(group=pod.labels["nearkv.io/group"], engines=1, held_bytes=_HELD_BYTES)
        for pod in pods
        if pod.labels.get("nearkv.io/role") == "prefill"
    ]
    return NodeSummary(
        node=node,
        boot="bench",
        seq=1,
        interval_seconds=600.0,
        devices=tuple(devices),
        groups=tuple(groups),
    )
