"""What is known of the engine in a pod at one moment, its ranks taken together (pure)."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from nearkv.agent.engine_tracking import EngineTracker
from nearkv.agent.kubernetes.pod_engines import PodEngine
from nearkv.agent.node_state import NodeState
from nearkv.agent.transfer.abilities import configured_name
from nearkv.state.model import TIER_DEVICE, EngineGauges, EngineState, EventsState

T = TypeVar("T")

_WORST_STATES = (
    EngineState.UNREACHABLE,
    EngineState.STARTING,
    EngineState.DRAINING,
    EngineState.ASLEEP,
    EngineState.READY,
)
_WORST_EVENTS = (
    EventsState.OFF,
    EventsState.LOST,
    EventsState.PARTIAL,
    EventsState.REPLAYING,
    EventsState.LIVE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The engine of one pod; ``None`` and empty text are "not known".

    ``state`` and ``events`` are those of the worst rank, ``None`` while the engine has never
    answered. Sums are over all ranks, and unknown unless all of them are known.
    """

    role: str
    group: str
    model: str = ""
    version: str = ""
    ranks: int = 0
    is_pod_ready: bool = True
    state: EngineState | None = None
    events: EventsState | None = None
    metrics_age_seconds: float | None = None
    transfer_mode: str = "agent"
    can_transfer: bool = False
    kv_used_ratio: float | None = None
    kv_total_bytes: int | None = None
    kv_held_bytes: int | None = None
    kv_bytes_per_token: float | None = None
    prefill_tokens_per_second: float | None = None
    requests_running: int | None = None
    requests_waiting: int | None = None
    blocks: Mapping[str, int] | None = None
    problem: str = ""


def observe(state: NodeState, engine: PodEngine) -> EngineFacts:
    """Return what the node's state says of a pod's engine."""
    trackers = [
        tracker
        for name, tracker in sorted(state.trackers.items())
        if engine.uid in (name, configured_name(name))
    ]
    problem = state.problems.get(engine.uid, "")
    if not trackers:
        return EngineFacts(
            role=engine.spec.role,
            group=engine.spec.group or "",
            is_pod_ready=engine.is_ready,
            transfer_mode=engine.transfer,
            problem=problem,
        )
    gauges = [state.log.gauges.get(tracker.identity.id) for tracker in trackers]
    known = [each for each in gauges if each is not None]
    ages = [state.now() - at for each in trackers if (at := each.metrics_at) is not None]
    whole = len(known) == len(trackers)
    blocks: Counter[str] = Counter()
    for tracker in trackers:
        blocks.update(tracker.table.blocks_by_tier())
    identity = trackers[0].identity
    infos = [state.log.infos.get(tracker.identity.id) for tracker in trackers]
    return EngineFacts(
        role=identity.role,
        group=identity.group,
        model=identity.model,
        version=identity.engine_version or "",
        ranks=len(trackers),
        is_pod_ready=engine.is_ready,
        state=_worst([tracker.info.state for tracker in trackers], _WORST_STATES),
        events=_worst([tracker.info.events for tracker in trackers], _WORST_EVENTS),
        metrics_age_seconds=max(ages) if len(ages) == len(trackers) else None,
        transfer_mode=engine.transfer,
        can_transfer=all(info is not None and info.transfer is not None for info in infos),
        kv_used_ratio=_used_ratio(known) if whole else None,
        kv_total_bytes=_sum(each.kv_total_bytes for each in known) if whole else None,
        kv_held_bytes=_held_bytes(trackers, state, gauges),
        kv_bytes_per_token=_bytes_per_token(trackers[0], state, gauges[0]),
        prefill_tokens_per_second=_prefill_speed(known),
        requests_running=_sum(each.requests_running for each in known) if whole else None,
        requests_waiting=_sum(each.requests_waiting for each in known) if whole else None,
        blocks=dict(sorted(blocks.items())),
        problem=problem,
    )


def _worst(found: Sequence[T], order: Sequence[T]) -> T:
    return min(found, key=order.index)


def _sum(values: Iterable[int | None]) -> int | None:
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _used_ratio(gauges: Sequence[EngineGauges]) -> float | None:
    """Return the used share of all ranks' caches, which are of one size."""
    ratios = [each.kv_used_ratio for each in gauges if each.kv_used_ratio is not None]
    return sum(ratios) / len(ratios) if ratios and len(ratios) == len(gauges) else None


def _prefill_speed(gauges: Sequence[EngineGauges]) -> float | None:
    speeds = [each.prefill_seconds_per_token for each in gauges if each.prefill_seconds_per_token]
    return len(speeds) / sum(speeds) if speeds else None


def _bytes_per_token(
    tracker: EngineTracker, state: NodeState, gauges: EngineGauges | None
) -> float | None:
    info = state.log.infos.get(tracker.identity.id)
    if info is not None and info.transfer is not None and info.transfer.kv_bytes_per_token:
        return info.transfer.kv_bytes_per_token
    if tracker.identity.kv_bytes_per_token:
        return tracker.identity.kv_bytes_per_token
    if gauges is None or not gauges.kv_total_bytes or not gauges.kv_total_tokens:
        return None
    return gauges.kv_total_bytes / gauges.kv_total_tokens


def _held_bytes(
    trackers: Sequence[EngineTracker], state: NodeState, gauges: Sequence[EngineGauges | None]
) -> int | None:
    """Return the KV that can be fetched; an engine without events keeps it to itself."""
    total = 0
    for tracker, reading in zip(trackers, gauges, strict=True):
        per_token = _bytes_per_token(tracker, state, reading)
        block_size = tracker.info.block_size
        if per_token is None or block_size is None or tracker.info.events is EventsState.OFF:
            return None
        blocks = tracker.table.blocks_by_tier().get(TIER_DEVICE, 0)
        total += round(blocks * block_size * per_token)
    return total
