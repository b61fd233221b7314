"""Spans from records: route, queue, prefill, transfer, decode, side by side."""

import pytest

from nearkv.ingress.tracing.context import TraceContext
from nearkv.ingress.tracing.spans import spans_of
from tests.ingress.recording.request_records import Clock, End, decision, pair, served, watch

TRACE = TraceContext(trace_id=7, span_id=11, prefill_id=13, parent_id=5, sampled=True)
MS = 1_000_000


def times(record):
    """Return each span's start and end in milliseconds from the request's arrival."""
    start_ns = int(record.at * 1e9)
    return {
        span.name: (round((span.start_ns - start_ns) / MS), round((span.end_ns - start_ns) / MS))
        for span in spans_of(record)
    }


def test_one_engine():
    record = served(trace=TRACE)
    assert times(record) == {
        "text_completion tiny": (0, 260),
        "route": (0, 10),
        "prefill": (10, 60),
        "decode": (60, 260),
    }
    root, *steps = spans_of(record)
    assert (root.span_id, root.parent_id, root.kind, root.error) == (11, 5, "server", "")
    assert {step.parent_id for step in steps} == {11}


def test_attributes_are_those_of_the_conventions():
    attributes = spans_of(served(trace=TRACE))[0].attributes
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.stream": True,
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 64,
        "gen_ai.response.time_to_first_chunk": pytest.approx(0.06),
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "nearkv.request.id": "r",
        "nearkv.engine": "a",
        "nearkv.reason": "prefix_hit",
        "nearkv.outcome": "ok",
        "nearkv.predicted_cached_tokens": 64,
    }


def test_two_engines():
    clock = Clock()
    watched = watch(clock, trace=TRACE)
    clock.after(0.01)
    watched.decided(decision("d", split=pair(), reason="pd"), now=0.0, pull=(4096, "tcp"))
    clock.after(0.08)
    watched.prefilled("ok")
    clock.after(0.02)
    watched.served("d", "pd", predicted=96, prefill_engine="p")
    watched.began()
    clock.after(0.3)
    watched.ended(200, End())
    watched.close()
    record = watched.record
    found = times(record)
    assert found["prefill"] == (10, 90)
    assert found["transfer"] == (90, 110)
    assert found["decode"] == (110, 410)
    spans = {span.name: span for span in spans_of(record)}
    assert (spans["prefill"].span_id, spans["prefill"].kind) == (13, "client")
    transfer = spans["transfer"].attributes
    assert (transfer["nearkv.transfer.path"], transfer["nearkv.transfer.predicted_bytes"]) == (
        "tcp",
        4096,
    )


def test_a_wait_and_a_failed_attempt():
    clock = Clock()
    watched = watch(clock, trace=TRACE)
    watched.decided(decision(None, reason="no_kv_room"), now=0.0)
    watched.queued()
    clock.after(0.4)
    watched.decided(decision("a"), now=0.0)
    clock.after(0.1)
    watched.failed("a", "status 503")
    watched.decided(decision("b", attempt=1), now=0.0)
    clock.after(0.1)
    watched.served("b", "prefix_miss", predicted=0)
    watched.began()
    watched.ended(200, End())
    watched.close()
    found = times(watched.record)
    assert (found["queue"], found["attempt"], found["prefill"]) == (
        (0, 400),
        (400, 500),
        (500, 600),
    )
    attempt = next(s for s in spans_of(watched.record) if s.name == "attempt")
    assert (attempt.error, attempt.attributes["nearkv.engine"]) == ("status 503", "a")


def test_a_refusal_is_an_error_with_its_reason():
    watched = watch(Clock(), trace=TRACE)
    watched.refused("no_engine", 503, "nobody is known")
    watched.close()
    root, *steps = spans_of(watched.record)
    assert root.attributes["error.type"] == "no_engine"
    assert root.error == "nobody is known"
    assert [step.name for step in steps] == ["route"]


def test_a_broken_stream_is_an_error_of_its_decoding():
    record = served(trace=TRACE)
    record.outcome, record.error = "broken", "engine_died"
    spans = {span.name: span for span in spans_of(record)}
    assert spans["decode"].error == "engine_died"
    assert spans["prefill"].error == ""


def test_what_is_not_traced_has_no_spans():
    assert spans_of(served()) == []
    assert spans_of(served(trace=TraceContext(7, 11, 13, 0, sampled=False))) == []
