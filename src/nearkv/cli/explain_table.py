"""The text of ``nearkv explain-pod`` (pure): the extender's answer in, lines out.

Every field has a default, so that a newer or older extender can still be read; what is not known
is "-", never zero.
"""

from collections.abc import Iterator, Sequence

import msgspec

from nearkv.cli.status_table import UNKNOWN, format_age, format_bytes

_MILLISECONDS = 1000.0
_HEADINGS = ("NODE", "SCORE", "CLASS", "FETCH", "HEADROOM", "FREE", "REPORT", "KV FREE", "WHY")


class NodeScore(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a decision."""

    node: str = UNKNOWN
    score: int | None = None
    headroom_ratio: float | None = None
    class_: str | None = msgspec.field(default=None, name="class")
    fetch_ms: float | None = None
    fetch_is: str = ""
    free_devices: float | None = None
    report_age_seconds: float | None = None
    kv_free_bytes: float | None = None
    why: str = ""


class NodeRejection(msgspec.Struct, frozen=True, kw_only=True):
    """One node that filter rejected."""

    node: str = UNKNOWN
    why: str = ""
    resolvable: bool | None = None


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where KV would be fetched from."""

    node: str = UNKNOWN
    kind: str = msgspec.field(default="", name="as")
    held_bytes: float | None = None


class PodDecision(msgspec.Struct, frozen=True, kw_only=True):
    """One decision: scores, or rejections."""

    verb: str = UNKNOWN
    at: str = UNKNOWN
    group: str = UNKNOWN
    role: str = UNKNOWN
    devices: int | None = None
    prefix_tokens: int | None = None
    kv_bytes: float | None = None
    recompute_ms: float | None = None
    sources: tuple[Source, ...] = ()
    source_count: int | None = None
    summary: str = ""
    nodes: int | None = None
    kept: int | None = None
    scores: tuple[NodeScore, ...] = ()
    rejections: tuple[NodeRejection, ...] = ()


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What ``/v1/explain`` answers."""

    decisions: tuple[PodDecision, ...]
    pod: str = UNKNOWN
    uid: str = UNKNOWN


def render_explanation(explanation: Explanation) -> str:
    """Return the explanation as text, latest decision first."""
    parts = [f"{explanation.pod}  uid {explanation.uid}"]
    for decision in explanation.decisions:
        lines = _scored(decision) if decision.verb == "prioritize" else _rejected(decision)
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _scored(decision: PodDecision) -> Iterator[str]:
    yield f"prioritize at {decision.at}: {decision.summary or UNKNOWN}"
    devices = UNKNOWN if decision.devices is None else str(decision.devices)
    yield f"  pod: group {decision.group}, role {decision.role}, devices {devices}"
    yield (
        f"  prefix: {_count(decision.prefix_tokens)} tokens, {format_bytes(decision.kv_bytes)} of "
        f"KV, {_milliseconds(decision.recompute_ms)} to compute again"
    )
    if decision.sources:
        yield f"  sources ({_count(decision.source_count)}): {_sources(decision.sources)}"
    shown = len(decision.scores)
    yield f"  nodes: {_count(decision.nodes)}, the best {shown} shown"
    yield from _columns([_HEADINGS, *map(_cells, decision.scores)])


def _sources(sources: Sequence[Source]) -> str:
    return ", ".join(
        f"{source.node} ({source.kind}{_held(source.held_bytes)})" for source in sources
    )


def _held(size: float | None) -> str:
    return "" if size is None else f", {format_bytes(size)}"


def _cells(node: NodeScore) -> tuple[str, ...]:
    fetch = _milliseconds(node.fetch_ms)
    return (
        node.node,
        _count(node.score),
        node.class_ or UNKNOWN,
        f"{fetch} {node.fetch_is}".rstrip(),
        UNKNOWN if node.headroom_ratio is None else f"{node.headroom_ratio:.2f}",
        UNKNOWN if node.free_devices is None else f"{node.free_devices:g}",
        format_age(node.report_age_seconds),
        format_bytes(node.kv_free_bytes),
        node.why,
    )


def _rejected(decision: PodDecision) -> Iterator[str]:
    kept, nodes = _count(decision.kept), _count(decision.nodes)
    yield f"{decision.verb} at {decision.at}: kept {kept} of {nodes} nodes"
    rows = [
        (found.node, found.why, "" if found.resolvable else "preemption cannot help")
        for found in decision.rejections
    ]
    yield from _columns([("REJECTED", "WHY", ""), *rows])


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  " + "   ".join(cells).rstrip()


def _count(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def _milliseconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if value >= _MILLISECONDS:
        return f"{value / _MILLISECONDS:.2f} s"
    return f"{value:.3g} ms"
