"""The parts of the transfer service, each made with those that it talks to."""

import os
from dataclasses import dataclass

from nearkv.agent.movers.pool import MoverPool
from nearkv.agent.node_state import NodeState
from nearkv.agent.settings import TransferSettings
from nearkv.agent.transfer.abilities import TransferAbilities
from nearkv.agent.transfer.backend_choice import BackendProbes
from nearkv.agent.transfer.bringing import Bringer
from nearkv.agent.transfer.departing import Departures
from nearkv.agent.transfer.known_leases import KnownLeases
from nearkv.agent.transfer.leasing import LeaseLimits
from nearkv.agent.transfer.lookups import LookupDesk
from nearkv.agent.transfer.metrics import TransferMetrics
from nearkv.agent.transfer.path_costs import PathCosts
from nearkv.agent.transfer.peer_client import PeerClient
from nearkv.agent.transfer.pulling import PullDesk, PullLimits
from nearkv.agent.transfer.registry import Registration, Registry
from nearkv.agent.transfer.sessions import Desks, EngineSessions, SessionRules
from nearkv.agent.transfer.sourcing import SourceDesk, SourceRules
from nearkv.transfer.messages import Registered


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the service is given: the node, and what it publishes to."""

    node: str
    state: NodeState
    abilities: TransferAbilities
    metrics: TransferMetrics
    costs: PathCosts
    packet_key: bytes | None


@dataclass(frozen=True, slots=True)
class Workings:
    """The parts of a running service."""

    registry: Registry
    source: SourceDesk
    lookups: LookupDesk
    bringer: Bringer
    pulls: PullDesk
    departures: Departures
    pool: MoverPool
    probes: BackendProbes
    around: Surroundings

    def engine_complete(self, registration: Registration, agent_url: str) -> None:
        """Publish that an engine can move KV."""
        self.around.abilities.set_registered(registration, agent_url=agent_url)
        self.around.state.refresh(registration.engine)

    def sessions(self, settings: TransferSettings, agent_url: str) -> EngineSessions:
        """Return the sessions of engines, who are told to be reached at ``agent_url``."""
        allowed = settings.allowed_uids or (os.geteuid(), 0)
        return EngineSessions(
            Desks(
                self.registry,
                self.source,
                self.lookups,
                self.pulls,
                self.departures,
                self.around.metrics,
            ),
            SessionRules(allowed_uids=frozenset(allowed), max_connections=settings.max_connections),
            Registered(node=self.around.node, agent=agent_url, boot=self.around.state.boot),
            mode_of=self.around.abilities.mode_of,
            on_complete=lambda engine: self.engine_complete(engine, agent_url),
            on_found=lambda node: self.around.costs.expect(node, self.bringer.expected_path(node)),
        )


def assemble(
    settings: TransferSettings,
    around: Surroundings,
    pool: MoverPool,
    probes: BackendProbes,
    peers: PeerClient,
) -> Workings:
    """Make all parts of a service."""
    rules = SourceRules(
        node=around.node,
        backends=settings.paths,
        require_rdma=settings.require_rdma,
        allow_cross_tenant=settings.allow_cross_tenant,
        lease_wait_seconds=settings.lease_wait_seconds,
    )
    registry = Registry(LeaseLimits(ttl_seconds=settings.lease_seconds))
    known = KnownLeases()
    metrics = around.metrics
    source = SourceDesk(registry, pool, probes, rules, metrics)
    lookups = LookupDesk(source, peers, known, metrics, node=around.node, key=around.packet_key)
    bringer = Bringer(pool, source, peers, probes, rules, metrics)
    limits = PullLimits(
        bytes_per_peer=settings.inflight_limit_bytes, pulls_per_engine=settings.max_pulls
    )
    pulls = PullDesk(bringer, known, around.costs, metrics, limits)

    def engine_gone(registration: Registration) -> None:
        around.abilities.set_gone(registration.engine)
        around.state.refresh(registration.engine)

    departures = Departures(
        pool,
        pulls,
        source,
        on_gone=engine_gone,
        on_scheduler_gone=lambda registration: lookups.forget_engine(registration.engine),
    )
    return Workings(registry, source, lookups, bringer, pulls, departures, pool, probes, around)
