"""Warm-up over real engine doubles: prefixes loaded, listed, cancelled, and loaded at a start."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest

from nearkv.agent.app import WARMING
from tests.doubles.engine import EngineDouble, EngineDoubleConfig, Faults
from tests.integration.stack import eventually, running_agent

DOCUMENT = "A long winter closed the pass above the village for weeks. " * 40
FAST = {"pause_seconds": 0.0, "deadline_seconds": 5.0}


def double(**config):
    return EngineDouble(EngineDoubleConfig(**{"num_blocks": 600, "max_model_len": 8192, **config}))


class Client:
    """Calls an agent's API of prefixes."""

    def __init__(self, session, agent):
        self._session = session
        self._agent = agent
        self.service = agent.app[WARMING]

    async def _call(self, method, path, **kwargs):
        async with self._session.request(method, self._agent.url + path, **kwargs) as answer:
            return answer.status, await answer.json()

    async def warm(self, prefix_id, **body):
        return await self._call("POST", f"/v1/prefixes/{prefix_id}/warm", json=body)

    async def show(self, prefix_id):
        return await self._call("GET", f"/v1/prefixes/{prefix_id}")

    async def list_all(self):
        return (await self._call("GET", "/v1/prefixes"))[1]["prefixes"]

    async def cancel(self, prefix_id):
        return await self._call("DELETE", f"/v1/prefixes/{prefix_id}")

    async def settled(self):
        await eventually(lambda: not self.service.under_way, what="all loads are over")

    async def holds(self, engine, prefix_id):
        await eventually(
            lambda: prefix_id in dict(self.service.named_prefixes(engine)), what="it is held"
        )


@asynccontextmanager
async def warming(*engines, **settings):
    async with (
        aiohttp.ClientSession() as session,
        running_agent(*engines, warming={**FAST, **settings}) as agent,
    ):
        yield Client(session, agent)


def generations(engine):
    paths = ("/v1/completions", "/v1/chat/completions")
    return [each for each in engine.record if each.path in paths]


@pytest.mark.parametrize(
    "what",
    [{"prompt": DOCUMENT}, {"messages": [{"role": "system", "content": DOCUMENT}]}],
    ids=["prompt", "messages"],
)
async def test_a_prefix_is_loaded_into_all_engines_and_known_by_name(what):
    async with double() as a, double() as b, warming(a, b) as client:
        status, body = await client.warm("doc", **what)
        assert (status, [each["id"] for each in body["engines"]]) == (202, ["a", "b"])
        await client.settled()
        for engine in ("a", "b"):
            await client.holds(engine, "doc")
        _, shown = await client.show("doc")
        assert [each["state"] for each in shown["engines"]] == ["loaded", "loaded"]
        assert [each["resident_ratio"] for each in shown["engines"]] == [1.0, 1.0]
        assert shown["tokens"] > 100
        (asked,) = generations(a)
        sent = msgspec.json.decode(asked.body)
        assert (sent["max_tokens"], sent["priority"]) == (1, 100)


