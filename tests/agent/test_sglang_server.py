"""The agent beside an SGLang server: found out, followed, replayed, and told from vLLM."""

import asyncio
import base64
import json
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import zmq.asyncio
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from nearkv.agent.app import build_app
from nearkv.agent.engine_kinds import EngineKind
from nearkv.agent.engine_kinds_probing import EngineKindProbe
from nearkv.agent.errors import EngineProbeError
from nearkv.agent.event_sources import EventSource
from nearkv.agent.settings import AgentSettings

DATA = Path(__file__).parents[1] / "data/sglang"
END = (-1).to_bytes(8, "big", signed=True)


def payloads():
    lines = (DATA / "kv_events.jsonl").read_text().splitlines()
    return [base64.b64decode(json.loads(line)["payload_base64"]) for line in lines]


class Answers:
    """What an engine answers by path; other paths are not there."""

    def __init__(self, **bodies):
        self.bodies = bodies
        self.asked = []

    async def handle(self, request):
        self.asked.append(request.path)
        body = self.bodies.get(request.path.strip("/").replace("/", "_"))
        if body is None:
            raise web.HTTPNotFound
        return web.Response(text=body)


@asynccontextmanager
async def serving(answers):
    app = web.Application()
    app.router.add_get("/{path:.*}", answers.handle)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


@asynccontextmanager
async def probing(answers, kind):
    async with serving(answers) as url, aiohttp.ClientSession() as session:
        yield EngineKindProbe(url, session, timeout_seconds=5.0, kind=kind)


def sglang(**more):
    names = {
        "v1_models": "models.json",
        "server_info": "server_info.json",
        "metrics": "metrics.txt",
    }
    return Answers(**{key: (DATA / name).read_text() for key, name in names.items()}, **more)


VLLM = {
    "version": '{"version": "0.33.0"}',
    "kv_event_sources": '{"0": {"endpoint": "tcp://*:7001"}}',
}


@pytest.mark.parametrize("kind", [EngineKind.AUTO, EngineKind.SGLANG])
async def test_sglang_tells_version_and_sources_at_one_place(kind):
    async with probing(sglang(), kind) as probe:
        assert await probe.version() == "0.5.23"
        assert await probe.event_sources() == {
            0: EventSource("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5567"),
            1: EventSource("tcp://127.0.0.1:5558", "tcp://127.0.0.1:5568"),
        }


@pytest.mark.parametrize("kind", [EngineKind.AUTO, EngineKind.VLLM])
async def test_vllm_is_never_asked_for_what_only_sglang_has(kind):
    answers = Answers(**VLLM)
    async with probing(answers, kind) as probe:
        assert await probe.version() == "0.33.0"
        assert await probe.event_sources() == {0: EventSource("tcp://127.0.0.1:7001")}
    assert "/server_info" not in answers.asked


async def test_the_configured_kind_is_believed():
    async with probing(sglang(**VLLM), EngineKind.SGLANG) as probe:
        assert await probe.version() == "0.5.23"
    async with probing(sglang(), EngineKind.VLLM) as probe:
        assert (await probe.version(), await probe.event_sources()) == (None, None)


@pytest.mark.parametrize(
    "body",
    [
        '{"vllm_config": "model=tiny"}',
        "[]",
        "<html>",
        '{"version": "1", "kv_events": {"dp_size": 0}}',
    ],
    ids=["vllm-in-developer-mode", "a-list", "no-json", "no-ranks"],
)
async def test_an_answer_that_is_not_sglangs_is_an_error_only_where_it_is_configured(body):
    async with probing(Answers(server_info=body), EngineKind.AUTO) as probe:
        assert (await probe.version(), await probe.event_sources()) == (None, None)
    async with probing(Answers(server_info=body), EngineKind.SGLANG) as probe:
        with pytest.raises(EngineProbeError, match="/server_info"):
            await probe.version()


# -- The whole agent -------------------------------------------------------------------------


class Publisher:
    """Publishes the captured messages and answers replays as SGLang does."""

    def __init__(self, context):
        self.pub = context.socket(zmq.XPUB)  # tells who subscribes
        self.router = context.socket(zmq.ROUTER)
        self.port = self.pub.bind_to_random_port("tcp://127.0.0.1")
        self.replay_port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.sent = []

    async def until_subscribed(self):
        async with asyncio.timeout(30):
            await self.pub.recv()

    async def publish(self, payload):
        self.sent.append(payload)
        await self.pub.send_multipart([b"", (len(self.sent) - 1).to_bytes(8, "big"), payload])

    async def answer_replays(self):
        while True:
            client, empty, start = await self.router.recv_multipart()
            for seq in range(int.from_bytes(start, "big"), len(self.sent)):
                frames = [client, empty, b"", seq.to_bytes(8, "big"), self.sent[seq]]
                await self.router.send_multipart(frames)
            await self.router.send_multipart([client, empty, b"", END, b""])


@asynccontextmanager
async def publishing():
    context = zmq.asyncio.Context()
    publisher = Publisher(context)
    replays = asyncio.create_task(publisher.answer_replays())
    try:
        yield publisher
    finally:
        replays.cancel()
        await asyncio.gather(replays, return_exceptions=True)
        context.destroy(linger=0)


async def engine_when(client, condition):
    """The engine in the node's status once the condition holds for it."""
    async with asyncio.timeout(30):
        while True:
            status = await (await client.get("/v1/status")).json()
            for engine in status["engines"]:
                if condition(engine):
                    return engine
            await asyncio.sleep(0.02)


async def test_the_agent_follows_an_sglang_server_it_was_told_only_the_url_of():
    answers = sglang()
    async with publishing() as publisher, serving(answers) as url:
        told = json.loads(answers.bodies["server_info"])
        told["kv_events"] |= {
            "dp_size": 1,
            "endpoint_port_base": publisher.port,
            "replay_endpoint_port_base": publisher.replay_port,
        }
        answers.bodies["server_info"] = json.dumps(told)
        for payload in payloads()[:4]:
            await publisher.publish(payload)  # before anybody listens: only a replay has them
        settings = AgentSettings(
            engines=({"id": "e", "url": url},), scrape={"interval_seconds": 0.05}
        )
        async with TestClient(TestServer(build_app(settings))) as client:
            engine = await engine_when(client, lambda e: e["events"] == "live" and e["blocks"])
            assert (engine["blocks"], engine["block_size"]) == ({"GPU": 8}, 16)
            assert (engine["engine_version"], engine["model"]) == ("0.5.23", "tiny")
            assert (engine["requests_waiting"], engine["kv_used_ratio"]) == (2, 0.28)
            await publisher.until_subscribed()
            for payload in payloads()[4:6]:
                await publisher.publish(payload)
            await engine_when(client, lambda e: e["blocks"] == {"GPU": 7, "CPU": 2})
            answers.bodies["metrics"] = answers.bodies["metrics"].replace("17.334", "18.334")
            publisher.sent.clear()  # what a new process has to replay
            again = await engine_when(client, lambda e: e["incarnation"] != engine["incarnation"])
            assert sum(again["blocks"].values()) == 0
