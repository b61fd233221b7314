"""Which peer is probed next, and when."""

import pytest

from nearkv.agent.probes.peers import Peer
from nearkv.agent.probes.planning import Measured, ProbePlan

A, B, C = (Peer(name, f"http://{name}") for name in "abc")


@pytest.fixture
def plan():
    return ProbePlan(interval_seconds=20.0, fresh_seconds=30.0, spread=lambda: 1.0)


def chosen(plan, by_class, now, **measured):
    peer = plan.choose(by_class, lambda node: measured.get(node, Measured()), now)
    return peer and peer.node


def test_a_peer_never_measured_comes_first(plan):
    assert chosen(plan, {"x": [A, B]}, 100.0, a=Measured(50.0)) == "b"


def test_the_class_measured_longest_ago_comes_first(plan):
    classes = {"x": [A, B], "y": [C]}
    last = {"a": Measured(0.0), "b": Measured(60.0), "c": Measured(40.0)}
    assert chosen(plan, classes, 100.0, **last) == "c"
    last["c"] = Measured(65.0)
    assert chosen(plan, classes, 100.0, **last) == "a"


def test_what_is_fresh_is_left_alone(plan):
    assert chosen(plan, {"x": [A]}, 100.0, a=Measured(71.0)) is None
    assert chosen(plan, {"x": [A]}, 101.0, a=Measured(71.0)) == "a"
    assert chosen(plan, {}, 0.0) is None


def test_a_change_is_confirmed_before_all_else(plan):
    last = {"a": Measured(99.0, is_suspect=True)}
    assert chosen(plan, {"x": [A, B]}, 100.0, **last) == "a"
    assert plan.pause_seconds(3.0, suspects=True) == 4.0


def test_a_peer_that_refuses_is_asked_again_soon_but_not_over_and_over(plan):
    plan.refused("a", 0.0)
    assert chosen(plan, {"x": [A, B]}, 1.0, b=Measured(0.0)) is None
    assert chosen(plan, {"x": [A]}, 3.0) == "a"
    plan.refused("a", 3.0)
    assert chosen(plan, {"x": [A]}, 8.0) is None
    assert chosen(plan, {"x": [A]}, 9.0) == "a"


def test_a_peer_that_was_put_off_is_waited_for(plan):
    assert plan.idle_pause_seconds(0.0, 1.0) == 20.0
    plan.refused("a", 0.0)
    assert plan.idle_pause_seconds(0.0, 1.0) == 2.0
    assert plan.idle_pause_seconds(5.0, 1.0) == 5.0
    assert plan.idle_pause_seconds(0.0, 3.0) == 20.0


def test_a_peer_that_fails_is_asked_ever_more_seldom(plan):
    pauses = []
    now = 0.0
    for _ in range(9):
        plan.failed("a", now)
        began = now
        while chosen(plan, {"x": [A]}, now) is None:
            now += 15.0
        pauses.append(now - began)
    assert pauses[:3] == [30.0, 60.0, 120.0]
    assert pauses[-2:] == [1800.0, 1800.0]
    plan.succeeded("a")
    plan.failed("a", now)
    assert chosen(plan, {"x": [A]}, now + 30.0) == "a"


def test_the_budget_can_make_pauses_longer_but_not_shorter(plan):
    assert plan.pause_seconds(0.0, suspects=False) == 20.0
    assert plan.pause_seconds(50.0, suspects=False) == 50.0
    assert plan.busy_pause_seconds() == 1.0


def test_after_a_refusal_another_peer_is_asked_soon_unless_all_refuse(plan):
    pauses = []
    for node in "abcdefg":
        plan.refused(node, 0.0)
        pauses.append(plan.refused_pause_seconds(0.0))
    assert pauses[0] == pytest.approx(20.0 / 3)
    assert pauses[-1] == 80.0
    assert plan.refused_pause_seconds(100.0) == 100.0
    plan.succeeded("a")
    plan.refused("b", 0.0)
    assert plan.refused_pause_seconds(0.0) == pytest.approx(20.0 / 3)


def test_records_of_peers_that_are_gone_go_too(plan):
    plan.failed("a", 0.0)
    chosen(plan, {"x": [B]}, 1.0)
    assert chosen(plan, {"x": [A]}, 2.0) == "a"
