"""The transfer service of a node: what runs, from the first socket to the last process."""

import asyncio
import ipaddress
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from aiohttp import web

from nearkv.agent.movers.pool import MoverPool
from nearkv.agent.probes.carriers import Carriers
from nearkv.agent.probes.neighbours import Neighbours
from nearkv.agent.probes.service import Probing, configured_peers
from nearkv.agent.settings import TransferSettings
from nearkv.agent.transfer.assembling import Surroundings, Workings, assemble, store_options
from nearkv.agent.transfer.backend_choice import BackendProbes
from nearkv.agent.transfer.data_address import backend_options
from nearkv.agent.transfer.describing import describe_transfer, list_problems, read_gauges
from nearkv.agent.transfer.memory_forms import SHM
from nearkv.agent.transfer.metrics import TransferGauges
from nearkv.agent.transfer.peer_api import LeaseApi, PeerApi
from nearkv.agent.transfer.peer_client import PeerClient
from nearkv.agent.transfer.peer_listener import listening_for_peers, load_peer_tls
from nearkv.agent.transfer.sessions import EngineSessions
from nearkv.agent.transfer.socket_server import SocketServer
from nearkv.agent.transfer.sourcing import SourceDesk
from nearkv.health import Readiness
from nearkv.supervising import Job, supervised
from nearkv.transfer.backends import contract

_CHECK = "transfer"
_TICK_SECONDS = 0.2
_CLASSES_SECONDS = 5.0
_STOP_SECONDS = 5.0

log = structlog.get_logger(__name__)

PoolMaker = Callable[[dict[str, dict[str, Any]]], MoverPool]
"""Makes the pool of movers from the options of its backends."""


def make_pool(options: dict[str, dict[str, Any]]) -> MoverPool:
    """Return the pool that agents have."""
    return MoverPool(options=options)


