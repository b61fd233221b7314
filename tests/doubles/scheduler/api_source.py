"""The scheduler double over an API server: nodes and pods by LIST and WATCH, bindings by POST."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import aiohttp

from tests.doubles.scheduler.cluster import Cluster
from tests.doubles.scheduler.configuration import SchedulerConfig
from tests.doubles.scheduler.cycling import Placement
from tests.doubles.scheduler.go_json import Json
from tests.doubles.scheduler.objects import PodInfo
from tests.doubles.scheduler.scheduler import BindError, SchedulerDouble

_LONGEST_LINE_BYTES = 1 << 22
_PAUSE_SECONDS = 0.05


class ApiSource:
    """Keeps a cluster in step with an API server, and writes what the scheduler decides."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.cluster = Cluster()
        self._url = url
        self._session = session

    async def follow(self, synced: asyncio.Event) -> None:
        """Follow nodes and pods until cancelled; ``synced`` is set once both were listed."""
        waits = [asyncio.Event(), asyncio.Event()]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow("nodes", self._node, waits[0]))
            tasks.create_task(self._follow("pods", self._pod, waits[1]))
            await asyncio.gather(*(wait.wait() for wait in waits))
            synced.set()

    async def bind(self, pod: PodInfo, node: str) -> None:
        """Bind a pod; raises :class:`BindError`."""
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/binding"
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": pod.name, "namespace": pod.namespace, "uid": pod.uid},
            "target": target,
        }
        async with self._session.post(self._url + path, json=body) as response:
            if response.status >= 300:
                raise BindError(await response.text())

    async def evict(self, pod: PodInfo) -> None:
        """Delete a pod; one that is gone is fine."""
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
        async with self._session.delete(self._url + path):
            pass

    async def nominate(self, pod: PodInfo, node: str) -> None:
        """Write down which node a pod waits for."""
        await self._patch_status(pod, {"nominatedNodeName": node})

    async def explain(self, placement: Placement) -> None:
        """Write down why a pod got no node."""
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": placement.outcome.value,
            "message": placement.describe(),
        }
        await self._patch_status(placement.pod, {"conditions": [condition]})

    async def _patch_status(self, pod: PodInfo, status: Json) -> None:
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/status"
        headers = {"Content-Type": "application/merge-patch+json"}
        patch = json.dumps({"status": status})
        async with self._session.patch(self._url + path, data=patch, headers=headers):
            pass

    def _node(self, kind: str, document: Json) -> None:
        if kind == "DELETED":
            self.cluster.delete_node(document["metadata"]["name"])
        else:
            self.cluster.set_node(document)

    def _pod(self, kind: str, document: Json) -> None:
        if kind == "DELETED":
            self.cluster.delete_pod(PodInfo(document).uid)
        else:
            self.cluster.set_pod(document)

    async def _follow(
        self, plural: str, take: Callable[[str, Json], None], listed: asyncio.Event
    ) -> None:
        version = ""
        while True:
            try:
                if not version:
                    version = await self._list(plural, take)
                    listed.set()
                version = await self._watch(plural, version, take)
            except (aiohttp.ClientError, TimeoutError):
                version = ""
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _list(self, plural: str, take: Callable[[str, Json], None]) -> str:
        async with self._session.get(f"{self._url}/api/v1/{plural}") as response:
            response.raise_for_status()
            found = await response.json()
        for item in found.get("items") or ():
            take("ADDED", item)
        version: str = found["metadata"]["resourceVersion"]
        return version

    async def _watch(self, plural: str, version: str, take: Callable[[str, Json], None]) -> str:
        query = {"watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true"}
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._session.get(
            f"{self._url}/api/v1/{plural}", params=query, timeout=timeout
        ) as response:
            response.raise_for_status()
            async for line in response.content:
                event = json.loads(line)
                document = event["object"]
                if event["type"] == "ERROR":
                    return ""
                version = document["metadata"]["resourceVersion"]
                if event["type"] != "BOOKMARK":
                    take(event["type"], document)
        return version


@asynccontextmanager
async def scheduling(
    url: str, config: SchedulerConfig, *, seed: int = 0, headers: dict[str, str] | None = None
) -> AsyncIterator[SchedulerDouble]:
    """Run a scheduler double against an API server inside the block; certificates are taken."""
    async with aiohttp.ClientSession(
        headers=headers,
        read_bufsize=_LONGEST_LINE_BYTES,
        connector=aiohttp.TCPConnector(ssl=False),
    ) as session:
        source = ApiSource(url, session)
        scheduler = SchedulerDouble(
            source.cluster,
            config,
            seed=seed,
            bind=source.bind,
            evict=source.evict,
            nominate=source.nominate,
            explain=source.explain,
        )
        synced = asyncio.Event()
        jobs = [asyncio.create_task(source.follow(synced))]
        try:
            await asyncio.wait_for(synced.wait(), 30)
            jobs.append(asyncio.create_task(scheduler.run()))
            yield scheduler
        finally:
            for job in jobs:
                job.cancel()
            for job in jobs:
                with suppress(asyncio.CancelledError):
                    await job
