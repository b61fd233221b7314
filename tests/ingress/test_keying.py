"""Prompts whose tokens are a guess: used while such guesses come true."""

import json
import tracemalloc

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from nearkv.ingress.fleet import EngineView, Fleet
from nearkv.ingress.hints import PrefixHints
from nearkv.ingress.keying import Job, KeyFinder
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.ledger import Ledger
from nearkv.ingress.metrics import IngressMetrics
from nearkv.ingress.parity import ParityCheck, ParityMode
from nearkv.ingress.parity_watch import ParityWatch
from nearkv.ingress.prefix_index import PrefixIndex
from nearkv.ingress.requests import parse_completion, parse_messages
from nearkv.ingress.routing import Policy
from nearkv.ingress.suspects import Suspects
from nearkv.ingress.tokens.memo import PromptKeys
from nearkv.serving import InFlight
from nearkv.state.model import EngineInfo, EngineState, EventsState

BODY = b'{"model": "tiny", "messages": [], "max_tokens": 1}'
INFO = EngineInfo(
    id="a",
    incarnation="i",
    url="http://a",
    models=("tiny",),
    block_size=16,
    state=EngineState.READY,
    events=EventsState.LIVE,
)


class Tokens:
    """A token service that knows every prompt, by guess or exactly."""

    def __init__(self, *, exact):
        self.exact = exact

    def recall(self, _request, _scope):
        return PromptKeys(32, (1, 2), "memo", exact=self.exact)


class Asking:
    """Finds keys of one kind of prompt, and hears what engines report."""

    def __init__(self, *, exact=False):
        fleet = Fleet(PrefixIndex(limit_bytes=1 << 20))
        fleet.add_static_engine("a", "http://a")
        fleet.engines["a"].info = INFO
        self.know = Knowledge(
            fleet=fleet,
            tokens=Tokens(exact=exact),
            hints=PrefixHints(),
            ledger=Ledger(),
            parity=ParityCheck(),
            suspects=Suspects(),
            in_flight=InFlight(),
        )
        metrics = IngressMetrics(CollectorRegistry())
        self._finder = KeyFinder(self.know, metrics, Policy.PREFIX_FIRST, lambda: 0.0)
        self._watch = ParityWatch(self.know.parity, metrics, self.know.guesses)
        self._views = list(fleet.engines.values())

    async def ask(self, body=BODY):
        job = Job(None, "/v1/messages", body, parse_messages(body), "r", 0.0, self._views)
        await self.find(job)
        return job

    async def find(self, job):
        await self._finder.find(job)

    async def report(self, reported, times):
        for _ in range(times):
            job = await self.ask()
            if job.prompt is not None:
                self._watch.compare(
                    INFO, predicted=16, reported=reported, guessed_as=job.guessed_as
                )


async def test_a_guess_is_used_until_it_does_not_come_true():
    asking = Asking()
    await asking.report(16, times=20)
    assert (await asking.ask()).prompt is not None
    await asking.report(0, times=20)
    assert (await asking.ask()).prompt is None
    assert asking.know.parity.mode("a", "i") is ParityMode.EXACT, "the engine is not to blame"


async def test_guesses_that_come_true_again_are_used_again():
    asking = Asking()
    await asking.report(0, times=20)
    asked = [await asking.ask() for _ in range(32)]
    assert sum(job.prompt is not None for job in asked) == 2
    await asking.report(16, times=16 * 70)
    assert all([(await asking.ask()).prompt is not None for _ in range(5)])


@pytest.mark.parametrize("reported", [0, 16])
async def test_exact_tokens_are_the_engine_s_to_keep(reported):
    asking = Asking(exact=True)
    await asking.report(reported, times=20)
    job = await asking.ask()
    assert (job.prompt is not None, job.guessed_as) == (True, "")
    assert (asking.know.parity.mode("a", "i") is ParityMode.EXACT) is bool(reported)


async def test_long_cache_salts_take_no_memory():
    asking = Asking(exact=True)
    tracemalloc.start()
    try:
        for number in range(20):
            salt = f"{number}" + "s" * (1 << 20)
            await asking.ask(json.dumps({"messages": [], "cache_salt": salt}).encode())
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 4 << 20


@pytest.mark.parametrize(
    ("longest", "keyed"), [((8, 8), False), ((8, 16), True), ((8, None), True)]
)
async def test_no_keys_are_made_of_more_token_ids_than_any_engine_takes(longest, keyed):
    asking = Asking(exact=True)
    body = json.dumps({"prompt": list(range(10))}).encode()
    views = [
        EngineView(msgspec.structs.replace(INFO, max_model_len=most), "agent") for most in longest
    ]
    job = Job(None, "/v1/completions", body, parse_completion(body), "r", 0.0, views)
    await asking.find(job)
    assert (job.prompt is not None) is keyed
