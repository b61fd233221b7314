"""The freshness ladder: agents away, engines gone, replicas that join; service goes on."""

import time
from contextlib import AsyncExitStack

from tests.doubles.engine import EngineDouble, EngineDoubleConfig
from tests.integration.stack import eventually, running_agent, running_ingress, small_fleet

QUICK = {"freshness": {"fresh_seconds": 0.5, "aged_seconds": 2.0}}
ONE, TWO = {"cluster_secret": "one"}, {"cluster_secret": "two"}
DOCUMENT = "A long winter closed the pass above the village for weeks. " * 30


def double(**config):
    return EngineDouble(EngineDoubleConfig(num_blocks=600, max_model_len=8192, **config))


async def test_without_its_agent_routing_goes_on_down_the_ladder():
    async with double() as a, double() as b, AsyncExitStack() as later:
        async with running_agent(a, b) as agent:
            ingress = await later.enter_async_context(running_ingress(agent.url, **QUICK))
            response, _ = await ingress.complete(DOCUMENT)
            holder = response.headers["x-nearkv-engine"]
            await ingress.synced(agent)
        response, _ = await ingress.complete(DOCUMENT)
        assert response.headers["x-nearkv-engine"] == holder
        views = ingress.knowledge.fleet.engines.values()
        aged_seconds = QUICK["freshness"]["aged_seconds"]
        await eventually(
            lambda: all(v.age_seconds(time.monotonic()) > aged_seconds for v in views),
            what="state is unknown",
        )
        served = [(await ingress.complete(DOCUMENT))[0] for _ in range(4)]
        assert sorted(r.headers["x-nearkv-engine"] for r in served) == ["a", "a", "b", "b"]
        assert {r.headers["x-nearkv-reason"] for r in served} == {"round_robin"}


async def test_a_dead_engine_is_avoided_and_used_again_after_its_return():
    async with double() as a, double() as b, small_fleet(a, b) as (ingress, agent):
        a.kill()
        await eventually(
            lambda: agent.state.trackers["a"].info.state == "unreachable", what="agent notices"
        )
        await ingress.synced(agent)
        for _ in range(4):
            response, _ = await ingress.complete("hello")
            assert response.headers["x-nearkv-engine"] == "b"
        await a.start()
        await eventually(
            lambda: agent.state.trackers["a"].info.state == "ready", what="agent sees it again"
        )
        await ingress.synced(agent)
        served = {
            (await ingress.complete(f"prompt {i}"))[0].headers["x-nearkv-engine"] for i in range(4)
        }
        assert served == {"a", "b"}


async def test_static_engines_serve_when_no_agent_ever_answered():
    async with double() as a, double() as b:
        engines = [{"id": "s1", "url": a.url}, {"id": "s2", "url": b.url}]
        async with running_ingress(
            "http://127.0.0.1:9", engines=engines, deadlines={"sync_seconds": 0.1}
        ) as ingress:
            served = [
                (await ingress.complete("hello"))[0].headers["x-nearkv-engine"] for _ in range(4)
            ]
            assert sorted(served) == ["s1", "s1", "s2", "s2"]


async def test_a_sleeping_engine_gets_nothing_and_counts_as_empty():
    async with double() as a, double() as b, small_fleet(a, b) as (ingress, agent):
        response, _ = await ingress.complete(DOCUMENT)
        holder = response.headers["x-nearkv-engine"]
        engine = {"a": a, "b": b}[holder]
        async with ingress.session.post(engine.url + "/sleep?level=1"):
            pass
        await eventually(
            lambda: agent.state.trackers[holder].info.state == "asleep", what="sleep is seen"
        )
        await eventually(
            lambda: agent.state.trackers[holder].table.block_count == 0, what="nothing is held"
        )
        await ingress.synced(agent)
        response, _ = await ingress.complete(DOCUMENT)
        assert response.headers["x-nearkv-engine"] != holder


async def test_a_restarted_agent_is_followed_again_and_nothing_is_lost():
    async with double() as a, double() as b, AsyncExitStack() as later:
        async with running_agent(a, b) as agent:
            ingress = await later.enter_async_context(running_ingress(agent.url))
            response, _ = await ingress.complete(DOCUMENT)
            holder = response.headers["x-nearkv-engine"]
            await ingress.synced(agent)
            incarnation = agent.state.trackers[holder].incarnation
        listen = agent.url.removeprefix("http://")
        async with running_agent(a, b, listen=listen) as again:
            await ingress.synced(again)
            assert again.state.trackers[holder].incarnation == incarnation
            response, body = await ingress.complete(DOCUMENT)
            assert response.headers["x-nearkv-engine"] == holder
            reported = body["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert int(response.headers["x-nearkv-predicted-cached-tokens"]) == reported > 0


async def test_another_cluster_secret_is_said_instead_of_hitting_nothing_in_silence():
    async with (
        double() as engine,
        running_agent(engine, **ONE) as agent,
        running_ingress(agent.url, **TWO) as ingress,
    ):
        async with ingress.session.get(ingress.url + "/v1/status") as answer:
            (problem,) = (await answer.json())["problems"]
        assert problem.startswith("a: ")
        assert "cluster secret" in problem
