"""P/D and pulls on real vLLM: the same tokens as one engine alone, over every path."""

import asyncio
import os
import random

import pytest
import pytest_asyncio

from tests.e2e.pd_stage import agents_and_ingress, corrupted, two_engines

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

BLOCK = 32
LENGTHS = (1, 31, 32, 33, 100, 640, 3000)
MOVED = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv'
"""What D took over. Its ``usage`` tells what was cached at P instead: that is vLLM's way."""
COMPUTED = MOVED.replace("external_kv", "local_compute")
"""What an engine computed of prompts."""
PATHS = ("shm", "tcp", "ucx", "nixl")


@pytest.fixture(scope="module", autouse=True)
def _only_loopback():
    """UCX and NIXL advertise every interface unless told otherwise."""
    before = os.environ.get("UCX_NET_DEVICES")
    os.environ["UCX_NET_DEVICES"] = "lo"
    yield
    if before is None:
        del os.environ["UCX_NET_DEVICES"]
    else:
        os.environ["UCX_NET_DEVICES"] = before


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(_only_loopback):
    async with two_engines() as running:
        yield running


def random_prompt(label, length):
    """Make a prompt that no other test uses."""
    numbers = random.Random(f"{label} {length}")
    return [numbers.randrange(10, 400) for _ in range(length)]


def words(label, count):
    numbers = random.Random(f"{label} {count}")
    return " ".join(f"w{numbers.randrange(10_000)}" for _ in range(count))


def pulls(statuses):
    """Count finished pulls by path, over all agents."""
    counted = {}
    for status in statuses:
        for pair in status["transfer"]["pairs"]:
            if pair["pulls"]:
                counted[pair["path"]] = counted.get(pair["path"], 0) + pair["pulls"]
    return counted


def transferable(length):
    return (length - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("path", PATHS)
async def test_pd_gives_the_tokens_of_one_engine(engines, path):
    async with agents_and_ingress(engines, path) as stack:
        for length in LENGTHS:
            prompt = random_prompt(path, length)
            before = await engines.counter("d", MOVED)
            headers, answer = await stack.post(
                "/v1/completions", {"prompt": prompt, "max_tokens": 8}
            )
            alone = await engines.complete("p", prompt)
            assert answer["choices"][0]["text"] == alone["choices"][0]["text"], length
            assert headers["x-nearkv-engine"] == "d"
            if transferable(length):
                assert headers["x-nearkv-prefill-engine"] == "p"
            moved = await engines.counter("d", MOVED) - before
            assert moved == transferable(length)
        wanted = sum(1 for length in LENGTHS if transferable(length))
        assert pulls(await stack.statuses()) == {path: wanted}


@pytest.mark.parametrize("path", PATHS)
async def test_pd_gives_the_same_chat(engines, path):
    async with agents_and_ingress(engines, path) as stack:
        for count in (1, 12, 40, 300):
            messages = [{"role": "user", "content": words(path, count)}]
            headers, answer = await stack.post(
                "/v1/chat/completions", {"messages": messages, "max_tokens": 8}
            )
            url = f"{engines.engines['p'].url}/v1/chat/completions"
            body = {"model": "tiny", "temperature": 0, "messages": messages, "max_tokens": 8}
            async with engines.session.post(url, json=body) as response:
                alone = await response.json()
            assert (
                answer["choices"][0]["message"]["content"]
                == alone["choices"][0]["message"]["content"]
            )
            assert headers["x-nearkv-engine"] == "d"


async def test_corrupting_what_is_pulled_changes_the_tokens(engines):
    """The tests above would fail if D did not use what it pulls."""
    async with agents_and_ingress(engines, "shm"):
        prompt = random_prompt("corrupt", 640)
        alone = await engines.complete("p", prompt)
        leg = await engines.complete(
            "p", prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True}
        )
        params = leg["kv_transfer_params"]
        with corrupted(engines.engines["p"]):
            wrong = await engines.complete("d", prompt, kv_transfer_params=params)
        assert wrong["choices"][0]["text"] != alone["choices"][0]["text"]


async def test_what_d_has_already_is_not_pulled_again(engines):
    async with agents_and_ingress(engines, "shm") as stack:
        prompt = random_prompt("partial", 640)
        await engines.complete("d", prompt[:320])
        before = await engines.counter("d", MOVED)
        await stack.post("/v1/completions", {"prompt": prompt, "max_tokens": 4})
        assert await engines.counter("d", MOVED) - before == transferable(640) - 320


async def test_leases_end_and_all_blocks_are_free(engines):
    async with agents_and_ingress(engines, "shm") as stack:
        for i in range(5):
            await stack.post("/v1/completions", {"prompt": random_prompt(f"free {i}", 200)})

        async def held():
            usage = [await engines.counter(name, "vllm:kv_cache_usage_perc") for name in "pd"]
            leases = [status["transfer"]["leases"] for status in await stack.statuses()]
            return any(usage) or any(any(each.values()) for each in leases)

        async with asyncio.timeout(60):
            while await held():  # noqa: ASYNC110 (they tell only when asked)
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("path", PATHS)
async def test_a_prefix_on_another_engine_is_pulled(engines, path):
    """The holder answers a request for one token, all of whose prompt it has.

    Neither engine prefills for others by role, so only a holder can be a source.
    """
    roles = {"p": "decode", "d": "decode"}
    pd = {"mode": "always", "min_tokens": BLOCK}
    async with agents_and_ingress(engines, path, roles=roles, pd=pd) as stack:
        for length in LENGTHS:
            prompt = random_prompt(f"pull {path}", length)
            await engines.complete("p", prompt)
            # With its own prefix cached, as D will have it: computed in other portions, the
            # last digits of bfloat16 differ, and near ties fall the other way.
            alone = await engines.complete("p", prompt)
            computed = await engines.counter("p", COMPUTED)
            moved = await engines.counter("d", MOVED)
            await stack.knows_blocks("p", prompt)
            headers, answer = await stack.post(
                "/v1/completions", {"prompt": prompt, "max_tokens": 8}
            )
            assert answer["choices"][0]["text"] == alone["choices"][0]["text"], length
            if transferable(length):
                assert headers["x-nearkv-reason"] == "pull"
                assert headers["x-nearkv-prefill-engine"] == "p"
                assert headers["x-nearkv-engine"] == "d"
                assert await engines.counter("d", MOVED) - moved == transferable(length)
                assert await engines.counter("p", COMPUTED) - computed <= BLOCK
