"""Admission over real sockets: waiting for room, refusals, keys, and the gauges."""

import asyncio

import pytest

from tests.doubles.engine import EngineDouble, EngineDoubleConfig
from tests.integration.stack import eventually, small_fleet

LONG = {"model": "tiny", "prompt": "word " * 1500, "max_tokens": 400, "stream": True}
GATE = {"min_free_ratio": 0.99}
TENANTS = """
tenants:
  - {name: search, keys: [sk-search], requests_per_second: 0.01, burst_requests: 2}
  - {name: reader, keys: [sk-reader], tokens_per_second: 1, burst_tokens: 50}
"""
POLICIES = pytest.mark.parametrize("policy", ["cost", "prefix-first"])


def double(**config):
    usual = {"decode_seconds_per_token": 0.05, "num_blocks": 600, "max_model_len": 8192}
    return EngineDouble(EngineDoubleConfig(**(usual | config)))


async def occupy(ingress):
    busy = await ingress.session.post(ingress.url + "/v1/completions", json=LONG)
    await busy.content.readany()
    return busy


async def series(ingress):
    async with ingress.session.get(ingress.url + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    pairs = (line.rpartition(" ") for line in lines if line[0] != "#")
    return {name: float(value) for name, _, value in pairs}


@POLICIES
async def test_a_request_waits_until_there_is_room(policy):
    waits = {"wait_seconds": 30}
    async with (
        double() as engine,
        small_fleet(engine, policy=policy, gate=GATE, admission=waits) as (ingress, _),
    ):
        busy = await occupy(ingress)
        waiting = asyncio.create_task(ingress.complete("hello"))
        found = {}

        async def see_one_waiting():
            while found.get('nearkv_ingress_waiting_requests{model="tiny"}') != 1:
                found.update(await series(ingress))

        await asyncio.wait_for(see_one_waiting(), 30)
        assert found['nearkv_ingress_saturation_ratio{model="tiny"}'] > 1
        busy.close()
        response, _ = await waiting
        assert response.status == 200
        after = await series(ingress)
        assert after['nearkv_ingress_admission_waits_total{outcome="admitted"}'] == 1
        assert after['nearkv_ingress_waiting_requests{model="tiny"}'] == 0


@POLICIES
async def test_when_the_time_is_up_the_answer_is_429_with_a_reason(policy):
    waits = {"wait_seconds": 0.1}
    async with (
        double() as engine,
        small_fleet(
            engine, policy=policy, gate=GATE | {"retry_after_seconds": 3}, admission=waits
        ) as (ingress, _),
    ):
        busy = await occupy(ingress)
        response, answer = await ingress.complete("hello")
        assert (response.status, response.headers["Retry-After"]) == (429, "3")
        assert response.headers["x-nearkv-reason"] == "no_kv_room"
        assert answer["error"]["type"] == "RateLimitError"
        busy.close()
        counted = await series(ingress)
        assert counted['nearkv_ingress_admission_waits_total{outcome="timeout"}'] == 1


async def test_a_full_room_turns_away_at_once():
    waits = {"wait_seconds": 30, "max_waiting": 1}
    async with (
        double() as engine,
        small_fleet(engine, policy="cost", gate=GATE, admission=waits) as (ingress, _),
    ):
        busy = await occupy(ingress)
        waiting = asyncio.create_task(ingress.complete("hello"))
        await eventually(lambda: ingress.knowledge.in_flight.count == 2, what="one waits")
        refused, _ = await ingress.complete("hello again")
        assert (refused.status, refused.headers["x-nearkv-reason"]) == (429, "queue_full")
        busy.close()
        assert (await waiting)[0].status == 200


async def test_the_two_alarm_levels_count_engines():
    async with (
        double(num_blocks=64, max_model_len=2016) as engine,
        small_fleet(engine, policy="cost", gate={"min_free_ratio": 0.0}) as (ingress, _),
    ):
        assert (await series(ingress))['nearkv_ingress_kv_alarm_engines{level="warning"}'] == 0
        body = LONG | {"prompt": "word " * 1850, "max_tokens": 100}
        busy = await ingress.session.post(ingress.url + "/v1/completions", json=body)
        await busy.content.readany()
        found = {}

        async def see_both():
            while not all(
                found.get(f'nearkv_ingress_kv_alarm_engines{{level="{level}"}}')
                for level in ("warning", "critical")
            ):
                found.update(await series(ingress))

        await asyncio.wait_for(see_both(), 30)
        busy.close()


async def test_keys_are_checked_limits_kept_and_engines_see_none_of_it(tmp_path):
    path = tmp_path / "tenants.yaml"
    path.write_text(TENANTS)
    settings = {"tenants": {"file": str(path), "reload_seconds": 0.02}, "engine_api_key": "sk-own"}
    async with double() as engine, small_fleet(engine, policy="cost", **settings) as (ingress, _):

        async def ask(key, prompt="hello", **headers):
            given = {"Authorization": f"Bearer {key}"} if key else {}
            response, body = await ingress.complete(prompt, headers=given | headers)
            return response, body

        for key in ("", "sk-nobody"):
            response, body = await ask(key)
            assert (response.status, response.headers["x-nearkv-reason"]) == (401, "bad_key")
            assert body["error"]["type"] == "AuthenticationError"
        assert [(await ask("sk-search"))[0].status for _ in range(3)] == [200, 200, 429]
        response, _ = await ask("sk-search")
        assert response.headers["x-nearkv-reason"] == "tenant_requests"
        assert int(response.headers["Retry-After"]) > 1
        assert (await ask("sk-reader", "word " * 100))[0].status == 200
        response, _ = await ask("sk-reader", "word " * 100)
        assert (response.status, response.headers["x-nearkv-reason"]) == (429, "tenant_tokens")
        seen = [r for r in engine.record if r.path == "/v1/completions"]
        assert {r.headers.get("authorization") for r in seen} == {"Bearer sk-own"}
        path.write_text("tenants: [{name: new, keys: [sk-new]}]")
        loads = 'nearkv_ingress_tenant_file_loads_total{outcome="loaded"}'

        async def see_it_loaded():
            found = await series(ingress)
            while found[loads] < 2:
                found = await series(ingress)

        await asyncio.wait_for(see_it_loaded(), 30)
        assert (await ask("sk-new"))[0].status == 200
        assert (await ask("sk-search"))[0].status == 401


async def test_a_priority_that_is_none_is_a_bad_request():
    async with double() as engine, small_fleet(engine, policy="cost") as (ingress, _):
        response, body = await ingress.complete("hi", headers={"X-Nearkv-Priority": "urgent"})
        assert (response.status, body["error"]["param"]) == (400, "X-Nearkv-Priority")
        response, _ = await ingress.complete("hi", headers={"X-Nearkv-Priority": "5"})
        assert response.status == 200
        (sent,) = (r for r in engine.record if r.path == "/v1/completions")
        assert not [name for name in sent.headers if name.startswith("x-nearkv")]
