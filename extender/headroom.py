"""Room for a pod's devices on each node: whole devices that are free and truly unused (pure).

What the API server knows (allocatable devices, what pods ask for) and what is expected by the
ledger say how many devices are free. What the agent reads from NVML says whether those are clean:
sound, and not in use by a process that no pod accounts for. The kubelet hands out devices without
knowing of foreign memory, so what counts is the chance that it picks only clean ones.

A fresh report counts in full. From there to an age of several intervals it fades into an even
chance, which is also what stands for missing readings: neither good nor bad. Only facts that are
fresh, and that time alone does not change, make a node one that cannot work.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

import numpy as np

from nearkv.extender.distance import Bools
from nearkv.extender.model import UNKNOWN_NODE, Floats, Ints, Marks, PodAsk, Snapshot

NEUTRAL_RATIO = 0.5
_MOST_DEVICES = 64
"""More than any node has; bounds the work for a pod that asks for an absurd number."""
_SHORTEST_SECONDS = 1e-3
"""No report comes more often; below that the interval is nonsense."""


class Verdict(IntEnum):
    """What a node's headroom rests on."""

    FRESH = 0
    AGED = 1
    NO_REPORT = 2
    NO_READING = 3
    NO_DEVICES = 4
    UNKNOWN_NODE = 5
    NOT_ASKED = 6
    SETTLING = 7
    FOREIGN = 8
    FAILED = 9


