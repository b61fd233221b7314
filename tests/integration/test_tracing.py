"""Spans over real sockets: a collector that speaks OTLP, engines that see the traceparent."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from nearkv.ingress.tracing.context import parse_traceparent
from nearkv.serving import running
from tests.doubles.engine import EngineDouble, EngineDoubleConfig
from tests.integration.pd_stack import Part, pd_double, pd_stack
from tests.integration.picker_site import gateway, running_picker
from tests.integration.stack import ANY_PORT, eventually, running_agent, small_fleet

GIVEN = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
UNSAMPLED = GIVEN[:-2] + "00"
TRACE_ID = GIVEN[3:35]
DOCUMENT = "A heron stands in the shallows below the weir until the light goes. " * 40


@dataclass(slots=True)
class Collector:
    """A collector for traces, over OTLP/HTTP."""

    url: str = ""
    status: int = 200
    asked: int = 0
    spans: list = field(default_factory=list)
    services: set[str] = field(default_factory=set)

    async def take(self, request: web.Request) -> web.Response:
        """Take an export."""
        self.asked += 1
        sent = ExportTraceServiceRequest.FromString(await request.read())
        if self.status == 200:
            for resource in sent.resource_spans:
                self.services |= {
                    attribute.value.string_value
                    for attribute in resource.resource.attributes
                    if attribute.key == "service.name"
                }
                for scope in resource.scope_spans:
                    self.spans += scope.spans
        return web.Response(
            status=self.status,
            body=ExportTraceServiceResponse().SerializeToString(),
            content_type="application/x-protobuf",
        )

    async def trace(self, count: int) -> dict[str, object]:
        """Return the spans by name once there are so many."""
        await eventually(lambda: len(self.spans) >= count, what=f"{count} spans")
        return {span.name: span for span in self.spans}


@asynccontextmanager
async def running_collector(status: int = 200) -> AsyncIterator[Collector]:
    collector = Collector(status=status)
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    async with running(app, ANY_PORT) as address:
        collector.url = f"{address.url}/v1/traces"
        yield collector


def traced(collector, **settings):
    return {"enabled": True, "endpoint": collector.url, "sampling_ratio": 1.0, **settings}


def double():
    return EngineDouble(EngineDoubleConfig(num_blocks=600, max_model_len=8192))


def parents(engine):
    """Return the traceparent of each generation that an engine got."""
    return [
        {name.lower(): value for name, value in request.headers.items()}.get("traceparent")
        for request in engine.record
        if request.path == "/v1/completions"
    ]


def hexadecimal(number_bytes):
    return number_bytes.hex()


async def test_a_client_s_trace_is_continued_to_the_engine_and_the_collector():
    async with (
        running_collector() as collector,
        double() as a,
        small_fleet(a, policy="cost", tracing=traced(collector)) as (ingress, _),
    ):
        await ingress.complete(DOCUMENT, headers={"traceparent": GIVEN, "tracestate": "x=1"})
        spans = await collector.trace(4)
        assert set(spans) == {"text_completion tiny", "route", "prefill", "decode"}
        root = spans["text_completion tiny"]
        assert {hexadecimal(span.trace_id) for span in spans.values()} == {TRACE_ID}
        assert hexadecimal(root.parent_span_id) == GIVEN[36:52]
        (seen,) = parents(a)
        assert seen == f"00-{TRACE_ID}-{hexadecimal(root.span_id)}-01"
        assert collector.services == {"nearkv-ingress"}
        attributes = {a.key: a.value for a in root.attributes}
        assert attributes["gen_ai.usage.input_tokens"].int_value == 961
        assert attributes["gen_ai.request.model"].string_value == "tiny"
        assert "heron" not in str(collector.spans)
        assert root.start_time_unix_nano <= spans["route"].start_time_unix_nano
        assert spans["decode"].end_time_unix_nano <= root.end_time_unix_nano


async def test_two_engines_hang_below_their_own_spans():
    parts = {"p": Part("prefill"), "d": Part("decode")}
    doubles = {"p": pd_double(), "d": pd_double()}
    async with (
        running_collector() as collector,
        pd_stack(parts, doubles=doubles, ingress={"tracing": traced(collector)}) as stack,
    ):
        await stack.ingress.complete(DOCUMENT)
        spans = await collector.trace(5)
        assert set(spans) == {"text_completion tiny", "route", "prefill", "transfer", "decode"}
        trace_id = hexadecimal(spans["route"].trace_id)
        prefill, root = spans["prefill"], spans["text_completion tiny"]
        assert parents(doubles["p"]) == [f"00-{trace_id}-{hexadecimal(prefill.span_id)}-01"]
        assert parents(doubles["d"]) == [f"00-{trace_id}-{hexadecimal(root.span_id)}-01"]
        assert not root.parent_span_id
        order = [spans[name].start_time_unix_nano for name in ("route", "prefill", "transfer")]
        assert order == sorted(order)


async def test_what_is_not_sampled_is_passed_on_so_and_not_exported():
    async with (
        running_collector() as collector,
        double() as a,
        small_fleet(a, tracing=traced(collector)) as (ingress, _),
    ):
        await ingress.complete("Short.", headers={"traceparent": UNSAMPLED})
        await ingress.complete("Short.", headers={"traceparent": GIVEN})
        await collector.trace(4)
        first, second = map(parse_traceparent, parents(a))
        assert (first.sampled, second.sampled) == (False, True)
        assert {hexadecimal(span.trace_id) for span in collector.spans} == {TRACE_ID}
        assert len(collector.spans) == 4


@pytest.mark.parametrize("given", [GIVEN, None])
async def test_without_tracing_the_client_s_header_goes_through_as_it_is(given):
    async with double() as a, small_fleet(a) as (ingress, _):
        await ingress.complete("Short.", headers={} if given is None else {"traceparent": given})
        assert parents(a) == [given]


async def test_a_collector_that_refuses_is_counted_and_no_request_sees_it():
    async with (
        running_collector(status=400) as collector,
        double() as a,
        small_fleet(a, tracing=traced(collector)) as (ingress, _),
    ):
        response, _ = await ingress.complete("Short.")
        assert response.status == 200

        async def failures():
            async with ingress.session.get(ingress.url + "/metrics") as answer:
                return re.findall(
                    r'traced_requests_total\{outcome="failed"\} (\S+)', await answer.text()
                )

        await eventually(lambda: collector.asked, what="an export")
        found: list[str] = []
        while not found:
            found = await failures()
        assert float(found[0]) == 1


async def test_a_collector_that_is_away_holds_up_neither_requests_nor_the_end():
    nobody = {"enabled": True, "endpoint": "http://127.0.0.1:9/v1/traces", "sampling_ratio": 1.0}
    async with double() as a, small_fleet(a, tracing=nobody) as (ingress, _):
        response, _ = await ingress.complete("Short.")
        assert response.status == 200


async def test_the_picker_names_its_span_to_the_engine(tmp_path):
    async with (
        running_collector() as collector,
        double() as a,
        running_agent(a) as agent,
        running_picker(agent.url, tracing=traced(collector)) as picker,
        gateway(picker, tmp_path) as entry,
    ):
        await entry.complete(DOCUMENT, headers={"traceparent": GIVEN})
        spans = await collector.trace(4)
        (seen,) = parents(a)
        assert parse_traceparent(seen).trace_id == int(TRACE_ID, 16)
        assert seen[36:52] == hexadecimal(spans["text_completion tiny"].span_id)
