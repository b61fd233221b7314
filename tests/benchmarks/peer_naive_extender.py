"""An extender as one writes it first: json, dictionaries, a loop over nodes and sources.

It does for prioritize what is measured of ours, in the same units and over the same cluster:
class of distance by label, predicted milliseconds, devices that are free, scores from 0 to 10.
"""

import asyncio
import math
import sys
from typing import Any

from aiohttp import web

from nearkv.extender.model import Snapshot
from nearkv.serving import run, running
from nearkv.settings import Address
from tests.extender.snapshots import make_cluster

_COSTS = ((0.3, 150e6), (1.0, 45e6), (1.5, 35e6), (3.0, 11e6), (5.0, 2.5e6), (30.0, 0.6e6))
_MEMORY_RATIO = 0.9
_PREFIX_BYTES = 8192 * 131072


class NaiveExtender:
    """Everything by name, in dictionaries."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.labels = {
            name: {f"level-{level}": f"domain-{value}" for level, value in enumerate(values)}
            for name, values in zip(snapshot.names, snapshot.labels.tolist(), strict=True)
        }
        self.devices = dict(zip(snapshot.names, snapshot.free_ratio.tolist(), strict=True))
        self.requested = dict(zip(snapshot.names, snapshot.requested.tolist(), strict=True))
        facts = snapshot.groups["g"]
        self.sources = {
            snapshot.names[row]: float(held)
            for row, held in zip(facts.holders.tolist(), facts.held_bytes, strict=True)
        }

    def milliseconds(self, node: str, source: str) -> float:
        """Predict moving a prefix from source to node."""
        if node == source:
            level = 0
        else:
            mine, theirs = self.labels.get(node, {}), self.labels[source]
            level = len(_COSTS) - 1
            for number, label in enumerate(theirs):
                if mine.get(label) == theirs[label]:
                    level = number + 1
                    break
        setup, bytes_per_millisecond = _COSTS[level]
        return setup + _PREFIX_BYTES / bytes_per_millisecond

    def headroom(self, node: str) -> float:
        """Return the share of devices that are free by requests, and unused by NVML."""
        devices = self.devices.get(node)
        if not devices:
            return 0.5
        unused = sum(1 for free_ratio in devices if free_ratio >= _MEMORY_RATIO)
        free = len(devices) - self.requested[node]
        return float(max(0, min(unused, free)) / len(devices))

    async def prioritize(self, request: web.Request) -> web.Response:
        """Answer scores."""
        arguments: dict[str, Any] = await request.json()
        if arguments["NodeNames"] is not None:
            nodes = arguments["NodeNames"]
        else:
            nodes = [item["metadata"]["name"] for item in arguments["Nodes"]["items"]]
        total = sum(self.sources.values())
        times = {}
        for node in nodes:
            mean, nearest = 0.0, math.inf
            for source, held in self.sources.items():
                milliseconds = self.milliseconds(node, source)
                mean += milliseconds * held / total
                nearest = min(nearest, milliseconds)
            times[node] = math.log((mean + nearest) / 2)
        least, most = min(times.values()), max(times.values())
        answer = []
        for node in nodes:
            network = 1.0 - (times[node] - least) / (most - least) if most > least else 0.5
            score = round(10 * (0.7 * network + 0.3 * self.headroom(node)))
            answer.append({"Host": node, "Score": max(0, min(10, score))})
        return web.json_response(answer)


async def _serve(count: int) -> None:
    extender = NaiveExtender(make_cluster(count))
    app = web.Application(client_max_size=512 << 20)
    app.router.add_post("/v1/prioritize", extender.prioritize)
    async with running(app, Address("127.0.0.1", 0)) as address:
        sys.stdout.write(address.url + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    run(_serve(int(sys.argv[1])))
