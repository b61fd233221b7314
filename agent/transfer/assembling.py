"""The parts of the transfer service, each made with those that it talks to."""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from nearkv.agent.movers.backends import STORE
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
from nearkv.agent.transfer.peer_messages import LeaseName
from nearkv.agent.transfer.pulling import PullDesk, PullLimits
from nearkv.agent.transfer.registry import Registration, Registry
from nearkv.agent.transfer.sessions import Desks, EngineSessions, SessionRules
from nearkv.agent.transfer.sourcing import SourceDesk, SourceRules
from nearkv.agent.transfer.store_health import StoreHealth
from nearkv.agent.transfer.storing import StoreDesk, StoreRules
from nearkv.transfer.messages import Registered
from nearkv.transfer.store.opening import StoreOptions, shown_url, tier_of


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
    store: StoreDesk | None = None

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
            Registered(
                node=self.around.node,
                agent=agent_url,
                boot=self.around.state.boot,
                store_min_tokens=0 if settings.store is None else settings.store.min_tokens,
                store_all=settings.store is not None and settings.store.write == "all",
            ),
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

    def release(name: LeaseName, why: str) -> None:
        source.release(name, why)

    store = _store_desk(settings, around, pool, release=release)
    source = SourceDesk(registry, pool, probes, rules, metrics, store)
    lookups = LookupDesk(
        source, peers, known, metrics, node=around.node, key=around.packet_key, store=store
    )
    bringer = Bringer(pool, source, peers, probes, rules, metrics, store=store)
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
    return Workings(
        registry, source, lookups, bringer, pulls, departures, pool, probes, around, store
    )


def _store_desk(
    settings: TransferSettings,
    around: Surroundings,
    pool: MoverPool,
    *,
    release: Callable[[LeaseName, str], object],
) -> StoreDesk | None:
    """Return the desk of the shared store, where there is one."""
    store = settings.store
    if store is None:
        return None
    url = store.url.get_secret_value()
    rules = StoreRules(
        node=around.node,
        tier=tier_of(url),
        url=shown_url(url),
        write=store.write,
        min_tokens=store.min_tokens,
        lookup_seconds=store.lookup_seconds,
        put_seconds=store.put_seconds,
        max_puts=store.max_puts,
        allow_cross_tenant=settings.allow_cross_tenant,
    )
    health = StoreHealth(lambda: random.uniform(0.5, 1.0))  # noqa: S311 - spreads load
    return StoreDesk(pool, rules, around.metrics, health, release=release)


def store_options(settings: TransferSettings, secret: bytes | None) -> dict[str, dict[str, Any]]:
    """Return what movers are told of the shared store; nothing where there is none."""
    store = settings.store
    if store is None:
        return {}
    options = StoreOptions(
        url=store.url.get_secret_value(),
        max_bytes=store.max_bytes,
        ttl_seconds=store.ttl_seconds,
        segment_blocks=store.segment_blocks,
        secret=secret or b"",
    )
    return {STORE: msgspec.structs.asdict(options)}
