"""What changes of pods mean for the engines in them."""

import pytest
from msgspec.structs import replace

from nearkv.agent.kubernetes.pod_engines import PodRules
from nearkv.agent.kubernetes.roster import MAX_ENGINES, PodRoster
from tests.agent.kubernetes.things import pod


@pytest.fixture
def roster():
    return PodRoster(PodRules(), node="n1")


def told(steps):
    """Return steps in short: what is there after them, by UID."""
    return [(step.before and step.before.uid, step.after and step.after.uid) for step in steps]


def test_a_pod_becomes_an_engine_once_it_runs(roster):
    assert roster.put(pod(phase="Pending", ip="")) == []
    assert roster.waiting == {"u-e": "Pending"}
    assert told(roster.put(pod())) == [(None, "u-e")]
    assert roster.waiting == {}
    assert roster.put(pod()) == []


def test_readiness_and_leaving_are_steps(roster):
    roster.put(pod(ready=False))
    (step,) = roster.put(pod())
    assert (step.before.is_ready, step.after.is_ready) == (False, True)
    (step,) = roster.put(pod(leaving=True))
    assert step.after.is_leaving
    assert told(roster.drop(pod())) == [("u-e", None)]
    assert roster.engines == {}


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_has_ended_is_no_engine(roster, phase):
    roster.put(pod())
    assert told(roster.put(pod(phase=phase))) == [("u-e", None)]
    assert roster.put(pod(phase=phase)) == []


def test_another_address_is_another_place_of_the_same_engine(roster):
    roster.put(pod())
    (step,) = roster.put(pod(ip="10.0.0.8"))
    assert step.before.spec.url != step.after.spec.url


def test_an_engine_stays_while_its_pod_cannot_be_read(roster):
    roster.put(pod())
    known = roster.engines["u-e"].spec
    assert roster.put(pod(annotations={"nearkv.io/port": "x"})) == []
    assert "nearkv.io/port" in roster.problems["u-e"]
    (step,) = roster.put(pod(ip="", leaving=True))
    assert (step.after.spec, step.after.is_leaving) == (known, True)
    assert roster.problems == {}


def test_a_pod_that_was_never_readable_is_a_problem_and_no_engine(roster):
    assert roster.put(pod(annotations={"nearkv.io/port": "x"})) == []
    assert list(roster.problems) == ["u-e"]
    assert roster.pod_of("u-e") == "default/e"
    assert told(roster.put(pod())) == [(None, "u-e")]
    assert roster.problems == {}


def test_a_label_that_is_taken_away_ends_it(roster):
    roster.put(pod())
    assert told(roster.put(pod(labels={"app": "x"}))) == [("u-e", None)]


def test_a_list_is_complete(roster):
    roster.replace([pod("a"), pod("b")])
    assert told(roster.replace([pod("b"), pod("c")])) == [("u-a", None), (None, "u-c")]
    assert set(roster.engines) == {"u-b", "u-c"}
    assert roster.uid_of("default", "a") is None


def test_all_pods_of_the_node_have_uids_and_a_namesake_takes_over(roster):
    roster.put(pod("web", labels={"app": "web"}))
    assert roster.uid_of("default", "web") == "u-web"
    roster.put(pod("e"))
    first = pod("e")
    roster.put(replace(first, metadata=replace(first.metadata, uid="u-2")))
    roster.drop(pod("e"))
    assert roster.uid_of("default", "e") == "u-2"


def test_pods_elsewhere_and_configured_engines_are_left_alone():
    roster = PodRoster(PodRules(), node="n1", taken=["u-e"])
    assert roster.put(pod("e")) == []
    assert roster.put(pod("far", node="n2")) == []
    assert roster.engines == {}


def test_the_number_of_engines_is_bounded(roster):
    roster.replace([pod(f"e{number}") for number in range(MAX_ENGINES + 2)])
    assert len(roster.engines) == MAX_ENGINES
    assert len(roster.problems) == 2
    assert "limit" in next(iter(roster.problems.values()))