class TransferService:
    """KV transfer of one node, through ``<directory>/agent.sock``; runs within :meth:`running`."""

    def __init__(
        self,
        directory: Path,
        settings: TransferSettings,
        around: Surroundings,
        *,
        make_pool: PoolMaker = make_pool,
        neighbours: Neighbours | None = None,
        readiness: Readiness | None = None,
    ) -> None:
        """Make a service.

        ``neighbours`` is what the cluster says, ``readiness`` is told of background tasks that
        fail.
        """
        self._directory = directory
        self._settings = settings
        self._around = around
        self._make_pool = make_pool
        self._neighbours = neighbours or Neighbours()
        self._readiness = readiness or Readiness()
        self._classes_due_at = 0.0
        self._workings: Workings | None = None
        self._probing: Probing | None = None
        self._peer_url = ""

    @property
    def workings(self) -> Workings | None:
        """The parts of the service, while it runs."""
        return self._workings

    @property
    def probing(self) -> Probing | None:
        """The probes of this node, while it runs."""
        return self._probing

    @property
    def peer_url(self) -> str:
        """What other agents reach this one at, once it runs."""
        return self._peer_url

    # -- What people see -----------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return the transfer as plain JSON types."""
        if self._workings is None:
            return {"running": False}
        described = describe_transfer(self._workings, self._probing, peer_url=self._peer_url)
        return {"running": True, **described}

    def problems(self) -> list[str]:
        """Return what is wrong with it, in words for people."""
        if self._workings is None:
            return []
        return list_problems(self._workings, self._settings, self._around)

    def gauges(self) -> TransferGauges:
        """Return what metrics show of this moment."""
        if self._workings is None:
            return TransferGauges()
        return read_gauges(self._workings, self._probing)

    async def release(self, request: web.Request) -> web.Response:
        """Answer ``POST /v1/transfer/release`` of the main listener."""
        if self._workings is None:
            raise web.HTTPServiceUnavailable(text="the transfer service does not run")
        return await LeaseApi(self._workings.source).release(request)

    # -- Running -------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve engines and other agents within the block.

        Raises ``ListenError`` or ``PeerTlsError`` when it cannot begin.
        """
        async with AsyncExitStack() as stack:
            await self._start(stack)
            yield
            log.info("transfer_stopping")

    async def _start(self, stack: AsyncExitStack) -> None:
        """Begin from the inside out; the stack ends it the other way round."""
        settings = self._settings
        options = await backend_options(settings)
        pool = self._make_pool({**options, **store_options(settings, self._around.packet_key)})
        stack.push_async_callback(pool.close)
        probes = BackendProbes(settings.paths, pool.probe)
        stack.push_async_callback(probes.close)
        given = settings.peer_tls
        tls = None if given is None else load_peer_tls(given, self._around.metrics)
        peers = PeerClient(
            token=settings.peer_token,
            tls=None if tls is None else tls.client,
            networks=[ipaddress.ip_network(text) for text in settings.peer_networks],
        )
        stack.push_async_callback(peers.close)
        workings = assemble(settings, self._around, pool, probes, peers)
        carriers = Carriers(pool, options)
        stack.push_async_callback(carriers.close)
        probing = self._probing = self._make_probing(workings, peers, carriers)
        address = await stack.enter_async_context(
            listening_for_peers(
                PeerApi(
                    workings.source,
                    self._around.metrics,
                    key=self._around.packet_key,
                    probes=probing.desk,
                ),
                settings.peer_listen,
                token=settings.peer_token,
                tls=None if tls is None else tls.server.context,
            )
        )
        scheme = "http" if tls is None else "https"
        self._peer_url = settings.peer_url or f"{scheme}://{address}"
        sessions = workings.sessions(settings, self._peer_url)
        server = SocketServer(self._directory, sessions.accept)
        server.start()
        stack.push_async_callback(self._stop, workings, sessions)
        stack.callback(server.stop_accepting)
        self._workings = workings
        self._around.costs.expect(self._around.node, contract.Path(name=SHM))
        jobs = [
            Job("transfer_tick", partial(self._keep_time, workings.source)),
            Job("probe_ahead", partial(_probe_ahead, probes)),
            Job("probing", probing.run),
        ]
        if workings.store is not None:
            jobs.append(Job("store_retries", workings.store.keep_trying))
        if tls is not None and given is not None:
            jobs.append(Job("peer_certificates", partial(tls.server.watch, given.reload_seconds)))
        await stack.enter_async_context(supervised(jobs, self._readiness, check=_CHECK))
        log.info("transfer_ready", socket=str(server.path), peer_url=self._peer_url)

    def _make_probing(self, workings: Workings, peers: PeerClient, carriers: Carriers) -> Probing:
        """Return the probes: what they measure is learnt like what pulls do."""
        settings, costs = self._settings, self._around.costs
        return Probing(
            settings,
            carriers,
            workings.probes,
            peers,
            costs,
            self._around.metrics,
            node=self._around.node,
            node_labels=self._neighbours.read_labels,
            providers=(
                configured_peers(settings.probes),
                self._neighbours.read_peers,
                costs.pulled_from,
            ),
            is_moving=lambda: len(workings.pulls) > 0 or workings.source.grants > 0,
        )

    async def _stop(self, workings: Workings, sessions: EngineSessions) -> None:
        """End pulls, then connections, then what depended on them."""
        self._workings = self._probing = None
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await workings.pulls.close()
                workings.lookups.leave_leases_be()
                if workings.store is not None:
                    await workings.store.close()
                sessions.close()
                await workings.departures.finish()
                await workings.lookups.close()
                await workings.bringer.close()
                await workings.source.close()
        except TimeoutError:
            log.warning("transfer_stop_took_too_long")

    async def _keep_time(self, source: SourceDesk) -> None:
        while True:
            try:
                source.tick()
                if self._probing is not None:
                    await self._probing.tick()
                self._publish_paths()
            except Exception:
                log.exception("transfer_tick_is_defect")
            await asyncio.sleep(_TICK_SECONDS)

    def _publish_paths(self) -> None:
        state, costs, now = self._around.state, self._around.costs, time.monotonic()
        for reading in costs.take_news(now):
            state.log.put_path(reading, now)
        if self._probing is not None and now >= self._classes_due_at:
            self._classes_due_at = now + _CLASSES_SECONDS
            state.log.put_path_classes(self._probing.classes(), now)
        for source in costs.take_dropped():
            state.log.drop_path(source, self._around.node)
        state.changed()


async def _probe_ahead(probes: BackendProbes) -> None:
    """Find out which transports work before the first pull needs one."""
    found = await probes.get()
    usable = [name for name, probe in found.items() if probe.usable]
    log.info("transports_probed", usable=usable)
