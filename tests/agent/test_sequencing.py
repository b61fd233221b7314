"""Sequence numbers: in order, repeated, missing, fallen."""

import pytest

from nearkv.agent.sequencing import Arrival, SequenceTracker


@pytest.mark.parametrize(
    ("applied", "last_live", "seq", "expected"),
    [
        pytest.param(None, None, 0, Arrival.IN_ORDER, id="from-the-start"),
        pytest.param(None, None, 7, Arrival.FIRST, id="joined-late"),
        pytest.param(4, 4, 5, Arrival.IN_ORDER, id="next"),
        pytest.param(4, 4, 6, Arrival.GAP, id="one-missing"),
        pytest.param(4, 4, 4, Arrival.RESTART, id="same-number-live-twice"),
        pytest.param(4, 4, 0, Arrival.RESTART, id="back-to-0"),
        pytest.param(4, 4, 2, Arrival.RESTART, id="fallen-but-not-to-0"),
        pytest.param(9, 4, 7, Arrival.REPEAT, id="replay-was-faster"),
        pytest.param(9, None, 3, Arrival.REPEAT, id="replay-before-anything-live"),
        pytest.param(9, 4, 3, Arrival.RESTART, id="fallen-below-the-last-live"),
        pytest.param(9, 4, 10, Arrival.IN_ORDER, id="next-after-a-replay"),
        pytest.param(9, 4, 11, Arrival.GAP, id="missing-after-a-replay"),
    ],
)
def test_live_messages_are_classified(applied, last_live, seq, expected):
    tracker = SequenceTracker(applied, last_live)
    assert tracker.classify(seq) is expected
    assert (tracker.applied, tracker.last_live) == (applied, last_live)


def test_a_replay_is_asked_from_the_first_number_not_applied():
    tracker = SequenceTracker()
    assert tracker.next_wanted == 0
    tracker.advance(3)
    tracker.advance(1)
    assert tracker.next_wanted == 4
    tracker.restart()
    assert tracker.next_wanted == 0
    assert tracker.classify(0) is Arrival.IN_ORDER
