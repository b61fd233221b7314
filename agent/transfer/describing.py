"""The transfer service for people and for Prometheus: what is so, and what is wrong."""

import time
from collections import Counter
from typing import Any

import msgspec

from nearkv.agent.movers.pool import MoverPool
from nearkv.agent.probes.service import Probing
from nearkv.agent.settings import TransferSettings
from nearkv.agent.transfer.abilities import AGENT_MODE
from nearkv.agent.transfer.assembling import Surroundings, Workings
from nearkv.agent.transfer.compatibility import digest_compatibility
from nearkv.agent.transfer.metrics import TransferGauges
from nearkv.agent.transfer.registry import Registration
from nearkv.transfer.messages import PROTOCOL
from nearkv.transfer.packet import MAJOR, MINOR

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def describe_transfer(
    workings: Workings, probing: Probing | None, *, peer_url: str
) -> dict[str, Any]:
    """Return the service as plain JSON types."""
    engines = workings.registry.engines.values()
    return {
        "peer_url": peer_url,
        "protocol": PROTOCOL,
        "packet": f"{MAJOR}.{MINOR}",
        "engines": [_describe_engine(engine) for engine in engines],
        "leases": _count_leases(workings),
        "readers": workings.source.grants,
        "pulls": len(workings.pulls),
        "inflight_bytes": workings.pulls.inflight_bytes,
        "movers": [msgspec.to_builtins(mover) for mover in workings.pool.describe()],
        "pairs": workings.around.costs.describe(time.monotonic()),
        "probing": None if probing is None else probing.describe(),
        "store": None if workings.store is None else workings.store.describe(),
        "paths": [msgspec.to_builtins(probe) for probe in workings.probes.found.values()],
    }


def list_problems(
    workings: Workings, settings: TransferSettings, around: Surroundings
) -> list[str]:
    """Return what is wrong with the transfer, in words for people."""
    return [
        *_unregistered(around),
        *_half_registered(workings),
        *_without_rdma(settings, around),
        *_open_doors(settings),
        *([] if workings.store is None else workings.store.problems()),
    ]


def read_gauges(workings: Workings, probing: Probing | None) -> TransferGauges:
    """Return what metrics show of this moment."""
    complete = sum(engine.is_complete for engine in workings.registry.engines.values())
    movers = Counter(mover.kind for mover in workings.pool.describe() if mover.pid is not None)
    return TransferGauges(
        inflight_bytes=workings.pulls.inflight_bytes,
        engines={
            "complete": complete,
            "incomplete": len(workings.registry.engines) - complete,
        },
        leases=_count_leases(workings),
        movers=movers,
        mover_ends=mover_ends(workings.pool),
        path_classes=() if probing is None else probing.class_costs(),
    )


def mover_ends(pool: MoverPool) -> dict[tuple[str, str], int]:
    """Return how many movers ended, by kind and cause."""
    return {(kind.value, cause.value): count for (kind, cause), count in pool.counts.ended.items()}


def _describe_engine(engine: Registration) -> dict[str, Any]:
    scheduler = engine.scheduler
    return {
        "id": engine.engine,
        "epoch": engine.epoch,
        "tenant": engine.tenant,
        "complete": engine.is_complete,
        "compat": digest_compatibility(engine.compatibility) if engine.is_complete else None,
        "workers": len(engine.workers),
        "ranks": engine.ranks or None,
        "scheduler": scheduler is not None,
        "leases": 0 if scheduler is None else len(scheduler.leases),
        "memory_bytes": sum(worker.layout.size for worker in engine.workers.values()),
    }


def _count_leases(workings: Workings) -> dict[str, int]:
    desks = [
        engine.scheduler.leases
        for engine in workings.registry.engines.values()
        if engine.scheduler is not None
    ]
    return {
        "open": sum(len(leases) for leases in desks),
        "closing": sum(leases.closing for leases in desks),
    }


def _unregistered(around: Surroundings) -> list[str]:
    return [
        f"{engine}: has not registered for KV transfer (start vLLM with nearkv's connector, or "
        "set its transfer to off)"
        for engine in sorted(around.state.trackers)
        if around.abilities.mode_of(engine) == AGENT_MODE
        and not around.abilities.is_registered(engine)
    ]


def _half_registered(workings: Workings) -> list[str]:
    return [
        f"{engine.engine}: {len(engine.workers)} of {engine.ranks or 'its'} workers and "
        f"{'its' if engine.scheduler else 'no'} scheduler have registered for KV transfer"
        for engine in workings.registry.engines.values()
        if not engine.is_complete
    ]


def _without_rdma(settings: TransferSettings, around: Surroundings) -> list[str]:
    if not settings.report_non_rdma:
        return []
    return [
        f"KV from node {source} comes by {path}, without RDMA"
        for source, path in around.costs.without_rdma()
    ]


def _open_doors(settings: TransferSettings) -> list[str]:
    """Name a listener that hands KV, which holds prompts, to whoever asks."""
    guarded = settings.peer_token or (settings.peer_tls and settings.peer_tls.ca)
    if guarded or settings.peer_listen.host in _LOOPBACK:
        return []
    text = (
        f"transfer: {settings.peer_listen} hands KV to whoever asks (set transfer.peer_token, "
        "or transfer.peer_tls with a ca)"
    )
    return [text]
