"""Pulls through real movers, real shared memory, and what ends them."""

import asyncio
import os
import signal

import pytest

from nearkv.agent.movers.handle import Cause
from nearkv.agent.movers.jobs import EngineMemory, PullJob
from nearkv.agent.movers.limits import DEFAULT_LIMITS
from nearkv.agent.movers.purposes import Kind
from nearkv.transfer.backends.contract import monotonic_ms
from nearkv.transfer.connector.settings import ConnectorSettings
from nearkv.transfer.errors import Reason
from nearkv.transfer.lease import SlotTable
from tests.agent.movers.engines import (
    LAYOUT,
    SCRIBBLING,
    assert_copied,
    eventually,
    is_gone,
    local_job,
    maps,
    mover_of,
    refused,
    request_of,
    scribble_job,
    scribbling,
)


async def test_a_pull_brings_the_right_bytes_and_nothing_else(pool, engine):
    p, d = engine("p"), engine("d")
    before = [d.block(layer, block) for layer in range(2) for block in range(LAYOUT.blocks)]
    report = await pool.pull(local_job(p, d))
    assert_copied(p, d)
    assert report.size_bytes == 2 * 3 * LAYOUT.block_bytes
    assert report.path.name == "shm"
    assert not report.path.rdma
    after = [d.block(layer, block) for layer in range(2) for block in range(LAYOUT.blocks)]
    changed = {i % LAYOUT.blocks for i in range(len(after)) if after[i] != before[i]}
    assert changed == {3, 4, 9}


async def test_many_pulls_into_one_engine_share_one_mover(pool, engine):
    p, q, d = engine("p"), engine("q"), engine("d")
    jobs = [local_job(source, d, blocks=(n, n + 1)) for n in range(0, 8, 2) for source in (p,)]
    jobs += [local_job(q, d, blocks=(n, n + 1)) for n in range(8, 16, 2)]
    reports = await asyncio.gather(*(pool.pull(job) for job in jobs))
    assert [report.size_bytes for report in reports] == [2048] * 8
    for n in range(0, 16, 2):
        assert_copied(p if n < 8 else q, d, (n, n + 1))
    assert pool.counts.started == {Kind.PULL: 1}
    assert mover_of(pool, "d").sources == 2


async def test_the_agent_itself_maps_nothing_of_the_engines(pool_of, engine):
    p, d = engine("p"), engine("d")
    pool = pool_of(command=SCRIBBLING)
    await pool.pull(local_job(p, d))
    pid = mover_of(pool, "d").pid
    assert maps(pid, p.name)
    assert maps(pid, d.name)
    # This process made the memory, so it maps it once for the test and must not once more.
    for each in (p, d):
        assert maps("self", each.name) == 1


async def test_a_closed_lease_is_stale_and_the_mover_lives(pool, engine):
    p, d = engine("p"), engine("d")
    SlotTable(p.slots.view).close(0)
    error = await refused(pool.pull(local_job(p, d)))
    assert error.reason == Reason.STALE
    assert mover_of(pool, "d").in_flight == 0
    assert pool.counts.ended == {}


@pytest.mark.parametrize(
    ("blocks", "to_blocks", "reason"),
    [((3, 4), (3, 16), Reason.LAYOUT), ((3, 4), (5, 5), Reason.LAYOUT)],
    ids=["outside", "twice"],
)
async def test_blocks_that_cannot_be_are_refused(pool, engine, blocks, to_blocks, reason):
    p, d = engine("p"), engine("d")
    job = local_job(p, d, blocks=blocks, to_blocks=to_blocks)
    assert (await refused(pool.pull(job))).reason == reason


@pytest.mark.parametrize("side", ["source", "target"])
async def test_memory_that_its_owner_could_take_away_is_refused(pool, engine, side):
    p, d = engine("p"), engine("d")
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, LAYOUT.size)
    bad = EngineMemory("bad", fd, LAYOUT, p.slots.fd, 4)
    source, target = (bad, d.memory) if side == "source" else (p.memory, bad)
    job = PullJob(
        target=target, source=source, request=request_of(p), deadline_ms=monotonic_ms() + 20_000
    )
    try:
        for _ in range(2):  # a refusal is remembered, not tried again with a closed descriptor
            error = await refused(pool.pull(job))
            assert error.reason == Reason.MEMORY
            assert "seal" in str(error)
    finally:
        os.close(fd)


