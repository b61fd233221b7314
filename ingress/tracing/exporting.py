"""Exporting spans by OpenTelemetry's SDK; imported only where tracing is on.

Spans are made once a request is over, on the outbox's thread, with the ids that engines were
told before. So nothing of the SDK is on the way of a request.
"""

import secrets
from collections.abc import Sequence
from typing import Any, Protocol

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from nearkv.ingress.recording.records import RequestRecord
from nearkv.ingress.tracing.errors import ExportFailedError
from nearkv.ingress.tracing.spans import PlannedSpan, spans_of

_SPAN_BITS = 64
_TRACE_BITS = 128
_SAMPLED = trace.TraceFlags(trace.TraceFlags.SAMPLED)


class Export(Protocol):
    """Where finished spans go."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans."""

    def shutdown(self) -> Any:  # noqa: ANN401 (exporters differ)
        """Send nothing any more, and stop trying again."""


def open_otlp(endpoint: str, *, timeout_seconds: float) -> Export:
    """Return OTLP's HTTP exporter; headers come from ``OTEL_EXPORTER_OTLP_HEADERS``."""
    return OTLPSpanExporter(endpoint=endpoint, timeout=timeout_seconds)


class SpanWriter:
    """Makes spans from records and exports them; used by one thread."""

    def __init__(self, export: Export, service_name: str) -> None:
        self._export = export
        self._ids = _PresetIds()
        self._ended = _Ended()
        provider = TracerProvider(
            sampler=ALWAYS_ON,  # whoever began the trace has decided
            resource=Resource.create({"service.name": service_name}),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("nearkv")

    def write(self, records: list[RequestRecord]) -> None:
        """Export the spans of finished requests; raises :class:`ExportFailedError`."""
        for record in records:
            if record.trace is not None:
                for planned in spans_of(record):
                    self._make(record.trace.trace_id, planned)
        spans = self._ended.take()
        if spans and self._export.export(spans) is not SpanExportResult.SUCCESS:
            raise ExportFailedError("the collector did not take the spans; see the log before")

    def close(self) -> None:
        """Give up what is under way."""
        self._export.shutdown()

    def _make(self, trace_id: int, planned: PlannedSpan) -> None:
        self._ids.next_trace, self._ids.next_span = trace_id, planned.span_id
        span = self._tracer.start_span(
            planned.name,
            context=_below(trace_id, planned),
            kind=trace.SpanKind[planned.kind.upper()],
            attributes=planned.attributes,
            start_time=planned.start_ns,
        )
        if planned.error:
            span.set_status(trace.Status(trace.StatusCode.ERROR, planned.error))
        span.end(planned.end_ns)


def _below(trace_id: int, planned: PlannedSpan) -> Context:
    if not planned.parent_id:
        return Context()
    parent = trace.SpanContext(
        trace_id, planned.parent_id, is_remote=planned.kind == "server", trace_flags=_SAMPLED
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())


class _Ended(SpanProcessor):
    """Keeps what ended until it is taken."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)

    def take(self) -> list[ReadableSpan]:
        spans, self._spans = self._spans, []
        return spans


class _PresetIds(IdGenerator):
    """Gives the next span the ids that it was promised."""

    def __init__(self) -> None:
        self.next_trace = 0
        self.next_span = 0

    def generate_span_id(self) -> int:
        return self.next_span or secrets.randbits(_SPAN_BITS) or 1

    def generate_trace_id(self) -> int:
        return self.next_trace or secrets.randbits(_TRACE_BITS) or 1
