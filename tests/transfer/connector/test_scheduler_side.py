"""The scheduler's side, with an agent on a real socket."""

import numpy as np
import pytest

from nearkv.transfer.connector.params import lease_params, read_address
from nearkv.transfer.connector.scheduler_side import RequestFacts, SchedulerSide
from nearkv.transfer.connector.settings import read_settings
from nearkv.transfer.lease import SlotTable
from nearkv.transfer.memory import create_slots
from nearkv.transfer.messages import (
    LeaseAddress,
    LeaseClosed,
    Lookup,
    LookupDone,
    OpenLease,
    RegisterScheduler,
    ReleaseLease,
    in_store,
)

BLOCK = 32
REMOTE = LeaseAddress(lease="far", engine="p", epoch="e0", node="n2", agent="http://127.0.0.1:2")
PREFILL = {"do_remote_decode": True}


def facts(request_id, count, **fields):
    tokens = np.arange(count, dtype="<u4").tobytes()
    return RequestFacts(id=request_id, token_ids=tokens, **fields)


class Clock:
    ms = 1000

    def __call__(self):
        return self.ms


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def side(agent_path, clock):
    memory = create_slots(8)
    slots = SlotTable(memory.view)
    side = SchedulerSide(
        read_settings({"engine": "d", "socket": str(agent_path), "lease_seconds": 1.0}, {}),
        epoch="e1",
        block_size=BLOCK,
        slots_fd=memory.fd,
        slots=slots,
        now_ms=clock,
        store_blocks=4,
    )
    side.start()
    yield side
    side.close()


@pytest.fixture
def registered(side, agent, eventually):
    agent.register()
    eventually(lambda: side._client.registered)
    return side


def finish(side, request, params=PREFILL, blocks=range(100), *, completed=True):
    return side.request_finished(request, params, list(blocks), completed=completed)


def test_it_registers_with_its_slots(side, agent):
    hello = agent.register()
    assert isinstance(hello, RegisterScheduler)
    assert (hello.engine, hello.epoch, hello.slots) == ("d", "e1", 8)
    assert len(agent.fds) == 1


def test_a_prefill_keeps_whole_blocks_and_says_where_they_are(registered, agent):
    keep, params = finish(registered, facts("r1", 70))
    opened = agent.next()
    assert isinstance(opened, OpenLease)
    assert opened.block_ids == (0, 1)
    assert opened.prefix.num_tokens == 64
    assert opened.prefix.token_ids == np.arange(64, dtype="<u4").tobytes()
    address = read_address(params)
    assert keep
    assert address == LeaseAddress(
        lease=opened.lease, engine="d", epoch="e1", node="n1", agent="http://127.0.0.1:1"
    )


def test_without_an_agent_nothing_is_kept(side):
    assert finish(side, facts("r1", 70)) == (False, None)
    assert side.tally.take() == {"lease/no_agent": 1}


@pytest.mark.parametrize(
    ("request_facts", "params", "completed"),
    [
        (facts("r1", 31), PREFILL, True),  # not one whole block
        (facts("r1", 70, plain=False), PREFILL, True),  # tokens alone do not say what the KV is
        (facts("r1", 70), PREFILL, False),  # aborted
        (facts("r1", 70), {}, True),
        (facts("r1", 70), None, True),
    ],
)
def test_requests_that_leave_nothing_to_pull(registered, request_facts, params, completed):
    assert finish(registered, request_facts, params, completed=completed) == (False, None)


def test_the_agents_release_hands_the_request_back(registered, agent, eventually):
    finish(registered, facts("r1", 70))
    opened = agent.next()
    agent.say(ReleaseLease(lease=opened.lease, why="pulled"))
    assert agent.next() == LeaseClosed(lease=opened.lease, why="pulled")
    assert registered.take_plan().released == ["r1"]
    assert registered.take_plan().released == []


def test_releasing_a_lease_that_ended_is_answered_all_the_same(registered, agent):
    agent.say(ReleaseLease(lease="long-gone", why="pulled"))
    assert agent.next() == LeaseClosed(lease="long-gone", why="unknown")


def test_time_hands_the_request_back_and_tells_the_agent(registered, agent, clock):
    finish(registered, facts("r1", 70))
    opened = agent.next()
    clock.ms += 1000
    assert registered.take_plan().released == ["r1"]
    assert agent.next() == LeaseClosed(lease=opened.lease, why="expired")


def test_an_agent_that_comes_back_learns_the_open_leases(registered, agent):
    finish(registered, facts("r1", 70))
    opened = agent.next()
    agent.hang_up()
    assert agent.register().leases == (opened,)


