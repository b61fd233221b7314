"""Warm-up on real vLLM: prefixes loaded, found again by requests, written to the API server.

One engine lives for the whole module. It schedules by priority and takes one request at a time,
so that tests can keep it busy. Each test has an agent, an API server and documents of its own.
"""

import asyncio
import itertools
import random
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import aiohttp
import pytest
import pytest_asyncio

from nearkv.agent.app import NODE_STATE, WARMING, build_app
from nearkv.agent.kubernetes.joining import WORKER_STATUSES
from nearkv.agent.settings import AgentSettings
from nearkv.demo.engine_env import ensure_engine_env
from nearkv.demo.engines import engine_addresses, real_engine
from nearkv.demo.models import ensure_model
from nearkv.demo.workspace import Workspace
from nearkv.serving import running
from tests.agent.kubernetes.things import engine_pod
from tests.agent.worker_status.things import documented_rights
from tests.doubles.api_server import ApiServerDouble
from tests.doubles.api_server.store import ApiProblemError
from tests.integration.stack import ANY_PORT, eventually

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

BLOCK = 32
LENGTH = 1000
WHOLE = LENGTH // BLOCK * BLOCK
ARGUMENTS = (
    *("--num-gpu-blocks-override", "80", "--max-model-len", "2048"),
    *("--scheduling-policy", "priority", "--max-num-seqs", "1"),
)
DEADLINE = aiohttp.ClientTimeout(total=120)
SECONDS = 90
WORDS = ("signal", "box", "north", "of", "the", "old", "river", "bridge", "keeps", "two")


class Documents:
    """Documents that the engine has not seen before, whichever test comes first."""

    def __init__(self):
        self._numbers = itertools.count()

    def tokens(self, length=LENGTH):
        source = random.Random(next(self._numbers))
        return [source.randrange(10, 400) for _ in range(length)]

    def prose(self, words=300):
        source = random.Random(next(self._numbers))
        return " ".join(source.choice(WORDS) for _ in range(words))


class Engine:
    """A real engine, which can be killed and started where it was."""

    def __init__(self, stack, session):
        self._stack = stack
        self.session = session
        self.addresses = stack.enter_context(engine_addresses())
        self.documents = Documents()

    async def start(self):
        context = real_engine(
            ensure_model("tiny", Workspace.default()),
            name="warm",
            model_name="tiny",
            addresses=self.addresses,
            extra_args=ARGUMENTS,
        )
        self._process = (await self._stack.enter_async_context(context)).process

    async def kill(self):
        self._process.kill()
        await self._process.wait()

    async def ask(self, path="/v1/completions", **fields):
        """Ask for a token; returns how many tokens of the prompt were cached."""
        body = {"model": "tiny", "temperature": 0, "max_tokens": 1, **fields}
        url = self.addresses.url + path
        async with self.session.post(url, json=body, timeout=DEADLINE) as response:
            answer = await response.json()
            assert response.status == 200, answer
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def requests(self, state):
        """Return how many requests are ``running`` or ``waiting``."""
        async with self.session.get(f"{self.addresses.url}/metrics", timeout=DEADLINE) as response:
            lines = (await response.text()).splitlines()
        series = f"vllm:num_requests_{state}{{"
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(series))

    async def until(self, state, count):
        async with asyncio.timeout(SECONDS):
            while await self.requests(state) != count:  # noqa: ASYNC110 (asks another process)
                await asyncio.sleep(0.02)

    @asynccontextmanager
    async def busy(self):
        """Keep it busy, so that all that is asked waits, until the block ends."""
        prompt = self.documents.tokens(40)
        asking = asyncio.create_task(self.ask(prompt=prompt, max_tokens=2000, ignore_eos=True))
        try:
            await self.until("running", 1)
            yield
            assert not asking.done(), "it was not busy long enough"
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine():
    ensure_engine_env(Workspace.default())
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        made = Engine(stack, session)
        await made.start()
        yield made


class Site:
    """An agent over the engine, which is a pod of its node."""

    def __init__(self, engine, api, app, pod_uid):
        self.engine = engine
        self.api = api
        self.uid = pod_uid
        self.service = app[WARMING]
        self.state = app[NODE_STATE]
        self.url = ""

    async def call(self, method, path, **body):
        """Call the API of prefixes; returns the status and the answer."""
        options = {"json": body} if body else {}
        url = f"{self.url}/v1/prefixes{path}"
        async with self.engine.session.request(method, url, timeout=DEADLINE, **options) as answer:
            return answer.status, await answer.json()

    async def begin(self, prefix_id, **body):
        """Have a prefix loaded, which goes on behind this."""
        status, answer = await self.call("POST", f"/{prefix_id}/warm", **body)
        assert status == 202, answer

    async def warm(self, prefix_id, **body):
        """Have a prefix loaded, and wait until the engine's events say that it holds it."""
        await self.begin(prefix_id, **body)
        await self.settled()
        await eventually(
            lambda: prefix_id in dict(self.service.named_prefixes(self.uid)),
            what=f"{prefix_id} is held",
            seconds=SECONDS,
        )

    async def settled(self):
        await eventually(
            lambda: not self.service.under_way, what="all loads are over", seconds=SECONDS
        )

    async def target(self, prefix_id):
        """Return how loading a prefix into the engine stands."""
        _, shown = await self.call("GET", f"/{prefix_id}")
        (target,) = shown["engines"]
        return target

    async def is_written(self, prefixes):
        """Wait until the pod's WorkerStatus lists these prefixes."""

        def cached():
            with suppress(ApiProblemError):  # it is written a moment after the start
                found = self.api.get("WorkerStatus", "e")
                return found.get("status", {}).get("cachedPrefixes", [])
            return None

        await eventually(
            lambda: cached() == prefixes, what=f"cachedPrefixes is {prefixes}", seconds=SECONDS
        )

    async def is_followed(self):
        def is_live():
            tracker = self.state.trackers.get(self.uid)
            return tracker is not None and tracker.info.events == "live"

        await eventually(is_live, what="the engine is followed", seconds=SECONDS)