async def test_memory_that_is_smaller_than_its_layout_is_refused(pool, engine):
    p, d = engine("p"), engine("d")
    small = EngineMemory("small", p.slots.fd, LAYOUT, p.slots.fd, 4)
    job = PullJob(
        target=d.memory, source=small, request=request_of(p), deadline_ms=monotonic_ms() + 20_000
    )
    assert (await refused(pool.pull(job))).reason == Reason.MEMORY


async def test_a_descriptor_that_is_closed_is_refused(pool, engine):
    p, d = engine("p"), engine("d")
    gone = EngineMemory("gone", -1, LAYOUT, p.slots.fd, 4)
    job = PullJob(
        target=d.memory, source=gone, request=request_of(p), deadline_ms=monotonic_ms() + 20_000
    )
    assert (await refused(pool.pull(job))).reason == Reason.MEMORY
    await pool.pull(local_job(p, d))
    assert_copied(p, d)


async def test_a_source_without_lease_slots_is_refused(pool, engine):
    p, d = engine("p"), engine("d")
    job = PullJob(
        target=d.memory,
        source=EngineMemory("bare", p.kv.fd, LAYOUT),
        request=request_of(p),
        deadline_ms=monotonic_ms() + 20_000,
    )
    assert (await refused(pool.pull(job))).reason == Reason.NO_SOURCE


@pytest.mark.parametrize("backend", ["carrier-pigeon", "shm"])
async def test_a_backend_that_cannot_be_used_is_no_path(pool, engine, backend):
    p, d = engine("p"), engine("d")
    job = PullJob(
        target=d.memory,
        request=request_of(p),
        deadline_ms=monotonic_ms() + 20_000,
        backend=backend,
        offer=b"x",
    )
    assert (await refused(pool.pull(job))).reason == Reason.NO_PATH


async def test_what_a_transport_throws_is_told_and_logged_as_internal(pool_of, engine):
    p, d = engine("p"), engine("d")
    pool = pool_of(command=SCRIBBLING)
    error = await refused(pool.pull(scribble_job(p, d, "fails")))
    assert error.reason == Reason.INTERNAL
    assert "ZeroDivisionError" in str(error)
    await pool.pull(scribble_job(p, d, "works"))
    assert pool.counts.ended == {}


async def test_a_connection_serves_the_next_pull_too(pool_of, engine):
    p, d = engine("p"), engine("d")
    pool = pool_of(command=SCRIBBLING)
    pieces = [(await pool.pull(scribble_job(p, d, "works"))).pieces for _ in range(3)]
    assert pieces == [1, 2, 3]


async def test_a_kept_connection_that_the_peer_closed_is_made_anew_once(pool_of, engine):
    p, d = engine("p"), engine("d")
    pool = pool_of(command=SCRIBBLING)
    pieces = [(await pool.pull(scribble_job(p, d, "peer_lost_once"))).pieces for _ in range(3)]
    assert pieces == [1, 1, 1]


async def test_a_failed_connection_is_not_kept(pool_of, engine):
    p, d = engine("p"), engine("d")
    pool = pool_of(command=SCRIBBLING)
    await refused(pool.pull(scribble_job(p, d, "fails")))
    assert (await pool.pull(scribble_job(p, d, "works"))).pieces == 1


async def test_a_mover_that_is_killed_fails_its_pulls_and_the_next_pull_gets_another(
    pool_of, engine
):
    p, d = engine("p"), engine("d")
    pool = pool_of(command=SCRIBBLING)
    pulls = [asyncio.create_task(pool.pull(scribble_job(p, d, "polite"))) for _ in range(2)]
    await scribbling(d)
    pid = mover_of(pool, "d").pid
    os.kill(pid, signal.SIGKILL)
    for pull in pulls:
        assert (await refused(pull)).reason == Reason.MOVER_LOST
    assert is_gone(pid)
    await pool.pull(local_job(p, d))
    assert_copied(p, d)
    assert pool.counts.ended == {(Kind.PULL, Cause.CRASHED): 1}
    assert mover_of(pool, "d").restarts == 1
    assert "SIGKILL" in mover_of(pool, "d").last_failure