def test_a_request_with_a_lease_is_looked_up_loaded_and_given_back(registered, agent, eventually):
    params = lease_params(REMOTE, 64)
    registered.request_added(facts("r1", 70), params)
    lookup = agent.next()
    assert isinstance(lookup, Lookup)
    assert lookup.address == REMOTE
    assert registered.matched_tokens("r1", 0, 70) is None
    agent.say(LookupDone(id=lookup.id, num_tokens=64))
    eventually(lambda: registered.matched_tokens("r1", 0, 70) == 64)
    registered.allocated("r1", [5, 6, 7], 64)
    (job,) = registered.take_plan().loads
    assert (job.address, job.first_block, job.target_blocks) == (REMOTE, 0, (5, 6))
    registered.allocated("r1", [5, 6, 7], 0)  # vLLM calls again once the load is done
    registered.loads_finished(["r1"])
    assert agent.next() == LeaseClosed(lease="far", why="pulled")
    assert finish(registered, facts("r1", 80), params) == (False, None)
    assert registered.take_plan().cancels == []


def test_a_lease_that_is_not_needed_is_given_back_at_once(registered, agent, eventually):
    registered.request_added(facts("r1", 70), lease_params(REMOTE, 64))
    lookup = agent.next()
    agent.say(LookupDone(id=lookup.id, num_tokens=64))
    eventually(lambda: registered.matched_tokens("r1", 64, 70) == 0)
    registered.allocated("r1", [5, 6, 7], 0)
    assert agent.next() == LeaseClosed(lease="far", why="unused")


def test_aborting_during_a_load_cancels_it(registered, agent, eventually):
    registered.request_added(facts("r1", 70), lease_params(REMOTE, 64))
    lookup = agent.next()
    agent.say(LookupDone(id=lookup.id, num_tokens=64))
    eventually(lambda: registered.matched_tokens("r1", 0, 70) == 64)
    registered.allocated("r1", [5, 6, 7], 64)
    registered.take_plan()
    assert finish(registered, facts("r1", 70), completed=False) == (False, None)
    assert registered.take_plan().cancels == ["r1"]
    registered.loads_finished(["r1"])
    assert agent.next() == LeaseClosed(lease="far", why="pulled")


def test_aborting_before_the_load_gives_the_lease_back(registered, agent):
    registered.request_added(facts("r1", 70), lease_params(REMOTE, 64))
    agent.next()
    finish(registered, facts("r1", 70), completed=False)
    assert agent.next() == LeaseClosed(lease="far", why="unused")


def test_a_lease_that_two_requests_brought_is_given_back_by_the_last(registered, agent, eventually):
    lookups = []
    for name in ("r1", "r2"):
        registered.request_added(facts(name, 70), lease_params(REMOTE, 64))
        lookups.append(agent.next())
    agent.say(LookupDone(id=lookups[0].id, num_tokens=64))
    eventually(lambda: registered.matched_tokens("r1", 0, 70) == 64)
    registered.allocated("r1", [5, 6, 7], 64)
    (job,) = registered.take_plan().loads
    assert job.lookup == lookups[0].id
    finish(registered, facts("r2", 70), completed=False)  # r1 still loads
    registered.request_added(facts("r3", 70), lease_params(REMOTE, 64))
    assert isinstance(agent.next(), Lookup)
    registered.loads_finished(["r1"])  # r3 has not begun
    finish(registered, facts("r3", 70), completed=False)
    assert agent.next() == LeaseClosed(lease="far", why="unused")
    finish(registered, facts("r1", 80))
    assert isinstance(agent.next(), OpenLease)


def test_a_reset_of_the_cache_ends_all_leases(registered, agent):
    opened = []
    for name in ("r1", "r2"):
        finish(registered, facts(name, 70))
        opened.append(agent.next())
    registered.end_leases("reset")
    assert [agent.next() for _ in opened] == [
        LeaseClosed(lease=lease.lease, why="reset") for lease in opened
    ]
    assert registered.take_plan().released == ["r1", "r2"]


def test_a_lease_of_its_own_that_comes_back_is_ended_here(registered, agent):
    """The agent takes the word for the owner's, so that nobody would tell the engine to end it."""
    _, answer = finish(registered, facts("r1", 70))
    opened = agent.next()
    registered.request_added(facts("r2", 70), answer)
    assert isinstance(agent.next(), Lookup)
    registered.allocated("r2", [5, 6, 7], 0)  # all of it was in the prefix cache
    assert agent.next() == LeaseClosed(lease=opened.lease, why="unused")
    assert registered.take_plan().released == ["r1"]


def test_a_request_waits_for_no_lookup_when_no_agent_is_there(side):
    side.request_added(facts("r1", 70), lease_params(REMOTE, 64))
    assert side.matched_tokens("r1", 0, 70) == 0
    assert side.tally.take() == {"lookup/no_agent": 1}


def test_images_are_never_loaded_by_token_ids_alone(registered, agent):
    registered.request_added(facts("r1", 70, plain=False), lease_params(REMOTE, 64))
    assert registered.matched_tokens("r1", 0, 70) == 0


# -- The store --------------------------------------------------------------------------------


