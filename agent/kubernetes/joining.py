"""Putting the Kubernetes part into the agent's application: pods, own Node, WorkerStatuses."""

from collections.abc import AsyncIterator

from aiohttp import web
from prometheus_client import CollectorRegistry

from nearkv.agent.gpu.service import GpuService
from nearkv.agent.kubernetes.metrics import KubernetesCollector
from nearkv.agent.kubernetes.peer_listing import PeerListing
from nearkv.agent.kubernetes.service import KubernetesService
from nearkv.agent.node_state import NodeState
from nearkv.agent.probes.neighbours import Neighbours
from nearkv.agent.settings import AgentSettings
from nearkv.agent.summary import HardwareReader
from nearkv.agent.transfer.abilities import TransferAbilities
from nearkv.agent.worker_status.metrics import WorkerStatusCollector
from nearkv.agent.worker_status.service import WorkerStatusService
from nearkv.health import Readiness

KUBERNETES = web.AppKey("kubernetes", KubernetesService)
WORKER_STATUSES = web.AppKey("worker_statuses", WorkerStatusService)


def make_services(
    registry: CollectorRegistry,
    settings: AgentSettings,
    state: NodeState,
    *,
    modes: TransferAbilities,
    hardware: HardwareReader,
    neighbours: Neighbours | None = None,
) -> tuple[KubernetesService, WorkerStatusService, PeerListing]:
    """Return the services, which do nothing yet, with their series registered."""
    kubernetes = KubernetesService(settings, state, modes)
    statuses = WorkerStatusService(settings, state, kubernetes, hardware=hardware)
    peers = PeerListing(settings, neighbours or Neighbours(), now=state.now)
    registry.register(KubernetesCollector(kubernetes, peers, state))
    registry.register(WorkerStatusCollector(statuses))
    return kubernetes, statuses, peers


def add_kubernetes(  # noqa: PLR0913 (each is a part of the agent)
    app: web.Application,
    registry: CollectorRegistry,
    settings: AgentSettings,
    state: NodeState,
    readiness: Readiness,
    *,
    modes: TransferAbilities,
    gpus: GpuService,
    hardware: HardwareReader,
    neighbours: Neighbours,
) -> None:
    """Add the part; its series and its section of the status are there in any case."""
    kubernetes, statuses, peers = make_services(
        registry, settings, state, modes=modes, hardware=hardware, neighbours=neighbours
    )
    app[KUBERNETES], app[WORKER_STATUSES] = kubernetes, statuses
    state.parts["kubernetes"] = kubernetes
    state.parts["worker_status"] = statuses
    state.parts["peer_listing"] = peers
    if not kubernetes.is_on:
        return
    app.middlewares.append(kubernetes.withhold)
    gpus.pod_uid_of = kubernetes.uid_of
    if not gpus.is_off:
        kubernetes.follow_upgrade = gpus.follow_upgrade
    if settings.transfer.socket_dir is not None:
        kubernetes.take_node_labels = neighbours.take_labels

    async def follow_pods(_app: web.Application) -> AsyncIterator[None]:
        async with (
            kubernetes.open_access() as access,
            kubernetes.running(access, readiness),
            statuses.running(access, readiness),
            peers.running(access, readiness),
        ):
            yield

    app.cleanup_ctx.append(follow_pods)
