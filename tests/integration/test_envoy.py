"""Envoy with our endpoint picker and ORIGINAL_DST routing: a real Envoy on loopback."""

import asyncio
import io
import json
import random
from collections import Counter

import pytest

from tests.doubles.engine import EngineDouble, EngineDoubleConfig, Faults
from tests.integration.envoy_site import endpoint, example, ext_proc_of
from tests.integration.picker_site import gateway, running_picker
from tests.integration.stack import eventually, running_agent, running_ingress

DOCUMENT = "The ferry to the outer islands leaves when the tide allows. " * 12


def small_double(**config):
    return EngineDouble(EngineDoubleConfig(num_blocks=2048, **config))


def generations(engine):
    return [request for request in engine.record if request.path == "/v1/completions"]


async def test_a_request_goes_where_the_picker_says_and_its_prefix_is_found_again(tmp_path):
    async with (
        small_double() as a,
        small_double() as b,
        running_agent(a, b) as agent,
        running_picker(agent.url) as picker,
        gateway(picker, tmp_path) as entry,
    ):
        first, _ = await entry.complete(DOCUMENT)
        assert first.status == 200
        assert first.headers["x-nearkv-reason"] == "prefix_miss"
        home = first.headers["x-nearkv-engine"]
        await picker.synced(agent)
        for _ in range(3):
            again, body = await entry.complete(DOCUMENT)
            assert again.headers["x-nearkv-engine"] == home
            cached = json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert int(again.headers["x-nearkv-predicted-cached-tokens"]) == cached > 0
        served = {"a": a, "b": b}[home]
        assert len(generations(served)) == 4
        await picker.is_idle()
        assert (await picker.counts("parity_checks"))[("equal",)] == 4
        assert (await picker.counts("ext_proc_served")) == {("picked",): 4}
        assert (await picker.counts("ext_proc_streams")) == {("complete",): 4}


async def test_what_names_hosts_is_taken_from_clients_and_only_the_picker_sets_it(tmp_path):
    forged = {
        "x-gateway-destination-endpoint": "127.0.0.1:1",
        "x-gateway-destination-endpoint-subset": "127.0.0.1:1",
        "x-prefiller-host-port": "127.0.0.1:1",
        "x-data-parallel-rank": "7",
        "x-data-parallel-host-port": "127.0.0.1:1",
    }
    async with (
        small_double() as a,
        running_agent(a) as agent,
        running_picker(agent.url) as picker,
        gateway(picker, tmp_path) as entry,
    ):
        response, _ = await entry.complete(DOCUMENT, headers=forged)
        assert response.status == 200
        (received,) = generations(a)
        headers = {name.lower(): value for name, value in received.headers.items()}
        assert headers["x-gateway-destination-endpoint"] == endpoint(a.url)
        assert not headers.keys() & (forged.keys() - {"x-gateway-destination-endpoint"})


async def test_ranks_are_told_apart_by_a_header(tmp_path):
    async with (
        small_double(dp_size=2) as a,
        running_agent(a) as agent,
        running_picker(agent.url) as picker,
        gateway(picker, tmp_path) as entry,
    ):
        first, _ = await entry.complete(DOCUMENT)
        await picker.synced(agent)
        again, _ = await entry.complete(DOCUMENT)
        rank = first.headers["x-nearkv-engine"].partition("/dp")[2]
        assert again.headers["x-nearkv-engine"] == first.headers["x-nearkv-engine"]
        for received in generations(a):
            assert received.headers["x-data-parallel-rank"] == rank


async def test_other_paths_and_methods_pass(tmp_path):
    async with (
        small_double() as a,
        running_agent(a) as agent,
        running_picker(agent.url) as picker,
        gateway(picker, tmp_path) as entry,
        picker.session.get(entry.envoy.url + "/v1/models?x=1") as response,
    ):
        assert response.status == 200
        assert (await response.json())["data"][0]["id"] == "tiny"
        assert response.headers["x-nearkv-engine"] == "a"


@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "STREAMED", "NONE"])
async def test_an_answer_is_counted_until_its_end_however_envoy_shows_it(tmp_path, mode):
    async with (
        small_double(decode_seconds_per_token=0.02) as a,
        running_agent(a) as agent,
        running_picker(agent.url) as picker,
    ):
        config = example("envoy-original-dst.yaml", picker=picker.address)
        ext_proc_of(config)["processing_mode"]["response_body_mode"] = mode
        async with gateway(picker, tmp_path, config) as entry:
            body = {"model": "tiny", "prompt": DOCUMENT, "max_tokens": 16, "stream": True}
            url = entry.envoy.url + "/v1/completions"
            async with picker.session.post(url, json=body) as response:
                assert response.headers["x-nearkv-engine"] == "a"
                assert await response.content.readline()
                assert picker.knowledge.ledger.total_requests == 1
                rest = await response.read()
            assert rest.endswith(b"data: [DONE]\n\n")
            await picker.is_idle()
            outcome = "not_shown" if mode == "NONE" else "complete"
            assert await picker.counts("ext_proc_streams") == {(outcome,): 1}


