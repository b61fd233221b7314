"""Conditions: what they say, and when they change."""

import pytest

from nearkv.agent.worker_status.conditions import ConditionBook, Verdict, judge
from nearkv.agent.worker_status.observing import EngineFacts
from nearkv.freshness import FreshnessLimits
from nearkv.state.model import EngineState, EventsState

SERVING = {
    "state": EngineState.READY,
    "events": EventsState.LIVE,
    "metrics_age_seconds": 1.0,
    "can_transfer": True,
}


def judged(used_ratio=0.5, *, was_pressed=False, **fields):
    facts = EngineFacts(role="both", group="g", **{**SERVING, **fields})
    found = judge(facts, FreshnessLimits(), used_ratio=used_ratio, was_pressed=was_pressed)
    return {verdict.type: (verdict.status, verdict.reason) for verdict in found}


def test_an_engine_that_serves():
    assert judged() == {
        "Ready": ("True", "Serving"),
        "Fresh": ("True", "ReadingsFresh"),
        "CacheParity": ("True", "EventsComplete"),
        "TransferReady": ("True", "Registered"),
        "KVPressure": ("False", "EnoughFree"),
    }


def test_an_engine_that_never_answered():
    never = {"state": None, "events": None, "metrics_age_seconds": None, "can_transfer": False}
    assert judged(None, **never) == {
        "Ready": ("False", "NotAnswering"),
        "Fresh": ("Unknown", "NeverRead"),
        "CacheParity": ("Unknown", "NeverRead"),
        "TransferReady": ("Unknown", "NeverRead"),
        "KVPressure": ("Unknown", "NotRead"),
    }


@pytest.mark.parametrize(
    ("fields", "kind", "said"),
    [
        ({"state": EngineState.ASLEEP}, "Ready", ("False", "Asleep")),
        ({"state": EngineState.DRAINING}, "Ready", ("False", "Draining")),
        ({"state": EngineState.UNREACHABLE}, "Ready", ("False", "Unreachable")),
        ({"state": EngineState.STARTING}, "Ready", ("False", "Starting")),
        (
            {"state": EngineState.STARTING, "is_pod_ready": False},
            "Ready",
            ("False", "PodNotReady"),
        ),
        ({"metrics_age_seconds": 10.0}, "Fresh", ("False", "ReadingsAged")),
        ({"metrics_age_seconds": 40.0}, "Fresh", ("False", "ReadingsOld")),
        ({"events": EventsState.PARTIAL}, "CacheParity", ("False", "EventsMissed")),
        ({"events": EventsState.LOST}, "CacheParity", ("False", "EventsLost")),
        ({"events": EventsState.OFF}, "CacheParity", ("False", "NoEvents")),
        ({"events": EventsState.REPLAYING}, "CacheParity", ("Unknown", "Replaying")),
        ({"can_transfer": False}, "TransferReady", ("False", "NotRegistered")),
        ({"transfer_mode": "off"}, "TransferReady", ("False", "Off")),
    ],
)
def test_reasons(fields, kind, said):
    assert judged(**fields)[kind] == said


def test_pressure_has_a_gap_between_coming_and_going():
    assert judged(0.9)["KVPressure"] == ("True", "LittleFree")
    assert judged(0.85)["KVPressure"] == ("False", "EnoughFree")
    assert judged(0.85, was_pressed=True)["KVPressure"] == ("True", "LittleFree")
    assert judged(0.8, was_pressed=True)["KVPressure"] == ("False", "EnoughFree")


# -- Times -----------------------------------------------------------------------------------


class Told:
    """A book of one condition, a second at a time."""

    def __init__(self):
        self.book = ConditionBook(settle_seconds=10.0)
        self.now = 0

    def see(self, status, reason="R", message="", *, seconds=1):
        for _ in range(seconds):
            verdict = Verdict("Ready", status, reason, message)
            self.book.take([verdict], now=float(self.now), stamp=f"t{self.now}")
            self.now += 1
        (condition,) = self.book.conditions
        return condition.verdict.status, condition.verdict.reason, condition.since


def test_the_first_verdict_counts_at_once():
    assert Told().see("False") == ("False", "R", "t0")


def test_a_change_counts_when_it_has_stood_and_since_it_began():
    told = Told()
    told.see("True", seconds=5)
    assert told.see("False", seconds=10) == ("True", "R", "t0")
    assert told.see("False") == ("False", "R", "t5")


def test_what_flaps_shows_as_nothing():
    told = Told()
    for _ in range(50):
        told.see("True", seconds=3)
        assert told.see("False", seconds=4) == ("True", "R", "t0")


def test_another_reason_is_no_transition():
    told = Told()
    told.see("False", "Starting", seconds=5)
    assert told.see("False", "Unreachable", seconds=11) == ("False", "Unreachable", "t0")


def test_messages_are_those_of_now():
    told = Told()
    told.see("False", message="one")
    told.see("False", message="two")
    assert told.book.conditions[0].verdict.message == "two"


def test_times_from_before_the_agents_start_are_kept_for_what_is_as_it_was():
    told = Told()
    told.see("True")
    told.book.adopt({"Ready": ("True", "long ago"), "Other": ("True", "t")})
    assert told.see("True") == ("True", "R", "long ago")
    other = Told()
    other.see("False")
    other.book.adopt({"Ready": ("True", "long ago")})
    assert other.see("False") == ("False", "R", "t0")
