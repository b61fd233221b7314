"""Leases of the engine's own blocks."""

import pytest

from nearkv.transfer.backends.contract import Fence
from nearkv.transfer.connector.leasing import LeaseDesk
from nearkv.transfer.connector.tally import Tally
from nearkv.transfer.errors import LeaseError, Reason
from nearkv.transfer.lease import SLOT_BYTES, SlotTable, check_fence
from nearkv.transfer.manifest import Prefix

PREFIX = Prefix(token_ids=b"\0" * 128, num_tokens=32, block_keys=b"")


class Clock:
    ms = 1000

    def __call__(self):
        return self.ms


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def slots():
    return SlotTable(bytearray(2 * SLOT_BYTES))


@pytest.fixture
def tally():
    return Tally()


@pytest.fixture
def desk(slots, clock, tally):
    return LeaseDesk(slots, ttl_ms=500, now_ms=clock, tally=tally)


def is_open(slots, opened, now_ms):
    try:
        check_fence(slots, opened.slot, opened.generation, now_ms=now_ms)
    except LeaseError as error:
        return error.reason
    return True


def test_a_lease_opens_its_slot_and_names_the_blocks(desk, slots, clock):
    opened = desk.open("r1", [7, 3], PREFIX)
    assert opened.block_ids == (7, 3)
    assert opened.expires_at_ms == 1500
    assert is_open(slots, opened, clock.ms) is True
    assert desk.open_leases() == (opened,)
    assert desk.take_released() == []


def test_the_slot_is_closed_before_the_request_is_handed_back(desk, slots, clock):
    opened = desk.open("r1", [7], PREFIX)
    closed = desk.end(opened.lease, "pulled")
    assert (closed.lease, closed.why) == (opened.lease, "pulled")
    assert is_open(slots, opened, clock.ms) is Reason.STALE
    assert desk.take_released() == ["r1"]
    assert desk.take_released() == []
    assert len(desk) == 0


def test_ending_twice_hands_back_once(desk):
    opened = desk.open("r1", [7], PREFIX)
    desk.end(opened.lease, "pulled")
    assert desk.end(opened.lease, "pulled") is None
    assert desk.end("never-was", "pulled") is None
    assert desk.take_released() == ["r1"]


def test_time_ends_a_lease_without_anybody(desk, slots, clock, tally):
    opened = desk.open("r1", [7], PREFIX)
    clock.ms = 1499
    assert desk.expire() == []
    clock.ms = 1500
    assert is_open(slots, opened, clock.ms) is Reason.EXPIRED
    assert [closed.why for closed in desk.expire()] == ["expired"]
    assert desk.take_released() == ["r1"]
    assert tally.take() == {"lease/opened": 1, "lease/expired": 1}


def test_renewing_moves_the_expiry_but_never_by_more_than_a_full_time(desk, slots, clock):
    opened = desk.open("r1", [7], PREFIX)
    clock.ms = 1400
    desk.renew(opened.lease, 10**9)
    clock.ms = 1899
    assert desk.expire() == []
    assert is_open(slots, opened, clock.ms) is True
    clock.ms = 1900
    assert len(desk.expire()) == 1


def test_an_agent_that_was_restarted_learns_the_renewed_expiry(desk, clock):
    opened = desk.open("r1", [7], PREFIX)
    clock.ms = 1400
    desk.renew(opened.lease, 1800)
    assert [lease.expires_at_ms for lease in desk.open_leases()] == [1800]


def test_renewing_an_ended_lease_does_not_open_it_again(desk, slots, clock):
    opened = desk.open("r1", [7], PREFIX)
    desk.end(opened.lease, "pulled")
    desk.renew(opened.lease, 10**9)
    assert is_open(slots, opened, clock.ms) is Reason.STALE


def test_when_all_slots_are_taken_no_lease_is_given(desk, tally):
    first = desk.open("r1", [1], PREFIX)
    assert desk.open("r2", [2], PREFIX) is not None
    assert desk.open("r3", [3], PREFIX) is None
    assert tally.take()["lease/no_slot"] == 1
    desk.end(first.lease, "pulled")
    again = desk.open("r4", [4], PREFIX)
    assert again.slot == first.slot
    assert again.generation != first.generation


def test_a_reader_of_the_earlier_lease_sees_that_the_slot_is_anothers(desk, slots, clock):
    first = desk.open("r1", [1], PREFIX)
    fence = Fence(first.slot, first.generation)
    desk.end(first.lease, "aborted")
    desk.open("r2", [1], PREFIX)
    with pytest.raises(LeaseError) as error:
        check_fence(slots, fence.slot, fence.generation, now_ms=clock.ms)
    assert error.value.reason is Reason.STALE
