"""A short chaos run (the long one is ``make bench-chaos``), and the plan that it follows."""

import pytest

from tests.benchmarks.chaos.plan import Harm, Plan, Victim
from tests.benchmarks.chaos.running import chaos
from tests.benchmarks.reporting import shortfalls

VICTIMS = [
    *(Victim(f"e{i}", is_engine=True) for i in range(4)),
    *(Victim(f"agent{i}", mortal=i > 0) for i in range(2)),
    *(Victim(f"ingress{i}", mortal=i > 0) for i in range(2)),
]


def faults(seed, count, in_trouble=()):
    plan = Plan(VICTIMS, seed)
    return [plan.next(in_trouble) for _ in range(count)]


def test_the_same_seed_gives_the_same_run():
    assert faults(1, 50) == faults(1, 50) != faults(2, 50)


def test_everybody_is_hurt_in_every_way_but_the_immortal_are_not_killed():
    seen = {(fault.victim, fault.harm) for fault in faults(1, 1000)}
    immortal = {(name, Harm.KILL) for name in ("agent0", "ingress0")}
    assert seen == {(v.name, harm) for v in VICTIMS for harm in Harm} - immortal


@pytest.mark.parametrize(
    ("in_trouble", "spared"),
    [
        ({"e0", "e1"}, {"e0", "e1", "e2", "e3"}),
        ({"e0", "agent1"}, {"e0", "agent0", "agent1", "ingress0", "ingress1"}),
    ],
    ids=["half of the engines", "one beside the engines"],
)
def test_somebody_is_always_well(in_trouble, spared):
    assert not {fault.victim for fault in faults(1, 300, in_trouble)} & spared


def test_there_is_a_limit_on_troubles_at_once():
    assert faults(1, 1, {"e0", "e1", "agent1"}) == [None]


@pytest.mark.slow
@pytest.mark.timeout(150)
async def test_a_short_chaos_run_gives_no_wrong_answer_and_leaves_nothing_behind(tmp_path):
    figures, details = await chaos(tmp_path, seconds=10.0, seed=4)
    assert shortfalls("chaos", figures) == [], details
    assert figures["right_answers"] > 100
