"""Envoy with our endpoint picker when things go wrong: a real Envoy on loopback."""

import asyncio
import io
import json

import aiohttp
import pytest

from tests.doubles.engine import EngineDouble, EngineDoubleConfig, Faults
from tests.integration.envoy_site import endpoint, example
from tests.integration.picker_site import gateway, running_picker
from tests.integration.stack import eventually, running_agent

DOCUMENT = "The ferry to the outer islands leaves when the tide allows. " * 12
JSON = {"Content-Type": "application/json"}


def small_double(**config):
    return EngineDouble(EngineDoubleConfig(num_blocks=2048, **config))


def error_of(body):
    return json.loads(body)["error"]


MALFORMED = {
    "cut": b'{"model":"tiny","prompt":"x',
    "empty": b"",
    "list": b"[1,2]",
    "deep": b'{"model":"tiny","prompt":' + b"[" * 5000,
    "not_utf8": b'{"model":"tiny","prompt":"\xff\xfe"}',
    "prompt_is_a_number": b'{"model":"tiny","prompt":7}',
    "nul": b"\x00" * 100,
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
async def test_malformed_bodies_are_the_clients_fault_and_reach_no_engine(tmp_path, body):
    async with (
        small_double() as a,
        running_agent(a) as agent,
        running_picker(agent.url) as picker,
        gateway(picker, tmp_path) as entry,
    ):
        response, answer = await entry.post("/v1/completions", data=body, headers=JSON)
        assert response.status == 400
        assert response.headers["x-nearkv-reason"] == "bad_request"
        assert error_of(answer)["code"] == 400
        assert a.record.counts["/v1/completions"] == 0
        await picker.is_idle()


async def test_each_refusal_has_its_status_reason_and_envelope(tmp_path):
    async with (
        small_double() as a,
        running_agent(a) as agent,
        running_picker(agent.url) as picker,
        gateway(picker, tmp_path) as entry,
    ):
        unknown, body = await entry.complete(DOCUMENT, model="nope")
        assert (unknown.status, error_of(body)["param"]) == (404, "model")
        up, body = await entry.post("/v1/../metrics", data=b"")
        # aiohttp resolves dots itself, so this is a path of its own
        assert up.status in (400, 404, 405)
        await picker.is_idle()
        assert await picker.counts("ext_proc_refusals") == {("unknown_model",): 1}
        assert (await picker.counts("requests"))[("unknown_model", "404")] == 1


@pytest.mark.parametrize("chunked", [False, True], ids=["declared", "chunked"])
async def test_a_body_over_the_limit_is_refused_whether_its_size_is_declared_or_not(
    tmp_path, chunked
):
    limits = {"max_body_bytes": 1 << 20}

    async def pieces():
        for _ in range(40):
            yield b"x" * (64 << 10)

    async with (
        small_double() as a,
        running_agent(a) as agent,
        running_picker(agent.url, limits=limits) as picker,
        gateway(picker, tmp_path) as entry,
    ):
        data = pieces() if chunked else io.BytesIO(b"x" * (40 * 64 << 10))
        response, answer = await entry.post("/v1/completions", data=data, headers=JSON)
        assert response.status == 413
        assert "limit" in error_of(answer)["message"]
        assert a.record.counts["/v1/completions"] == 0
        await picker.is_idle()


async def test_no_engine_is_a_503_and_no_room_a_429_with_retry_after(tmp_path):
    async with running_picker() as picker, gateway(picker, tmp_path) as entry:
        response, body = await entry.complete(DOCUMENT)
        assert response.status == 503
        assert response.headers["x-nearkv-reason"] == "no_engine"
        assert response.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
        assert error_of(body)["type"] == "ServiceUnavailableError"
    gate = {"min_free_bytes": 1 << 60, "min_free_ratio": 1.0, "retry_after_seconds": 7}
    busy = EngineDoubleConfig(num_blocks=400, decode_seconds_per_token=0.5)
    async with (
        EngineDouble(busy) as a,
        running_agent(a) as agent,
        running_picker(agent.url, gate=gate, admission={"wait_seconds": 0}) as picker,
        gateway(picker, tmp_path) as entry,
    ):
        body = {"model": "tiny", "prompt": DOCUMENT, "max_tokens": 50}
        running = asyncio.create_task(entry.post("/v1/completions", body))
        await eventually(
            lambda: any(
                view.gauges is not None and view.gauges.kv_used_ratio
                for view in picker.knowledge.fleet.engines.values()
            ),
            what="the engine tells that it is in use",
        )
        # Of another beginning: what the engine has it may take, however full.
        response, body = await entry.complete("Another text. " + DOCUMENT)
        assert response.status == 429
        assert response.headers["Retry-After"] == "7"
        assert response.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
        assert error_of(body)["code"] == 429
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await picker.is_idle()


async def test_clients_that_go_away_leave_nothing_behind(tmp_path):
    async with (
        small_double(decode_seconds_per_token=0.05) as a,
        running_agent(a) as agent,
        running_picker(agent.url) as picker,
        gateway(picker, tmp_path) as entry,
    ):
        host, _, port = endpoint(entry.envoy.url).partition(":")
        for sent in (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n{",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{",
        ):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            await writer.drain()
            await eventually(lambda: picker.knowledge.in_flight.count == 1, what="a stream is open")
            writer.transport.abort()
            await eventually(lambda: picker.knowledge.in_flight.count == 0, what="it is closed")
        body = {"model": "tiny", "prompt": DOCUMENT, "max_tokens": 100, "stream": True}
        async with picker.session.post(entry.envoy.url + "/v1/completions", json=body) as response:
            await response.content.readline()
            assert picker.knowledge.ledger.total_requests == 1
            response.close()
        await picker.is_idle()
        await eventually(lambda: a.record.aborted == 1, what="the engine's work ended, too")
        assert (await picker.counts("ext_proc_streams"))[("broken_off",)] == 1


async def test_a_body_that_does_not_come_is_not_waited_for_for_ever(tmp_path):
    async with (
        small_double() as a,
        running_agent(a) as agent,
        running_picker(agent.url, deadlines={"body_seconds": 0.2}) as picker,
        gateway(picker, tmp_path) as entry,
    ):
        host, _, port = endpoint(entry.envoy.url).partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), 30)
        assert answer.startswith(b"HTTP/1.1 408 ")
        writer.close()
        await writer.wait_closed()
        await picker.is_idle()


