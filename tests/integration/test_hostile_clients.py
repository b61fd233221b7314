"""The ingress in front of clients who mean harm, and of a fleet that changes while they wait."""

import asyncio

import pytest

from tests.integration.raw_http import deaf_client, exchange, raw_engine, request
from tests.integration.stack import eventually, running_agent, running_ingress, small_fleet
from tests.integration.test_admission import GATE, double, occupy, series

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
STEERING = {"do_remote_prefill": True, "remote_host": "evil", "remote_block_ids": [1]}
BODIES = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": []},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": []},
    "/v1/anything": {},
}


def in_front_of(engine, **settings):
    return running_ingress(engines=[{"id": "s", "url": engine.url}], **settings)


@pytest.mark.parametrize("path", BODIES)
async def test_clients_cannot_say_where_kv_lies(path):
    body = BODIES[path] | {"kv_transfer_params": STEERING}
    async with raw_engine(OK) as engine:
        async with in_front_of(engine) as ingress:
            response, answer = await ingress.post(path, body)
            assert response.status == 400
            assert "kv_transfer_params" in str(answer)
        assert engine.requests == []
        async with (
            in_front_of(engine, models={"client_transfer_params": True}) as ingress,
            ingress.session.post(ingress.url + path, json=body) as response,
        ):
            assert response.status == 200
        assert b"evil" in engine.requests[-1][1]


async def test_a_prefix_id_that_is_no_text_can_be_listed():
    named = request("POST /v1/x", "X-Session-ID: caf\xe9 \xff").replace(b"\xc3", b"")
    async with raw_engine(OK) as engine, in_front_of(engine) as ingress:
        await exchange(ingress.url, named, until=b"ok")
        async with ingress.session.get(ingress.url + "/v1/prefixes") as response:
            assert response.status == 200
            (listed,) = (await response.json())["prefixes"]
            assert listed["id"].startswith("X-Session-ID:caf")
        for limit in ("9" * 5000, "0", "x"):
            asked = f"{ingress.url}/v1/prefixes?limit={limit}"
            async with ingress.session.get(asked) as response:
                assert response.status == 400


async def test_all_bodies_together_have_so_much_room():
    limits = {"max_bodies_bytes": 1 << 20, "max_body_bytes": 1 << 20}
    most = b'{"prompt":"' + b"x" * (900 << 10)
    unfinished = request("POST /v1/completions", body=most + b'"}')[:-2]
    async with raw_engine(OK) as engine, in_front_of(engine, limits=limits) as ingress:

        async def ask(size_bytes):
            body = {"prompt": "y" * size_bytes}
            async with ingress.session.post(ingress.url + "/v1/completions", json=body) as answer:
                await answer.read()
                return answer.status, answer.headers["x-nearkv-reason"]

        async def is_full():
            while await ask(200 << 10) != (429, "too_many_requests"):
                pass

        async with deaf_client(ingress.url, unfinished):
            await asyncio.wait_for(is_full(), 30)
            assert (await ask(10))[0] == 200
        await eventually(lambda: ingress.knowledge.in_flight.count == 0, what="it left")
        for _ in range(3):
            assert (await ask(900 << 10))[0] == 200


async def test_a_chunked_body_is_counted_as_it_comes():
    limits = {"max_body_bytes": 1 << 16}

    async def pieces():
        for _ in range(9):
            yield b"x" * (1 << 13)

    async with raw_engine(OK) as engine, in_front_of(engine, limits=limits) as ingress:
        for _ in range(2):
            asked = ingress.session.post(ingress.url + "/v1/completions", data=pieces())
            async with asked as answer:
                assert answer.status == 413
        assert engine.requests == []


LONG = "word " * 400
COMPLETION = {"model": "tiny", "max_tokens": 1}


@pytest.mark.parametrize(
    ("policy", "path", "body"),
    [
        ("cost", "/v1/completions", COMPLETION | {"prompt": LONG}),
        ("cost", "/v1/completions", COMPLETION | {"prompt": ["hi", LONG]}),
        ("cost", "/v1/embeddings", {"model": "tiny", "input": LONG}),
        ("round-robin", "/v1/completions", COMPLETION | {"prompt": LONG}),
    ],
    ids=["usual", "several", "embeddings", "policy without tokens"],
)
async def test_there_is_no_way_around_a_tenant_s_tokens(tmp_path, policy, path, body):
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: [{name: a, keys: [k], tokens_per_second: 1, burst_tokens: 200}]")
    key = {"Authorization": "Bearer k"}
    async with (
        double() as engine,
        small_fleet(engine, policy=policy, tenants={"file": str(file)}) as (ingress, _),
    ):
        first, _ = await ingress.post(path, body, headers=key)
        second, _ = await ingress.post(path, body, headers=key)
        assert (first.status, second.status) == (200, 429)
        assert second.headers["x-nearkv-reason"] == "tenant_tokens"
        async with ingress.session.get(ingress.url + "/v1/x", headers=key) as asked:
            assert asked.status == 404, "the engine's own answer: without a body, no tokens"


POLICIES = pytest.mark.parametrize("policy", ["cost", "prefix-first"])


async def waits(ingress):
    """Send a request that has to wait; return once it does."""
    waiting = asyncio.create_task(ingress.complete("hello"))

    async def see_it():
        while (await series(ingress)).get('nearkv_ingress_waiting_requests{model="tiny"}') != 1:
            assert not waiting.done()

    await asyncio.wait_for(see_it(), 30)
    return waiting


@POLICIES
async def test_a_request_that_waits_sees_room_though_the_agent_said_everything_anew(policy):
    async with (
        double() as engine,
        running_agent(engine) as agent,
        running_ingress(
            agent.url, policy=policy, gate=GATE, admission={"wait_seconds": 30}
        ) as ingress,
    ):
        busy = await occupy(ingress)
        waiting = await waits(ingress)
        fleet = ingress.knowledge.fleet
        before = fleet.engines["a"]
        fleet.agents[agent.url].cursor = None  # the next frame is a gap, so a snapshot follows
        await eventually(lambda: fleet.engines["a"] is not before, what="a new snapshot")
        busy.close()
        response, _ = await waiting
        assert (response.status, response.headers["x-nearkv-engine"]) == (200, "a")


@POLICIES
async def test_a_request_that_waits_goes_to_an_engine_that_was_added(policy):
    async with (
        double() as engine,
        double() as added,
        running_agent(engine) as agent,
        running_ingress(
            agent.url, policy=policy, gate=GATE, admission={"wait_seconds": 30}
        ) as ingress,
    ):
        busy = await occupy(ingress)
        waiting = await waits(ingress)
        ingress.knowledge.fleet.add_static_engine("z", added.url)
        response, _ = await waiting
        assert (response.status, response.headers["x-nearkv-engine"]) == (200, "z")
        busy.close()
