"""The last report of each node, from its agent or from WorkerStatus objects (pure).

A report is taken as it came, or not at all: one that is older than what is known, speaks for
another node, or makes no sense is refused with a reason. Ages count from the receipt, since
clocks of other machines are not trusted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from nearkv.node_summary import SCHEMA_VERSION, NodeSummary, PathSummary

MAX_SUMMARY_BYTES = 256 << 10
_MAX_DEVICES = 64
_MAX_GROUPS = 64
_MAX_PATHS = 128
_MAX_PODS = 1024
_MAX_NAME = 253
_MAX_SETUP_SECONDS = 600.0
_MAX_BYTES_PER_SECOND = 1e14
_MAX_COUNT = 2**63 - 1
"""JSON knows no largest integer, arrays do."""
_SHORTEST_SECONDS = 0.1
_LONGEST_SECONDS = 3600.0

_decoder = msgspec.json.Decoder(NodeSummary)


class Refusal(StrEnum):
    """Why a report was not taken."""

    GARBAGE = "garbage"
    TOO_MUCH = "too_much"
    WRONG_NODE = "wrong_node"
    WRONG_VERSION = "wrong_version"
    OLDER = "older"
    DUPLICATE = "duplicate"


class SummaryRefusedError(Exception):
    """A report was not taken; ``reason`` is for counting, the message for people."""

    def __init__(self, reason: Refusal, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """A summary, who gave it and when it was received (monotonic seconds).

    While ``live``, somebody listens to the agent, and it promised to speak up at once when
    anything changes, and within ``promised_seconds`` if nothing does.
    """

    summary: NodeSummary
    source: str
    received_at: float
    promised_seconds: float
    live: bool = True
    from_status: bool = False


@dataclass(frozen=True, slots=True)
class ReportChange:
    """A report that was taken; ``before`` is what it replaces."""

    report: NodeReport
    before: NodeReport | None

    @property
    def is_news(self) -> bool:
        """Whether it says anything that the one before did not."""
        return self.before is None or self.before.summary != self.report.summary


def decode_summary(body: bytes, *, node: str) -> NodeSummary:
    """Decode and check a summary; ``node`` is whose it must be, empty where that is open.

    Raises :class:`SummaryRefusedError`.
    """
    try:
        summary = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SummaryRefusedError(Refusal.GARBAGE, str(error)) from error
    check_summary(summary, node=node)
    return summary


def check_summary(summary: NodeSummary, *, node: str = "") -> None:
    """Check what the types cannot say; raises :class:`SummaryRefusedError`."""
    if summary.schema_version > SCHEMA_VERSION:
        raise SummaryRefusedError(
            Refusal.WRONG_VERSION, f"schema_version: {summary.schema_version} is not known"
        )
    if node and summary.node != node:
        raise SummaryRefusedError(
            Refusal.WRONG_NODE, f"node: expected {node!r}, got {summary.node[:_MAX_NAME]!r}"
        )
    _check_sizes(summary)
    _check_values(summary)


def _check_sizes(summary: NodeSummary) -> None:
    for name, values, limit in (
        ("devices", summary.devices, _MAX_DEVICES),
        ("groups", summary.groups, _MAX_GROUPS),
        ("paths", summary.paths, _MAX_PATHS),
        ("pods", summary.pods, _MAX_PODS),
    ):
        if values is not None and len(values) > limit:
            raise SummaryRefusedError(
                Refusal.TOO_MUCH, f"{name}: {len(values)} entries, the limit is {limit}"
            )


def _check_values(summary: NodeSummary) -> None:
    names = [("node", summary.node), ("boot", summary.boot)]
    names += [("groups.group", group.group) for group in summary.groups]
    names += [("paths.source", path.source) for path in summary.paths]
    for field, text in names:
        if not 0 < len(text) <= _MAX_NAME:
            raise SummaryRefusedError(Refusal.GARBAGE, f"{field}: {len(text)} characters")
    if not _SHORTEST_SECONDS <= summary.interval_seconds <= _LONGEST_SECONDS:
        raise SummaryRefusedError(
            Refusal.GARBAGE, f"interval_seconds: {summary.interval_seconds} is out of range"
        )
    for field, number in _numbers(summary):
        if number is not None and not 0 <= number <= _MAX_COUNT:
            wrong = "is negative" if number < 0 else f"is above {_MAX_COUNT}"
            raise SummaryRefusedError(Refusal.GARBAGE, f"{field}: {wrong}")


def _numbers(summary: NodeSummary) -> Iterator[tuple[str, float | None]]:
    for group in summary.groups:
        yield "groups.engines", group.engines
        yield "groups.held_bytes", group.held_bytes
        yield "groups.free_bytes", group.free_bytes
        yield "groups.kv_bytes_per_token", group.kv_bytes_per_token
        yield "groups.prefill_tokens_per_second", group.prefill_tokens_per_second
    for device in summary.devices or ():
        yield "devices.total_bytes", device.total_bytes
        yield "devices.used_bytes", device.used_bytes


def usable_paths(summary: NodeSummary) -> Iterator[PathSummary]:
    """Return the measured paths of a summary whose figures can be true."""
    for path in summary.paths:
        if (
            0 < path.count <= _MAX_COUNT
            and path.age_seconds >= 0
            and 0 <= path.setup_seconds <= _MAX_SETUP_SECONDS
            and 1 <= path.bytes_per_second <= _MAX_BYTES_PER_SECOND
        ):
            yield path


class SummaryStore:
    """The last report of each node, and who may replace it.

    An agent that is listened to cannot be replaced by another one. A WorkerStatus replaces an
    agent's report only when it is newer and the agent is silent for ``hold_seconds``.
    """

    def __init__(self, *, hold_seconds: float = 30.0) -> None:
        self._reports: dict[str, NodeReport] = {}
        self._hold_seconds = hold_seconds

    def __len__(self) -> int:
        return len(self._reports)

    def __iter__(self) -> Iterator[NodeReport]:
        return iter(self._reports.values())

    def get(self, node: str) -> NodeReport | None:
        """Return the last report of a node."""
        return self._reports.get(node)

    def take(self, report: NodeReport) -> ReportChange:
        """Keep a report; raises :class:`SummaryRefusedError` for one that must not count."""
        node = report.summary.node
        before = self._reports.get(node)
        if before is not None:
            self._check_order(before, report)
        self._reports[node] = report
        return ReportChange(report, before)

    def heard(self, node: str, source: str, now: float, promised_seconds: float) -> bool:
        """Note that a report still holds; False where there is none of this source."""
        known = self._reports.get(node)
        if known is None or known.source != source:
            return False
        self._reports[node] = replace(
            known, received_at=now, promised_seconds=promised_seconds, live=True
        )
        return True

    def lost(self, node: str, source: str) -> bool:
        """Note that nobody listens to the agent any more: its report ages by its own interval.

        False where that changes nothing.
        """
        known = self._reports.get(node)
        if known is None or known.source != source or not known.live:
            return False
        interval_seconds = known.summary.interval_seconds
        self._reports[node] = replace(known, promised_seconds=interval_seconds, live=False)
        return True

    def drop(self, node: str) -> NodeReport | None:
        """Forget a node's report, and return it."""
        return self._reports.pop(node, None)

    def older_than(self, received_before: float) -> list[str]:
        """Return the nodes whose report was received before a moment."""
        return [
            node for node, report in self._reports.items() if report.received_at < received_before
        ]

    def _check_order(self, before: NodeReport, report: NodeReport) -> None:
        if before.source == report.source:
            old, new = before.summary, report.summary
            if old.boot == new.boot and new.seq < old.seq:
                raise SummaryRefusedError(
                    Refusal.OLDER, f"seq: {new.seq} after {old.seq} of the same boot"
                )
        elif before.from_status and not report.from_status:
            return
        elif before.live or (report.from_status and self._still_counts(before, report)):
            raise SummaryRefusedError(
                Refusal.DUPLICATE,
                f"node {report.summary.node} is already reported by {before.source}",
            )

    def _still_counts(self, before: NodeReport, report: NodeReport) -> bool:
        return report.received_at - before.received_at < self._hold_seconds


def pods_newly_covered(change: ReportChange) -> set[str]:
    """Return UIDs of pods that a report covers and the one before did not."""
    covered = set(change.report.summary.pods or ())
    if change.before is not None:
        covered -= set(change.before.summary.pods or ())
    return covered