def unread():
    raise AssertionError("nobody needs to know what the request is")


@pytest.fixture
def with_store(side, agent, eventually):
    agent.register(store_min_tokens=64, store_all=True)
    eventually(lambda: side._client.registered)
    return side


def asked(side, request, *, computed=0):
    count = len(request.token_ids) // 4
    return side.matched_tokens(request.id, computed, count, lambda: request)


def test_without_a_store_nobody_is_asked(registered, agent):
    assert registered.matched_tokens("r1", 0, 1000, unread) == 0
    finish(registered, facts("r1", 1000), None)
    finish(registered, facts("r2", 70))
    assert isinstance(agent.next(), OpenLease)  # the first word since the registration
    assert "store" not in str(registered.tally.take())


def test_without_an_agent_nobody_is_asked(side):
    assert side.matched_tokens("r1", 0, 1000, unread) == 0


def test_a_request_without_a_lease_is_looked_for_in_the_store(with_store, agent, eventually):
    request = facts("r1", 130, cache_salt="s", lora="l")
    with_store.request_added(request, None)
    assert asked(with_store, request, computed=32) is None
    lookup = agent.next()
    assert isinstance(lookup, Lookup)
    assert lookup.address == in_store("r1")
    assert (lookup.token_ids, lookup.first_block) == (request.token_ids, 1)
    assert (lookup.cache_salt, lookup.lora) == ("s", "l")
    agent.say(LookupDone(id=lookup.id, num_tokens=128))
    eventually(lambda: with_store.matched_tokens("r1", 32, 130, unread) == 96)
    with_store.allocated("r1", [5, 6, 7, 8, 9], 96)
    (job,) = with_store.take_plan().loads
    assert (job.address, job.first_block, job.target_blocks) == (in_store("r1"), 1, (6, 7, 8))
    with_store.loads_finished(["r1"])
    assert agent.next() == LeaseClosed(lease="r1", why="pulled")
    assert with_store.matched_tokens("r1", 0, 130, unread) == 0  # used once
    assert with_store.tally.take() == {"store/found": 1}


@pytest.mark.parametrize(("count", "computed"), [(63, 0), (100, 64), (1000, 990)])
def test_little_is_not_worth_a_question(with_store, count, computed):
    assert with_store.matched_tokens("r1", computed, count, unread) == 0


def test_a_request_with_a_lease_asks_for_that_alone(with_store, agent):
    with_store.request_added(facts("r1", 130), lease_params(REMOTE, 64))
    assert with_store.matched_tokens("r1", 0, 130, unread) is None
    assert agent.next().address == REMOTE


def test_images_are_not_looked_for(with_store):
    assert asked(with_store, facts("r1", 130, plain=False)) == 0
    assert with_store.tally.take() == {"store/prefix": 1}


def test_what_nobody_wants_is_kept_until_it_is_stored(with_store, agent, eventually):
    keep, params = finish(with_store, facts("r1", 70), None)
    assert (keep, params) == (True, None)
    opened = agent.next()
    assert (opened.for_store, opened.block_ids, opened.prefix.num_tokens) == (True, (0, 1), 64)
    agent.say(ReleaseLease(lease=opened.lease, why="stored"))
    assert agent.next() == LeaseClosed(lease=opened.lease, why="stored")
    assert with_store.take_plan().released == ["r1"]


def test_no_more_than_a_share_of_the_blocks_is_kept_for_the_store(with_store, agent):
    assert finish(with_store, facts("r1", 96), None)[0]
    assert not finish(with_store, facts("r2", 64), None)[0]  # 4 blocks may be
    assert with_store.tally.take()["lease/no_room_for_store"] == 1
    agent.say(ReleaseLease(lease=agent.next().lease, why="stored"))
    agent.next()
    assert finish(with_store, facts("r3", 64), None)[0]


@pytest.mark.parametrize(
    ("request_facts", "completed"),
    [
        (facts("r1", 63), True),  # too short
        (facts("r1", 70, plain=False), True),
        (facts("r1", 70), False),  # aborted
    ],
)
def test_requests_that_are_not_kept_for_the_store(with_store, request_facts, completed):
    assert finish(with_store, request_facts, None, completed=completed) == (False, None)


def test_a_lost_agent_ends_what_is_kept_for_its_store(with_store, agent, eventually):
    finish(with_store, facts("r1", 70), None)
    finish(with_store, facts("r2", 70))
    kept, leased = agent.next(), agent.next()
    agent.hang_up()
    assert agent.register().leases == (leased,)
    assert kept.for_store
    assert with_store.take_plan().released == ["r1"]


def test_a_store_that_is_only_read_keeps_nothing(side, agent, eventually):
    agent.register(store_min_tokens=1)
    eventually(lambda: side._client.registered)
    assert not side.keeps_for_store
    assert finish(side, facts("r1", 70), None) == (False, None)
