"""An ingress that is Envoy's endpoint picker, and Envoy in front of it."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from nearkv.ingress.app import KNOWLEDGE
from nearkv.ingress.app import build_app as build_ingress
from nearkv.ingress.extproc.app import EXT_PROC
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.settings import IngressSettings
from nearkv.serving import running
from tests.integration.envoy_site import Config, RunningEnvoy, example, running_envoy
from tests.integration.stack import ANY_PORT, LASTING, PATIENT, RunningAgent, eventually


@dataclass(slots=True)
class RunningPicker:
    """An ingress that serves clients by HTTP and Envoy by gRPC."""

    url: str
    address: str
    knowledge: Knowledge
    session: aiohttp.ClientSession
    health: str = ""

    async def counts(self, family: str) -> dict[tuple[str, ...], int]:
        """Return one of its counters by label values."""
        async with self.session.get(self.url + "/metrics") as answer:
            text = await answer.text()
        found: dict[tuple[str, ...], int] = {}
        for line in text.splitlines():
            name, _, rest = line.replace("} ", " ").replace("{", " ", 1).partition(" ")
            if name == f"nearkv_ingress_{family}_total":
                labels, _, value = rest.rpartition(" ")
                values = (pair.partition("=")[2].strip('"') for pair in labels.split(",") if pair)
                found[tuple(values)] = int(float(value))
        return found

    async def synced(self, agent: RunningAgent) -> None:
        """Wait until everything the agent knows has arrived here."""
        await eventually(
            lambda: (
                agent.is_caught_up()
                and self.knowledge.fleet.agents[agent.url].cursor == agent.state.log.cursor
            ),
            what="picker in step with the agent",
        )

    async def is_idle(self) -> None:
        """Wait until nothing is in flight, by the ledger and by the streams."""
        await eventually(
            lambda: (
                self.knowledge.ledger.total_requests == 0 and self.knowledge.in_flight.count == 0
            ),
            what="ledger at zero",
        )


@asynccontextmanager
async def running_picker(*agents: str, **settings: Any) -> AsyncIterator[RunningPicker]:
    """Run an ingress as endpoint picker over these agents' URLs."""
    ext_proc = {"listen": "127.0.0.1:0", **settings.pop("ext_proc", {})}
    given = {
        "mode": "ext-proc",
        "listen": "127.0.0.1:0",
        "agents": agents,
        "freshness": LASTING,
        **settings,
    }
    given["deadlines"] = PATIENT | given.get("deadlines", {})
    app = await build_ingress(IngressSettings.model_validate({**given, "ext_proc": ext_proc}))
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(running(app, ANY_PORT))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        knowledge = app[KNOWLEDGE]
        await eventually(
            lambda: all(agent.synced for agent in knowledge.fleet.agents.values()),
            what="picker is synced",
        )
        servers = app[EXT_PROC].servers
        assert servers is not None
        yield RunningPicker(
            address.url, str(servers.picker), knowledge, session, str(servers.health or "")
        )


@dataclass(slots=True)
class Gateway:
    """Envoy with its picker."""

    envoy: RunningEnvoy
    picker: RunningPicker

    async def post(
        self, path: str, body: Any = None, **options: Any
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """Post JSON (or ``data``) to Envoy; return the response with its body."""
        given = {"json": body} if body is not None else {}
        async with self.picker.session.post(self.envoy.url + path, **given, **options) as response:
            return response, await response.read()

    async def complete(self, prompt: str, **fields: Any) -> tuple[aiohttp.ClientResponse, bytes]:
        """Ask for a short completion."""
        headers = fields.pop("headers", None)
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
        return await self.post("/v1/completions", body, headers=headers)


@asynccontextmanager
async def gateway(
    picker: RunningPicker, folder: Path, config: Config | None = None
) -> AsyncIterator[Gateway]:
    """Run Envoy over a picker, by default with ORIGINAL_DST routing."""
    given = config or example("envoy-original-dst.yaml", picker=picker.address)
    async with running_envoy(given, folder) as envoy:
        yield Gateway(envoy, picker)
