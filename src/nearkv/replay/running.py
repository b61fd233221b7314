"""Running a trace under one policy after another (pure): the same trace, fleet and seed for all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nearkv.ingress.routing import Policy
from nearkv.ingress.settings import IngressSettings
from nearkv.replay.engine_model import SimulatedEngine
from nearkv.replay.errors import ReplayError
from nearkv.replay.fleet_feed import EngineSpec, FleetFeed
from nearkv.replay.measuring import Figures, summarise
from nearkv.replay.nearkv_router import NearkvRouter
from nearkv.replay.peers import PEERS
from nearkv.replay.routing import Clock, Router
from nearkv.replay.simulation import Outcome, Simulation, Surroundings
from nearkv.replay.traces import Trace

OWN_POLICIES = tuple(policy.value for policy in Policy)


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy to try; ``settings`` are the ingress's, for our own policies."""

    label: str
    policy: str
    settings: IngressSettings


@dataclass(frozen=True, slots=True)
class Fleet:
    """The engines, and what is between them and the router."""

    specs: Sequence[EngineSpec]
    surroundings: Surroundings


def replay(
    trace: Trace,
    fleet: Fleet,
    variant: Variant,
    *,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> list[Outcome]:
    """Return what became of each request of a trace under one policy."""
    clock = Clock()
    engines = {spec.name: SimulatedEngine(spec.name, spec.profile) for spec in fleet.specs}
    router = _router(variant, clock, list(engines.values()), fleet.surroundings, seed)
    feed = FleetFeed(fleet.specs, fleet.surroundings.link)
    simulation = Simulation(engines, feed, fleet.surroundings, clock=clock, router=router)
    return simulation.run(trace, progress)


def measure(
    trace: Trace,
    fleet: Fleet,
    variant: Variant,
    *,
    seed: int,
    warm_up_ratio: float = 0.0,
    progress: Callable[[int], None] | None = None,
) -> Figures:
    """Return the figures of a trace under one policy."""
    outcomes = replay(trace, fleet, variant, seed=seed, progress=progress)
    names = [spec.name for spec in fleet.specs]
    return summarise(outcomes, names, warm_up_ratio=warm_up_ratio)


def _router(
    variant: Variant,
    clock: Clock,
    engines: Sequence[SimulatedEngine],
    surroundings: Surroundings,
    seed: int,
) -> Router:
    if variant.policy in OWN_POLICIES:
        return NearkvRouter(variant.settings, clock, surroundings.link)
    peer = PEERS.get(variant.policy)
    if peer is None:
        known = ", ".join([*OWN_POLICIES, *PEERS])
        raise ReplayError(f"--policy: {variant.policy!r} is none of {known}")
    return peer(clock, engines, seed)
