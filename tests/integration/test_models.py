"""Names of models, adapters, salts and ranks, from client to engine double."""

import json

import openai
import pytest

from tests.doubles.engine import EngineDouble, EngineDoubleConfig
from tests.integration.stack import eventually, running_agent, running_ingress, small_fleet

DOCUMENT = "Once upon a time, in a small town by the river, there was a baker. " * 20
ALIASES = {"aliases": {"gpt-x": "tiny", "writer": "sql", "idle": "nobody"}}


def double(**config):
    return EngineDouble(EngineDoubleConfig(num_blocks=600, **config))


def cached(body):
    return body["usage"]["prompt_tokens_details"]["cached_tokens"]


def predicted(response):
    return int(response.headers["x-nearkv-predicted-cached-tokens"])


def received(engine, path="/v1/completions"):
    return [r for r in engine.record if r.path == path]


# -- Aliases -------------------------------------------------------------------------------


async def test_an_alias_is_forwarded_under_the_name_that_engines_serve():
    async with double() as engine, small_fleet(engine, models=ALIASES) as (ingress, agent):
        await ingress.complete(DOCUMENT)
        await ingress.synced(agent)
        response, body = await ingress.complete(DOCUMENT, model="gpt-x", user="me")
        assert (response.status, body["model"]) == (200, "tiny")
        assert predicted(response) == cached(body) > 0
        forwarded = json.loads(received(engine)[-1].body)
        assert (forwarded["model"], forwarded["user"]) == ("tiny", "me")


