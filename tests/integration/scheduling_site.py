"""A small cluster: an API server, a scheduler, agents, and real ``nearkv-extender`` processes.

Everything goes through the API, so that the same scenarios run with doubles (here) and with real
binaries (``tests/cluster``).
"""

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self

import aiohttp

from nearkv.agent.app import build_app as build_agent
from nearkv.agent.settings import AgentSettings
from nearkv.node_summary import DeviceSummary
from nearkv.serving import running
from nearkv.settings import Address
from tests.doubles.api_server import ApiServerDouble, node_object, pod_object
from tests.doubles.scheduler import ExtenderConfig, SchedulerConfig
from tests.doubles.scheduler.api_source import scheduling

ANY_PORT = Address("127.0.0.1", 0)
GPU = "nvidia.com/gpu"
OURS = {"nearkv.io/group": "g", "nearkv.io/role": "decode"}
SCHEDULER = "llm-scheduler"
DEADLINE_SECONDS = 30.0
NODES = "/api/v1/nodes"
PODS = "/api/v1/namespaces/default/pods"
Json = dict[str, Any]
_DEVICE_BYTES = 80 << 30


@dataclass(slots=True)
class Gpus:
    """The devices of a node as NVML would tell; tests spoil and mend them."""

    count: int = 8
    used_ratio: float = 0.0
    health: str = "ok"

    def read(self) -> Sequence[DeviceSummary]:
        """Read them, as an agent does."""
        return [
            DeviceSummary(
                id=f"GPU-{index}",
                total_bytes=_DEVICE_BYTES,
                used_bytes=int(self.used_ratio * _DEVICE_BYTES),
                health=self.health,  # type: ignore[arg-type]
            )
            for index in range(self.count)
        ]


@dataclass(slots=True)
class ExtenderProcess:
    """A ``nearkv-extender`` of its own."""

    process: asyncio.subprocess.Process
    url: str

    @classmethod
    async def start(cls, *arguments: str) -> Self:
        """Start it on a free port; return once it listens."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("NEARKV_")}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "nearkv.extender", "--listen", "127.0.0.1:0", *arguments),
            env=inherited,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        said = b""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while line := await process.stderr.readline():
                said += line
                event = json.loads(line) if line.startswith(b"{") else {}
                if event.get("event") == "listening":
                    return cls(process, event["url"])
        raise AssertionError(f"nearkv-extender ended before it listened:\n{said.decode()}")

    @property
    def address(self) -> str:
        """Where it listens, for one that takes its place."""
        return self.url.rpartition("/")[2]

    async def stop(self) -> None:
        """Stop it, the hard way if need be; harmless when it has ended."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self.process.wait(), 30)
            except TimeoutError:
                self.process.kill()
        await self.process.wait()
        self.process._transport.close()  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """An API server, and how to run a scheduler against it.

    ``headers`` let a client in; ``scheduling`` runs a scheduler with a configuration inside a
    block.
    """

    url: str
    kubeconfig: Path
    headers: Mapping[str, str]
    scheduling: Callable[[SchedulerConfig], AbstractAsyncContextManager[object]]


