"""A small cluster with the scheduler double and a scripted extender, for its contract tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.doubles.scheduler import ExtenderConfig, SchedulerConfig, SchedulerDouble
from tests.doubles.scheduler.clocks import HandClock
from tests.doubles.scheduler.cluster import Cluster
from tests.doubles.scheduler.scripted_extender import ScriptedExtender

GPU = "nvidia.com/gpu"


def make_node(name: str, *, devices: int = 8, labels: dict[str, str] | None = None) -> Any:
    """Return a node as the API server would."""
    room = {"cpu": "192", "memory": "2000Gi", "pods": "110", GPU: str(devices)}
    return {
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name, **(labels or {})},
            "annotations": {},
        },
        "spec": {},
        "status": {
            "capacity": room,
            "allocatable": room,
            "conditions": [
                {"type": "Ready", "status": "True", "lastHeartbeatTime": "2026-11-29T00:00:00Z"}
            ],
        },
    }


def make_pod(name: str, *, devices: int = 1, node: str = "", **spec: Any) -> Any:
    """Return a pod as the API server would; ``devices`` 0 names no managed resource."""
    requests = {"cpu": "1", "memory": "1Gi"}
    if devices:
        requests[GPU] = str(devices)
    container = {"name": "c", "resources": {"requests": requests}}
    bound = {"nodeName": node} if node else {}
    return {
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}", "labels": {}},
        "spec": {"containers": [container], **bound, **spec},
        "status": {"phase": "Pending"},
    }


@dataclass(slots=True)
class Stage:
    """What a test plays with."""

    cluster: Cluster
    scheduler: SchedulerDouble
    extender: ScriptedExtender
    clock: HandClock

    async def place(self, document: Any) -> Any:
        """Add a pod, run one cycle, return its placement."""
        self.cluster.set_pod(document)
        return await self.scheduler.step()

    async def later(self, seconds: float) -> list[Any]:
        """Let time pass and run what is ready then; return the placements."""
        self.clock.advance(seconds)
        return await self.scheduler.drain()

    @property
    def bound(self) -> dict[str, str]:
        """Nodes by names of bound pods."""
        return {pod.name: pod.node_name for pod in self.cluster.bound.values()}


@asynccontextmanager
async def staged(nodes: int = 5, *, percentage: int = 0, **entry: Any) -> AsyncIterator[Stage]:
    """Run a stage; ``entry`` are fields of the extender's configuration."""
    defaults: dict[str, Any] = {
        "filter_verb": "filter",
        "prioritize_verb": "prioritize",
        "weight": 1,
        "node_cache_capable": True,
        "timeout_seconds": 5.0,
    }
    cluster, clock = Cluster(), HandClock()
    for index in range(nodes):
        cluster.set_node(make_node(f"n{index}"))
    async with ScriptedExtender().serving() as extender:
        config = SchedulerConfig(
            extenders=[ExtenderConfig(url_prefix=extender.url, **{**defaults, **entry})],
            percentage_of_nodes_to_score=percentage,
        )
        scheduler = SchedulerDouble(cluster, config, now=clock)
        try:
            yield Stage(cluster, scheduler, extender, clock)
        finally:
            scheduler.close()
