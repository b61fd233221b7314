"""The node's summary for the extender: built from the node's state, published when it is news.

Thousands of agents give one extender their summaries, so what swings all the time must not be
told all the time. Two kinds of change are told apart: those that decide where a pod can run
(devices, engines, RDMA), published at once, and those that only shift a cost (KV held and free,
speeds, paths), published when they have moved by more than a tolerance, and not often.

Pure; callers pass the time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import msgspec

from nearkv.agent.engine_tracking import EngineTracker
from nearkv.agent.node_state import NodeState
from nearkv.node_summary import DeviceSummary, GroupSummary, NodeSummary, PathSummary
from nearkv.state.model import (
    TIER_DEVICE,
    EngineGauges,
    EngineState,
    EventsState,
    PathReading,
)

DeviceReader = Callable[[], Sequence[DeviceSummary] | None]
"""Returns the node's GPUs, ``None`` while they cannot be read."""

_MAX_PATHS = 64
_DEVICE_TOLERANCE = 0.01
_KV_TOLERANCE = 0.05
_SPEED_TOLERANCE = 0.15
_PATH_TOLERANCE = 0.2
_TURN_RATIO = 1.5
_TURNS_PER_DRIFT = 3
"""A path that is another one now is told sooner: placement should follow within a minute."""
_NOT_READ = EngineGauges(id="")
_ANY_ENGINE = frozenset({"prefill", "decode", "both"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryTiming:
    """How often the summary is made anew, and how often it may and must be published."""

    interval_seconds: float = 5.0
    drift_seconds: float = 30.0
    heartbeat_seconds: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What was last read of the node's hardware; ``why`` says by field what is not known."""

    devices: Sequence[DeviceSummary] | None = None
    rdma: bool | None = None
    why: Mapping[str, str] = field(default_factory=dict)


HardwareReader = Callable[[], Hardware]


class SummaryBuilder:
    """Makes summaries of a node."""

    def __init__(self, state: NodeState, *, node: str, interval_seconds: float) -> None:
        self._state = state
        self._node = node
        self._interval_seconds = interval_seconds

    def build(self, hardware: Hardware) -> NodeSummary:
        """Return the summary of this moment, without a place in the sequence yet."""
        reasons = {}
        pods = sorted({each.pod_uid for each in hardware.devices or () if each.pod_uid})
        if not pods:
            reasons["pods"] = "no device is mapped to a pod"
        for name, value in (("devices", hardware.devices), ("rdma", hardware.rdma)):
            if value is None:
                reasons[name] = hardware.why.get(name, "not read yet")
        by_group: dict[str, list[EngineTracker]] = {}
        for _, tracker in sorted(self._state.trackers.items()):
            by_group.setdefault(tracker.identity.group, []).append(tracker)
        groups = []
        for name, trackers in sorted(by_group.items()):
            if name:
                groups.append(self._group(name, trackers, reasons))
        return NodeSummary(
            node=self._node,
            boot=self._state.boot,
            seq=0,
            interval_seconds=self._interval_seconds,
            devices=None if hardware.devices is None else tuple(hardware.devices),
            rdma=hardware.rdma,
            pods=tuple(pods) or None,
            groups=tuple(groups),
            paths=self._measured_paths(),
            reasons=reasons,
        )

    def _group(
        self, name: str, trackers: Sequence[EngineTracker], reasons: dict[str, str]
    ) -> GroupSummary:
        gauges = [self._gauges(tracker) for tracker in trackers]
        held = [
            _held_bytes(tracker, self._bytes_per_token(tracker, reading))
            for tracker, reading in zip(trackers, gauges, strict=True)
        ]
        free = [reading.kv_free_bytes for reading in gauges]
        for fact, values in (("held_bytes", held), ("free_bytes", free)):
            unknown = sum(value is None for value in values)
            if unknown:
                reasons[f"groups.{name}.{fact}"] = f"unknown of {unknown} of {len(values)} engines"
        return GroupSummary(
            group=name,
            engines=sum(_is_there(tracker) for tracker in trackers),
            roles=tuple(sorted({tracker.identity.role for tracker in trackers} & _ANY_ENGINE)),
            held_bytes=_add_up(held),
            free_bytes=_add_up(free),
            total_bytes=_add_up(reading.kv_total_bytes for reading in gauges),
            kv_bytes_per_token=_middle(
                self._bytes_per_token(tracker, reading)
                for tracker, reading in zip(trackers, gauges, strict=True)
            ),
            prefill_tokens_per_second=_middle(
                1.0 / reading.prefill_seconds_per_token
                for reading in gauges
                if reading.prefill_seconds_per_token
            ),
            requests_waiting=_add_up(reading.requests_waiting for reading in gauges),
        )

    def _gauges(self, tracker: EngineTracker) -> EngineGauges:
        """Return an engine's last reading; that of one that does not answer says nothing."""
        if tracker.info.state is not EngineState.READY:
            return _NOT_READ
        return self._state.log.gauges.get(tracker.identity.id, _NOT_READ)

    def _bytes_per_token(self, tracker: EngineTracker, gauges: EngineGauges) -> float | None:
        published = self._state.log.infos.get(tracker.identity.id)
        if published is not None and published.transfer is not None:
            told = published.transfer.kv_bytes_per_token
            if told:
                return told
        if tracker.identity.kv_bytes_per_token:
            return tracker.identity.kv_bytes_per_token
        if not gauges.kv_total_bytes or not gauges.kv_total_tokens:
            return None
        return gauges.kv_total_bytes / gauges.kv_total_tokens

    def _measured_paths(self) -> tuple[PathSummary, ...]:
        """Return the measured paths to this node, those with the newest measurement first."""
        now, log = self._state.now(), self._state.log
        found: dict[str, tuple[PathReading, float]] = {}
        for (source, target), reading in log.paths.items():
            at = log.measured_at(source, target)
            if target == self._node and reading.points and at is not None:
                found[source] = (reading, at)
        newest = sorted(found.items(), key=lambda item: (-item[1][1], item[0]))[:_MAX_PATHS]
        return tuple(
            PathSummary(
                source=source,
                transport=reading.path,
                setup_seconds=reading.setup_seconds,
                bytes_per_second=reading.bytes_per_second,
                count=reading.points,
                age_seconds=round(max(now - at, 0.0), 3),
            )
            for source, (reading, at) in newest
        )


def _is_there(tracker: EngineTracker) -> bool:
    return tracker.info.state is not EngineState.UNREACHABLE


def _held_bytes(tracker: EngineTracker, bytes_per_token: float | None) -> int | None:
    """Return the KV that an engine holds; one that publishes no events keeps it to itself."""
    info = tracker.info
    if not _is_there(tracker) or info.events is EventsState.OFF:
        return None
    if bytes_per_token is None or info.block_size is None:
        return None
    blocks = tracker.table.blocks_by_tier().get(TIER_DEVICE, 0)
    return round(blocks * info.block_size * bytes_per_token)


def _add_up(values: Iterable[int | None]) -> int | None:
    """Return the sum of what is known, ``None`` where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


# -- What is news --------------------------------------------------------------------------


def is_urgent(before: NodeSummary, now: NodeSummary) -> bool:
    """Tell whether something changed that decides where a pod can run."""
    if (before.rdma, before.pods) != (now.rdma, now.pods):
        return True
    if [_identity(group) for group in before.groups] != [_identity(group) for group in now.groups]:
        return True
    if before.devices is None or now.devices is None:
        return before.devices is not now.devices
    return len(before.devices) != len(now.devices) or any(
        _device_changed(old, new) for old, new in zip(before.devices, now.devices, strict=True)
    )


def has_drifted(before: NodeSummary, now: NodeSummary) -> bool:
    """Tell whether a cost has moved by more than a tolerance."""
    groups = zip(before.groups, now.groups, strict=False)
    if any(_group_drifted(old, new) for old, new in groups):
        return True
    known = {path.source: path for path in before.paths}
    return any(_path_drifted(known.get(path.source), path) for path in now.paths)


def has_turned(before: NodeSummary, now: NodeSummary) -> bool:
    """Tell whether a path that was known goes over something else, or much faster or slower."""
    known = {path.source: path for path in before.paths}
    return any(_path_turned(known.get(path.source), path) for path in now.paths)


def _path_turned(old: PathSummary | None, new: PathSummary) -> bool:
    if old is None:
        return False
    slower, faster = sorted((old.bytes_per_second, new.bytes_per_second))
    return old.transport != new.transport or faster >= _TURN_RATIO * slower


def _identity(group: GroupSummary) -> tuple[str, int, tuple[str, ...]]:
    return group.group, group.engines, group.roles


def _device_changed(old: DeviceSummary, new: DeviceSummary) -> bool:
    def facts(device: DeviceSummary) -> DeviceSummary:
        return msgspec.structs.replace(device, used_bytes=None)

    tolerance_bytes = _DEVICE_TOLERANCE * (new.total_bytes or 0)
    return facts(old) != facts(new) or _moved(old.used_bytes, new.used_bytes, tolerance_bytes)


def _group_drifted(old: GroupSummary, new: GroupSummary) -> bool:
    tolerance_bytes = _KV_TOLERANCE * (new.total_bytes or max(new.held_bytes or 0, 1))
    return (
        _moved(old.held_bytes, new.held_bytes, tolerance_bytes)
        or _moved(old.free_bytes, new.free_bytes, tolerance_bytes)
        or _scaled(old.kv_bytes_per_token, new.kv_bytes_per_token, 0.0)
        or _scaled(old.prefill_tokens_per_second, new.prefill_tokens_per_second, _SPEED_TOLERANCE)
    )


def _path_drifted(old: PathSummary | None, new: PathSummary) -> bool:
    return (
        old is None
        or old.transport != new.transport
        or _scaled(old.bytes_per_second, new.bytes_per_second, _PATH_TOLERANCE)
        or _scaled(old.setup_seconds, new.setup_seconds, _PATH_TOLERANCE)
    )


def _moved(old: float | None, new: float | None, tolerance: float) -> bool:
    if old is None or new is None:
        return old is not new
    return abs(new - old) > tolerance


def _scaled(old: float | None, new: float | None, tolerance_ratio: float) -> bool:
    if old is None or new is None:
        return old is not new
    return abs(new - old) > tolerance_ratio * max(abs(old), abs(new))


class SummarySequence:
    """Numbers the summaries that are news; ``seq`` is the number of the last one."""

    def __init__(self, timing: SummaryTiming) -> None:
        self._timing = timing
        self._last: NodeSummary | None = None
        self._last_at = float("-inf")
        self.seq = 0

    def offer(self, summary: NodeSummary, now: float) -> bool:
        """Take a summary; True where it is news."""
        if self._last is not None and not self._is_due(self._last, summary, now - self._last_at):
            return False
        self._last, self._last_at = summary, now
        self.seq += 1
        return True

    def _is_due(self, last: NodeSummary, summary: NodeSummary, quiet_seconds: float) -> bool:
        if is_urgent(last, summary) or quiet_seconds >= self._timing.heartbeat_seconds:
            return True
        drift_seconds = self._timing.drift_seconds
        if quiet_seconds >= drift_seconds / _TURNS_PER_DRIFT and has_turned(last, summary):
            return True
        return quiet_seconds >= drift_seconds and has_drifted(last, summary)
