"""What backends with a server promise on top: nothing without a grant."""

import dataclasses

import pytest

from nearkv.transfer.backends.contract import monotonic_ms
from nearkv.transfer.errors import PullError, Reason, TransferError
from tests.transfer.backends.kinds import KINDS
from tests.transfer.backends.rig import (
    PATIENCE_MS,
    UNTOUCHED,
    HookedStop,
    patient,
    reason_of,
    slow_layout,
    usable,
)

REFUSED = (Reason.AUTH, Reason.PEER_REFUSED)


@pytest.fixture(params=[it for it in KINDS if not it.handed_over], ids=lambda kind: kind.name)
def kind(request):
    """Those that are handed over have no server to refuse anything."""
    return usable(request.param)


@pytest.mark.parametrize("ticket", [b"\0" * 16, b"", b"x" * 64], ids=["zeros", "empty", "long"])
def test_another_ticket_is_refused(make_rig, ticket):
    rig = make_rig()
    grant = rig.grant([1])
    assert_refused(rig, grant, ticket)
    rig.pull(grant, [0])  # the right one still works


def assert_refused(rig, grant, ticket):
    """With whatever is secret in the offer, too, the wrong ticket brings nothing."""

    def attempt():
        rig.connect(grant).pull(rig.request(grant, [0], ticket=ticket), patient())

    assert reason_of(attempt) in REFUSED
    assert (rig.target_bytes == UNTOUCHED).all()


def test_a_poor_ticket_is_no_grant(make_rig):
    rig = make_rig()
    grant = rig.grant([1])
    with pytest.raises(PullError):
        rig.server.offer(dataclasses.replace(grant, ticket=b"short"))


def test_a_withdrawn_grant_is_refused(make_rig):
    rig = make_rig()
    grant = rig.grant([1])
    rig.server.withdraw(grant.ticket)
    rig.server.withdraw(grant.ticket)
    rig.server.withdraw(b"unknown")
    assert reason_of(lambda: rig.pull(grant, [0])) in (*REFUSED, Reason.EXPIRED)
    assert (rig.target_bytes == UNTOUCHED).all()


def test_a_grant_withdrawn_in_the_middle_of_a_pull_does_not_count(make_rig):
    rig = make_rig(slow_layout())
    count = rig.source.region.layout.blocks
    grant = rig.grant(range(count))
    stop = HookedStop(monotonic_ms() + PATIENCE_MS, hook=lambda: rig.server.withdraw(grant.ticket))
    assert reason_of(lambda: rig.pull(grant, range(count), stop=stop)) in (
        *REFUSED,
        Reason.EXPIRED,
    )


def test_a_grant_that_expired_is_refused_while_the_lease_still_holds(make_rig):
    rig = make_rig()
    grant = rig.grant([1], grant_ms=0)
    assert reason_of(lambda: rig.pull(grant, [0])) is Reason.EXPIRED
    assert (rig.target_bytes == UNTOUCHED).all()


@pytest.mark.parametrize(("first", "count"), [(0, 4), (2, 2), (-1, 1), (3, 1), (1 << 40, 1)])
def test_blocks_beyond_the_grant_are_refused(make_rig, first, count):
    rig = make_rig()
    grant = rig.grant([1, 2, 3])
    request = rig.request(
        grant, range(count), source_blocks=tuple(range(1, count + 1)), first_block=first
    )
    link = rig.connect(grant)
    assert reason_of(lambda: link.pull(request, patient())) in (Reason.RANGE, Reason.LAYOUT)
    assert (rig.target_bytes == UNTOUCHED).all()


def test_nothing_is_served_once_the_server_is_closed(make_rig):
    rig = make_rig()
    grant = rig.grant([1])
    rig.server.close()
    assert reason_of(lambda: rig.pull(grant, [0])) in (
        Reason.NO_SOURCE,
        Reason.NO_PATH,
        Reason.PEER_LOST,
        Reason.PEER_REFUSED,
        Reason.DEADLINE,
    )
    with pytest.raises(PullError):
        rig.server.offer(grant)


def test_a_server_closed_in_the_middle_of_a_pull_ends_it(make_rig):
    rig = make_rig(slow_layout())
    count = rig.source.region.layout.blocks
    grant = rig.grant(range(count))
    stop = HookedStop(monotonic_ms() + PATIENCE_MS, hook=rig.server.close)
    assert reason_of(lambda: rig.pull(grant, range(count), stop=stop)) in (
        *REFUSED,
        Reason.EXPIRED,
        Reason.PEER_LOST,
    )


@pytest.mark.parametrize("offer", [b"", b"\xc1", b"\x80", b"offer" * 9], ids=repr)
def test_an_offer_that_is_none_is_refused(make_rig, offer):
    rig = make_rig()
    with pytest.raises(TransferError):
        rig.backend.connect(offer, rig.target, patient())
