"""A control plane around the three hosts: the double of an API server, a real extender."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.hosts.network import HOSTS
from tests.hosts.site import Site
from tests.integration.scheduling_site import GPU, ExtenderProcess, doubles, site_over

_SMALL_PREFIX = ("--distance.kv-bytes-per-token", "128")
"""A megabyte for a typical prefix: over these cables a real one would take longer than computing
it, however fast they are, and then all nodes are alike."""


@dataclass(slots=True)
class Extender:
    """A real ``nearkv-extender``, asked as a scheduler asks."""

    process: ExtenderProcess
    session: aiohttp.ClientSession

    async def scores(self, *hosts: str) -> dict[str, int]:
        """Return the scores of hosts for a decode pod of the group."""
        labels = {"nearkv.io/group": "g", "nearkv.io/role": "decode"}
        pod = {
            "metadata": {"name": "next", "namespace": "default", "uid": "next", "labels": labels},
            "spec": {"containers": [{"resources": {"requests": {GPU: "1"}}}]},
        }
        body = json.dumps({"Pod": pod, "Nodes": None, "NodeNames": list(hosts)})
        async with self.session.post(f"{self.process.url}/v1/prioritize", data=body) as answer:
            scores: list[dict[str, Any]] = await answer.json()
        return {score["Host"]: score["Score"] for score in scores}


@asynccontextmanager
async def cluster_around(
    site: Site, folder: Path, *, racks: dict[str, str]
) -> AsyncIterator[Extender]:
    """Run an extender that knows the hosts as nodes, in these racks; ``n3`` prefills."""
    async with doubles(folder) as plane, site_over(plane) as cluster:
        for host in HOSTS:
            await cluster.add_node(host, rack=racks[host], agent=False)
            cluster.agents.append(site.url(host))
        await cluster.add_running("prefill", "n3")
        process = await cluster.start_extender(*_SMALL_PREFIX)
        yield Extender(process, cluster.session)
