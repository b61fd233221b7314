"""Pulls with scripted movers: one answer each, bounds, retries, renewals, and every end."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from nearkv.transfer.errors import PullError, Reason
from tests.doubles.kv_engine import FakeEngine, KvShape
from tests.doubles.movers import report
from tests.integration.kv_service import TCP, UCX, scripted_service
from tests.integration.stack import eventually

TOKENS = list(range(40))
BLOCKS = list(range(10))


@asynccontextmanager
async def one_node(**settings):
    """Yield a service with engines p and d on one node."""
    async with (
        scripted_service(**settings) as node,
        FakeEngine(node.socket, "p") as p,
        FakeEngine(node.socket, "d") as d,
    ):
        yield node, p, d


@asynccontextmanager
async def two_nodes(shape=None, **settings):
    """Yield the services of two nodes, with engine p on the first and d on the second."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        here = await enter(scripted_service("n1", **settings))
        there = await enter(scripted_service("n2", **settings))
        p = await enter(FakeEngine(here.socket, "p", shape=shape))
        d = await enter(FakeEngine(there.socket, "d", shape=shape))
        yield here, there, p, d


async def leased(p, d, **options):
    """Return the address of a lease that d has looked up."""
    address = await p.open_lease(TOKENS, BLOCKS, **options)
    found = await d.lookup(address, TOKENS)
    assert found.num_tokens == 40, found
    return address


def held_back(movers):
    """Let pulls wait until the event that is returned is set."""
    gate = asyncio.Event()

    async def wait(job):
        await gate.wait()
        return report(job)

    movers.script = wait
    return gate


# -- Answers -------------------------------------------------------------------------------


async def test_a_pull_carries_the_leases_blocks_and_fence_to_the_mover():
    async with one_node() as (node, p, d):
        address = await leased(p, d)
        done = await d.pull(address, [30, 31], first_block=4)
        assert (done.reason, done.path, done.size_bytes) == ("", "shm", 2 * 2 * 1024)
        (job,) = node.movers.jobs
        held = p.leases[address.lease]
        assert job.request.source_blocks == (4, 5)
        assert job.request.target_blocks == (30, 31)
        assert (job.request.fence.slot, job.request.fence.generation) == (held.slot, 0)
        assert (job.source.key.split(":")[0], job.target.key.split(":")[0]) == ("p", "d")
        assert node.count("pulls", path="shm", outcome="done", reason="") == 1
        assert node.count("bytes", path="shm") == done.size_bytes


@pytest.mark.parametrize(
    ("blocks", "first_block", "seconds", "reason"),
    [
        ([], 0, 10, Reason.RANGE),
        ([1], -1, 10, Reason.RANGE),
        ([1, 2], 9, 10, Reason.RANGE),
        ([1, 1], 0, 10, Reason.RANGE),
        ([64], 0, 10, Reason.RANGE),
        ([-1], 0, 10, Reason.RANGE),
        ([1], 0, -1, Reason.DEADLINE),
    ],
)
async def test_pulls_that_cannot_be_are_refused_before_any_mover_hears_of_them(
    blocks, first_block, seconds, reason
):
    async with one_node() as (node, p, d):
        address = await leased(p, d)
        done = await d.pull(address, blocks, first_block=first_block, seconds=seconds)
        assert done.reason == reason
        assert node.movers.jobs == []
        assert node.count("pulls", path="none", outcome="failed", reason=reason) == 1


async def test_only_what_fitted_the_request_may_be_pulled():
    async with one_node() as (_, p, d):
        address = await p.open_lease(TOKENS, BLOCKS)
        found = await d.lookup(address, [*TOKENS[:9], 999])
        assert found.num_tokens == 8
        assert (await d.pull(address, [1, 2])).reason == ""
        assert (await d.pull(address, [1, 2, 3])).reason == Reason.RANGE


async def test_a_lease_that_was_not_looked_up_is_not_pulled_from():
    async with one_node() as (node, p, d):
        address = await p.open_lease(TOKENS, BLOCKS)
        assert (await d.pull(address, [1])).reason == Reason.UNKNOWN_LEASE
        assert node.movers.jobs == []


