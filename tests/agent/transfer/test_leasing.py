"""The leases of one engine: open, closing, ended, and remembered for a while."""

import pytest

from nearkv.agent.transfer.known_leases import KnownLeases
from nearkv.agent.transfer.leasing import EXPIRED, EngineLeases, LeaseLimits, known_why
from nearkv.transfer.errors import LeaseError, PullError, Reason
from nearkv.transfer.manifest import LeaseRef, Prefix
from nearkv.transfer.messages import LeaseAddress, OpenLease

LIMITS = LeaseLimits(ttl_seconds=30, close_seconds=5, max_open=3, max_bytes=1000, max_remembered=2)


def opening(lease="a", slot=0, seconds=30.0, now=0.0, tokens=4):
    return OpenLease(
        lease=lease,
        slot=slot,
        generation=7,
        expires_at_ms=int((now + seconds) * 1000),
        block_ids=(1,),
        prefix=Prefix(token_ids=b"\0" * 4 * tokens, num_tokens=tokens, block_keys=b""),
    )


@pytest.fixture
def leases():
    return EngineLeases("e", "1", slots=8, limits=LIMITS)


def reason_of(call, *args, **kwargs):
    with pytest.raises(LeaseError) as raised:
        call(*args, **kwargs)
    return raised.value.reason


def test_an_open_lease_is_found_until_its_time_is_up(leases):
    leases.open(opening(), now=0.0)
    held = leases.use("a", now=29.9)
    assert (held.lease.slot, held.lease.generation, held.block_ids) == (0, 7, (1,))
    assert reason_of(leases.use, "a", now=30.0) is Reason.EXPIRED
    assert reason_of(leases.use, "b", now=0.0) is Reason.UNKNOWN_LEASE


def test_the_engines_own_time_counts_where_it_is_shorter(leases):
    leases.open(opening(seconds=2.0), now=0.0)
    assert leases.use("a", now=0.0).ttl_seconds == 2.0
    assert reason_of(leases.use, "a", now=2.0) is Reason.EXPIRED


def test_the_agents_time_counts_where_it_is_shorter(leases):
    leases.open(opening(seconds=3600.0), now=0.0)
    assert leases.expire(29.0) == []
    assert leases.expire(30.0) == ["a"]


def test_a_renewal_gives_the_whole_time_again(leases):
    leases.open(opening(seconds=2.0), now=0.0)
    assert leases.renew("a", now=1.5).lease.expires_at == 3.5
    assert leases.expire(3.4) == []


def test_an_expired_lease_is_closing_until_the_engine_has_closed_it(leases):
    leases.open(opening(), now=0.0)
    assert leases.expire(31.0) == ["a"]
    assert (len(leases), leases.closing) == (0, 1)
    assert reason_of(leases.use, "a", now=31.0) is Reason.EXPIRED
    assert leases.closed("a", "whatever") == EXPIRED
    assert leases.closing == 0
    assert reason_of(leases.use, "a", now=31.0) is Reason.EXPIRED
    assert leases.closed("a", "whatever") is None


def test_an_engine_that_does_not_close_is_not_waited_for_for_ever(leases):
    leases.open(opening(), now=0.0)
    assert leases.end("a", "pulled", now=1.0)
    assert leases.overdue(5.9) == []
    assert leases.overdue(6.0) == ["a"]
    assert leases.closing == 0


def test_ending_twice_tells_the_engine_once(leases):
    leases.open(opening(), now=0.0)
    assert leases.end("a", "pulled", now=1.0)
    assert not leases.end("a", "aborted", now=1.0)
    assert leases.closed("a", "x") == "pulled"
    assert not leases.end("a", "aborted", now=1.0)


def test_the_engines_own_end_is_an_end(leases):
    leases.open(opening(), now=0.0)
    assert leases.closed("a", "expired") == "expired"
    assert len(leases) == 0


def test_a_release_that_overtook_its_lease_still_counts(leases):
    assert leases.may_come("a")
    assert not leases.end("a", "aborted", now=0.0)
    assert not leases.may_come("a")
    assert reason_of(leases.open, opening(), now=0.0) is Reason.UNKNOWN_LEASE
    assert len(leases) == 0


def test_only_so_many_ends_are_remembered(leases):
    for lease in "abc":
        leases.end(lease, "aborted", now=0.0)
    assert [leases.may_come(lease) for lease in "abc"] == [True, False, False]


