"""Spans made by the SDK, in memory."""

import pytest
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from nearkv.ingress.tracing.context import TraceContext
from nearkv.ingress.tracing.errors import ExportFailedError
from nearkv.ingress.tracing.exporting import SpanWriter
from tests.ingress.recording.request_records import served

TRACE = TraceContext(trace_id=7, span_id=11, prefill_id=13, parent_id=5, sampled=True)


class Refusing(InMemorySpanExporter):
    def export(self, spans):
        super().export(spans)
        return SpanExportResult.FAILURE


def test_spans_have_the_ids_that_engines_were_told():
    memory = InMemorySpanExporter()
    SpanWriter(memory, "router").write([served(trace=TRACE)])
    root, *steps = memory.get_finished_spans()
    assert (root.context.trace_id, root.context.span_id, root.parent.span_id) == (7, 11, 5)
    assert (root.kind, root.parent.is_remote) == (SpanKind.SERVER, True)
    assert root.resource.attributes["service.name"] == "router"
    assert {step.context.trace_id for step in steps} == {7}
    assert {step.parent.span_id for step in steps} == {11}
    assert len({span.context.span_id for span in (root, *steps)}) == 4


def test_a_trace_that_begins_here_has_no_parent():
    memory = InMemorySpanExporter()
    SpanWriter(memory, "router").write([served(trace=TraceContext(7, 11, 13, 0, sampled=True))])
    assert memory.get_finished_spans()[0].parent is None


def test_failures_are_errors():
    record = served(trace=TRACE)
    record.outcome, record.error = "broken", "engine_died"
    memory = InMemorySpanExporter()
    SpanWriter(memory, "router").write([record])
    root = memory.get_finished_spans()[0]
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, "engine_died")


def test_what_the_collector_does_not_take_is_said_and_not_sent_twice():
    refusing = Refusing()
    writer = SpanWriter(refusing, "router")
    for _ in range(2):
        refusing.clear()
        with pytest.raises(ExportFailedError):
            writer.write([served(trace=TRACE)])
        assert len(refusing.get_finished_spans()) == 4


def test_nothing_is_sent_for_nothing():
    refusing = Refusing()
    SpanWriter(refusing, "router").write([served()])