async def test_a_mover_that_keeps_dying_is_not_started_again_and_again(pool_of, engine):
    p, d = engine("p"), engine("d")
    pool = pool_of(command=SCRIBBLING, backoff_seconds=1000.0, backoff_limit_seconds=1000.0)
    for _ in range(2):
        error = await refused(pool.pull(scribble_job(p, d, "dies")))
        assert error.reason == Reason.MOVER_LOST
    error = await refused(pool.pull(scribble_job(p, d, "works")))
    assert error.reason == Reason.MOVER_LOST
    assert "keep dying" in str(error)
    assert pool.counts.started == {Kind.PULL: 2}
    (status,) = pool.describe()
    assert (status.state, status.pid, status.restarts) == ("failed", None, 2)
    # Others are not held up, and neither is the engine when it comes back as a new one.
    await pool.pull(scribble_job(p, engine("other"), "works"))
    await pool.drop("d")
    await pool.pull(scribble_job(p, d, "works"))


async def test_a_program_that_cannot_be_started_is_a_lost_mover(pool_of, engine):
    p, d = engine("p"), engine("d")
    pool = pool_of(command=("/nowhere/python",))
    assert (await refused(pool.pull(local_job(p, d)))).reason == Reason.MOVER_LOST
    assert pool.describe()[0].last_failure


def test_no_mover_is_killed_for_a_slow_start_while_a_pull_has_time_left():
    assert DEFAULT_LIMITS.start_seconds > ConnectorSettings().pull_seconds


@pytest.mark.parametrize("program", [("/bin/cat",), ("/bin/sleep", "1000")], ids=["eof", "mute"])
async def test_a_program_that_is_no_mover_is_given_up(pool_of, engine, program):
    p, d = engine("p"), engine("d")
    pool = pool_of(command=program, start_seconds=0.3)
    assert (await refused(pool.pull(local_job(p, d)))).reason == Reason.MOVER_LOST
    (status,) = pool.describe()
    assert status.pid is None


async def test_more_pulls_than_may_wait_are_refused_at_once(pool_of, engine):
    p, d = engine("p"), engine("d")
    pool = pool_of(command=SCRIBBLING, threads=1, max_queued=2)
    pulls = [asyncio.create_task(pool.pull(scribble_job(p, d, "polite"))) for _ in range(2)]
    await scribbling(d)
    assert (await refused(pool.pull(scribble_job(p, d, "works")))).reason == Reason.BUSY
    for pull in pulls:
        pull.cancel()
    await asyncio.gather(*pulls, return_exceptions=True)
    await pool.pull(scribble_job(p, d, "works"))


async def test_more_movers_than_may_be_are_refused_unless_one_is_idle(pool_of, engine):
    p, d, e = engine("p"), engine("d"), engine("e")
    pool = pool_of(command=SCRIBBLING, max_movers=1)
    pull = asyncio.create_task(pool.pull(scribble_job(p, d, "polite")))
    await scribbling(d)
    assert (await refused(pool.pull(scribble_job(p, e, "works")))).reason == Reason.BUSY
    pull.cancel()
    await asyncio.gather(pull, return_exceptions=True)
    await pool.pull(scribble_job(p, e, "works"))
    await eventually(
        lambda: pool.counts.ended == {(Kind.PULL, Cause.IDLE): 1}, what="the idle one ended"
    )


async def test_a_mover_that_nobody_needs_ends(pool_of, engine):
    p, d = engine("p"), engine("d")
    pool = pool_of(idle_seconds=0.05)
    await pool.pull(local_job(p, d))
    await eventually(lambda: not pool.describe(), what="the mover ended")
    assert pool.counts.ended == {(Kind.PULL, Cause.IDLE): 1}
    await pool.pull(local_job(p, d))
    assert_copied(p, d)


async def test_a_pool_that_is_closed_ends_pulls_and_takes_none(pool_of, engine):
    p, d = engine("p"), engine("d")
    pool = pool_of(command=SCRIBBLING)
    pull = asyncio.create_task(pool.pull(scribble_job(p, d, "stubborn")))
    await scribbling(d)
    pid = mover_of(pool, "d").pid
    await pool.close()
    assert is_gone(pid)
    assert (await refused(pull)).reason == Reason.CANCELLED
    assert (await refused(pool.pull(local_job(p, d)))).reason == Reason.AGENT_LOST
    assert not (await pool.probe("scribble")).usable
    await pool.close()
