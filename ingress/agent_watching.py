"""Following the EndpointSlices of the agents' Service for ever.

While the API server is away, the agents that were known last stay.
"""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import NoReturn

import msgspec
import structlog

from nearkv.ingress.agent_slices import agent_urls
from nearkv.ingress.api_access import api_access
from nearkv.ingress.settings import AgentServiceSettings
from nearkv.kube.access import ApiAccess
from nearkv.kube.endpoint_slices import SERVICE_LABEL, EndpointSlice, slices_path
from nearkv.kube.keeping import KeptObjects
from nearkv.kube.watching import Watch, WatchLimits

_MOST_LOGGED = 20

log = structlog.get_logger(__name__)


class AgentWatch:
    """Keeps the agents' URLs; ``on_agents`` gets all of them whenever they change."""

    def __init__(
        self,
        access: ApiAccess,
        service: AgentServiceSettings,
        *,
        on_agents: Callable[[AbstractSet[str]], None],
        count_failure: Callable[[str], None],
        limits: WatchLimits | None = None,
    ) -> None:
        """Make a watch; ``count_failure`` takes each failure's name."""
        self._access = access
        self._service = service
        self._on_agents = on_agents
        self._slices: KeptObjects[EndpointSlice] = KeptObjects(self._work_out)
        self._urls: frozenset[str] | None = None
        self._watch = Watch(
            access,
            slices_path(service.namespace),
            decode=msgspec.json.Decoder(EndpointSlice).decode,
            on_replace=self._slices.replace,
            on_change=self._slices.change,
            label_selector=f"{SERVICE_LABEL}={service.name}",
            count_failure=count_failure,
            limits=limits,
        )

    @property
    def was_read(self) -> bool:
        """Whether the agents were ever listed."""
        return self._slices.was_read

    @property
    def problem(self) -> str:
        """What is wrong at present, for people; empty while all is well."""
        return self._watch.problem

    async def run(self) -> NoReturn:
        """Follow until cancelled; opens the access, which nobody else uses."""
        async with self._access:
            await self._watch.run()

    def _work_out(self) -> None:
        service = self._service
        urls = agent_urls(self._slices, port_name=service.port_name, scheme=service.scheme)
        if urls == self._urls:
            return
        log.info(
            "agents_listed",
            count=len(urls),
            new=sorted(urls - (self._urls or frozenset()))[:_MOST_LOGGED],
            gone=sorted((self._urls or frozenset()) - urls)[:_MOST_LOGGED],
        )
        self._urls = urls
        self._on_agents(urls)


def make_agent_watch(
    service: AgentServiceSettings,
    *,
    on_agents: Callable[[AbstractSet[str]], None],
    count_failure: Callable[[str], None],
) -> AgentWatch | None:
    """Return the watch of the Service that settings name, ``None`` where they name none."""
    if not service.name:
        return None
    access = api_access(service.kubeconfig, service.api_server)
    return AgentWatch(access, service, on_agents=on_agents, count_failure=count_failure)