@asynccontextmanager
async def site_over(engine, scratch, **warming):
    async with ApiServerDouble() as api:
        rights = documented_rights()
        api.allow({name: [v for v, of in rights if of == name] for _, name in rights})
        settings = {
            "node": "n1",
            "listen": "127.0.0.1:0",
            "scrape": {"interval_seconds": 0.2},
            "gpu": {"enabled": "off"},
            "kubernetes": {"kubeconfig": str(api.write_kubeconfig(scratch / "kubeconfig"))},
            "worker_status": {"spread_seconds": 0.0, "seconds_per_write": 0.0},
            "warming": {"pause_seconds": 0.0, **warming},
        }
        app = build_app(AgentSettings.model_validate(settings))
        app[WORKER_STATUSES]._look_seconds = 0.05
        annotations = {"nearkv.io/port": str(engine.addresses.port)}
        pod = api.put(engine_pod("e", ip="127.0.0.1", annotations=annotations))
        site = Site(engine, api, app, pod["metadata"]["uid"])
        async with running(app, ANY_PORT) as address:
            site.url = address.url
            await site.is_followed()
            yield site


@pytest_asyncio.fixture(loop_scope="module")
async def site(engine, tmp_path):
    async with site_over(engine, tmp_path) as made:
        yield made


async def test_a_prefix_is_held_written_and_hit_until_it_is_evicted(engine, site):
    document = engine.documents.tokens()
    await site.warm("handbook", token_ids=document)
    target = await site.target("handbook")
    assert (target["state"], target["resident_ratio"]) == ("loaded", 1.0)
    assert (target["prompt_tokens"], target["cached_tokens"]) == (LENGTH, 0)
    await site.is_written(["handbook"])
    assert await engine.ask(prompt=document + [7] * 50) == WHOLE
    for _ in range(4):  # a cache of 2,560 tokens overflows
        await engine.ask(prompt=engine.documents.tokens())
    await site.is_written([])
    assert (await site.target("handbook"))["resident_ratio"] < 1.0
    await site.warm("handbook", token_ids=document)
    await site.is_written(["handbook"])
    assert await engine.ask(prompt=document + [8] * 50) == WHOLE


@pytest.mark.parametrize("form", ["prompt", "messages"])
async def test_a_text_is_loaded_as_the_requests_to_come_will_have_it(engine, site, form):
    text = engine.documents.prose()
    messages = [{"role": "system", "content": text}]
    await site.warm("text", **({"prompt": text} if form == "prompt" else {"messages": messages}))
    _, shown = await site.call("GET", "/text")
    whole = shown["tokens"] // BLOCK * BLOCK
    assert whole > 5 * BLOCK
    question = "What does the bridge keep?"
    if form == "prompt":
        cached = await engine.ask(prompt=f"{text} {question}")
    else:
        messages.append({"role": "user", "content": question})
        cached = await engine.ask("/v1/chat/completions", messages=messages)
    assert cached == whole


async def test_a_load_that_is_cancelled_is_dropped_by_the_engine(engine, site):
    document = engine.documents.tokens()
    async with engine.busy():
        await site.begin("draft", token_ids=document)
        await engine.until("waiting", 1)
        assert (await site.target("draft"))["state"] == "loading"
        assert (await site.call("DELETE", "/draft"))[0] == 200
        await engine.until("waiting", 0)
        assert (await site.call("GET", ""))[1] == {"prefixes": []}
    assert site.service.loads == {"cancelled": 1}
    assert await engine.ask(prompt=[*document, 7]) == 0


async def test_requests_that_come_later_go_before_a_load(engine, site):
    document, question = engine.documents.tokens(), engine.documents.tokens(200)
    async with engine.busy():
        await site.begin("background", token_ids=document)
        await engine.until("waiting", 1)
        asking = asyncio.create_task(engine.ask(prompt=question, max_tokens=64))
        await engine.until("waiting", 2)
    await asking
    assert site.service.loads == {}
    await site.settled()
    assert site.service.loads == {"loaded": 1}


async def test_a_mounted_folder_is_loaded_and_again_when_the_engine_starts_anew(engine, tmp_path):
    folder = tmp_path / "prompts"
    data = folder / "..2026_11_30"
    data.mkdir(parents=True)
    (folder / "..data").symlink_to(data)  # as Kubernetes mounts a ConfigMap
    text = engine.documents.prose()
    (data / "guide.txt").write_text(text)
    (data / "nowhere.json").write_text('{"prompt": "x", "group": "of another node"}')
    for name in ("guide.txt", "nowhere.json"):
        (folder / name).symlink_to(folder / "..data" / name)
    async with site_over(engine, tmp_path, folder=str(folder)) as site:
        await site.is_written(["guide"])
        await engine.kill()
        await site.is_written([])
        await engine.start()
        await site.is_written(["guide"])
        assert await engine.ask(prompt=f"{text} What does the bridge keep?") > 5 * BLOCK
        assert [prefix.id for prefix in site.service.book] == ["guide"]