async def test_models_are_listed_once_and_found_by_name():
    async with (
        double(loras=("sql",)) as a,
        double() as b,
        small_fleet(a, b, models=ALIASES) as (ingress, _),
        openai.AsyncOpenAI(base_url=ingress.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        listed = [model.id async for model in client.models.list()]
        assert listed == ["gpt-x", "sql", "tiny", "writer"]
        found = await client.models.retrieve("writer")
        assert (found.owned_by, found.parent, found.root) == ("nearkv", "tiny", "sql")
        with pytest.raises(openai.NotFoundError, match="Known: gpt-x, sql, tiny, writer"):
            await client.models.retrieve("org/nope")


@pytest.mark.parametrize("model", ["nope", "idle"])
async def test_a_model_that_nobody_serves_is_not_found(model):
    async with double() as engine, small_fleet(engine, models=ALIASES) as (ingress, _):
        response, body = await ingress.complete("x", model=model)
        assert response.status == 404
        assert response.headers["x-nearkv-reason"] == "unknown_model"
        assert body["error"]["type"] == "NotFoundError"
        assert "Known: gpt-x, tiny." in body["error"]["message"]


# -- Adapters ------------------------------------------------------------------------------


async def test_an_adapter_s_requests_go_only_to_engines_that_have_it():
    async with (
        double() as a,
        double(loras=("sql",)) as b,
        small_fleet(a, b, policy="round-robin") as (ingress, _),
    ):
        for i in range(6):
            response, body = await ingress.complete(f"{i} {DOCUMENT}", model="sql")
            assert (response.status, body["model"]) == (200, "sql")
            assert response.headers["x-nearkv-engine"] == "b"


async def test_an_adapter_that_is_loaded_or_unloaded_later_is_noticed():
    async with (
        double() as a,
        double() as b,
        small_fleet(
            a, b, agent={"scrape": {"interval_seconds": 0.1, "adapters_seconds": 0.05}}
        ) as (
            ingress,
            agent,
        ),
    ):
        served = ingress.knowledge.fleet.serving
        assert (await ingress.complete("x", model="sql"))[0].status == 404
        before = agent.state.trackers["b"].incarnation
        asked = {"lora_name": "sql", "lora_path": "/sql"}
        await ingress.session.post(b.url + "/v1/load_lora_adapter", json=asked)
        await eventually(lambda: len(served("sql")) == 1, what="the adapter is known")
        response, _ = await ingress.complete("x", model="sql")
        assert (response.status, response.headers["x-nearkv-engine"]) == (200, "b")
        await ingress.session.post(b.url + "/v1/unload_lora_adapter", json=asked)
        await eventually(lambda: not served("sql"), what="the adapter is gone")
        assert agent.state.trackers["b"].incarnation == before, "it is the same engine"


async def test_engines_of_which_only_the_address_is_known_get_no_adapter_s_requests():
    async with double() as a, double(loras=("sql",)) as b, running_agent(b) as agent:
        static = [{"id": "static", "url": a.url}]
        async with running_ingress(agent.url, engines=static, policy="round-robin") as ingress:
            answers = [await ingress.complete(f"{i}", model="sql") for i in range(4)]
            assert {r.headers["x-nearkv-engine"] for r, _ in answers} == {"a"}


async def test_an_adapter_s_blocks_are_its_own():
    async with double(loras=("sql", "poet")) as engine, small_fleet(engine) as (ingress, agent):
        for model in ("tiny", "sql", "poet"):
            for hits in (False, True):
                await ingress.synced(agent)
                response, body = await ingress.complete(DOCUMENT, model=model)
                assert predicted(response) == cached(body)
                assert (cached(body) > 0) is hits, model


async def test_by_cost_an_adapter_s_new_prompts_stay_where_it_is_loaded():
    async with (
        double(loras=("sql", "poet")) as a,
        double(loras=("sql", "poet")) as b,
        small_fleet(a, b, policy="cost") as (ingress, agent),
    ):
        engines = []
        for i in range(8):
            await ingress.synced(agent)
            response, _ = await ingress.complete(f"Question {i} of its own", model="sql")
            engines.append(response.headers["x-nearkv-engine"])
        assert len(set(engines)) == 1


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
async def test_clients_cannot_change_an_engine_s_adapters(path):
    async with double() as engine, small_fleet(engine) as (ingress, _):
        response, body = await ingress.post(path, {"lora_name": "x", "lora_path": "/x"})
        assert response.status == 403
        assert response.headers["x-nearkv-reason"] == "not_routed"
        assert body["error"]["type"] == "PermissionDeniedError"
        assert received(engine, path) == []


# -- Cache salts ---------------------------------------------------------------------------


async def test_two_tenants_with_equal_prompts_and_salts_of_their_own_share_nothing():
    async with (
        double() as a,
        double() as b,
        small_fleet(a, b) as (ingress, agent),
    ):
        for turn in range(2):
            for tenant in ("red", "blue"):
                await ingress.synced(agent)
                response, body = await ingress.complete(DOCUMENT, cache_salt=tenant)
                assert predicted(response) == cached(body)
                assert (cached(body) > 0) is bool(turn), tenant
        await ingress.synced(agent)
        response, body = await ingress.complete(DOCUMENT)
        assert predicted(response) == cached(body) == 0


# -- Ranks ---------------------------------------------------------------------------------


async def ranks_used(ingress, rank, count=4):
    used = []
    for i in range(count):
        response, _ = await ingress.complete(
            f"Question {rank} {i}", headers={"X-data-parallel-rank": str(rank)}
        )
        used.append(response.headers["x-nearkv-engine"])
    return used


async def test_a_client_s_rank_is_removed_unless_the_settings_say_otherwise():
    async with double(dp_size=2) as engine, running_agent(engine) as agent:
        await eventually(lambda: len(agent.state.trackers) == 2, what="two ranks")
        async with running_ingress(agent.url, policy="round-robin") as ingress:
            assert set(await ranks_used(ingress, 1)) == {"a/dp0", "a/dp1"}
        sent = [r.headers["X-data-parallel-rank"] for r in received(engine)]
        assert sorted(set(sent)) == ["0", "1"]
        chosen = {"models": {"client_ranks": True}, "policy": "round-robin"}
        async with running_ingress(agent.url, **chosen) as ingress:
            assert set(await ranks_used(ingress, 1)) == {"a/dp1"}
            assert set(await ranks_used(ingress, 0)) == {"a/dp0"}
            response, body = await ingress.complete("x", headers={"X-data-parallel-rank": "7"})
            assert response.status == 400
            assert "rank '7'" in body["error"]["message"]
