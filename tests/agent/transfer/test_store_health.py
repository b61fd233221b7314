"""When a store that failed is asked again."""

import pytest

from nearkv.agent.transfer.store_health import StoreHealth
from nearkv.transfer.errors import PullError, Reason


@pytest.fixture
def store():
    return StoreHealth(lambda: 1.0)


def is_left_alone(store):
    try:
        store.check()
    except PullError as error:
        return error.reason is Reason.NO_PATH
    return False


def test_it_is_asked_before_anything_is_known_of_it_and_tried_at_once(store):
    assert store.usable is None
    assert not is_left_alone(store)
    assert store.is_due(0.0)


def test_one_that_works_is_not_tried(store):
    store.worked()
    assert not store.is_due(1e9)
    assert not is_left_alone(store)


def test_after_a_failure_requests_leave_it_alone_until_it_worked(store):
    store.worked()
    store.failed(Reason.DEADLINE, "no answer", now=10.0)
    assert (store.usable, store.why) == (False, "deadline: no answer")
    assert is_left_alone(store)
    assert not store.is_due(10.9)
    assert store.is_due(11.0)
    assert is_left_alone(store)
    store.worked()
    assert (store.usable, store.why) == (True, "")
    assert not is_left_alone(store)


def test_the_pause_doubles_up_to_a_limit(store):
    now, pauses = 0.0, []
    for _ in range(8):
        store.failed(Reason.NO_PATH, "refused", now=now)
        begun = now
        while not store.is_due(now):
            now += 0.25
        pauses.append(now - begun)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]


@pytest.mark.parametrize(("moved", "pause"), [(True, 1), (False, 4)])
def test_only_one_that_moves_kv_begins_anew(store, moved, pause):
    store.failed(Reason.DEADLINE, "slow", now=0.0)
    store.failed(Reason.DEADLINE, "slow", now=1.0)
    store.worked(moved=moved)
    store.failed(Reason.DEADLINE, "slow", now=10.0)
    assert not store.is_due(10 + pause - 0.1)
    assert store.is_due(10 + pause)


def test_many_failures_at_once_are_one(store):
    for _ in range(10):
        store.failed(Reason.PEER_LOST, "gone", now=5.0)
    assert store.is_due(6.0)


@pytest.mark.parametrize(
    "reason",
    [Reason.NOT_STORED, Reason.STORE_FULL, Reason.CORRUPT, Reason.STALE, Reason.MOVER_LOST],
)
def test_what_is_about_one_entry_says_nothing_of_the_store(store, reason):
    store.failed(reason, "", now=0.0)
    assert store.usable is None