async def test_a_movers_reason_reaches_the_engine_and_the_pair():
    async with one_node() as (node, p, d):

        async def fail(_job):
            raise PullError(Reason.STALE, "slot 1 changed")

        node.movers.script = fail
        done = await d.pull(await leased(p, d), [1])
        assert (done.reason, done.message) == (Reason.STALE, "slot 1 changed")
        assert node.pair["failures"] == {"stale": 1}
        assert node.count("pulls", path="shm", outcome="failed", reason="stale") == 1


async def test_a_defect_is_an_answer_too():
    async with one_node() as (node, p, d):

        async def fail(_job):
            raise ZeroDivisionError

        node.movers.script = fail
        assert (await d.pull(await leased(p, d), [1])).reason == Reason.INTERNAL


# -- Ends ----------------------------------------------------------------------------------


async def test_a_cancelled_pull_is_answered_only_once_nobody_writes():
    async with one_node() as (node, p, d):
        held_back(node.movers)
        address = await leased(p, d)
        number, answer = d.start_pull(address, [1])
        await eventually(lambda: node.movers.jobs, what="the pull runs")
        node.movers.acknowledged.clear()
        for _ in range(2):
            d.cancel_pull(number)
            for _ in range(2):  # by then the agent has read it, and acted on it
                assert (await d.lookup(address, TOKENS)).num_tokens == 40
            assert not answer.done()
            assert node.movers.writing.total() == 1
        node.movers.acknowledged.set()
        done = await answer
        assert done.reason == Reason.CANCELLED
        assert node.movers.writing.total() == 0
        assert node.count("pulls", path="shm", outcome="cancelled", reason="cancelled") == 1


async def test_a_pull_cancelled_before_it_began_is_answered():
    async with one_node(max_pulls=1) as (node, p, d):
        gate = held_back(node.movers)
        address = await leased(p, d)
        _, first = d.start_pull(address, [1])
        number, second = d.start_pull(address, [2])
        await eventually(lambda: node.movers.jobs, what="the first pull runs")
        d.cancel_pull(number)
        assert (await second).reason == Reason.CANCELLED
        gate.set()
        assert (await first).reason == ""
        d.cancel_pull(number)  # over: nothing more comes of it
        assert len(node.movers.jobs) == 1


async def test_pulls_into_an_engine_that_is_gone_end_before_its_memory_is_closed():
    async with one_node() as (node, p, d):
        held_back(node.movers)
        address = await leased(p, d)
        d.start_pull(address, [1])
        await eventually(lambda: node.movers.jobs, what="the pull runs")
        node.movers.acknowledged.clear()
        target = node.movers.jobs[0].target
        await d.disconnect()
        await eventually(lambda: "d" not in engines(node), what="the agent has seen it")
        assert target.key not in node.movers.dropped
        node.movers.acknowledged.set()
        await eventually(lambda: target.key in node.movers.dropped, what="it is dropped")
        assert node.movers.writing.total() == 0


def engines(node):
    return node.service.workings.registry.engines


async def test_pulls_from_an_engine_that_is_gone_fail_and_its_leases_end():
    async with one_node() as (node, p, d):
        held_back(node.movers)
        address = await leased(p, d)
        _, answer = d.start_pull(address, [1])
        await eventually(lambda: node.movers.jobs, what="the pull runs")
        await p.disconnect()
        assert (await answer).reason in (Reason.PEER_LOST, Reason.NO_SOURCE)
        assert (await d.pull(address, [1])).reason == Reason.NO_SOURCE
        assert (await d.lookup(address, TOKENS)).reason == Reason.NO_SOURCE
        assert node.count("lease_ends", why="engine_gone") == 1
        assert dict(node.service.gauges().leases) == {"open": 0, "closing": 0}


