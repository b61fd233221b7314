"""Where a request stands in a trace: W3C trace context, read and written (pure).

https://www.w3.org/TR/trace-context/: a header ``00-<trace>-<span>-<flags>`` in hex.
"""

import re
from collections.abc import Callable

import msgspec

TRACEPARENT_HEADER = "traceparent"

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01
_FIRST_VERSION = "00"
_NO_VERSION = "ff"
_RATIO_BITS = 63


class Parent(msgspec.Struct, frozen=True):
    """The span that a request comes from."""

    trace_id: int
    span_id: int
    sampled: bool


class TraceContext(msgspec.Struct, frozen=True):
    """One request's place in its trace.

    ``span_id`` is the request's own span, ``prefill_id`` that of its first leg where two
    engines serve; engines' spans hang below these. ``parent_id`` is 0 where the trace
    begins here.
    """

    trace_id: int
    span_id: int
    prefill_id: int
    parent_id: int
    sampled: bool

    @property
    def header(self) -> str:
        """The ``traceparent`` for the engine that answers."""
        return format_traceparent(self.trace_id, self.span_id, sampled=self.sampled)

    @property
    def prefill_header(self) -> str:
        """The ``traceparent`` for the engine that prefills only."""
        return format_traceparent(self.trace_id, self.prefill_id, sampled=self.sampled)


def parse_traceparent(text: str) -> Parent | None:
    """Return what a ``traceparent`` says; ``None`` for one that is to be ignored."""
    found = _FORM.fullmatch(text.strip())
    if found is None or found[1] == _NO_VERSION or (found[1] == _FIRST_VERSION and found[5]):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    if not trace_id or not span_id:
        return None
    return Parent(trace_id, span_id, bool(int(found[4], 16) & _SAMPLED))


def format_traceparent(trace_id: int, span_id: int, *, sampled: bool) -> str:
    """Return a ``traceparent``."""
    return f"00-{trace_id:032x}-{span_id:016x}-{_SAMPLED if sampled else 0:02x}"


def start_context(parent: Parent | None, ratio: float, draw: Callable[[int], int]) -> TraceContext:
    """Return the place of a new request.

    Whoever begins a trace says whether it is recorded; ours are by ``ratio`` of their ids.
    ``draw`` returns as many random bits as it is asked for.
    """
    if parent is not None:
        trace_id, parent_id, sampled = parent.trace_id, parent.span_id, parent.sampled
    else:
        trace_id, parent_id = draw(128) or 1, 0
        sampled = trace_id & ((1 << _RATIO_BITS) - 1) < ratio * (1 << _RATIO_BITS)
    return TraceContext(trace_id, draw(64) or 1, draw(64) or 1, parent_id, sampled)