async def test_a_prompt_counts_as_being_computed_until_the_first_byte_of_the_answer(tmp_path):
    async with (
        small_double(decode_seconds_per_token=1.0) as a,
        running_agent(a) as agent,
        running_picker(agent.url, policy="cost") as picker,
        gateway(picker, tmp_path) as entry,
    ):
        know = picker.knowledge
        incarnation = know.fleet.engines["a"].info.incarnation
        await a.inject(Faults(hang_seconds=0.5))
        body = {"model": "tiny", "prompt": DOCUMENT, "max_tokens": 30, "stream": True}
        url = entry.envoy.url + "/v1/completions"
        asking = asyncio.create_task(picker.session.post(url, json=body))
        await eventually(lambda: know.computing.at("a", incarnation) > 0, what="it is counted")
        async with await asking as response:
            await response.content.readline()
            await eventually(lambda: know.computing.at("a", incarnation) == 0, what="it is not")
            assert know.ledger.total_requests == 1
            response.close()
        await picker.is_idle()
        assert know.fits.points("a") == 1


async def test_a_buffered_request_is_picked_for_as_well(tmp_path):
    async with (
        small_double() as a,
        running_agent(a) as agent,
        running_picker(agent.url) as picker,
    ):
        config = example("envoy-original-dst.yaml", picker=picker.address)
        mode = ext_proc_of(config)["processing_mode"]
        mode |= {"request_body_mode": "BUFFERED", "request_trailer_mode": "SKIP"}
        mode |= {"response_body_mode": "BUFFERED", "response_trailer_mode": "SKIP"}
        async with gateway(picker, tmp_path, config) as entry:
            for reason in ("prefix_miss", "prefix_hit"):
                response, _ = await entry.complete(DOCUMENT)
                assert (response.status, response.headers["x-nearkv-reason"]) == (200, reason)
                await picker.synced(agent)


async def test_a_body_mode_that_shows_no_body_is_refused_with_a_reason(tmp_path):
    async with (
        small_double() as a,
        running_agent(a) as agent,
        running_picker(agent.url) as picker,
    ):
        config = example("envoy-original-dst.yaml", picker=picker.address)
        mode = ext_proc_of(config)["processing_mode"]
        mode |= {"request_body_mode": "STREAMED", "request_trailer_mode": "SKIP"}
        mode |= {"response_body_mode": "NONE"}
        async with gateway(picker, tmp_path, config) as entry:
            response, body = await entry.complete(DOCUMENT)
            assert response.status == 500
            assert "FULL_DUPLEX_STREAMED" in json.loads(body)["error"]["message"]
            assert generations(a) == []


async def test_a_prompt_of_8_mb_arrives_byte_for_byte(tmp_path):
    limits = {"max_body_bytes": 9 << 20}
    async with (
        small_double() as a,
        running_agent(a) as agent,
        running_picker(agent.url, limits=limits) as picker,
        gateway(picker, tmp_path) as entry,
    ):
        data = random.Random(7).randbytes(8 << 20)
        sent = b'{"model":"tiny","input":"' + data.hex()[: 8 << 20].encode() + b'"}'
        headers = {"Content-Type": "application/json"}
        response, _ = await entry.post("/v1/embeddings", data=io.BytesIO(sent), headers=headers)
        assert response.headers["x-nearkv-engine"] == "a"
        (received,) = [r for r in a.record if r.path == "/v1/embeddings"]
        assert received.body == sent
        await picker.is_idle()


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_an_8_mb_prompt_is_found_again_by_its_tokens(tmp_path):
    words = random.Random(7).choices(["winter", "pass", "village", "bridge", "lamp"], k=1_400_000)
    prompt = " ".join(words)[:8_000_000]
    sent = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json"}
    room = {"num_blocks": 130_000, "max_model_len": 4_000_000, "requests_kept": 2}
    async with (
        EngineDouble(EngineDoubleConfig(**room)) as a,
        EngineDouble(EngineDoubleConfig(**room)) as b,
        running_agent(a, b) as agent,
        running_picker(agent.url, deadlines={"tokenize_seconds": 100.0}) as picker,
        gateway(picker, tmp_path) as entry,
    ):
        homes = set()
        for reason in ("prefix_miss", "prefix_hit"):
            response, body = await entry.post(
                "/v1/completions", data=io.BytesIO(sent), headers=headers
            )
            assert (response.status, response.headers["x-nearkv-reason"]) == (200, reason)
            homes.add(response.headers["x-nearkv-engine"])
            await picker.synced(agent)
        cached = json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert int(response.headers["x-nearkv-predicted-cached-tokens"]) == cached > 1_000_000
        assert len(homes) == 1