async def test_a_newer_boot_ends_the_older_ones_pulls_before_its_connections():
    async with one_node() as (node, p, d):
        held_back(node.movers)
        address = await leased(p, d)
        _, answer = d.start_pull(address, [1])
        await eventually(lambda: node.movers.jobs, what="the pull runs")
        async with FakeEngine(node.socket, "d") as newer:
            assert (await answer).reason == Reason.CANCELLED
            await asyncio.wait_for(d.workers[0].ended.wait(), 30)
            await asyncio.wait_for(d.scheduler.ended.wait(), 30)
            await eventually(lambda: p.releases, what="what the older one read is let go")
            assert (p.releases[0].lease, p.releases[0].why) == (address.lease, "reader_gone")
            await leased(p, newer)


async def test_the_same_id_twice_ends_the_connection_and_the_pull():
    async with one_node() as (node, p, d):
        held_back(node.movers)
        address = await leased(p, d)
        number, _ = d.start_pull(address, [1])
        d._ids = iter([number])
        d.start_pull(address, [2])
        await asyncio.wait_for(d.workers[0].ended.wait(), 30)
        await eventually(lambda: not len(node.service.workings.pulls), what="it ends")
        assert node.count("connection_ends", cause="malformed") == 1


async def test_stopping_answers_pulls_before_it_ends_connections():
    async with AsyncExitStack() as engines_stack, AsyncExitStack() as stack:
        node = await stack.enter_async_context(scripted_service())
        p = await engines_stack.enter_async_context(FakeEngine(node.socket, "p"))
        d = await engines_stack.enter_async_context(FakeEngine(node.socket, "d"))
        held_back(node.movers)
        _, answer = d.start_pull(await leased(p, d), [1])
        await eventually(lambda: node.movers.jobs, what="the pull runs")
        await stack.aclose()
        assert (await answer).reason == Reason.CANCELLED
        assert node.movers.closed
        assert len(node.movers.dropped) == 2


# -- Bounds and leases ---------------------------------------------------------------------


async def test_bytes_in_flight_are_bounded_for_each_peer():
    block_bytes = 2 * 1024
    async with one_node(inflight_limit_bytes=3 * block_bytes) as (node, p, d):
        gate = held_back(node.movers)
        address = await leased(p, d)
        _, first = d.start_pull(address, [1, 2])
        _, second = d.start_pull(address, [3, 4])
        late = await d.pull(address, [5, 6], seconds=0.2)
        assert late.reason == Reason.BUSY
        assert len(node.movers.jobs) == 1
        assert node.service.gauges().inflight_bytes == 2 * block_bytes
        gate.set()
        assert [(await answer).reason for answer in (first, second)] == ["", ""]
        assert node.service.gauges().inflight_bytes == 0


async def test_a_lease_is_renewed_for_as_long_as_somebody_pulls():
    async with one_node(lease_seconds=1.5) as (node, p, d):
        gate = held_back(node.movers)
        address = await leased(p, d)
        _, answer = d.start_pull(address, [1])
        await eventually(lambda: len(p.renewals) >= 4, what="it outlives its time")
        assert p.releases == []
        gate.set()
        assert (await answer).reason == ""
        await eventually(lambda: p.releases, what="it ends when nobody pulls")
        assert p.releases[0].why == "expired"


# -- Between nodes -------------------------------------------------------------------------


async def test_the_source_grants_what_is_pulled_and_no_more():
    async with two_nodes() as (here, there, p, d):
        gate = held_back(there.movers)
        address = await leased(p, d)
        _, answer = d.start_pull(address, [7, 8], first_block=2)
        await eventually(lambda: there.movers.jobs, what="the pull runs")
        ((key, backend, grant),) = here.movers.grants.values()
        assert (key.split(":")[0], backend, grant.block_ids) == ("p", "tcp", (0, 1, 2, 3))
        (job,) = there.movers.jobs
        assert (job.offer, job.source, job.backend) == (b"offer", None, "tcp")
        assert (job.request.ticket, job.request.first_block) == (grant.ticket, 2)
        assert job.request.source_blocks == (2, 3)
        gate.set()
        assert (await answer).reason == ""
        await eventually(lambda: not here.movers.grants, what="the grant is withdrawn")


