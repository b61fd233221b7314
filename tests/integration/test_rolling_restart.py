"""Three replicas restarted one after the other under load: hardly a hit is lost."""

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager

from tests.doubles.engine import EngineDouble, EngineDoubleConfig
from tests.integration.stack import eventually, running_agent, running_ingress

CONVERSATIONS = 48
TURNS = 5
CLIENTS = 8
SYSTEMS = 6
WORDS = "winter pass village bridge lamp window snow river mill road".split()  # noqa: SIM905 (shorter)


def text(seed, words):
    source = random.Random(seed)
    return " ".join(source.choice(WORDS) for _ in range(words))


def engine():
    config = EngineDoubleConfig(
        num_blocks=220,
        max_model_len=6000,
        prefill_tokens_per_second=60_000,
        decode_seconds_per_token=0.001,
    )
    return EngineDouble(config)


class Replicas:
    """Replicas behind a load balancer that takes turns among those that are ready."""

    def __init__(self, agent_url):
        self._agent_url = agent_url
        self._serving = []
        self._turn = 0
        self._stacks = {}
        self._busy = Counter()

    async def add(self):
        stack = AsyncExitStack()
        replica = await stack.enter_async_context(running_ingress(self._agent_url, policy="cost"))
        self._stacks[replica.url] = stack
        self._serving.append(replica)

    async def replace_first(self):
        """Take the oldest replica out of service, let it finish, and put a new one in."""
        old = self._serving.pop(0)
        await eventually(lambda: not self._busy[old.url], what="the old one is idle")
        await self._stacks.pop(old.url).aclose()
        await self.add()

    async def complete(self, prompt):
        self._turn += 1
        replica = self._serving[self._turn % len(self._serving)]
        self._busy[replica.url] += 1
        try:
            return await replica.complete(prompt)
        finally:
            self._busy[replica.url] -= 1

    async def close(self):
        for stack in self._stacks.values():
            await stack.aclose()


@asynccontextmanager
async def three_replicas():
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(engine()) for _ in range(3)]
        agent = await stack.enter_async_context(running_agent(*engines))
        replicas = Replicas(agent.url)
        stack.push_async_callback(replicas.close)
        for _ in range(3):
            await replicas.add()
        yield replicas


class Load:
    """Conversations that go on turn by turn, some at a time; counts what was cached."""

    def __init__(self, replicas):
        self.replicas = replicas
        self.prompt_tokens = self.cached_tokens = self.done = 0

    async def run(self):
        waiting = list(range(CONVERSATIONS))

        async def work():
            while waiting:
                await self.converse(waiting.pop(0))

        await asyncio.gather(*(work() for _ in range(CLIENTS)))

    async def converse(self, number):
        prompt = text(number % SYSTEMS, 400)
        for turn in range(TURNS):
            prompt += f" {text(1000 * number + turn, 60)}"
            response, body = await self.replicas.complete(prompt)
            assert response.status == 200, body
            prompt += body["choices"][0]["text"]
            usage = body["usage"]
            self.prompt_tokens += usage["prompt_tokens"]
            self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
            self.done += 1

    @property
    def hit_ratio(self):
        return self.cached_tokens / self.prompt_tokens


async def hit_ratio(*, restarts):
    async with three_replicas() as replicas:
        load = Load(replicas)
        running = asyncio.create_task(load.run())
        for number in range(restarts):
            at = CONVERSATIONS * TURNS * (number + 1) // (restarts + 1)
            await eventually(lambda at=at: load.done >= at, what="the load goes on", seconds=60)
            await replicas.replace_first()
        assert restarts == 0 or not running.done(), "the restarts were under load"
        await running
        return load.hit_ratio


async def test_a_rolling_restart_costs_at_most_a_twentieth_of_the_hits():
    calm = await hit_ratio(restarts=0)
    restarted = await hit_ratio(restarts=3)
    assert calm > 0.6, "there is something to lose"
    assert restarted >= 0.95 * calm
