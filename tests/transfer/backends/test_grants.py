"""Grants: what a server lets a reader at, and for how long."""

import dataclasses

import pytest

from nearkv.transfer.backends.contract import Fence, Grant, monotonic_ms
from nearkv.transfer.backends.grants import Grants, granted_blocks
from nearkv.transfer.errors import PullError, Reason

TICKET = b"t" * 16


def grant(ticket=TICKET, *, left_ms=60_000):
    return Grant(
        ticket=ticket, block_ids=(5, 6, 7), fence=Fence(0, 0),
        expires_at_ms=monotonic_ms() + left_ms,
    )  # fmt: skip


def reason_of(call):
    with pytest.raises(PullError) as caught:
        call()
    return caught.value.reason


def test_only_the_ticket_finds_the_grant():
    grants, one = Grants(), grant()
    grants.add(one)
    grants.add(grant(b"u" * 16))
    assert grants.find(TICKET) is one
    for other in (b"", TICKET[:15], TICKET + b"t", b"v" * 16):
        assert reason_of(lambda other=other: grants.find(other)) is Reason.AUTH


def test_a_withdrawn_grant_neither_stands_nor_is_found():
    grants, one = Grants(), grant()
    grants.add(one)
    grants.check_standing(one)
    grants.withdraw(TICKET)
    assert reason_of(lambda: grants.check_standing(one)) is Reason.EXPIRED
    assert reason_of(lambda: grants.find(TICKET)) is Reason.AUTH


def test_a_ticket_given_again_does_not_bring_an_old_grant_back():
    grants, one = Grants(), grant()
    grants.add(one)
    grants.withdraw(TICKET)
    grants.add(dataclasses.replace(one, block_ids=(9,)))
    assert reason_of(lambda: grants.check_standing(one)) is Reason.EXPIRED


def test_an_expired_grant_neither_stands_nor_is_found():
    grants, one = Grants(), grant(left_ms=0)
    grants.add(one)
    assert reason_of(lambda: grants.find(TICKET)) is Reason.EXPIRED
    assert reason_of(lambda: grants.check_standing(one)) is Reason.EXPIRED


def test_grants_are_bounded_and_expired_ones_make_room():
    grants = Grants(limit=2)
    grants.add(grant(b"a" * 16, left_ms=0))
    grants.add(grant(b"b" * 16))
    grants.add(grant(b"c" * 16))
    assert len(grants) == 2
    assert reason_of(lambda: grants.add(grant(b"d" * 16))) is Reason.BUSY
    grants.clear()
    assert len(grants) == 0


@pytest.mark.parametrize(
    ("first", "count", "blocks"), [(0, 3, (5, 6, 7)), (1, 1, (6,)), (3, 0, ()), (0, 0, ())]
)
def test_a_range_of_the_grant_is_its_blocks(first, count, blocks):
    assert granted_blocks(grant(), first, count) == blocks


@pytest.mark.parametrize(
    ("first", "count"), [(0, 4), (3, 1), (-1, 1), (-1, 3), (1, -1), (4, 0), (1 << 70, 1)]
)
def test_a_range_outside_the_grant_is_refused(first, count):
    assert reason_of(lambda: granted_blocks(grant(), first, count)) is Reason.RANGE
