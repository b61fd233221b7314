"""The shared store on real vLLM: a fresh engine goes on where one that is gone left off.

Engine ``a`` computes prompts and is ended; engine ``b`` starts afterwards, with nothing in its
cache, and must give the tokens that ``a`` gave.
"""

import asyncio
import os
import random
import signal
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from nearkv.agent.app import TRANSFER
from nearkv.agent.app import build_app as build_agent
from nearkv.agent.settings import AgentSettings
from nearkv.demo.engine_env import ensure_engine_env
from nearkv.demo.engines import real_engine
from nearkv.demo.models import ensure_model
from nearkv.demo.workspace import Workspace
from nearkv.serving import running
from tests.e2e.pd_stage import CACHE, Engines, patient_transfer
from tests.integration.stack import ANY_PORT, eventually
from tests.transfer.store.stores import RedisServer, redis_missing

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(redis_missing()), reason=redis_missing()),
]

BLOCK = 32
LENGTH = 1500
MOVED = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv'
EVENTS = "vllm:nearkv_connector_events_total{"
TIERS = ("files", "redis")


def random_prompt(label, length=LENGTH):
    numbers = random.Random(label)
    return [numbers.randrange(10, 400) for _ in range(length)]


def transferable(length):
    return (length - 1) // BLOCK * BLOCK


@dataclass
class Stage:
    """Both tiers, one engine at a time, and what ``a`` answered."""

    folder: Path
    redis: RedisServer
    engines: Engines
    computed: dict = field(default_factory=dict)
    """Answers of an engine that computed the whole prompt."""
    cached: dict = field(default_factory=dict)
    """Answers of an engine that had the prompt's prefix, as one that pulls it has."""

    def url(self, tier):
        return f"file://{self.folder / 'store'}" if tier == "files" else self.redis.url

    @asynccontextmanager
    async def agent(self, name, tier, **store):
        """Have an agent with the tier behind an engine's socket; yields its transfer service."""
        with tempfile.TemporaryDirectory(prefix="nk-") as folder:
            engine = {"id": name, "url": self.engines.engines[name].url}
            settings = {
                "node": "n1",
                "engines": [engine],
                "transfer": {
                    "socket_dir": folder,
                    "peer_listen": "127.0.0.1:0",
                    "paths": [],
                    "store": {
                        "url": self.url(tier),
                        "min_tokens": 64,
                        "lookup_seconds": 2,
                        **store,
                    },
                },
            }
            app = build_agent(AgentSettings.model_validate(settings))
            self.engines.point(name, Path(folder))
            async with running(app, ANY_PORT):
                service = app[TRANSFER]
                await eventually(
                    lambda: any(e["complete"] for e in service.describe()["engines"]),
                    what=f"{name} registers",
                    seconds=30,
                )
                await eventually(
                    lambda: service.describe()["store"]["usable"], what="it works", seconds=30
                )
                yield service

    async def ask(self, name, prompt, **fields):
        answer = await self.engines.complete(name, prompt, **fields)
        return answer["choices"][0]["text"]

    async def fill(self, tier):
        """Have engine ``a`` compute prompts and store them: as a prefill, and as they come."""
        for label, write, fields in (
            ("prefill", "leased", {"kv_transfer_params": {"do_remote_decode": True}}),
            ("spoilt", "leased", {"kv_transfer_params": {"do_remote_decode": True}}),
            ("plain", "all", {}),
        ):
            name = f"{tier} {label}"
            prompt = random_prompt(name)
            async with self.agent("a", tier, write=write, put_seconds=60) as service:
                # The first answer is for the tokens, so that the second finds them cached.
                if write == "leased":
                    self.computed[name] = await self.ask("a", prompt)
                    self.cached[name] = await self.ask("a", prompt)
                await self._quiet(service)
                puts = service.describe()["store"]["puts"]
                await self.ask("a", prompt, max_tokens=1, **fields)
                await eventually(
                    lambda service=service, puts=puts: service.describe()["store"]["puts"] > puts,
                    what=f"{name} is stored",
                    seconds=60,
                )
                self.cached[name] = await self.ask("a", prompt)

    @staticmethod
    async def _quiet(service):
        """Wait until nothing is being stored; an agent begins with the leases still open."""

        def is_quiet():
            return not service.describe()["store"]["puts_under_way"]

        await eventually(is_quiet, what="all is stored", seconds=60)


