"""Spans made from a request's record (pure): route, queue, prefill, transfer, decode.

Names of attributes are those of the GenAI semantic conventions where these have one (of 2026,
in development still), else they begin with ``nearkv.``.
"""

from collections.abc import Iterator
from typing import Protocol

import msgspec

from nearkv.ingress.recording.records import RequestRecord
from nearkv.ingress.tracing.context import TraceContext

Value = str | int | float | bool

_NANOSECONDS = 1_000_000_000
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


class PlannedSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One span; ``span_id`` 0 is for any, ``parent_id`` 0 for none.

    ``error`` is empty for a span that went well.
    """

    name: str
    kind: str
    span_id: int
    parent_id: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Value]
    error: str = ""


class _Step(Protocol):
    def __call__(
        self, name: str, start: float, end: float, attributes: dict[str, Value | None]
    ) -> PlannedSpan:
        """Return a span below the request's own."""


def spans_of(record: RequestRecord) -> list[PlannedSpan]:
    """Return a finished request's spans, its own first; none where it is not traced."""
    trace = record.trace
    if trace is None or not trace.sampled or record.ended_at is None:
        return []
    return [_root(record, trace, record.ended_at), *_steps(record, trace, record.ended_at)]


def _root(record: RequestRecord, trace: TraceContext, ended_at: float) -> PlannedSpan:
    operation = _OPERATIONS.get(record.path, "")
    failed = record.outcome != "ok"
    return PlannedSpan(
        name=f"{operation} {record.model}".strip() or record.path,
        kind="server",
        span_id=trace.span_id,
        parent_id=trace.parent_id,
        start_ns=_nanoseconds(record, record.arrived_at),
        end_ns=_nanoseconds(record, ended_at),
        attributes=_known(
            {
                "gen_ai.operation.name": operation or None,
                "gen_ai.request.model": record.model or None,
                "gen_ai.request.stream": record.stream,
                "gen_ai.usage.input_tokens": _prompt_tokens(record),
                "gen_ai.usage.output_tokens": record.output_tokens,
                "gen_ai.usage.cache_read.input_tokens": record.reported_cached_tokens,
                "gen_ai.response.time_to_first_chunk": _seconds_to_first(record),
                "http.response.status_code": record.status or None,
                "url.path": record.path,
                "error.type": (record.reason or record.outcome) if failed else None,
                "nearkv.request.id": record.request_id,
                "nearkv.engine": record.engine or None,
                "nearkv.reason": record.reason or None,
                "nearkv.outcome": record.outcome,
                "nearkv.predicted_cached_tokens": record.predicted_cached_tokens,
            }
        ),
        error=(record.error or record.outcome) if failed else "",
    )


def _steps(record: RequestRecord, trace: TraceContext, ended_at: float) -> Iterator[PlannedSpan]:
    def step(
        name: str, start: float, end: float, attributes: dict[str, Value | None], error: str = ""
    ) -> PlannedSpan:
        return PlannedSpan(
            name=name,
            kind="client" if name in ("prefill", "attempt") else "internal",
            span_id=trace.prefill_id if name == "prefill" else 0,
            parent_id=trace.span_id,
            start_ns=_nanoseconds(record, start),
            end_ns=_nanoseconds(record, end),
            attributes=_known(attributes),
            error=error,
        )

    first, last = record.choices[:1], record.choice
    queued_at, left_at = record.queued_at, record.left_queue_at
    sent_at = left_at or (first[0].at if first else ended_at)
    yield step("route", record.arrived_at, queued_at or sent_at, _of_routing(record))
    if queued_at is not None:
        yield step("queue", queued_at, sent_at, {})
    for failure in record.failures:
        yield step(
            "attempt",
            sent_at,
            failure.at,
            {"nearkv.engine": failure.engine, "nearkv.leg": failure.leg},
            failure.why,
        )
        sent_at = failure.at
    if last is None or record.began_at is None:
        return
    yield from _serving(record, last.at, record.began_at, step)
    yield step(
        "decode",
        record.began_at,
        ended_at,
        {
            "nearkv.engine": record.engine or None,
            "gen_ai.usage.output_tokens": record.output_tokens,
            "nearkv.output_chunks": record.output_chunks,
        },
        record.error if record.outcome == "broken" else "",
    )


def _serving(
    record: RequestRecord, sent_at: float, began_at: float, step: _Step
) -> Iterator[PlannedSpan]:
    """Yield what lies between dispatch and first byte: on one engine, or on two."""
    if not record.prefill_engine or record.prefilled_at is None:
        yield step(
            "prefill",
            sent_at,
            began_at,
            {
                "nearkv.engine": record.engine or None,
                "nearkv.predicted_ms": record.predicted_first_token_ms,
            },
        )
        return
    choice = record.choice
    yield step(
        "prefill",
        sent_at,
        record.prefilled_at,
        {"nearkv.engine": record.prefill_engine, "nearkv.outcome": record.prefill_outcome},
    )
    yield step(
        "transfer",
        record.prefilled_at,
        began_at,
        {
            "nearkv.source": record.prefill_engine,
            "nearkv.engine": record.engine or None,
            "nearkv.transfer.path": (choice.pull_path if choice else "") or None,
            "nearkv.transfer.predicted_bytes": choice.pull_bytes if choice else None,
        },
    )


def _of_routing(record: RequestRecord) -> dict[str, Value | None]:
    choice = record.choice
    if choice is None:
        return {}
    decision = choice.decision
    return {
        "nearkv.policy": decision.policy,
        "nearkv.reason": decision.reason,
        "nearkv.rung": decision.rung,
        "nearkv.tokens_from": decision.tokens_from,
        "nearkv.candidates": len(decision.candidates),
    }


def _prompt_tokens(record: RequestRecord) -> int | None:
    return None if record.choice is None else record.choice.decision.prompt_tokens


def _seconds_to_first(record: RequestRecord) -> float | None:
    if record.began_at is None or not record.stream:
        return None
    return record.began_at - record.arrived_at


def _known(attributes: dict[str, Value | None]) -> dict[str, Value]:
    return {name: value for name, value in attributes.items() if value is not None}


def _nanoseconds(record: RequestRecord, mark: float) -> int:
    return int((record.at + mark - record.arrived_at) * _NANOSECONDS)
