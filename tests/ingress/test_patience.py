"""Waiting for first bytes: what ends a wait early, and what does not."""

import pytest

from nearkv.ingress.engine_failures import FailureKind
from nearkv.ingress.fleet import EngineView, Fleet
from nearkv.ingress.patience import Patience
from nearkv.ingress.patience_rules import PatienceRules
from nearkv.ingress.prefix_index import PrefixIndex
from nearkv.ingress.suspects import Suspects
from nearkv.ingress.upstream.answer import Answer
from nearkv.state.model import EngineInfo, EngineState

RULES = PatienceRules(unreachable_seconds=10.0, least_seconds=30.0, factor=10.0)
READY, UNREACHABLE = EngineState.READY, EngineState.UNREACHABLE


class World:
    """Engines a and b, a clock that is set by hand, and one wait for a."""

    def __init__(self, a=READY, b=READY):
        self.now = 0.0
        self.fleet = Fleet(PrefixIndex())
        self.suspects = Suspects()
        self.set(a=a, b=b)
        self.patience = Patience(RULES, self.fleet, self.suspects, lambda: self.now)
        self.tried = set()

    def set(self, **states):
        for name, state in states.items():
            info = EngineInfo(id=name, incarnation="i", url="", state=state)
            self.fleet.engines[name] = EngineView(info, "agent")

    async def ended_after(self, *seconds, predicted_ms=None):
        """Look at these times; return why the wait ended, and when."""
        views = list(self.fleet.engines.values())
        wait = self.patience.begin("a", views, self.tried, predicted_ms=predicted_ms)
        for self.now in seconds:
            wait.answer = Answer(None)
            self.patience.look()
            if wait.why is not None:
                with pytest.raises(TimeoutError):
                    await wait.answer.begun()
                return wait.why, self.now
        self.patience.end(wait)
        assert self.patience.count == 0
        return None


async def test_an_engine_that_its_agent_cannot_reach_for_long_loses_the_request():
    world = World(a=UNREACHABLE)
    assert await world.ended_after(0.0, 9.9, 10.0) == (FailureKind.LOST, 10.0)


async def test_an_engine_that_is_reached_again_keeps_it():
    world = World(a=UNREACHABLE)
    assert await world.ended_after(0.0, 9.0) is None
    world.set(a=READY)
    assert await world.ended_after(9.5, 20.0, 1000.0) is None


@pytest.mark.parametrize(
    ("predicted_ms", "end"), [(100.0, (FailureKind.SILENT, 31.0)), (None, None)]
)
async def test_only_what_was_predicted_can_be_late(predicted_ms, end):
    assert await World().ended_after(0.0, 30.9, 31.0, predicted_ms=predicted_ms) == end


@pytest.mark.parametrize("other", [state for state in EngineState if state is not READY])
async def test_without_another_ready_engine_it_is_waited_for(other):
    assert await World(a=UNREACHABLE, b=other).ended_after(0.0, 100.0, predicted_ms=1.0) is None


async def test_an_engine_that_failed_is_no_other_engine():
    world = World(a=UNREACHABLE)
    world.suspects.failed("b", "i", 99.0)
    assert await world.ended_after(0.0, 100.0) is None
    world.tried.add("b")
    assert await world.ended_after(200.0, 300.0) is None
    world.tried.clear()
    assert await world.ended_after(400.0, 500.0) == (FailureKind.LOST, 500.0)


async def test_a_wait_that_has_not_begun_or_is_over_is_left_alone():
    world = World(a=UNREACHABLE)
    wait = world.patience.begin("a", list(world.fleet.engines.values()), ())
    for world.now in (0.0, 100.0):
        world.patience.look()
    assert wait.why is None
