"""The decode-side sidecar between engine doubles: prefill there, decode here, or all here."""

import asyncio
import io
import json

import aiohttp
import pytest

from tests.doubles.engine import Faults
from tests.integration.envoy_site import endpoint
from tests.integration.pd_stack import LEASE_KEYS, pd_double
from tests.integration.sidecar_site import running_sidecar
from tests.integration.stack import eventually

DOCUMENT = "The ferry to the outer islands leaves when the tide allows. " * 30
COMPLETION = {"model": "tiny", "prompt": DOCUMENT, "max_tokens": 4, "temperature": 0}
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": DOCUMENT}],
    "max_completion_tokens": 4,
}
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
ENDPOINTS = pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)],
    ids=["completion", "chat"],
)


def legs(engine):
    return [r.as_json() for r in engine.record if r.path.endswith("completions")]


def named(*engines):
    return {"x-prefiller-host-port": ",".join(endpoint(e.url) for e in engines)}


def pair(p, d, **options):
    return running_sidecar(d.url, prefillers=[endpoint(p.url)], **options)


@ENDPOINTS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_the_prefiller_named_prefills_and_the_engine_beside_answers(path, body, stream):
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    sent = body | (usage if stream else {})
    async with pd_double() as p, pd_double() as d, pair(p, d) as sidecar:
        headers = named(p) | {"X-Request-Id": "one-id", "traceparent": TRACEPARENT}
        response, answer = await sidecar.post(path, sent, headers=headers)
        assert (response.status, response.headers["x-nearkv-prefill"]) == (200, "ok")
        (prefill,), (decode,) = legs(p), legs(d)
        assert prefill["body"]["max_tokens"] == 1
        assert prefill["body"]["stream"] is False
        assert prefill["body"]["kv_transfer_params"]["do_remote_decode"] is True
        params = decode["body"].pop("kv_transfer_params")
        assert decode["body"] == sent
        assert params["do_remote_prefill"] is True
        assert params.items() >= LEASE_KEYS.items()
        for leg in (prefill, decode):
            assert leg["headers"]["x-request-id"] == "one-id"
            assert leg["headers"]["traceparent"] == TRACEPARENT
            assert "x-prefiller-host-port" not in leg["headers"]
        assert b'"cached_tokens":0' not in answer
        assert answer.rstrip().endswith(b"data: [DONE]") is stream
        assert await sidecar.count("prefills", "ok") == 1


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        (Faults(answer_status=500), "failed"),
        (Faults(answer_status=429), "refused"),
        (Faults(close_before_first_byte=True), "failed"),
        (Faults(hang_seconds=30.0), "timeout"),
        (Faults(withhold_transfer_params=True), "no_kv"),
        (Faults(refuse_connections_seconds=30.0), "failed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_whatever_the_prefiller_does_the_client_gets_its_answer(fault, outcome):
    async with pd_double() as p, pd_double() as d:
        options = {"sidecar": {"prefill_seconds": 0.2 if outcome == "timeout" else 10.0}}
        async with pair(p, d, **options) as sidecar:
            await p.inject(fault)
            response, answer = await sidecar.post("/v1/completions", COMPLETION, headers=named(p))
            assert (response.status, response.headers["x-nearkv-prefill"]) == (200, outcome)
            assert json.loads(answer)["choices"][0]["text"]
            (decode,) = legs(d)
            assert decode["body"] == COMPLETION
            assert await sidecar.count("prefills", outcome) == 1


async def test_the_next_prefiller_named_is_tried_when_the_first_one_fails():
    async with pd_double() as p, pd_double() as q, pd_double() as d:
        allowed = [endpoint(p.url), endpoint(q.url)]
        async with running_sidecar(d.url, prefillers=allowed) as sidecar:
            p.kill()
            response, _ = await sidecar.post("/v1/completions", COMPLETION, headers=named(p, q))
            assert response.headers["x-nearkv-prefill"] == "ok"
            assert len(legs(q)) == len(legs(d)) == 1


async def test_an_engine_that_refuses_the_parameters_gets_the_request_as_it_was():
    async with pd_double() as p, pd_double() as d, pair(p, d) as sidecar:
        await d.inject(Faults(reject_transfer_params=True))
        response, _ = await sidecar.post("/v1/completions", COMPLETION, headers=named(p))
        assert (response.status, response.headers["x-nearkv-prefill"]) == (200, "params_refused")
        first, second = legs(d)
        assert "kv_transfer_params" in first["body"]
        assert second["body"] == COMPLETION


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        ("169.254.169.254:80", "not_allowed"),
        ("127.0.0.1:1", "not_allowed"),
        ("localhost:8000", "not_allowed"),
        ("http://127.0.0.1:80/x", "malformed"),
        ("127.0.0.1", "malformed"),
        ("user@127.0.0.1:80", "malformed"),
        ("127.0.0.1:0", "malformed"),
        ("[::1", "malformed"),
        (" , ", "not_named"),
    ],
)
async def test_nobody_is_asked_who_was_not_allowed(value, outcome):
    async with pd_double() as p, pd_double() as d, pair(p, d) as sidecar:
        headers = {"x-prefiller-host-port": value}
        response, _ = await sidecar.post("/v1/completions", COMPLETION, headers=headers)
        assert (response.status, response.headers["x-nearkv-prefill"]) == (200, outcome)
        assert legs(p) == []
        assert legs(d)[0]["body"] == COMPLETION


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"n": 2}, "several_answers"),
        ({"kv_transfer_params": {"mine": 1}}, "own_params"),
        ({"prompt": [DOCUMENT, DOCUMENT]}, "several_prompts"),
    ],
    ids=["n", "params", "prompts"],
)
async def test_a_request_that_cannot_be_split_goes_to_the_engine_whole(change, outcome):
    async with pd_double() as p, pd_double() as d, pair(p, d) as sidecar:
        body = COMPLETION | change
        response, _ = await sidecar.post("/v1/completions", body, headers=named(p))
        assert response.headers["x-nearkv-prefill"] == outcome
        assert legs(p) == []
        assert legs(d)[0]["body"] == body