async def test_a_thousand_requests_at_once_spread_and_are_all_answered(tmp_path):
    async with (
        small_double(requests_kept=10) as a,
        small_double(requests_kept=10) as b,
        small_double(requests_kept=10) as c,
        running_agent(a, b, c) as agent,
        running_picker(agent.url) as picker,
        gateway(picker, tmp_path) as entry,
    ):
        prompts = [f"Question {number % 20}: {DOCUMENT}" for number in range(1000)]
        answers = await asyncio.gather(*(entry.complete(prompt) for prompt in prompts))
        assert {response.status for response, _ in answers} == {200}
        engines = [response.headers["x-nearkv-engine"] for response, _ in answers]
        assert set(engines) == {"a", "b", "c"}
        await picker.is_idle()
        assert (await picker.counts("ext_proc_streams")) == {("complete",): 1000}


STILL = {"freshness": {"fresh_seconds": 3600.0, "aged_seconds": 7200.0}}
"""For replicas of an agent that reads its engines once: what differs is how requests come."""


async def ask_engine(picker, engine, prompt):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    async with picker.session.post(engine.url + "/v1/completions", json=body) as response:
        assert response.status == 200


def mixed_requests(draw, prompts, count):
    """Yield prompts that are held by one or more, held but for their end, and held by nobody."""
    for number in range(count):
        kind = draw.choice(["held", "held", "longer", "new"])
        prompt = f"New {number}." if kind == "new" else draw.choice(prompts)
        yield f"r{number}", prompt + (f" And {number}?" if kind == "longer" else "")


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
async def test_the_pick_is_that_of_an_own_proxy_for_every_request(tmp_path, count):
    """Envoy's picker, and an ingress of its own; requests with one id come to both."""
    async with (
        small_double() as a,
        small_double() as b,
        small_double() as c,
        running_agent(a, b, c, scrape={"interval_seconds": 3600.0}) as agent,
        running_picker(agent.url, **STILL) as picker,
        running_ingress(agent.url, **STILL) as proxy,
        gateway(picker, tmp_path) as entry,
    ):
        prompts = [f"Question {number}: {DOCUMENT}" for number in range(24)]
        for number, prompt in enumerate(prompts):
            for engine in ((a, b), (c,), (a, b, c))[number % 3]:
                await ask_engine(picker, engine, prompt)
        await picker.synced(agent)
        await proxy.synced(agent)
        seen = Counter()
        for request_id, prompt in mixed_requests(random.Random(1), prompts, count):
            given = {"max_tokens": 1, "headers": {"X-Request-Id": request_id}}
            by_envoy, _ = await entry.complete(prompt, **given)
            by_proxy, _ = await proxy.complete(prompt, **given)
            for name in ("engine", "reason", "predicted-cached-tokens"):
                header = f"x-nearkv-{name}"
                assert by_envoy.headers[header] == by_proxy.headers[header], (request_id, prompt)
            seen[by_envoy.headers["x-nearkv-engine"], by_envoy.headers["x-nearkv-reason"]] += 1
        assert len(seen) == 6, "hits and misses on each engine"


async def test_an_engine_that_fails_is_left_alone_for_a_while(tmp_path):
    async with (
        small_double() as a,
        small_double() as b,
        running_agent(a, b) as agent,
        running_picker(agent.url) as picker,
        gateway(picker, tmp_path) as entry,
    ):
        first, _ = await entry.complete(DOCUMENT)
        home = {"a": a, "b": b}[first.headers["x-nearkv-engine"]]
        await picker.synced(agent)
        await home.inject(Faults(answer_status=500, times=3))
        failed = [await entry.complete(DOCUMENT) for _ in range(3)]
        assert {response.status for response, _ in failed} == {500}
        after, _ = await entry.complete(DOCUMENT)
        assert after.status == 200
        assert after.headers["x-nearkv-engine"] != first.headers["x-nearkv-engine"]
        await picker.is_idle()