@pytest.mark.parametrize("reason", [Reason.PEER_LOST, Reason.NO_PATH, Reason.CORRUPT])
async def test_the_next_transport_is_tried_once(reason):
    async with two_nodes(probes=(UCX, TCP)) as (_, there, p, d):

        async def fail_first(job):
            if len(there.movers.jobs) == 1:
                raise PullError(reason, "no")
            return report(job)

        there.movers.script = fail_first
        done = await d.pull(await leased(p, d), [1])
        assert (done.reason, done.path) == ("", "tcp")
        assert [job.backend for job in there.movers.jobs] == ["ucx", "tcp"]
        assert there.count("pulls", path="ucx", outcome="retried", reason=reason) == 1
        assert there.count("pulls", path="tcp", outcome="done", reason="") == 1


async def test_two_failures_are_the_end():
    async with two_nodes(probes=(UCX, TCP)) as (here, there, p, d):

        async def fail(_job):
            raise PullError(Reason.PEER_LOST, "no")

        there.movers.script = fail
        assert (await d.pull(await leased(p, d), [1])).reason == Reason.PEER_LOST
        assert len(there.movers.jobs) == 2
        await eventually(lambda: not here.movers.grants, what="both grants are withdrawn")


async def test_a_transport_that_the_source_cannot_serve_is_passed_over():
    async with two_nodes(probes=(UCX, TCP)) as (here, _, p, d):
        here.movers.unserved["ucx"] = Reason.NO_PATH
        done = await d.pull(await leased(p, d), [1])
        assert (done.reason, done.path) == ("", "tcp")
        here.movers.unserved["tcp"] = Reason.NO_PATH
        assert (await d.pull(await leased(p, d), [1])).reason == Reason.NO_PATH


async def test_without_rdma_nothing_moves_where_it_is_required():
    async with two_nodes(probes=(TCP,), require_rdma=True) as (_, there, p, d):
        assert (await d.pull(await leased(p, d), [1])).reason == Reason.RDMA_REQUIRED
        assert there.movers.jobs == []


async def test_a_path_that_turns_out_not_to_be_rdma_is_refused_where_it_is_required():
    async with two_nodes(probes=(UCX,), require_rdma=True) as (_, there, p, d):

        async def over(job):
            return report(job, rdma=len(there.movers.jobs) == 1)

        there.movers.script = over
        address = await leased(p, d)
        assert (await d.pull(address, [1])).reason == ""
        assert (await d.pull(address, [1])).reason == Reason.RDMA_REQUIRED


async def test_each_rank_pulls_from_its_own():
    shape = KvShape(tp_size=2)
    async with two_nodes(shape) as (here, there, p, d):
        gate = held_back(there.movers)
        address = await leased(p, d)
        answers = [d.start_pull(address, [1], rank=rank)[1] for rank in (0, 1)]
        await eventually(lambda: len(there.movers.jobs) == 2, what="both pulls run")
        keys = sorted(key.split(":")[2] for key, _, _ in here.movers.grants.values())
        assert keys == ["0", "1"]
        gate.set()
        assert [(await answer).reason for answer in answers] == ["", ""]


async def test_pulls_teach_what_the_path_costs():
    async with two_nodes() as (_, there, p, d):
        address = await leased(p, d)
        for count in range(1, 7):
            assert (await d.pull(address, list(range(count)))).reason == ""
        log = there.state.log
        await eventually(
            lambda: log.paths.get(("n1", "n2")) and log.paths["n1", "n2"].points >= 5,
            what="the cost is published",
        )
        assert there.pair["measured"]
        assert there.pair["bytes"] == 21 * 2 * 1024
        assert log.paths["n2", "n2"].points == 0


async def test_kv_that_came_without_rdma_is_a_problem_where_that_is_asked_for():
    async with two_nodes(report_non_rdma=True) as (_, there, p, d):
        assert there.service.problems() == []
        assert (await d.pull(await leased(p, d), [1])).reason == ""
        assert there.service.problems() == ["KV from node n1 comes by tcp, without RDMA"]
