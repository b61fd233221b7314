"""Four engine doubles, two agents and two ingress replicas, and what is left of them at the end."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.benchmarks.chaos.parts import Part, engine_part, service_part
from tests.benchmarks.chaos.plan import Victim

_SETTLED_SECONDS = 30.0
_IN_FLIGHT = re.compile(r"^nearkv_ingress_in_flight_requests (\S+)", re.MULTILINE)

_AGENT: dict[str, Any] = {
    "scrape": {"interval_seconds": 0.25, "timeout_seconds": 0.5},
    "state": {"heartbeat_seconds": 0.25},
}
_INGRESS: dict[str, Any] = {
    "policy": "cost",
    "retries": 3,
    "deadlines": {
        "connect_seconds": 1.0,
        "first_byte_seconds": 30.0,
        "late_seconds": 1.0,
        "unreachable_seconds": 1.0,
        "tokenize_seconds": 1.0,
        "agent_silence_seconds": 1.5,
        "sync_seconds": 2.0,
    },
}


@dataclass(slots=True)
class Site:
    """All parts by name."""

    engines: dict[str, Part]
    agents: list[Part]
    replicas: list[Part]

    @property
    def parts(self) -> dict[str, Part]:
        """Every part by name."""
        return {**self.engines, **{part.name: part for part in (*self.agents, *self.replicas)}}

    @property
    def victims(self) -> list[Victim]:
        """Who may be hurt: everybody, but one agent and one replica are not killed.

        Their memory is followed; once that is over, they are as mortal as the others.
        """
        engines = [Victim(name, is_engine=True) for name in self.engines]
        agents = [Victim(part.name, mortal=i > 0) for i, part in enumerate(self.agents)]
        replicas = [Victim(part.name, mortal=i > 0) for i, part in enumerate(self.replicas)]
        return [*engines, *agents, *replicas]

    async def settle(self) -> float:
        """Wait until nothing is in flight anywhere; returns what was left when time was up."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + _SETTLED_SECONDS
        async with aiohttp.ClientSession() as session:
            while True:
                left = await self._left(session)
                if not left or loop.time() > give_up_at:
                    return left
                await asyncio.sleep(0.2)

    async def _left(self, session: aiohttp.ClientSession) -> float:
        left = 0.0
        for replica in self.replicas:
            async with session.get(f"{replica.url}/metrics") as answer:
                found = _IN_FLIGHT.search(await answer.text())
                left += float(found[1]) if found else 1.0
            async with session.get(f"{replica.url}/v1/status") as answer:
                left += sum(e["inflight"] for e in (await answer.json())["engines"])
        for engine in self.engines.values():
            async with session.get(f"{engine.url}/load") as answer:
                left += (await answer.json())["server_load"]
        return left


@asynccontextmanager
async def running_site(folder: Path) -> AsyncIterator[Site]:
    """Start everything, and end it by force."""
    engines = {name: engine_part(name, folder) for name in ("e0", "e1", "e2", "e3")}
    site = Site(engines, [], [])
    try:
        await asyncio.gather(*(engine.start() for engine in engines.values()))
        for number, names in enumerate((("e0", "e1"), ("e2", "e3"))):
            listed = [{"id": name, "url": engines[name].url} for name in names]
            config = {**_AGENT, "node": f"n{number}", "engines": listed}
            site.agents.append(service_part(f"agent{number}", "agent", folder, config))
        await asyncio.gather(*(agent.start() for agent in site.agents))
        config = {**_INGRESS, "agents": [agent.url for agent in site.agents]}
        site.replicas += [service_part(f"ingress{i}", "ingress", folder, config) for i in range(2)]
        await asyncio.gather(*(replica.start() for replica in site.replicas))
        await asyncio.gather(*(replica.ready("/readyz") for replica in site.replicas))
        yield site
    finally:
        for part in site.parts.values():
            await part.kill()