async def test_an_engine_that_dies_within_an_answer_ends_the_stream_and_the_books(tmp_path):
    async with (
        small_double(decode_seconds_per_token=0.01) as a,
        running_agent(a) as agent,
        running_picker(agent.url) as picker,
        gateway(picker, tmp_path) as entry,
    ):
        await a.inject(Faults(die_after_chunks=3))
        body = {"model": "tiny", "prompt": DOCUMENT, "max_tokens": 20, "stream": True}
        async with picker.session.post(entry.envoy.url + "/v1/completions", json=body) as response:
            assert response.status == 200
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        await picker.is_idle()


async def test_an_engine_that_refuses_connections_is_replaced_by_the_next_one_named(tmp_path):
    async with (
        small_double() as a,
        small_double() as b,
        running_agent(a, b) as agent,
        running_picker(agent.url, ext_proc={"fallback_endpoints": 1}) as picker,
    ):
        config = example(
            "envoy-override-host.yaml",
            picker=picker.address,
            engines=[endpoint(a.url), endpoint(b.url)],
        )
        async with gateway(picker, tmp_path, config) as entry:
            first, _ = await entry.complete(DOCUMENT)
            names = {"a": a, "b": b}
            home = first.headers["x-nearkv-engine"]
            assert first.headers["x-nearkv-reason"] != "served_elsewhere"
            names[home].kill()
            again, _ = await entry.complete(DOCUMENT)
            assert again.status == 200
            assert again.headers["x-nearkv-engine"] != home
            await picker.is_idle()


async def test_the_books_follow_the_endpoint_that_served(tmp_path):
    """The engine picked is gone before its agent says so, and Envoy takes the second one."""
    async with (
        small_double() as a,
        small_double() as b,
        running_picker(
            engines=[{"id": "a", "url": a.url}, {"id": "b", "url": b.url}],
            ext_proc={"fallback_endpoints": 1},
        ) as picker,
    ):
        config = example(
            "envoy-override-host.yaml",
            picker=picker.address,
            engines=[endpoint(a.url), endpoint(b.url)],
        )
        a.kill()
        async with gateway(picker, tmp_path, config) as entry:
            answers = [await entry.complete(DOCUMENT) for _ in range(4)]
            assert {r.headers["x-nearkv-engine"] for r, _ in answers} == {"b"}
            assert {r.status for r, _ in answers} == {200}
            await picker.is_idle()
            served = await picker.counts("ext_proc_served")
            assert served[("fallback",)] >= 1
            assert (await picker.counts("requests"))[("served_elsewhere", "200")] >= 1