REASONS: Mapping[Verdict, str] = MappingProxyType(
    {
        Verdict.FRESH: "the report is fresh",
        Verdict.AGED: "the report is aged",
        Verdict.NO_REPORT: "there is no report, or it is too old to count",
        Verdict.NO_READING: "the agent has no device readings",
        Verdict.NO_DEVICES: "allocatable devices are not known",
        Verdict.UNKNOWN_NODE: "the node is not known yet",
        Verdict.NOT_ASKED: "the pod asks for no devices",
        Verdict.SETTLING: "a pod left, and its memory may still be on its way back",
        Verdict.FOREIGN: "memory of devices is in use by processes of no pod",
        Verdict.FAILED: "devices have failed",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadroomConfig:
    """How far reports are trusted.

    ``fresh_intervals`` and ``aged_intervals`` are ages in intervals of the report;
    ``grace_seconds`` is how long the memory of a pod that left may take to come back;
    ``default_report_seconds`` is the interval where the agent did not say.
    """

    fresh_intervals: float = 2.0
    aged_intervals: float = 6.0
    grace_seconds: float = 10.0
    default_report_seconds: float = 15.0

    def __post_init__(self) -> None:
        if not 0 < self.fresh_intervals < self.aged_intervals < float("inf"):
            raise ValueError("fresh_intervals must be above 0, and aged_intervals above it")
        if not 0 < self.default_report_seconds < float("inf") or not self.grace_seconds >= 0:
            raise ValueError("default_report_seconds must be above 0, grace_seconds 0 or more")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeviceRoom:
    """Room on each candidate, in their order.

    ``ratio`` is 0 (none) to 1 (all devices are free and clean), ``free`` the devices that are
    free by requests and ledger (NaN where unknown). ``rejects`` marks nodes on which the pod
    cannot work, ``unresolvable`` those of them on which no preemption could help.
    """

    ratio: Floats
    verdict: Marks
    free: Floats
    age_seconds: Floats
    rejects: Bools
    unresolvable: Bools


@dataclass(frozen=True, slots=True, eq=False)
class _Nodes:
    """What is known of the candidates' devices: counts, as floats."""

    allocatable: Floats
    requested: Floats
    readings: Floats
    failed: Floats
    in_use: Floats
    age_seconds: Floats
    trust: Floats
    settled: Bools
    first_hand: Bools


@dataclass(frozen=True, slots=True, eq=False)
class _Findings:
    """What the readings say: sound devices, foreign ones, and whether a report counts at all."""

    sound: Floats
    foreign: Floats
    bad_free: Floats
    free: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Readings:
    """Devices by row: of how many something was read, how many failed, how many are in use.

    In use means that too little of a device's memory is free for an engine that takes
    ``memory_ratio`` of it.
    """

    memory_ratio: float
    known: Floats
    failed: Floats
    in_use: Floats

    @classmethod
    def of(cls, snapshot: Snapshot, memory_ratio: float) -> "Readings":
        """Count the devices of every node."""
        failed = snapshot.device_ok == 0
        with np.errstate(invalid="ignore"):
            in_use = (snapshot.free_ratio < memory_ratio) & ~failed
        known = ~np.isnan(snapshot.free_ratio) | failed
        return cls(memory_ratio, _count(known), _count(failed), _count(in_use))


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The nodes to judge: their rows, and what holds for all nodes of the snapshot.

    ``taken`` is what the ledger expects, in devices, by row of the snapshot (and one entry more,
    for nodes that are not known).
    """

    rows: Ints
    taken: Floats
    readings: Readings


def device_room(
    snapshot: Snapshot, ask: PodAsk, candidates: Candidates, now: float, config: HeadroomConfig
) -> DeviceRoom:
    """Return the room for the pod on each candidate, in their order."""
    rows, readings = candidates.rows, candidates.readings
    taken = np.maximum(candidates.taken[rows], 0.0)
    if not len(snapshot.names):
        return _nothing_known(len(rows))
    with np.errstate(invalid="ignore"):
        nodes = _gather(snapshot, readings, rows, now, config)
        findings = _find(nodes)
        ratio = _ratio(nodes, findings, ask.devices, taken)
        rejects, unresolvable = _impossible(nodes, findings, ask.devices, rows)
    verdict = _verdicts(nodes, findings, rows)
    neutral = (verdict == Verdict.NO_DEVICES) | (verdict == Verdict.UNKNOWN_NODE)
    if ask.devices <= 0:
        neutral |= True
        verdict = np.full(len(rows), Verdict.NOT_ASKED, np.int8)
    ratio[neutral] = NEUTRAL_RATIO
    # Below none there is nothing: the ledger may expect more pods than there are devices.
    free = np.maximum(findings.free - taken, 0.0)
    free[(verdict == Verdict.NO_DEVICES) | (verdict == Verdict.UNKNOWN_NODE)] = np.nan
    return DeviceRoom(
        ratio=ratio,
        verdict=verdict,
        free=free,
        age_seconds=np.where(rows == UNKNOWN_NODE, np.inf, nodes.age_seconds),
        rejects=rejects,
        unresolvable=unresolvable,
    )


def _nothing_known(count: int) -> DeviceRoom:
    return DeviceRoom(
        ratio=np.full(count, NEUTRAL_RATIO),
        verdict=np.full(count, Verdict.UNKNOWN_NODE, np.int8),
        free=np.full(count, np.nan),
        age_seconds=np.full(count, np.inf),
        rejects=np.zeros(count, np.bool_),
        unresolvable=np.zeros(count, np.bool_),
    )


def _gather(
    snapshot: Snapshot, readings: Readings, rows: Ints, now: float, config: HeadroomConfig
) -> _Nodes:
    reported_at = snapshot.reported_at[rows]
    age = np.maximum(np.nan_to_num(now - reported_at, nan=np.inf, posinf=np.inf), 0.0)
    interval = snapshot.report_seconds[rows]
    stated = (interval >= _SHORTEST_SECONDS) & (interval < np.inf)
    interval = np.where(stated, interval, config.default_report_seconds)
    spread = config.aged_intervals - config.fresh_intervals
    trust = np.clip((config.aged_intervals - age / interval) / spread, 0.0, 1.0)
    return _Nodes(
        allocatable=np.maximum(snapshot.devices[rows].astype(np.float64), 0.0),
        requested=np.maximum(snapshot.requested[rows].astype(np.float64), 0.0),
        readings=readings.known[rows],
        failed=readings.failed[rows],
        in_use=readings.in_use[rows],
        age_seconds=age,
        trust=trust,
        settled=reported_at > snapshot.left_at[rows] + config.grace_seconds,
        first_hand=snapshot.from_status[rows] == 0,
    )


def _count(marks: Bools) -> Floats:
    """Count the marks of each row; by column, since numpy is slow along short rows."""
    counts = np.zeros(len(marks))
    for column in range(marks.shape[1]):
        counts += marks[:, column]
    return counts


def _find(nodes: _Nodes) -> _Findings:
    """Put requests and readings together.

    A device in use is put down to the pods on the node as far as there are any, and right after
    one has left. Failed devices that the device plugin has withdrawn are no longer allocatable,
    so more readings than allocatable devices account for them.
    """
    free = np.maximum(nodes.allocatable - nodes.requested, 0.0)
    sound = np.minimum(
        nodes.allocatable, np.maximum(nodes.readings, nodes.allocatable) - nodes.failed
    )
    sound = np.maximum(sound, 0.0)
    foreign = np.where(nodes.settled, np.maximum(nodes.in_use - nodes.requested, 0.0), 0.0)
    bad_free = np.minimum(foreign + (nodes.allocatable - sound), free)
    return _Findings(sound=sound, foreign=foreign, bad_free=bad_free, free=free)


def _ratio(nodes: _Nodes, findings: _Findings, asked: int, taken: Floats) -> Floats:
    free = np.maximum(findings.free - taken, 0.0)
    share = free / np.maximum(nodes.allocatable, 1.0)
    # Less than the pod asks for is worth little, yet not nothing: a request may be about to go.
    fits = np.minimum(free / max(asked, 1), 1.0)
    chance = _chance_of_clean(findings, asked)
    unread = np.clip(nodes.allocatable - nodes.readings, 0.0, findings.free)
    unread /= np.maximum(findings.free, 1.0)
    trust = nodes.trust * (1.0 - unread)
    clean = trust * chance + (1.0 - trust) * NEUTRAL_RATIO
    return np.clip(share * fits * clean, 0.0, 1.0)


def _chance_of_clean(findings: _Findings, asked: int) -> Floats:
    """Return the chance that devices picked blindly among the free ones are all clean."""
    chance = np.ones(len(findings.free))
    if not findings.bad_free.any():
        return chance
    good = findings.free - findings.bad_free
    for picked in range(min(asked, _MOST_DEVICES)):
        left = np.maximum(findings.free - picked, 1.0)
        chance *= np.clip((good - picked) / left, 0.0, 1.0)
    return chance


def _impossible(nodes: _Nodes, findings: _Findings, asked: int, rows: Ints) -> tuple[Bools, Bools]:
    """Mark nodes on which fewer devices can work than the pod asks for, by a fresh report.

    Devices in use by pods are the scheduler's own business, as is a node with no allocatable
    devices at all: the pod may be served by a resource claim. A WorkerStatus is not fresh enough:
    it is written rarely, and after a start of the extender old ones look as if just written.
    """
    judged = (nodes.trust >= 1.0) & nodes.first_hand & (nodes.allocatable > 0)
    judged &= (rows != UNKNOWN_NODE) & (asked > 0)
    failed = judged & (nodes.failed > 0) & (findings.sound < asked)
    usable = np.maximum(nodes.readings, nodes.allocatable) - nodes.failed - nodes.in_use
    usable = np.minimum(nodes.allocatable, usable)
    foreign = judged & (findings.foreign > 0) & (usable < asked)
    return failed | foreign, failed


def _verdicts(nodes: _Nodes, findings: _Findings, rows: Ints) -> Marks:
    """Name what each node's headroom rests on; what is written last counts most."""
    verdict = np.full(len(rows), Verdict.FRESH, np.int8)
    verdict[~nodes.settled] = Verdict.SETTLING
    verdict[findings.foreign > 0] = Verdict.FOREIGN
    verdict[findings.sound < nodes.allocatable] = Verdict.FAILED
    verdict[nodes.readings <= 0] = Verdict.NO_READING
    verdict[nodes.trust < 1.0] = Verdict.AGED
    verdict[nodes.trust <= 0.0] = Verdict.NO_REPORT
    verdict[nodes.allocatable <= 0] = Verdict.NO_DEVICES
    verdict[rows == UNKNOWN_NODE] = Verdict.UNKNOWN_NODE
    return verdict
