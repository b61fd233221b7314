"""Engines that failed: breakers by incarnation, and whom to ask when none is fit."""

import pytest

from nearkv.ingress.breaker import BreakerRules, BreakerState
from nearkv.ingress.fleet import EngineView
from nearkv.ingress.suspects import Suspects
from nearkv.state.model import EngineInfo, EngineState


@pytest.fixture
def suspects():
    return Suspects(BreakerRules(open_seconds=2.0))


def view(name, state=EngineState.READY):
    return EngineView(EngineInfo(id=name, incarnation="i", url="", state=state), "agent")


def names(views):
    return [v.info.id for v in views]


def test_neither_others_nor_other_incarnations_are_suspect(suspects):
    suspects.failed("e", "i1", 0.0)
    suspects.succeeded("other", "i1", 0.0)
    assert suspects.is_suspect("e", "i1", 1.0)
    assert not suspects.is_suspect("e", "i2", 1.0)
    assert not suspects.is_suspect("other", "i1", 1.0)
    assert suspects.state_of("e", "i1", 1.0) is BreakerState.OPEN
    assert suspects.state_of("e", "i1", 2.0) is BreakerState.HALF_OPEN
    assert suspects.state_of("e", "i2", 1.0) is BreakerState.CLOSED


def test_openings_and_closings_are_counted(suspects):
    suspects.failed("e", "i", 0.0)
    suspects.failed("e", "i", 0.1)
    assert suspects.begin("e", "i", 2.0)
    suspects.succeeded("e", "i", 2.1)
    assert suspects.changes == {"opened": 1, "closed": 1}


def test_what_no_longer_exists_is_forgotten_and_so_is_what_is_long_past(suspects):
    suspects.failed("gone", "i", 0.0)
    suspects.failed("here", "i", 0.0)
    suspects.forget({("here", "i")})
    assert not suspects.is_suspect("gone", "i", 1.0)
    assert suspects.is_suspect("here", "i", 1.0)
    for now in (3.0, 100.0):
        suspects.succeeded("here", "i", now)
    assert not suspects._of


def test_the_jitter_stretches_pauses():
    suspects = Suspects(BreakerRules(open_seconds=2.0), jitter=lambda: 1.2)
    suspects.failed("e", "i", 0.0)
    assert suspects.is_suspect("e", "i", 2.39)
    assert not suspects.is_suspect("e", "i", 2.4)


def test_while_any_engine_is_fit_all_are_to_choose_from(suspects):
    views = [view("a"), view("b"), view("c", EngineState.DRAINING)]
    suspects.failed("a", "i", 0.0)
    assert suspects.worth_asking(views, (), 1.0) is views


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (("draining", "unreachable", "asleep"), ["e1"]),
        (("draining", "asleep", "asleep"), ["e0"]),
        (("asleep", "starting", "draining"), ["e1"]),
        (("asleep", "asleep", "asleep"), ["e0", "e1", "e2"]),
    ],
)
def test_of_engines_that_are_not_ready_the_likeliest_are_asked(suspects, states, expected):
    views = [view(f"e{i}", EngineState(state)) for i, state in enumerate(states)]
    assert names(suspects.worth_asking(views, (), 0.0)) == expected


def test_an_open_breaker_is_better_than_an_engine_that_shuts_down(suspects):
    views = [view("a"), view("b", EngineState.DRAINING)]
    suspects.failed("a", "i", 0.0)
    assert names(suspects.worth_asking(views, (), 1.0)) == ["a"]
    assert names(suspects.worth_asking(views, {"a"}, 1.0)) == ["b"]


def test_of_open_breakers_the_one_that_closes_first_goes_on_trial_then_the_next(suspects):
    views = [view("a"), view("b"), view("c")]
    for name, now in (("a", 0.3), ("b", 0.1), ("c", 0.2)):
        suspects.failed(name, "i", now)
    asked = []
    for _ in views:
        (best,) = suspects.worth_asking(views, (), 1.0)
        assert suspects.begin(best.info.id, "i", 1.0)
        asked.append(best.info.id)
    assert asked == ["b", "c", "a"]
    assert names(suspects.worth_asking(views, (), 1.0)) == ["a", "b", "c"], "never nobody"
    suspects.succeeded("c", "i", 1.2)
    assert suspects.worth_asking(views, (), 1.2) is views
    assert not suspects.is_suspect("c", "i", 1.2)


def test_a_request_that_fails_everywhere_opens_no_breaker():
    suspects = Suspects(BreakerRules(failures=1))
    strikes = [suspects.failed(name, "i", 0.0, reached=True) for name in "ab"]
    assert suspects.is_suspect("a", "i", 0.0)
    for strike in strikes:
        suspects.retract(strike)
    assert not suspects.is_suspect("a", "i", 0.0)
    assert not suspects.is_suspect("b", "i", 0.0)