def test_leases_that_cannot_be_are_refused(leases):
    assert reason_of(leases.open, opening(slot=8), now=0.0) is Reason.RANGE
    assert reason_of(leases.open, opening(slot=-1), now=0.0) is Reason.RANGE
    leases.open(opening("a"), now=0.0)
    assert reason_of(leases.open, opening("a"), now=0.0) is Reason.RANGE


def test_leases_are_bounded_in_number_and_bytes(leases):
    assert reason_of(leases.open, opening(tokens=300), now=0.0) is Reason.TOO_LARGE
    leases.open(opening("big", tokens=200), now=0.0)
    assert reason_of(leases.open, opening("b", tokens=100), now=0.0) is Reason.TOO_LARGE
    leases.closed("big", "pulled")
    for lease in "abc":
        leases.open(opening(lease), now=0.0)
    assert reason_of(leases.open, opening("d"), now=0.0) is Reason.RANGE


def test_only_known_words_become_labels():
    assert (known_why("pulled"), known_why("x" * 99)) == ("pulled", "other")


# -- Leases of others ----------------------------------------------------------------------


def address(lease="a", epoch="1"):
    return LeaseAddress(lease=lease, engine="p", epoch=epoch, node="n", agent="http://x")


REF = LeaseRef(id="a", slot=1, generation=2, ttl_ms=1000)


def test_only_a_verified_lease_may_be_pulled_from():
    known = KnownLeases()
    with pytest.raises(PullError):
        known.get("d", 1, address())
    known.asked("d", 1, address())
    with pytest.raises(PullError):
        known.get("d", 1, address())
    known.verified("d", 1, (1, 2), REF)
    assert known.get("d", 1, address()).block_ids == (1, 2)
    for engine, lookup, other in (
        ("x", 1, address()),
        ("d", 2, address()),
        ("d", 1, address(epoch="2")),
    ):
        with pytest.raises(PullError) as raised:
            known.get(engine, lookup, other)
        assert raised.value.reason is Reason.UNKNOWN_LEASE


def test_two_lookups_of_one_lease_keep_what_each_has_found():
    known = KnownLeases()
    known.asked("d", 1, address())
    known.asked("d", 2, address())
    known.found_in_store("d", 1, 3, "one prompt")
    known.found_in_store("d", 2, 4, "another")
    assert known.get("d", 1, address()).stored == "one prompt"
    assert known.get("d", 2, address()).stored == "another"
    assert known.take("d", "a") is not None
    assert len(known) == 0


def test_a_connector_that_names_no_lookup_gets_what_cannot_be_mistaken():
    known = KnownLeases()
    known.asked("d", 1, address())
    known.verified("d", 1, (1, 2), REF)
    assert known.get("d", 0, address()).block_ids == (1, 2)
    known.asked("d", 2, address())
    with pytest.raises(PullError):
        known.get("d", 0, address())


def test_a_lease_of_another_tenant_is_not_released_whoever_asked_last():
    known = KnownLeases()
    known.asked("d", 1, address())
    known.asked("d", 2, address())
    known.not_ours("d", 1)
    assert not known.take("d", "a").may_release


def test_a_lookup_that_ends_after_the_engine_let_go_leaves_nothing():
    known = KnownLeases()
    known.asked("d", 1, address())
    assert known.take("d", "a").address == address()
    known.verified("d", 1, (1, 2), REF)
    assert len(known) == 0
    assert known.take("d", "a") is None


def test_an_engine_that_is_gone_takes_its_own_with_it():
    known = KnownLeases()
    for lookup, (engine, lease) in enumerate((("d", "a"), ("d", "b"), ("e", "a"), ("d", "b")), 1):
        known.asked(engine, lookup, address(lease))
    assert sorted(k.address.lease for k in known.drop_engine("d")) == ["a", "b"]
    assert len(known) == 1


def test_known_leases_are_bounded_in_number_and_blocks():
    known = KnownLeases(max_lookups=3, max_blocks=10)
    for lookup, lease in enumerate("abcd", 1):
        known.asked("d", lookup, address(lease))
    assert known.take("d", "a") is None
    known.verified("d", 3, tuple(range(8)), REF)
    known.verified("d", 4, tuple(range(8)), REF)
    assert len(known) == 1
    assert len(known.get("d", 4, address("d")).block_ids) == 8
