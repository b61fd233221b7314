"""A sidecar before an engine double, in this process."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from nearkv.ingress.settings import IngressSettings
from nearkv.ingress.sidecar.app import build_sidecar
from nearkv.serving import InFlight, running
from nearkv.settings import Address
from tests.integration.stack import ANY_PORT


@dataclass(slots=True)
class RunningSidecar:
    """A sidecar that serves."""

    url: str
    probes_url: str
    in_flight: InFlight
    session: aiohttp.ClientSession

    async def post(
        self, path: str, body: Any = None, **options: Any
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """Post JSON (or ``data``); return the response with its body."""
        given = {"json": body} if body is not None else {}
        async with self.session.post(self.url + path, **given, **options) as response:
            return response, await response.read()

    async def count(self, family: str, label: str) -> int:
        """Return one of its counters by its only label."""
        async with self.session.get(self.probes_url + "/metrics") as answer:
            text = await answer.text()
        wanted = f"nearkv_ingress_sidecar_{family}_total{{"
        for line in text.splitlines():
            if line.startswith(wanted) and f'="{label}"' in line:
                return int(float(line.rpartition(" ")[2]))
        return 0


@asynccontextmanager
async def running_sidecar(
    engine: str,
    *,
    prefillers: Sequence[str] = (),
    address: Address = ANY_PORT,
    sidecar: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[RunningSidecar]:
    """Run a sidecar before an engine's URL."""
    own = {"engine": engine, "prefillers": prefillers, **(sidecar or {})}
    built = build_sidecar(
        IngressSettings.model_validate({"mode": "sidecar", **settings, "sidecar": own})
    )
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running(built.proxy, address))
        probes = await stack.enter_async_context(running(built.probes, ANY_PORT))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield RunningSidecar(proxy.url, probes.url, built.in_flight, session)
