"""Racing two legs: what becomes of the one that is not needed."""

import asyncio
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from nearkv.ingress.cost_planning import Expected
from nearkv.ingress.engine_failures import FailureKind
from nearkv.ingress.failure_settings import HedgeSettings
from nearkv.ingress.forwarding import Opened, RetryableFailureError
from nearkv.ingress.hedging import Hedger, Spare
from nearkv.ingress.keying import Job
from nearkv.ingress.metrics import IngressMetrics
from nearkv.ingress.planning import Plan
from nearkv.ingress.requests import GenerateRequest, PromptKind
from nearkv.ingress.routing import Decision, Rung


@dataclass
class Response:
    """An engine's answer; notes whether it was let go."""

    closed: bool = False

    def close(self):
        self.closed = True


@dataclass(eq=False)
class Leg:
    """A leg that ends when it is told to, well or not."""

    fails: bool = False
    closes: int = 0
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    response: Response = field(default_factory=Response)

    def close(self):
        self.closes += 1


async def ask(leg):
    leg.asked.set()
    await leg.go_on.wait()
    opened = Opened(leg.response, b"", whole=True)
    if leg.fails:
        raise RetryableFailureError("x", FailureKind.STATUS, opened)
    return opened


class Race:
    """One request, its first leg and a spare one."""

    def __init__(self, first, second):
        settings = HedgeSettings(after_ms=1.0, budget_ratio=1.0)
        self.hedger = Hedger(settings, IngressMetrics(CollectorRegistry()), lambda: 0.0)
        parsed = GenerateRequest(model="m", kind=PromptKind.NONE, stream=True)
        self.job = Job(None, "/", b"", parsed, "r", 0.0, ())
        self.first, self.second, self.failed = first, second, []
        plan = Plan(Decision("e", "why", Rung.FRESH))
        after_seconds = self.hedger.after_seconds(self.job, plan)
        spare = Spare(lambda: second, lambda leg, _: self.failed.append(leg))
        self.task = asyncio.create_task(
            self.hedger.open(self.job, first, after_seconds, ask, spare)
        )

    async def finish(self, *legs):
        """Let legs end in the same moment; returns the leg that serves."""
        await self.second.asked.wait()
        for leg in legs:
            leg.go_on.set()
        leg, opened = await self.task
        assert opened.response is leg.response
        assert not opened.response.closed
        return leg


async def test_of_two_answers_in_the_same_moment_one_is_let_go():
    first, second = Leg(), Leg()
    race = Race(first, second)
    assert await race.finish(second, first) is first
    assert second.response.closed
    assert (first.closes, second.closes) == (0, 1)


async def test_an_answer_that_comes_as_the_client_leaves_is_let_go():
    first, second = Leg(), Leg()
    race = Race(first, second)
    await second.asked.wait()
    first.go_on.set()
    await asyncio.sleep(0)  # it answers; who waits for it does not know yet
    race.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await race.task
    await asyncio.sleep(0)
    assert first.response.closed
    assert (first.closes, second.closes) == (0, 1), "the first one is the caller's to close"


async def test_the_leg_that_lost_is_off_the_books():
    first, second = Leg(), Leg()
    assert await Race(first, second).finish(second) is second
    assert (first.closes, second.closes) == (1, 0)


async def test_a_failure_beside_an_answer_is_noted_and_let_go():
    first, second = Leg(fails=True), Leg()
    race = Race(first, second)
    assert await race.finish(first, second) is second
    assert race.failed == [first]
    assert first.response.closed


async def test_two_failures_leave_the_first_to_the_caller():
    first, second = Leg(fails=True), Leg(fails=True)
    race = Race(first, second)
    with pytest.raises(RetryableFailureError) as failure:
        await race.finish(second, first)
    assert failure.value.opened.response is first.response
    assert not first.response.closed
    assert race.failed == [second]
    assert second.response.closed
    assert (first.closes, second.closes) == (0, 1)


async def test_a_caller_that_is_cancelled_ends_both():
    first, second = Leg(), Leg()
    race = Race(first, second)
    await second.asked.wait()
    race.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await race.task
    assert (first.closes, second.closes) == (0, 1)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others


@pytest.mark.parametrize(
    ("settings", "stream", "split", "seconds"),
    [
        ({"after_ms": 50.0}, True, None, 0.05),
        ({"after_ms": 50.0}, False, None, None),
        ({"after_ms": 50.0, "streamed_only": False}, False, None, 0.05),
        ({"after_ms": 50.0}, True, object(), None),
        ({}, True, None, None),
    ],
    ids=["streamed", "not streamed", "not streamed, and it does not matter", "pair", "off"],
)
async def test_what_may_be_late(settings, stream, split, seconds):
    hedger = Hedger(HedgeSettings(**settings), IngressMetrics(CollectorRegistry()), lambda: 0.0)
    parsed = GenerateRequest(model="m", kind=PromptKind.NONE, stream=stream)
    job = Job(None, "/", b"", parsed, "r", 0.0, ())
    plan = Plan(Decision("e", "why", Rung.FRESH), split=split)
    assert hedger.after_seconds(job, plan) == seconds


async def test_what_was_predicted_to_take_long_is_late_later():
    hedger = Hedger(HedgeSettings(after_ms=50.0), IngressMetrics(CollectorRegistry()), lambda: 0.0)
    parsed = GenerateRequest(model="m", kind=PromptKind.NONE, stream=True)
    job = Job(None, "/", b"", parsed, "r", 0.0, ())
    expected = Expected(first_token_ms=100.0, missing_tokens=10, undisturbed=True)
    plan = Plan(Decision("e", "why", Rung.FRESH), expected=expected)
    assert hedger.after_seconds(job, plan) == pytest.approx(0.3)
