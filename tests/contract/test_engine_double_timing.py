"""Queueing, prefill order, pre-emption and aborts of the double."""

import asyncio

import aiohttp
import pytest

from tests.doubles.engine import EngineDouble, EngineDoubleConfig
from tests.doubles.engine.block_cache import CacheScope
from tests.doubles.engine.ranks import QueueTimeoutError, Rank
from tests.doubles.engine.timing import TimeModel
from tests.doubles.engine.tokenizing import Prompt


def make_rank(**options):
    config = EngineDoubleConfig(
        **{"block_size": 4, "num_blocks": 9, "publish_events": False} | options
    )
    return Rank(config, index=0, times=TimeModel(config))


def submit(rank, start, length, *, produce=1):
    prompt = Prompt(list(range(start, start + length)))
    return rank.submit(prompt, reply_tokens=list(range(produce)), scope=CacheScope())


async def serve(rank, job, order=None):
    try:
        await rank.prefill(job)
        await rank.decode(job, len(job.reply_tokens) - 1)
        rank.finish(job, "length")
    finally:
        rank.finish(job)
    if order is not None:
        order.append(job)


async def eventually(condition, timeout_seconds=30.0):
    async with asyncio.timeout(timeout_seconds):
        while not condition():  # noqa: ASYNC110 - a rank offers no event for this
            await asyncio.sleep(0.001)


async def test_prefills_run_one_after_another_in_order():
    rank = make_rank(prefill_tokens_per_second=1000)
    jobs = [submit(rank, start, 8) for start in (0, 100, 200)]
    order = []
    tasks = [asyncio.create_task(serve(rank, job, order)) for job in jobs]
    await eventually(lambda: rank.statistics.running == 1)
    assert rank.statistics.waiting == 2
    await asyncio.gather(*tasks)
    assert order == jobs
    assert jobs[2].first_token_at - jobs[0].first_token_at >= 0.015


async def test_queued_equal_prompt_finds_the_first_one_cached():
    rank = make_rank(prefill_tokens_per_second=1000)
    jobs = [submit(rank, 0, 9), submit(rank, 0, 9)]
    await asyncio.gather(*(serve(rank, job) for job in jobs))
    assert [job.cached_tokens for job in jobs] == [0, 8]


async def test_request_waits_for_room():
    rank = make_rank()
    first, second = submit(rank, 0, 20), submit(rank, 100, 20)
    await rank.prefill(first)
    waiting = asyncio.create_task(serve(rank, second))
    await asyncio.sleep(0)
    assert (rank.statistics.running, rank.statistics.waiting) == (1, 1)
    rank.finish(first, "length")
    await asyncio.wait_for(waiting, 30)
    assert rank.statistics.finished["length"] == 2


async def test_wait_for_room_ends():
    rank = make_rank(queue_seconds=0.05)
    first, second = submit(rank, 0, 20), submit(rank, 100, 20)
    await rank.prefill(first)
    with pytest.raises(QueueTimeoutError):
        await serve(rank, second)
    assert (rank.statistics.running, rank.statistics.waiting) == (1, 0)


async def test_running_limit():
    rank = make_rank(max_num_seqs=1)
    first, second = submit(rank, 0, 4), submit(rank, 100, 4)
    await rank.prefill(first)
    waiting = asyncio.create_task(serve(rank, second))
    await asyncio.sleep(0)
    assert rank.statistics.running == 1
    rank.finish(first, "length")
    await asyncio.wait_for(waiting, 30)


async def test_preempted_request_completes():
    rank = make_rank(decode_seconds_per_token=0.001)
    jobs = [submit(rank, 0, 12, produce=16), submit(rank, 100, 12, produce=16)]
    await asyncio.wait_for(asyncio.gather(*(serve(rank, job) for job in jobs)), 30)
    assert rank.statistics.preemptions >= 1
    assert rank.statistics.generated_tokens == 32
    assert (rank.statistics.running, rank.cache.used_ratio) == (0, 0.0)


async def test_sleeping_engine_serves_after_wake_up():
    rank = make_rank()
    rank.sleep(1)
    waiting = asyncio.create_task(serve(rank, submit(rank, 0, 4)))
    await asyncio.sleep(0)
    assert rank.statistics.waiting == 1
    rank.wake_up()
    await asyncio.wait_for(waiting, 30)


async def test_client_that_leaves_aborts_its_request():
    config = EngineDoubleConfig(decode_seconds_per_token=10, publish_events=False)
    body = {"prompt": "hello", "stream": True}
    async with EngineDouble(config) as engine, aiohttp.ClientSession() as session:
        async with session.post(engine.url + "/v1/completions", json=body) as response:
            await response.content.readline()
            assert engine.ranks[0].statistics.running == 1
        await eventually(lambda: engine.record.aborted == 1)
        statistics = engine.ranks[0].statistics
        assert (statistics.running, statistics.finished["abort"]) == (0, 1)
        assert engine.ranks[0].cache.used_ratio == 0.0
