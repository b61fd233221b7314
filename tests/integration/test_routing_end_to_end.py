"""The main job over real sockets: follow-ups go to the engine that holds the prefix."""

import asyncio
import json
from contextlib import AsyncExitStack

import aiohttp
import pytest

from tests.doubles.engine import EngineDouble, EngineDoubleConfig
from tests.integration.stack import eventually, running_agent, running_ingress, small_fleet

DOCUMENT = "The signal box at mile seven guards the branch to the quarry. " * 40


def double(**config):
    return EngineDouble(EngineDoubleConfig(num_blocks=600, max_model_len=8192, **config))


async def test_follow_ups_go_to_the_holder_and_predictions_come_true():
    async with double() as a, double() as b, small_fleet(a, b) as (ingress, agent):
        response, body = await ingress.complete(DOCUMENT)
        holder = response.headers["x-nearkv-engine"]
        assert response.headers["x-nearkv-reason"] == "prefix_miss"
        for question in ("Who works there?", "How far is it?", "What is guarded?"):
            await ingress.synced(agent)
            response, body = await ingress.complete(DOCUMENT + question)
            assert response.headers["x-nearkv-engine"] == holder
            assert response.headers["x-nearkv-reason"] == "prefix_hit"
            reported = body["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert reported > 0
            assert int(response.headers["x-nearkv-predicted-cached-tokens"]) == reported


async def test_a_chat_conversation_stays_on_its_engine():
    async with double() as a, double() as b, small_fleet(a, b) as (ingress, agent):
        messages = [{"role": "system", "content": DOCUMENT}]
        holders = set()
        for turn in range(5):
            messages.append({"role": "user", "content": f"Question number {turn}?"})
            await ingress.synced(agent)
            response, body = await ingress.post(
                "/v1/chat/completions", {"model": "tiny", "messages": messages, "max_tokens": 8}
            )
            holders.add(response.headers["x-nearkv-engine"])
            reported = body["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert int(response.headers["x-nearkv-predicted-cached-tokens"]) == reported
            messages.append(
                {"role": "assistant", "content": body["choices"][0]["message"]["content"]}
            )
        assert len(holders) == 1


@pytest.mark.parametrize("encoding", ["map", "array"])
@pytest.mark.parametrize("framing", ["topic", "plain"])
async def test_an_agent_that_joins_late_learns_all_by_replay(encoding, framing):
    async with double(event_encoding=encoding, replay_framing=framing) as engine:
        async with aiohttp.ClientSession() as client:
            await client.post(
                engine.url + "/v1/completions", json={"model": "tiny", "prompt": DOCUMENT}
            )
        async with small_fleet(engine) as (ingress, agent):
            await ingress.synced(agent)
            response, body = await ingress.complete(DOCUMENT)
            reported = body["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert reported > 0
            assert int(response.headers["x-nearkv-predicted-cached-tokens"]) == reported


async def test_a_restarted_engine_loses_its_blocks_and_gets_a_new_incarnation():
    async with double() as a, double() as b, small_fleet(a, b) as (ingress, agent):
        response, _ = await ingress.complete(DOCUMENT)
        holder = response.headers["x-nearkv-engine"]
        await ingress.synced(agent)
        before = agent.state.trackers[holder].incarnation
        await {"a": a, "b": b}[holder].restart()
        await eventually(
            lambda: (
                agent.state.trackers[holder].incarnation != before
                and agent.state.trackers[holder].info.state == "ready"
            ),
            what="agent sees the restart",
        )
        await ingress.synced(agent)
        response, body = await ingress.complete(DOCUMENT)
        assert response.headers["x-nearkv-predicted-cached-tokens"] == "0"
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_two_ranks_behind_one_url_are_two_engines():
    async with double(dp_size=2) as engine:
        names = ("x",)
        async with (
            running_agent(engine, names=names) as agent,
            running_ingress(agent.url) as ingress,
        ):
            await eventually(lambda: len(agent.state.trackers) == 2, what="two ranks")
            served = []
            for i in range(2):
                await ingress.synced(agent)
                response, _ = await ingress.complete(f"Prompt {i} of its own. " + DOCUMENT)
                served.append(response.headers["x-nearkv-engine"])
            assert sorted(served) == ["x/dp0", "x/dp1"]
            for i in range(2):
                await ingress.synced(agent)
                response, body = await ingress.complete(f"Prompt {i} of its own. " + DOCUMENT)
                assert response.headers["x-nearkv-engine"] == served[i]
                assert body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_salted_prompts_do_not_hit_unsalted_ones():
    async with double() as engine, small_fleet(engine) as (ingress, agent):
        await ingress.complete(DOCUMENT)
        await ingress.synced(agent)
        response, _ = await ingress.complete(DOCUMENT, cache_salt="s1")
        assert response.headers["x-nearkv-predicted-cached-tokens"] == "0"
        await ingress.synced(agent)
        response, body = await ingress.complete(DOCUMENT, cache_salt="s1")
        reported = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert int(response.headers["x-nearkv-predicted-cached-tokens"]) == reported > 0


async def test_the_article_s_prompt_hash_brings_a_short_prompt_back_to_its_engine():
    async with double() as a, double() as b, small_fleet(a, b) as (ingress, _agent):
        headers = {"X-Prompt-Hash": "prefix-020"}
        first, _ = await ingress.complete("Explain the scheduler.", headers=headers)
        for prompt in ("Go on with pods.", "And their life?", "And then?"):
            response, _ = await ingress.complete(prompt, headers=headers)
            assert response.headers["x-nearkv-engine"] == first.headers["x-nearkv-engine"]
            assert response.headers["x-nearkv-reason"] == "hint"


async def test_named_prefixes_are_listed_with_what_engines_hold_of_them():
    async with double() as a, double() as b, small_fleet(a, b) as (ingress, agent):
        response, _ = await ingress.complete(DOCUMENT, headers={"X-Session-ID": "s-1"})
        holder = response.headers["x-nearkv-engine"]
        await ingress.synced(agent)
        async with ingress.session.get(ingress.url + "/v1/prefixes?limit=5") as answer:
            (prefix,) = (await answer.json())["prefixes"]
        assert prefix["id"] == "X-Session-ID:s-1"
        assert prefix["last_engine"] == holder
        assert prefix["held_tokens"] == {holder: prefix["blocks"] * 32}
        async with ingress.session.get(ingress.url + "/v1/prefixes?limit=x") as answer:
            assert answer.status == 400


async def test_each_request_is_tokenized_exactly_once_by_one_engine():
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(double()) for _ in range(4)]
        ingress, _ = await stack.enter_async_context(small_fleet(*engines))
        for i in range(5):
            await ingress.complete(f"Unseen prompt number {i}, short. " * 3)
        asked = sum(
            count
            for engine in engines
            for path, count in engine.record.counts.items()
            if path.endswith(("/render", "/tokenize"))
        )
        assert asked == 5


async def test_a_second_replica_picks_the_same_engine():
    async with (
        double() as a,
        double() as b,
        small_fleet(a, b) as (first, agent),
        running_ingress(agent.url) as second,
    ):
        response, _ = await first.complete(DOCUMENT)
        await second.synced(agent)
        other, _ = await second.complete(DOCUMENT)
        assert other.headers["x-nearkv-engine"] == response.headers["x-nearkv-engine"]
        assert other.headers["x-nearkv-reason"] == "prefix_hit"


async def test_each_policy_routes_as_its_name_says():
    async with double() as a, double() as b, running_agent(a, b) as agent:
        async with running_ingress(agent.url, policy="round-robin") as ingress:
            served = [
                (await ingress.complete(DOCUMENT))[0].headers["x-nearkv-engine"] for _ in range(4)
            ]
            assert sorted(served) == ["a", "a", "b", "b"]
        async with running_ingress(agent.url, policy="least-loaded") as ingress:
            answers = await asyncio.gather(*(ingress.complete(f"{i}") for i in range(20)))
            served = [response.headers["x-nearkv-engine"] for response, _ in answers]
            assert abs(served.count("a") - served.count("b")) <= 2


async def test_streams_pass_byte_for_byte():
    async with double() as engine, small_fleet(engine) as (ingress, _):
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "stream": True}
        texts = []
        for url in (engine.url, ingress.url):
            async with ingress.session.post(url + "/v1/completions", json=body) as response:
                assert response.content_type == "text/event-stream"
                events = (await response.text()).split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""]
            chunks = [json.loads(e.removeprefix("data: ")) for e in events[:-2]]
            texts.append("".join(chunk["choices"][0]["text"] for chunk in chunks))
        assert texts[0] == texts[1]


async def test_unknown_paths_and_embeddings_are_routed_by_load():
    async with double() as engine, small_fleet(engine) as (ingress, _):
        response, body = await ingress.post("/v1/embeddings", {"model": "tiny", "input": "x"})
        assert response.status == 200
        assert body["data"][0]["embedding"]
        response, _ = await ingress.post("/v1/not/known", {"model": "tiny"})
        assert response.status == 404
        assert response.headers["x-nearkv-engine"] == "a"
        async with ingress.session.get(ingress.url + "/v1/models") as models:
            assert [card["id"] for card in (await models.json())["data"]] == ["tiny"]
