"""Background tasks: defects show, and nothing outlives the block."""

import asyncio

from nearkv.health import Readiness
from nearkv.supervising import supervised


async def fail():
    raise ValueError("a defect")


async def test_a_defect_fails_the_check_and_leaves_the_others_running():
    readiness, running = Readiness(), asyncio.Event()

    async def work():
        running.set()
        await asyncio.Event().wait()

    async with supervised([fail(), work()], readiness, check="working"):
        await asyncio.wait_for(running.wait(), 5)
        assert not readiness.is_ready
        assert readiness.checks["working"].why == "a task failed: ValueError('a defect')"


async def test_jobs_end_with_the_block():
    ended = asyncio.Event()

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with supervised([work()], Readiness(), check="working"):
        await asyncio.sleep(0)  # lets the job begin
    assert ended.is_set()
