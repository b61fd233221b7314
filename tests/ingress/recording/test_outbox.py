"""The outbox: bounded, in order, never in the way."""

import threading
import time
from collections import Counter

import pytest

from nearkv.ingress.recording.outbox import Outbox

DEADLINE_SECONDS = 30.0


def until(condition):
    give_up_at = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


@pytest.fixture
def counts():
    return Counter()


def outbox(deliver, counts, **limits):
    def count(outcome, by):
        counts[outcome] += by

    return Outbox(deliver, name="test", count=count, **{"limit": 100, "batch": 10} | limits)


def test_all_items_arrive_in_order(counts):
    got = []
    box = outbox(got.extend, counts, batch=3)
    for number in range(10):
        box.put(number)
    box.start()
    until(lambda: len(got) == 10)
    box.close(deadline_seconds=DEADLINE_SECONDS)
    assert got == list(range(10))
    assert counts == {"delivered": 10}


def test_what_is_too_much_is_dropped_and_counted_at_once(counts):
    got = []
    box = outbox(got.extend, counts, limit=4)
    for number in range(10):
        box.put(number)
    assert counts == {"dropped": 6}
    box.start()
    box.close(deadline_seconds=DEADLINE_SECONDS)
    assert got == [0, 1, 2, 3]


def test_a_delivery_that_fails_is_counted_and_the_next_goes_on(counts):
    got = []

    def deliver(items):
        if 0 in items:
            raise OSError("no space left")
        got.extend(items)

    box = outbox(deliver, counts, batch=1)
    box.put(0)
    box.put(1)
    box.start()
    box.close(deadline_seconds=DEADLINE_SECONDS)
    assert got == [1]
    assert counts == {"failed": 1, "delivered": 1}


def test_a_delivery_that_hangs_ends_the_wait_at_its_deadline(counts):
    held = threading.Event()
    entered = threading.Event()

    def deliver(_items):
        entered.set()
        held.wait(DEADLINE_SECONDS)

    box = outbox(deliver, counts, batch=1, abandon=held.set)
    box.put(0)
    box.put(1)
    box.start()
    assert entered.wait(DEADLINE_SECONDS)
    box.close(deadline_seconds=0.05)
    assert held.is_set()
