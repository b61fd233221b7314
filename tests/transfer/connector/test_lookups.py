"""What D's scheduler knows of leases that requests brought."""

import pytest

from nearkv.transfer.connector.lookups import LookupDesk
from nearkv.transfer.connector.tally import Tally
from nearkv.transfer.errors import Reason
from nearkv.transfer.messages import LeaseAddress, LookupDone, in_store

ADDRESS = LeaseAddress(lease="l1", engine="p", epoch="e1", node="n1", agent="http://127.0.0.1:1")
BLOCK = 32


class Clock:
    ms = 1000

    def __call__(self):
        return self.ms


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def tally():
    return Tally()


@pytest.fixture
def desk(clock, tally):
    return LookupDesk(block_size=BLOCK, lookup_ms=200, pull_ms=5000, now_ms=clock, tally=tally)


def ask(desk, request_id="r1"):
    return desk.ask(request_id, ADDRESS, b"", salt="", lora="")


def found(desk, num_tokens, request_id="r1"):
    desk.answer(LookupDone(id=ask(desk, request_id).id, num_tokens=num_tokens))


def test_a_request_without_a_lease_gets_nothing(desk):
    assert desk.matched_tokens("r1", 0, 1000) == 0
    assert desk.load("r1", [1, 2], 0) is None
    assert desk.drop("r1") is None


def test_a_request_waits_for_the_agents_word(desk):
    lookup = ask(desk)
    assert desk.matched_tokens("r1", 0, 100) is None
    desk.answer(LookupDone(id=lookup.id, num_tokens=96))
    assert desk.matched_tokens("r1", 0, 100) == 96


@pytest.mark.parametrize(
    ("remote", "prompt", "computed", "expected"),
    [
        (0, 100, 0, 0),
        (96, 100, 0, 96),
        (96, 96, 0, 64),  # the last token is always computed
        (96, 97, 0, 96),
        (96, 100, 64, 32),  # only what is missing
        (96, 100, 96, 0),
        (64, 100, 96, 0),  # more is here than there
        (1000, 33, 0, 32),
        (50, 100, 0, 32),  # whole blocks only
        (-5, 100, 0, 0),
    ],
)
def test_how_many_tokens_a_lease_supplies(desk, remote, prompt, computed, expected):
    found(desk, remote)
    assert desk.matched_tokens("r1", computed, prompt) == expected


def test_the_deadline_ends_the_wait_and_the_answer_that_comes_later_is_ignored(desk, clock, tally):
    lookup = ask(desk)
    clock.ms = 1200
    assert desk.matched_tokens("r1", 0, 100) == 0
    desk.answer(LookupDone(id=lookup.id, num_tokens=96))
    assert desk.matched_tokens("r1", 0, 100) == 0
    assert tally.take() == {"lookup/deadline": 1, "lookup/found": 1}


def test_nobody_waits_for_an_agent_that_was_silent_until_it_speaks_again(desk, clock):
    first = ask(desk)
    clock.ms = 1200
    desk.matched_tokens("r1", 0, 100)
    ask(desk, "r2")
    assert desk.matched_tokens("r2", 0, 100) == 0
    desk.answer(LookupDone(id=first.id, num_tokens=0, reason="stale"))
    ask(desk, "r3")
    assert desk.matched_tokens("r3", 0, 100) is None


def test_a_lost_agent_settles_all_open_questions(desk, tally):
    ask(desk, "r1")
    found(desk, 96, "r2")
    desk.agent_lost()
    assert desk.matched_tokens("r1", 0, 100) == 0
    assert desk.matched_tokens("r2", 0, 100) == 96
    assert tally.take()["lookup/agent_lost"] == 1


def test_only_the_blocks_that_are_missing_are_loaded(desk, clock):
    found(desk, 96)
    assert desk.matched_tokens("r1", 32, 100) == 64
    job = desk.load("r1", [10, 11, 12, 13], 64)
    assert (job.first_block, job.target_blocks) == (1, (11, 12))
    assert job.address == ADDRESS
    assert job.deadline_ms == clock.ms + 5000


def test_a_lease_is_used_once(desk):
    found(desk, 96)
    desk.matched_tokens("r1", 0, 100)
    assert desk.load("r1", [1, 2, 3, 4], 96) is not None
    assert desk.matched_tokens("r1", 0, 100) == 0  # after a failed load, or a preemption
    assert desk.load("r1", [1, 2, 3, 4], 96) is None


def test_the_reason_is_counted(desk, tally):
    lookup = ask(desk)
    desk.answer(LookupDone(id=lookup.id, num_tokens=0, reason="layout", message="block_size"))
    assert tally.take() == {"lookup/layout": 1}


def test_a_lease_known_to_be_useless_is_not_waited_for(desk, tally):
    ask(desk)
    desk.note("r1", Reason.NO_AGENT)
    assert desk.matched_tokens("r1", 0, 100) == 0
    assert tally.take() == {"lookup/no_agent": 1}


def test_dropping_gives_the_lease_back_and_forgets_the_request(desk):
    ask(desk)
    assert desk.drop("r1") == ADDRESS
    assert desk.drop("r1") is None
    assert len(desk) == 0


# -- The store --------------------------------------------------------------------------------


def test_the_store_is_asked_in_place_of_a_lease_and_counted_on_its_own(desk, tally):
    lookup = desk.ask("r1", in_store("r1"), b"", salt="", lora="", first_block=2)
    assert (lookup.address.is_store, lookup.first_block) == (True, 2)
    assert desk.knows("r1")
    desk.answer(LookupDone(id=lookup.id, num_tokens=96))
    assert desk.matched_tokens("r1", 64, 100) == 32
    job = desk.load("r1", [1, 2, 3, 4], 32)
    assert (job.address, job.first_block, job.target_blocks) == (in_store("r1"), 2, (3,))
    assert tally.take() == {"store/found": 1}


def test_a_lease_is_no_store():
    assert not ADDRESS.is_store


def test_a_store_that_is_silent_counts_as_such(desk, clock, tally):
    desk.ask("r1", in_store("r1"), b"", salt="", lora="")
    clock.ms = 1200
    assert desk.matched_tokens("r1", 0, 100) == 0
    assert tally.take() == {"store/deadline": 1}
