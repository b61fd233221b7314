"""Background tasks: they are begun anew, but not for ever, and nothing outlives the block."""

import asyncio
from contextlib import suppress

import aiohttp
import pytest
from aiohttp import web

from nearkv.health import Readiness, add_health_routes, create_registry
from nearkv.serving import running
from nearkv.settings import Address
from nearkv.supervising import Job, RestartLimits, RestartPlan, TaskFailureCollector, supervised
from tests.integration.stack import eventually

AT_ONCE = RestartLimits(max_restarts=3, first_pause_seconds=0.0)
LIMITS = RestartLimits()


class Failing:
    """A task that fails so many times, then runs on."""

    def __init__(self, times):
        self.times = times
        self.starts = 0
        self.runs = asyncio.Event()
        self.ended = asyncio.Event()

    async def run(self):
        self.starts += 1
        if self.starts <= self.times:
            raise ValueError("a defect")
        self.runs.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()


async def test_a_task_that_fails_is_begun_anew_and_counted():
    readiness, task, other = Readiness(), Failing(3), Failing(0)
    jobs = [Job("task", task.run), Job("other", other.run)]
    async with supervised(jobs, readiness, check="working", limits=AT_ONCE):
        await asyncio.wait_for(task.runs.wait(), 30)
        await asyncio.wait_for(other.runs.wait(), 30)
        assert readiness.is_ready
        assert readiness.task_failures == {"task": 3, "other": 0}
        assert (task.starts, other.starts) == (4, 1)


async def test_one_that_fails_over_and_over_ends_readiness_and_liveness():
    readiness, task, other = Readiness(), Failing(99), Failing(0)
    jobs = [Job("task", task.run), Job("other", other.run)]
    async with supervised(jobs, readiness, check="working", limits=AT_ONCE):
        await eventually(lambda: readiness.given_up, what="it gives up")
        assert not readiness.is_ready
        why = "the task task failed too often: ValueError('a defect')"
        assert readiness.given_up == readiness.checks["working"].why == why
        assert task.starts == 4
        # What others say of the check does not bring the process back.
        readiness.set("working", ok=True)
        assert not readiness.is_ready
        assert other.runs.is_set()
        assert not other.ended.is_set()


async def test_a_task_that_ends_by_itself_is_left_alone():
    readiness, starts = Readiness(), []

    async def once():
        starts.append(1)

    async with supervised([Job("once", once)], readiness, check="working", limits=AT_ONCE):
        for _ in range(20):
            await asyncio.sleep(0)
    assert starts == [1]
    assert readiness.is_ready


async def test_jobs_end_with_the_block():
    task = Failing(0)
    async with supervised([Job("task", task.run)], Readiness(), check="working"):
        await asyncio.wait_for(task.runs.wait(), 30)
    assert task.ended.is_set()


async def test_one_that_waits_for_its_next_start_ends_with_the_block_too():
    task = Failing(9)
    limits = RestartLimits(first_pause_seconds=3600.0)
    with suppress(TimeoutError):
        async with (
            asyncio.timeout(30),
            supervised([Job("task", task.run)], Readiness(), check="working", limits=limits),
        ):
            await eventually(lambda: task.starts == 1, what="it began")
            return
    pytest.fail("it did not end")


def test_pauses_grow_and_are_spread():
    plan = RestartPlan(LIMITS, draw=lambda: 0.5)
    assert [plan.failed(float(now)) for now in range(6)] == [1.0, 2.0, 4.0, 8.0, 16.0, None]
    assert RestartPlan(LIMITS, draw=lambda: 0.0).failed(0.0) == 0.5
    assert RestartPlan(LIMITS, draw=lambda: 1.0).failed(0.0) == 1.5


def test_failures_of_long_ago_do_not_count():
    plan = RestartPlan(LIMITS, draw=lambda: 0.5)
    # One in two minutes and a bit is never six in ten minutes.
    assert all(plan.failed(121.0 * number) for number in range(100))
    # One in less is.
    often = RestartPlan(LIMITS, draw=lambda: 0.5)
    assert None in [often.failed(100.0 * number) for number in range(6)]


async def test_the_kubelet_and_prometheus_see_it():
    readiness = Readiness()
    registry = create_registry("agent")
    registry.register(TaskFailureCollector("agent", readiness))
    app = web.Application()
    add_health_routes(app, readiness, registry=registry)
    async with running(app, Address("127.0.0.1", 0)) as at, aiohttp.ClientSession() as client:

        async def get(path):
            async with client.get(at.url + path) as answer:
                return answer.status, await answer.text()

        assert await get("/livez") == (200, "ok")
        readiness.task_failures["links"] += 2
        readiness.give_up("the task links failed too often: OSError()")
        for path in ("/livez", "/readyz", "/healthz"):
            status, text = await get(path)
            assert (status, "the task links failed too often" in text) == (503, True)
        _, text = await get("/metrics")
        assert 'nearkv_agent_background_task_failures_total{task="links"} 2.0' in text
