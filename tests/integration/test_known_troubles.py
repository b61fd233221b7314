"""Troubles that users of other routers reported, over real sockets: each once, and small."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.doubles.engine import EngineDouble, EngineDoubleConfig
from tests.integration.pd_stack import Part, pd_double, pd_stack
from tests.integration.stack import eventually, running_agent, running_ingress

DOCUMENT = "The ferry to the outer islands leaves when the tide allows. " * 30
ONE, TWO = {"cluster_secret": "one"}, {"cluster_secret": "two"}
POLICIES = pytest.mark.parametrize("policy", ["cost", "prefix-first"])


def double(**config):
    return EngineDouble(EngineDoubleConfig(num_blocks=600, max_model_len=8192, **config))


async def test_four_replicas_leave_an_engine_with_one_scraper_and_one_subscriber():
    slowly = {"scrape": {"interval_seconds": 3600.0}}
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(double())
        agent = await stack.enter_async_context(running_agent(engine, **slowly))
        scrapes = engine.record.counts["/metrics"]
        replicas = [await stack.enter_async_context(running_ingress(agent.url)) for _ in range(4)]
        for replica in replicas:
            response, _ = await replica.complete(DOCUMENT)
            assert response.status == 200
            await replica.synced(agent)
        assert engine.record.counts["/metrics"] == scrapes, "none of the replicas scraped"
        with pytest.raises(TimeoutError):
            await engine.wait_for_subscribers(2, timeout_seconds=0.2)
        assert response.headers["x-nearkv-reason"] == "prefix_hit", "they know all the same"


@POLICIES
async def test_hand_offs_beyond_a_decode_engine_s_room_are_not_made_and_nobody_is_preempted(policy):
    """Nine requests fit a decode engine of 199 blocks; 32 come at once."""
    doubles = {
        "p": pd_double(num_blocks=1200, prefill_tokens_per_second=40_000),
        "d": pd_double(num_blocks=200, max_model_len=4096, decode_seconds_per_token=0.005),
        "e": pd_double(num_blocks=200, max_model_len=4096, decode_seconds_per_token=0.005),
    }
    parts = {"p": Part("prefill"), "d": Part("decode"), "e": Part("decode")}
    async with pd_stack(
        parts, doubles=doubles, ingress={"policy": policy}, room_margin_tokens=64
    ) as stack:
        answers = await asyncio.gather(
            *(stack.ingress.complete(f"{n} {DOCUMENT}", max_tokens=32) for n in range(32))
        )
        assert {response.status for response, _ in answers} == {200}
        assert all(body["choices"][0]["text"] for _, body in answers)
        preempted = {name: e.ranks[0].statistics.preemptions for name, e in doubles.items()}
        assert preempted == {"p": 0, "d": 0, "e": 0}
        counted = await stack.counts("pd_decisions")
        assert counted["pd", "always"] >= 10
        assert counted["local", "no_room"] > 0
        await eventually(
            lambda: stack.ingress.knowledge.ledger.total_requests == 0, what="nothing is in flight"
        )


async def test_an_engine_whose_hits_are_not_those_predicted_is_flagged_and_believed_less():
    """Another secret stands for any difference between what we hash and what the engine has."""
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(double())
        agent = await stack.enter_async_context(running_agent(engine, **ONE))
        ingress = await stack.enter_async_context(running_ingress(agent.url, **TWO))

        async def mode():
            async with ingress.session.get(ingress.url + "/v1/status") as answer:
                (told,) = (await answer.json())["engines"]
            return told["mode"]

        assert await mode() == "exact"
        for _ in range(12):
            response, body = await ingress.complete(DOCUMENT)
            assert response.status == 200
        assert response.headers["x-nearkv-predicted-cached-tokens"] == "0"
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert await mode() == "approximate"
        async with ingress.session.get(ingress.url + "/metrics") as answer:
            text = await answer.text()
        assert 'nearkv_ingress_parity_checks_total{outcome="different"} 11.0' in text
