"""Real agents on three hosts, engines whose connectors are the real ones, and doubles of HTTP.

Prefill engines ``p1`` and ``p2`` are on ``n1`` and ``n2``, the decode engine ``d`` on ``n3``. What
an engine says over HTTP comes from a double beside the switch; its KV is on its host.
"""

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from tests.doubles.engine import EngineDouble
from tests.hosts.network import HOSTS, US, Network
from tests.integration.kv_programs import EngineProgram, Program
from tests.integration.pd_stack import pd_double
from tests.integration.stack import RunningIngress, running_ingress

ENGINES = {"p1": ("n1", "prefill"), "p2": ("n2", "prefill"), "d": ("n3", "decode")}
SHAPE = {"layers": 2, "blocks": 64, "block_bytes": 256 << 10}
PATIENCE_SECONDS = 60.0
SHARED = "between agents"
Pair = dict[str, Any]


def agent_settings(host: str, folder: Path, engines: dict[str, EngineDouble]) -> dict[str, Any]:
    """Return the settings of a host's agent; those of its probes are the defaults."""
    configured = [
        {"id": name, "url": double.url, "role": ENGINES[name][1]}
        for name, double in engines.items()
        if ENGINES[name][0] == host
    ]
    others = {name: address for name, address in HOSTS.items() if name != host}
    return {
        "node": host,
        "listen": f"{HOSTS[host]}:9470",
        "engines": configured,
        "transfer": {
            "socket_dir": str(folder),
            "peer_listen": f"{HOSTS[host]}:9471",
            "peer_token": SHARED,
            "paths": ["tcp"],
            "probes": {
                "peers": [
                    {"node": name, "url": f"http://{address}:9471"}
                    for name, address in others.items()
                ]
            },
        },
    }


@dataclass(slots=True)
class Site:
    """All of it, running."""

    network: Network
    session: aiohttp.ClientSession
    doubles: dict[str, EngineDouble]
    engines: dict[str, EngineProgram] = field(default_factory=dict)
    _turns: Any = field(default_factory=lambda: count(1))

    # -- What agents say -----------------------------------------------------------------

    def url(self, host: str) -> str:
        """Return where a host's agent serves."""
        return f"http://{HOSTS[host]}:9470"

    async def pair(self, source: str, target: str) -> Pair | None:
        """Return what the target's agent says of KV from the source, once it was measured."""
        async with self.session.get(f"{self.url(target)}/v1/status") as answer:
            pairs = (await answer.json())["transfer"]["pairs"]
        return next((p for p in pairs if p["source"] == source and p["measured"]), None)

    async def rate(self, source: str, target: str) -> float:
        """Return a measured bandwidth in Mbit/s, 0 where there is none."""
        pair = await self.pair(source, target)
        return 0.0 if pair is None else pair["bytes_per_second"] * 8 / 1e6

    async def until_measured(
        self, limits: dict[tuple[str, str], int], *, seconds: float = PATIENCE_SECONDS
    ) -> dict[tuple[str, str], float]:
        """Wait until each pair's measured cost is within a fifth of its limit (Mbit/s)."""
        give_up_at = time.monotonic() + seconds
        while True:
            rates = {pair: round(await self.rate(*pair), 1) for pair in limits}
            if all(abs(rates[pair] - limit) <= limit / 5 for pair, limit in limits.items()):
                return rates
            assert time.monotonic() < give_up_at, f"measured {rates}, limits {limits}"
            await asyncio.sleep(0.5)

    async def until_counted(self, source: str, target: str, count: int) -> None:
        """Wait until a pair was measured so many times."""
        give_up_at = time.monotonic() + 3 * PATIENCE_SECONDS
        while (await self.pair(source, target) or {}).get("measurements", 0) < count:
            assert time.monotonic() < give_up_at, f"{source} to {target} is not measured"
            await asyncio.sleep(0.5)

    # -- Moving KV -----------------------------------------------------------------------

    async def pull(self, source: str, target: str = "d") -> None:
        """Prefill on one engine and decode on another; the KV must come by the transfer."""
        turn = next(self._turns)
        tokens = [turn % 50_000, turn // 50_000, *range(31)]
        prefill = await asyncio.to_thread(self.engines[source].get, "prefill", tokens=tokens)
        outcome = await asyncio.to_thread(
            self.engines[target].get, "decode", tokens=tokens, params=prefill.params
        )
        assert outcome.right
        assert outcome.loaded == len(tokens) // 4

    async def chosen(self, ingress: RunningIngress) -> str:
        """Send a request that nobody has seen; return the prefill engine that got it."""
        before = {name: self._legs(name) for name in ("p1", "p2")}
        prompt = f"{next(self._turns)} of a kind: " + "words upon words " * 40
        response, body = await ingress.complete(prompt)
        assert response.status == 200, body
        (chosen,) = [name for name, legs in before.items() if self._legs(name) != legs]
        return chosen

    def _legs(self, name: str) -> str:
        """Return the id of the last request that an engine got to generate something."""
        asked = [r for r in self.doubles[name].record if r.path == "/v1/completions"]
        return str(id(asked[-1])) if asked else ""

    @asynccontextmanager
    async def ingress(self) -> AsyncIterator[RunningIngress]:
        """Run an ingress over all agents, which splits whatever can be split."""
        urls = [self.url(host) for host in HOSTS]
        settings = {"mode": "always", "min_tokens": 1}
        async with running_ingress(*urls, pd=settings) as entry:
            await until(
                lambda: len(entry.knowledge.fleet.traits("tiny").movers) == len(ENGINES),
                "the ingress knows that all engines can move KV",
            )
            yield entry


async def until(
    condition: Callable[[], object], what: str, *, seconds: float = PATIENCE_SECONDS
) -> None:
    """Wait until a condition holds."""
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, f"never came true: {what}"
        await asyncio.sleep(0.05)


def start_agent(network: Network, host: str, folder: Path, settings: dict[str, Any]) -> Program:
    """Start a host's agent; what it writes goes to a file beside its settings."""
    config = folder / "agent.json"
    config.write_text(json.dumps(settings))
    with (folder / "agent.log").open("wb") as log:
        return Program(
            ["nearkv.agent", "--config", str(config)], within=network.within(host), stderr=log
        )


@asynccontextmanager
async def three_hosts(**mbit_per_second: int) -> AsyncIterator[Site]:
    """Run a site whose cables have these limits."""
    folder = Path(tempfile.mkdtemp(prefix="nkh-", dir="/tmp"))
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        things = stack.enter_context(ExitStack())
        network = Network(things)
        network.limit(**mbit_per_second)
        doubles = {
            name: await stack.enter_async_context(pd_double(host=US, remote_host=US))
            for name in ENGINES
        }
        session = await stack.enter_async_context(aiohttp.ClientSession())
        site = Site(network, session, doubles)
        for host in HOSTS:
            (folder / host).mkdir()
            settings = agent_settings(host, folder / host, doubles)
            things.callback(start_agent(network, host, folder / host, settings).end)
        for name, (host, _) in ENGINES.items():
            engine = EngineProgram(name, folder, folder / host / "agent.sock", shape=SHAPE)
            things.callback(engine.end)
            site.engines[name] = engine
        for engine in site.engines.values():
            await asyncio.to_thread(engine.wait_registered)
        try:
            yield site
        except BaseException:
            for host in HOSTS:
                print((folder / host / "agent.log").read_text()[-3000:])  # noqa: T201 (pytest shows it)
            raise
