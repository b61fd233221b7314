"""How often agents are asked."""

import pytest

from nearkv.extender.view.polling import CollectLimits, pause_after, plan_polls, within_descriptors

LIMITS = CollectLimits(wait_seconds=30.0, polls_per_second=100.0, max_connections=1000)


@pytest.mark.parametrize(
    ("agents", "wait", "cycle"),
    [(0, 30, 30), (1, 30, 30), (500, 30, 30), (1000, 30, 30), (2000, 15, 30), (10_000, 10, 100)],
)
def test_the_wait_follows_from_the_agents_and_the_bounds(agents, wait, cycle):
    plan = plan_polls(agents, LIMITS)
    assert (plan.wait_seconds, plan.cycle_seconds) == (wait, cycle)


@pytest.mark.parametrize("agents", [1, 100, 5000, 15_000])
def test_neither_connections_nor_polls_go_over_their_bounds(agents):
    plan = plan_polls(agents, LIMITS)
    assert agents / plan.cycle_seconds <= LIMITS.polls_per_second
    assert agents * plan.wait_seconds / plan.cycle_seconds <= LIMITS.max_connections
    assert agents / plan.pause_seconds <= 5 * LIMITS.polls_per_second


def pauses(agents, draw=1.0):
    plan = plan_polls(agents, LIMITS)
    return [pause_after(failures, plan, LIMITS, draw) for failures in range(1, 20)]


@pytest.mark.parametrize(("agents", "longest"), [(1, 10), (2000, 20), (15_000, 60)])
def test_pauses_grow_to_a_bound_that_grows_with_the_agents(agents, longest):
    assert pauses(agents)[:3] == [0.5, 1.0, 2.0]
    assert max(pauses(agents)) == pauses(agents)[-1] == longest
    assert pauses(agents, draw=0.0)[-1] == longest / 2


@pytest.mark.parametrize("descriptors", [0, 64, 300, 1024, 4096, 1 << 20])
def test_questions_leave_descriptors_to_others(descriptors):
    found = within_descriptors(CollectLimits(), descriptors)
    assert found.max_connections >= 1
    assert found.fetching >= 1
    assert found.max_connections + found.fetching <= max(descriptors - 256, 2)


def test_many_descriptors_change_nothing():
    assert within_descriptors(CollectLimits(), 1 << 20) == CollectLimits()