@asynccontextmanager
async def _engine(engines, name):
    folder = engines.folder / name
    async with real_engine(
        ensure_model("tiny", Workspace.default()),
        name=f"store-{name}",
        model_name="tiny",
        extra_args=(*patient_transfer(name, folder), *CACHE),
    ) as engine:
        engines.engines[name] = engine
        yield
    del engines.engines[name]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage():
    """Yield the stage when ``a`` has stored its prompts and is gone, and ``b`` has started."""
    ensure_engine_env(Workspace.default())
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nk-")))
        (folder / "redis").mkdir()
        redis = RedisServer.start(folder / "redis")
        stack.callback(redis.end)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        engines = Engines(folder, {}, session)
        stage = Stage(folder, redis, engines)
        async with _engine(engines, "a"):
            for tier in TIERS:
                await stage.fill(tier)
            for label in ("slow", "gone"):
                stage.computed[label] = await stage.ask("a", random_prompt(label))
        await stack.enter_async_context(_engine(engines, "b"))
        yield stage


async def moved(stage):
    return await stage.engines.counter("b", MOVED)


async def events(stage, kind, outcome):
    """Count what the connector of ``b`` says of itself."""
    url = f"{stage.engines.engines['b'].url}/metrics"
    async with stage.engines.session.get(url) as response:
        lines = (await response.text()).splitlines()
    wanted = (f'kind="{kind}"', f'outcome="{outcome}"')
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith(EVENTS) and all(label in line for label in wanted)
    )


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("label", ["prefill", "plain"])
async def test_a_fresh_engine_goes_on_with_what_another_stored(stage, tier, label):
    name = f"{tier} {label}"
    async with stage.agent("b", tier) as service:
        before = await moved(stage)
        assert await stage.ask("b", random_prompt(name)) == stage.cached[name]
        assert await moved(stage) - before == transferable(LENGTH)
        store = service.describe()["store"]
        assert (store["hits"], store["pulls"], store["tier"]) == (1, 1, tier)


@pytest.mark.parametrize("tier", TIERS)
async def test_a_spoilt_entry_is_computed_instead(stage, tier):
    name = f"{tier} spoilt"
    with spoilt(stage, tier):
        async with stage.agent("b", tier) as service:
            before = await events(stage, "load", "corrupt")
            assert await stage.ask("b", random_prompt(name)) == stage.computed[name]
            assert service.describe()["store"]["pulls_failed"] == 1
            assert await events(stage, "load", "corrupt") == before + 1


@contextmanager
def spoilt(stage, tier):
    """Have all entries spoilt for a while; those that were read in it are gone after it."""
    flip(stage, tier)
    try:
        yield
    finally:
        flip(stage, tier)


def flip(stage, tier):
    """Flip a bit at the end of every entry, where the KV is."""
    if tier == "files":
        for path in (stage.folder / "store").glob("??/*.kvsp"):
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        return
    with stage.redis.client() as client:
        for key in client.keys("nearkv:kv:*"):
            end = client.strlen(key) - 1
            client.setrange(key, end, bytes([client.getrange(key, end, end)[0] ^ 1]))


async def test_a_store_that_hangs_costs_a_request_no_more_than_its_deadline(stage):
    async with stage.agent("b", "redis", lookup_seconds=0.3) as service:
        os.kill(stage.redis.process.pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(60):
                answer = await stage.ask("b", random_prompt("slow"))
            assert answer == stage.computed["slow"]
            store = service.describe()["store"]
            assert (store["usable"], store["lookups_failed"]) == (False, 1)
        finally:
            os.kill(stage.redis.process.pid, signal.SIGCONT)


async def test_a_store_that_is_gone_costs_a_request_nothing_but_the_computing(stage):
    (stage.folder / "another").mkdir()
    another = RedisServer.start(stage.folder / "another")  # the other tests need theirs
    try:
        async with stage.agent("b", "redis", url=another.url) as service:
            another.end()
            assert await stage.ask("b", random_prompt("gone")) == stage.computed["gone"]
            assert service.describe()["store"]["why"].startswith("no_path")
    finally:
        another.end()
