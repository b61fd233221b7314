"""After a failure before the first byte: who is to blame, and whether to try again."""

import asyncio
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from nearkv.ingress.breaker import BreakerRules
from nearkv.ingress.engine_failures import FailureKind
from nearkv.ingress.fleet import EngineView
from nearkv.ingress.forwarding import RetryableFailureError
from nearkv.ingress.keying import Job
from nearkv.ingress.metrics import IngressMetrics
from nearkv.ingress.requests import GenerateRequest, PromptKind
from nearkv.ingress.retry_budget import BudgetRules, RetryBudget
from nearkv.ingress.retrying import Retrying
from nearkv.ingress.suspects import Suspects
from nearkv.state.model import EngineInfo, EngineState

UNREACHABLE, BROKEN, STATUS, SILENT, LOST = FailureKind
ENGINES = {
    name: EngineView(EngineInfo(id=name, incarnation="i", url="", state=EngineState.READY), "x")
    for name in "abcdefghij"
}


class World:
    """One replica's retrying, with a clock that stands still."""

    def __init__(self, *, retries=1, budget=1.0, failures=1, pause_seconds=0.0):
        self.suspects = Suspects(BreakerRules(failures=failures))
        self.retrying = Retrying(
            suspects=self.suspects,
            budget=RetryBudget(BudgetRules(ratio=budget, floor_per_second=0.0)),
            metrics=IngressMetrics(CollectorRegistry()),
            retries=retries,
            pause_seconds=pause_seconds,
            now=lambda: 0.0,
            draw=lambda: 0.5,
        )

    def job(self):
        job = Job(
            web_request=None,
            path="/v1/completions",
            body=b"",
            parsed=GenerateRequest(model="m", kind=PromptKind.NONE),
            request_id="r",
            arrived_at=0.0,
            views=(),
        )
        self.retrying.count(job)
        return job

    def fail(self, job, engine, kind):
        """Fail at an engine; returns whether another try is allowed."""
        job.tried.add(engine)
        self.retrying.blame(job, ENGINES[engine], kind)
        return self.retrying.may_retry(job, RetryableFailureError("x", kind))

    def suspected(self):
        return {name for name in ENGINES if self.suspects.is_suspect(name, "i", 0.0)}


@pytest.mark.parametrize("kind", [BROKEN, STATUS, SILENT, LOST])
def test_what_an_engine_had_is_tried_as_often_as_set(kind):
    world = World(retries=2)
    job = world.job()
    world.job()
    assert [world.fail(job, engine, kind) for engine in "abc"] == [True, True, False]


def test_engines_that_know_nothing_of_it_do_not_count():
    world = World(budget=0.0)
    job = world.job()
    tries = [world.fail(job, engine, UNREACHABLE) for engine in "abcdefghi"]
    assert tries == [True] * 8 + [False]
    assert world.suspected() == set("abcdefghi")


def test_without_budget_there_is_no_retry():
    world = World(budget=0.5)
    tries = [world.fail(world.job(), "a", STATUS) for _ in range(6)]
    assert tries == [False, True, False, True, False, True]


def test_a_request_that_fails_on_two_engines_is_to_blame_itself():
    world = World(retries=5)
    job = world.job()
    world.fail(job, "a", STATUS)
    assert world.suspected() == {"a"}
    world.fail(job, "b", BROKEN)
    assert world.suspected() == set()
    world.fail(job, "c", STATUS)
    assert world.suspected() == set()


def test_an_engine_that_could_not_be_reached_is_to_blame_whatever_else_happens():
    world = World()
    job = world.job()
    world.fail(job, "a", UNREACHABLE)
    world.fail(job, "b", STATUS)
    assert world.suspected() == {"a", "b"}
    world.fail(job, "c", STATUS)
    assert world.suspected() == {"a"}


def test_the_same_request_counts_once_against_an_engine():
    world = World(failures=2, retries=5)
    job = world.job()
    world.fail(job, "a", STATUS)
    world.fail(job, "a", STATUS)
    assert world.suspected() == set()
    world.fail(world.job(), "a", STATUS)
    assert world.suspected() == {"a"}


@pytest.mark.parametrize(
    ("kind", "status", "again"),
    [
        (UNREACHABLE, None, True),
        (STATUS, 503, True),
        (STATUS, 500, False),
        (BROKEN, None, False),
        (SILENT, None, False),
    ],
)
def test_the_only_engine_is_asked_again_where_it_had_not_begun(kind, status, again):
    world = World()
    job = world.job()
    world.fail(job, "a", kind)
    opened = status and SimpleNamespace(response=SimpleNamespace(status=status))
    failure = RetryableFailureError("x", kind, opened)

    def same_again():
        return asyncio.run(world.retrying.same_again(job, "a", failure))

    assert same_again() is again
    assert ("a" in job.tried) is not again
    assert same_again() is False, "once"


async def test_a_client_that_leaves_in_the_pause_lets_the_engine_s_answer_go():
    closed = []
    world = World(pause_seconds=60.0)
    job = world.job()
    world.fail(job, "a", STATUS)
    answer = SimpleNamespace(status=503, close=lambda: closed.append("a"))
    failure = RetryableFailureError("x", STATUS, SimpleNamespace(response=answer))
    pause = asyncio.create_task(world.retrying.same_again(job, "a", failure))
    await asyncio.sleep(0)
    pause.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pause
    assert closed == ["a"]