async def test_a_request_for_a_warm_document_hits_and_is_counted_as_a_use():
    async with double() as engine, warming(engine) as client, aiohttp.ClientSession() as session:
        await client.warm("doc", prompt=DOCUMENT)
        await client.settled()
        await client.holds("a", "doc")
        question = {"model": "tiny", "prompt": DOCUMENT + "Who was there, and for how long? " * 9}
        async with session.post(engine.url + "/v1/completions", json=question) as answer:
            usage = (await answer.json())["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 100
        await eventually(
            lambda: client.service.named_prefixes("a") == [("doc", 1)], what="the use is counted"
        )


async def test_asking_again_loads_nothing_while_it_is_held():
    async with double() as engine, warming(engine) as client:
        for _ in range(3):
            await client.warm("doc", prompt=DOCUMENT)
            await client.settled()
            await client.holds("a", "doc")
        assert len(generations(engine)) == 1
        status, body = await client.warm("doc", prompt="another text")
        assert status == 409
        assert "DELETE" in body["error"]


async def test_what_an_engine_holds_already_is_not_computed():
    async with double() as engine, warming(engine) as client, aiohttp.ClientSession() as session:
        async with session.post(
            engine.url + "/v1/completions", json={"model": "tiny", "prompt": DOCUMENT}
        ):
            pass
        tracker = next(iter(client._agent.state.trackers.values()))
        await eventually(lambda: tracker.table.block_count > 3, what="its blocks are known")
        await client.warm("doc", prompt=DOCUMENT)
        await client.settled()
        assert client.service.loads == {"resident": 1}
        assert len(generations(engine)) == 1


async def test_only_the_engines_asked_for_get_it():
    async with double() as a, double() as b, warming(a, b) as client:
        await client.warm("doc", token_ids=list(range(100)), engines=["b"])
        await client.settled()
        assert (len(generations(a)), len(generations(b))) == (0, 1)
        status, body = await client.warm("other", prompt="x", engines=["z"])
        assert status == 400
        assert "engines: z" in body["error"]


async def test_a_load_can_be_cancelled_and_the_engine_drops_it():
    async with double(prefill_tokens_per_second=10.0) as engine, warming(engine) as client:
        await client.warm("doc", prompt=DOCUMENT)
        await eventually(lambda: generations(engine), what="the engine computes")
        status, _ = await client.cancel("doc")
        assert status == 200
        await eventually(lambda: engine.record.aborted == 1, what="the engine drops it")
        assert await client.list_all() == []
        assert client.service.loads["cancelled"] == 1
        assert (await client.cancel("doc"))[0] == 404


async def test_one_engine_loads_one_prefix_at_a_time():
    async with double(prefill_tokens_per_second=10.0) as engine, warming(engine) as client:
        for number in range(3):
            await client.warm(f"doc{number}", prompt=f"{number} {DOCUMENT}")
        await eventually(lambda: generations(engine), what="the engine computes")
        states = [prefix["engines"][0]["state"] for prefix in await client.list_all()]
        assert sorted(states) == ["loading", "waiting", "waiting"]


async def test_an_engine_that_refuses_fails_with_its_words_and_can_be_asked_again():
    async with double() as engine, warming(engine) as client:
        await engine.inject(Faults(answer_status=500, times=1))
        await client.warm("doc", prompt=DOCUMENT)
        await client.settled()
        _, shown = await client.show("doc")
        (target,) = shown["engines"]
        assert (target["state"], "status 500" in target["error"]) == ("failed", True)
        await client.warm("doc", prompt=DOCUMENT)
        await client.settled()
        await client.holds("a", "doc")
        assert client.service.loads == {"refused": 1, "loaded": 1}


async def test_there_is_a_bound_on_prefixes_and_bodies():
    async with double() as engine, warming(engine, max_prefixes=1, max_body_bytes=2000) as client:
        assert (await client.warm("1", prompt="a"))[0] == 202
        assert (await client.warm("2", prompt="b"))[0] == 429
        assert (await client.warm("1", prompt="a" * 2000))[0] == 413
        await client.settled()


async def test_a_folder_of_prompts_is_loaded_at_each_start_of_an_engine(tmp_path):
    (tmp_path / "doc.txt").write_text(DOCUMENT)
    (tmp_path / "elsewhere.json").write_text('{"prompt": "x", "group": "of another node"}')
    (tmp_path / "broken.json").write_text("{")
    async with double() as engine, warming(engine, folder=str(tmp_path)) as client:
        await client.holds("a", "doc")
        engine.kill()
        await eventually(
            lambda: client.service.named_prefixes("a") == [], what="the death is noticed"
        )
        await engine.start()
        await client.holds("a", "doc")
        assert [prefix["id"] for prefix in await client.list_all()] == ["doc"]


async def test_prompts_of_the_folder_that_fail_are_tried_again_a_few_times(tmp_path, monkeypatch):
    monkeypatch.setattr("nearkv.agent.warming.seeding._RETRY_SECONDS", (0.01, 0.02))
    (tmp_path / "doc.txt").write_text(DOCUMENT)
    async with double() as engine, double() as broken:
        await engine.inject(Faults(answer_status=500, times=1))
        await broken.inject(Faults(answer_status=500))
        async with warming(engine, broken, folder=str(tmp_path)) as client:
            await client.holds("a", "doc")
            await eventually(
                lambda: client.service.loads["refused"] >= 4, what="it was tried again"
            )
            await client.settled()
            assert client.service.loads == {"loaded": 1, "refused": 1 + 3}
            (prefix,) = client.service.book
            assert prefix.targets["b"].state == "failed"


async def test_strangers_cannot_make_engines_work():
    settings = {"listen": "0.0.0.0:0", "warming": FAST}
    async with (
        double() as engine,
        aiohttp.ClientSession() as session,
        running_agent(engine, **settings) as agent,
    ):
        url = f"http://127.0.0.1:{agent.url.rpartition(':')[2]}"
        for method, path in (("POST", "/v1/prefixes/doc/warm"), ("DELETE", "/v1/prefixes/doc")):
            async with session.request(method, url + path, json={"prompt": "x"}) as answer:
                assert answer.status == 403
        async with session.get(url + "/v1/prefixes") as answer:
            assert await answer.json() == {"prefixes": []}


async def test_an_agent_that_stops_leaves_no_load_behind():
    async with double(prefill_tokens_per_second=10.0) as engine:
        async with warming(engine) as client:
            await client.warm("doc", prompt=DOCUMENT)
            await eventually(lambda: generations(engine), what="the engine computes")
        await eventually(lambda: engine.record.aborted == 1, what="the engine drops it")
        await asyncio.sleep(0)


async def test_engines_that_are_gone_leave_nothing_behind():
    async with double() as a, double() as b, warming(a, b) as client:
        await client.warm("doc", prompt=DOCUMENT)
        await client.settled()
        await client.holds("b", "doc")
        client._agent.state.drop("b")
        await client.warm("doc", prompt=DOCUMENT)
        (prefix,) = client.service.book
        assert (list(prefix.targets), list(prefix.keys)) == (["a"], ["a"])
        assert client.service.named_prefixes("b") == []


async def test_a_name_that_is_given_up_leaves_the_uses_of_another_for_the_same_text():
    async with double() as engine, warming(engine) as client:
        for name in ("doc", "copy"):
            await client.warm(name, prompt=DOCUMENT)
            await client.settled()
            await client.holds("a", name)
        await client.cancel("copy")
        (prefix,) = client.service.book
        tracker = client._agent.state.trackers["a"]
        assert prefix.keys["a"][-1] in tracker.table.uses
        await client.cancel("doc")
        assert tracker.table.uses == {}


async def test_whether_an_engine_without_events_holds_it_is_unknown():
    async with double(publish_events=False) as engine, warming(engine) as client:
        await client.warm("doc", prompt=DOCUMENT)
        await client.settled()
        _, shown = await client.show("doc")
        (target,) = shown["engines"]
        assert (target["state"], target["resident_ratio"]) == ("loaded", None)


async def test_a_defect_fails_the_load_and_not_the_prefix(monkeypatch):
    async with double() as engine, warming(engine) as client:
        with monkeypatch.context() as broken:
            broken.setattr("nearkv.agent.warming.service.pack_tokens", lambda _: 1 / 0)
            await client.warm("doc", prompt=DOCUMENT)
            await client.settled()
        _, shown = await client.show("doc")
        assert "ZeroDivisionError" in shown["engines"][0]["error"]
        await client.warm("doc", prompt=DOCUMENT)
        await client.settled()
        await client.holds("a", "doc")
        assert client.service.loads == {"defect": 1, "loaded": 1}