@dataclass(slots=True)
class Site:
    """The cluster of a test."""

    plane: ControlPlane
    session: aiohttp.ClientSession
    stack: AsyncExitStack
    gpus: dict[str, Gpus] = field(default_factory=dict)
    agents: list[str] = field(default_factory=list)
    extender_arguments: tuple[str, ...] = ()

    async def request(self, method: str, path: str, **options: Any) -> Any:
        """Ask the API server; return the answer, an error as an assertion."""
        async with self.session.request(
            method, self.plane.url + path, headers=self.plane.headers, ssl=False, **options
        ) as response:
            text = await response.text()
            assert response.status < HTTPStatus.MULTIPLE_CHOICES, f"{method} {path}: {text}"
            return json.loads(text)

    async def patch(self, path: str, patch: Json) -> None:
        """Merge a patch into an object."""
        kind = {"Content-Type": "application/merge-patch+json"}
        async with self.session.patch(
            self.plane.url + path,
            data=json.dumps(patch),
            headers={**self.plane.headers, **kind},
            ssl=False,
        ) as response:
            assert response.status < HTTPStatus.MULTIPLE_CHOICES, await response.text()

    # -- Nodes and pods ------------------------------------------------------------------

    async def add_node(
        self, name: str, *, rack: str = "r0", devices: int = 8, agent: bool = True
    ) -> None:
        """Add a node, with an agent on it that tells of clean devices."""
        labels = {"nearkv.io/rack": rack, "topology.kubernetes.io/zone": "z"}
        node = node_object(name, labels=labels, gpus=devices)
        await self.request("POST", NODES, json=node)
        await self.patch(f"{NODES}/{name}/status", {"status": node["status"]})
        if agent:
            await self._add_agent(name, devices)

    async def _add_agent(self, name: str, devices: int) -> None:
        gpus = self.gpus[name] = Gpus(devices)
        kubeconfig = self.plane.kubeconfig
        settings = AgentSettings.model_validate(
            {
                "node": name,
                "listen": "127.0.0.1:0",
                "summary": {"interval_seconds": 0.2, "heartbeat_seconds": 2.0},
                "waking": {"enabled": True, "kubeconfig": kubeconfig, "min_seconds": 1},
            }
        )
        agent = build_agent(settings, devices=gpus.read)
        address = await self.stack.enter_async_context(running(agent, ANY_PORT))
        self.agents.append(address.url)

    async def add_pod(
        self, name: str, *, labels: dict[str, str] | None = None, gpus: int = 1
    ) -> None:
        """Add a pod that wants a node; ours unless ``labels`` say otherwise."""
        labels = OURS if labels is None else labels
        pod = pod_object(name, labels=labels, gpus=gpus, scheduler=SCHEDULER)
        await self.request("POST", PODS, json=pod)

    async def add_running(self, name: str, node: str, *, role: str = "prefill") -> None:
        """Add a pod of the group that runs already."""
        labels = {"nearkv.io/group": "g", "nearkv.io/role": role}
        pod = pod_object(name, node=node, labels=labels)
        await self.request("POST", PODS, json=pod)
        await self.patch(f"{PODS}/{name}/status", {"status": pod["status"]})

    async def delete_pod(self, name: str) -> None:
        """Delete a pod at once."""
        await self.request("DELETE", f"{PODS}/{name}?gracePeriodSeconds=0")

    async def pods(self) -> list[Json]:
        """Return all pods."""
        found: list[Json] = (await self.request("GET", PODS))["items"]
        return found

    async def nodes(self) -> list[Json]:
        """Return all nodes."""
        found: list[Json] = (await self.request("GET", NODES))["items"]
        return found

    async def nodes_of(self) -> dict[str, str]:
        """Return the nodes of pods that are bound."""
        pods = [pod for pod in await self.pods() if pod["spec"].get("nodeName")]
        return {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in pods}

    async def bound(self, *names: str, seconds: float = DEADLINE_SECONDS) -> dict[str, str]:
        """Return where pods are once all of them are bound."""
        give_up_at = time.monotonic() + seconds
        while True:
            placed = await self.nodes_of()
            if placed.keys() >= set(names):
                return {name: placed[name] for name in names}
            waiting = sorted(set(names) - placed.keys())
            assert time.monotonic() < give_up_at, f"never bound: {waiting}"
            await asyncio.sleep(0.02)

    async def not_placed(self, name: str) -> str:
        """Return the reason that the scheduler wrote down for a pod that got no node."""
        give_up_at = time.monotonic() + DEADLINE_SECONDS
        while True:
            pod = await self.request("GET", f"{PODS}/{name}")
            for condition in pod["status"].get("conditions") or ():
                if condition["type"] == "PodScheduled" and condition["status"] == "False":
                    return str(condition["reason"])
            assert not pod["spec"].get("nodeName"), f"{name} was bound"
            assert time.monotonic() < give_up_at, f"{name} was not tried"
            await asyncio.sleep(0.02)

    async def counts(self, prefix: str) -> Counter[str]:
        """Return how many pods whose name begins so each node has."""
        placed = (await self.nodes_of()).items()
        return Counter(node for name, node in placed if name.startswith(prefix))

    # -- Extender and scheduler ----------------------------------------------------------

    async def start_extender(self, *arguments: str) -> ExtenderProcess:
        """Start an extender over this cluster; return once it has heard of every node."""
        agents = [item for url in self.agents for item in ("--agents.urls", url)]
        extender = await ExtenderProcess.start(
            *("--kubernetes.kubeconfig", str(self.plane.kubeconfig)),
            # Its CRD is not installed here.
            *("--kubernetes.no-worker-statuses", *agents, *self.extender_arguments, *arguments),
        )
        self.stack.push_async_callback(extender.stop)
        await self.until(extender, lambda known: known["nodes_reported"] == len(self.agents))
        return extender

    async def topology(self, extender: ExtenderProcess) -> Any:
        """Return what an extender knows, ``None`` before its first snapshot."""
        async with self.session.get(f"{extender.url}/v1/topology") as response:
            return await response.json() if response.status == HTTPStatus.OK else None

    async def until(self, extender: ExtenderProcess, holds: Callable[[Any], bool]) -> None:
        """Wait until something holds of what an extender knows."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                known = await self.topology(extender)
                if known is not None and holds(known):
                    return
                await asyncio.sleep(0.02)

    async def calls(self, extender: ExtenderProcess) -> dict[str, int]:
        """Return how many requests an extender has answered, by verb."""
        async with self.session.get(f"{extender.url}/metrics") as response:
            text = await response.text()
        pattern = r'nearkv_extender_request_seconds_count\{.*verb="(\w+)"\} (\S+)'
        counts: Counter[str] = Counter()
        for verb, count in re.findall(pattern, text):
            counts[verb] += int(float(count))
        return dict(counts)

    def scheduler(self, url: str, **entry: Any) -> AbstractAsyncContextManager[object]:
        """Return a scheduler for ``async with`` that asks the extender at this URL."""
        fields: dict[str, Any] = {
            "filter_verb": "filter",
            "prioritize_verb": "prioritize",
            "weight": 8,
            "node_cache_capable": True,
            "ignorable": True,
            "timeout_seconds": 5.0,
            "managed_resources": frozenset({GPU}),
        }
        config = SchedulerConfig(
            scheduler_name=SCHEDULER,
            percentage_of_nodes_to_score=100,
            extenders=[ExtenderConfig(url_prefix=f"{url}/v1", **{**fields, **entry})],
        )
        return self.plane.scheduling(config)


@asynccontextmanager
async def site_over(plane: ControlPlane) -> AsyncIterator[Site]:
    """Run a cluster without nodes over a control plane inside the block."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Site(plane, session, stack)


@asynccontextmanager
async def doubles(folder: Path) -> AsyncIterator[ControlPlane]:
    """Run the double of an API server, with scheduler doubles against it, inside the block."""
    async with ApiServerDouble() as api:
        kubeconfig = api.write_kubeconfig(folder / "kubeconfig")
        yield ControlPlane(api.url, kubeconfig, {}, lambda config: scheduling(api.url, config))