async def test_everything_else_is_the_engines():
    async with pd_double(dp_size=2) as d, running_sidecar(d.url) as sidecar:
        for path in ("/health", "/metrics", "/v1/models", "/version"):
            async with sidecar.session.get(sidecar.url + path) as response:
                assert response.status == 200
                assert "x-nearkv-prefill" not in response.headers
        async with sidecar.session.head(sidecar.url + "/v1/models") as response:
            assert response.status in (200, 405)
        response, body = await sidecar.post("/tokenize", {"model": "tiny", "prompt": "one two"})
        assert (response.status, json.loads(body)["count"] > 0) == (200, True)
        response, _ = await sidecar.post("/v1/nothing", {})
        assert response.status == 404
        headers = {"X-data-parallel-rank": "1"}
        await sidecar.post("/v1/completions", COMPLETION, headers=headers)
        assert legs(d)[0]["headers"]["x-data-parallel-rank"] == "1"


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (b"", "unreadable_body"),
        (b"{", "unreadable_body"),
        (b"[1]", "unreadable_body"),
        (b'{"prompt":"\xff"}', "refused"),
    ],
)
async def test_malformed_bodies_get_the_engines_own_words(body, outcome):
    async with pd_double() as p, pd_double() as d, pair(p, d) as sidecar:
        headers = named(p) | {"Content-Type": "application/json"}
        response, answer = await sidecar.post("/v1/completions", data=body, headers=headers)
        assert response.status == 400
        assert "error" in json.loads(answer)
        assert response.headers["x-nearkv-prefill"] == outcome


async def test_a_body_over_the_limit_is_refused():
    limits = {"max_body_bytes": 1000}
    async with pd_double() as d, running_sidecar(d.url, limits=limits) as sidecar:
        response, answer = await sidecar.post("/v1/completions", data=io.BytesIO(b"x" * 2000))
        assert response.status == 413
        assert json.loads(answer)["error"]["code"] == 413


async def test_an_engine_that_is_away_is_a_502_and_an_error_of_its_own_is_passed_on():
    async with pd_double() as d, running_sidecar(d.url) as sidecar:
        await d.inject(Faults(answer_status=503))
        response, _ = await sidecar.post("/v1/completions", COMPLETION)
        assert response.status == 503
        d.kill()
        response, answer = await sidecar.post("/v1/completions", COMPLETION)
        assert response.status == 502
        assert "sidecar" in json.loads(answer)["error"]["message"]


async def test_a_client_that_goes_away_ends_the_work_of_both_engines():
    async with (
        pd_double(decode_seconds_per_token=0.05) as d,
        pd_double() as p,
        pair(p, d) as sidecar,
    ):
        body = COMPLETION | {"max_tokens": 100, "stream": True}
        url = sidecar.url + "/v1/completions"
        async with sidecar.session.post(url, json=body, headers=named(p)) as response:
            await response.content.readline()
            response.close()
        await eventually(lambda: d.record.aborted == 1, what="the engine's work ended")
        await p.inject(Faults(hang_seconds=30.0))
        asking = asyncio.create_task(sidecar.post("/v1/completions", COMPLETION, headers=named(p)))
        await eventually(lambda: len(legs(p)) == 2, what="the prefiller is asked")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: sidecar.in_flight.count == 0, what="nothing in flight")
        assert len(legs(d)) == 1


async def test_an_engine_that_dies_within_an_answer_ends_the_stream_with_an_error_event():
    async with pd_double() as d, running_sidecar(d.url) as sidecar:
        await d.inject(Faults(die_after_chunks=2))
        body = COMPLETION | {"stream": True}
        try:
            _, answer = await sidecar.post("/v1/completions", body)
        except aiohttp.ClientError:
            pytest.fail("the stream was cut without a word")
        assert b'"error"' in answer
        assert await sidecar.count("broken_streams", "engine_died") == 1


async def test_probes_have_an_address_of_their_own():
    async with pd_double() as d, running_sidecar(d.url) as sidecar:
        for path in ("/livez", "/readyz", "/metrics"):
            async with sidecar.session.get(sidecar.probes_url + path) as response:
                assert response.status == 200
        assert d.record.counts["/livez"] == 0
