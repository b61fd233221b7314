"""The conditions of a WorkerStatus: judged from facts, told when they have settled (pure)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from nearkv.agent.worker_status.observing import EngineFacts
from nearkv.freshness import Freshness, FreshnessLimits
from nearkv.state.model import EngineState, EventsState

Status = Literal["True", "False", "Unknown"]

READY = "Ready"
PRESSURE_RATIO = 0.9
"""Used share of the KV cache from which on there is pressure."""
_RELIEF_RATIO = 0.8
_LONGEST_MESSAGE = 160

_EVENTS: Mapping[EventsState, tuple[Status, str, str]] = MappingProxyType(
    {
        EventsState.LIVE: ("True", "EventsComplete", ""),
        EventsState.PARTIAL: ("False", "EventsMissed", "some KV events were missed"),
        EventsState.REPLAYING: ("Unknown", "Replaying", "KV events are being replayed"),
        EventsState.LOST: ("False", "EventsLost", "the stream of KV events is broken"),
        EventsState.OFF: ("False", "NoEvents", "the engine publishes no KV events"),
    }
)
_STATES: Mapping[EngineState, tuple[Status, str, str]] = MappingProxyType(
    {
        EngineState.READY: ("True", "Serving", ""),
        EngineState.ASLEEP: ("False", "Asleep", "the engine sleeps"),
        EngineState.DRAINING: ("False", "Draining", "the pod is being deleted"),
        EngineState.UNREACHABLE: ("False", "Unreachable", "the engine does not answer"),
        EngineState.STARTING: ("False", "Starting", "the engine has not been read yet"),
    }
)
_FRESHNESS: Mapping[Freshness, tuple[Status, str, str]] = MappingProxyType(
    {
        Freshness.FRESH: ("True", "ReadingsFresh", ""),
        Freshness.AGED: ("False", "ReadingsAged", "the last reading is aged"),
        Freshness.UNKNOWN: ("False", "ReadingsOld", "the last reading is too old to be used"),
    }
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A condition of one moment."""

    type: str
    status: Status
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition to tell; ``since`` is when its status changed, in Kubernetes' form."""

    verdict: Verdict
    since: str


def judge(
    facts: EngineFacts, limits: FreshnessLimits, *, used_ratio: float | None, was_pressed: bool
) -> list[Verdict]:
    """Return all conditions; ``used_ratio`` is the steady share of the KV cache in use."""
    return [
        _ready(facts),
        _fresh(facts, limits),
        _parity(facts),
        _transfer(facts),
        _pressure(used_ratio, was_pressed=was_pressed),
    ]


def _ready(facts: EngineFacts) -> Verdict:
    if facts.state is None:
        message = facts.problem or "the engine has not answered yet"
        return Verdict(READY, "False", "NotAnswering", message[:_LONGEST_MESSAGE])
    if facts.state is EngineState.STARTING and not facts.is_pod_ready:
        return Verdict(READY, "False", "PodNotReady", "the pod's Ready condition is not True")
    return Verdict(READY, *_STATES[facts.state])


def _fresh(facts: EngineFacts, limits: FreshnessLimits) -> Verdict:
    if facts.metrics_age_seconds is None:
        return Verdict("Fresh", "Unknown", "NeverRead", "the engine was never read")
    return Verdict("Fresh", *_FRESHNESS[limits.classify(facts.metrics_age_seconds)])


def _parity(facts: EngineFacts) -> Verdict:
    if facts.events is None:
        return Verdict("CacheParity", "Unknown", "NeverRead", "the engine was never read")
    return Verdict("CacheParity", *_EVENTS[facts.events])


def _transfer(facts: EngineFacts) -> Verdict:
    kind = "TransferReady"
    if facts.transfer_mode == "off":
        return Verdict(kind, "False", "Off", "transfer is switched off for this engine")
    if facts.state is None:
        return Verdict(kind, "Unknown", "NeverRead", "the engine was never read")
    if not facts.can_transfer:
        return Verdict(kind, "False", "NotRegistered", "the engine has not registered")
    return Verdict(kind, "True", "Registered")


def _pressure(used_ratio: float | None, *, was_pressed: bool) -> Verdict:
    kind = "KVPressure"
    if used_ratio is None:
        return Verdict(kind, "Unknown", "NotRead", "the use of the KV cache is not known")
    if used_ratio >= PRESSURE_RATIO or (was_pressed and used_ratio > _RELIEF_RATIO):
        return Verdict(kind, "True", "LittleFree", "little of the KV cache is free")
    return Verdict(kind, "False", "EnoughFree")


@dataclass(slots=True)
class _Entry:
    shown: Condition
    coming: Verdict | None = None
    coming_at: float = 0.0
    coming_since: str = ""


class ConditionBook:
    """Holds back verdicts until they have stood for ``settle_seconds``; keeps their times."""

    def __init__(self, *, settle_seconds: float) -> None:
        self._settle_seconds = settle_seconds
        self._entries: dict[str, _Entry] = {}

    @property
    def conditions(self) -> list[Condition]:
        """The conditions to tell."""
        return [entry.shown for entry in self._entries.values()]

    def status_of(self, kind: str) -> Status | None:
        """Return what is told of a condition, ``None`` before anything is."""
        entry = self._entries.get(kind)
        return None if entry is None else entry.shown.verdict.status

    def take(self, verdicts: Iterable[Verdict], *, now: float, stamp: str) -> None:
        """Take the verdicts of one moment, which is ``stamp`` in Kubernetes' form."""
        for verdict in verdicts:
            entry = self._entries.get(verdict.type)
            if entry is None:
                self._entries[verdict.type] = _Entry(Condition(verdict, stamp))
            else:
                self._take(entry, verdict, now=now, stamp=stamp)

    def adopt(self, told: Mapping[str, tuple[str, str]]) -> None:
        """Go on from (status, time) by type, as told before the agent started."""
        for kind, (status, since) in told.items():
            entry = self._entries.get(kind)
            if entry is not None and entry.shown.verdict.status == status:
                entry.shown = Condition(entry.shown.verdict, since)

    def _take(self, entry: _Entry, verdict: Verdict, *, now: float, stamp: str) -> None:
        shown = entry.shown.verdict
        if (verdict.status, verdict.reason) == (shown.status, shown.reason):
            entry.coming = None
            entry.shown = Condition(verdict, entry.shown.since)
            return
        coming = entry.coming
        if coming is None or (coming.status, coming.reason) != (verdict.status, verdict.reason):
            entry.coming_at, entry.coming_since = now, stamp
        entry.coming = verdict
        if now - entry.coming_at >= self._settle_seconds:
            is_transition = verdict.status != shown.status
            since = entry.coming_since if is_transition else entry.shown.since
            entry.shown = Condition(verdict, since)
            entry.coming = None
