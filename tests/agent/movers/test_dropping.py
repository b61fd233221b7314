"""An engine is gone: nobody holds its memory any more, and others go on."""

import asyncio
import os
import signal

import pytest

from nearkv.agent.movers.handle import Cause
from nearkv.agent.movers.purposes import Kind
from nearkv.transfer.errors import Reason
from tests.agent.movers.engines import (
    SCRIBBLING,
    assert_copied,
    eventually,
    grant_for,
    holders,
    is_gone,
    local_job,
    maps,
    mover_of,
    refused,
    scribble_job,
    scribbling,
)


async def test_a_target_that_is_gone_takes_its_mover_with_it(pool_of, engine):
    p, d = engine("p"), engine("d")
    pool = pool_of(command=SCRIBBLING)
    pulls = [
        asyncio.create_task(pool.pull(job))
        for job in (scribble_job(p, d, "stubborn"), scribble_job(p, d, "polite"))
    ]
    await scribbling(d)
    assert holders(d.name, but=os.getpid())
    await pool.drop("d")
    assert holders(d.name, but=os.getpid()) == []
    for pull in pulls:
        assert (await refused(pull)).reason == Reason.PEER_LOST
    assert pool.counts.ended == {(Kind.PULL, Cause.ENGINE_GONE): 1}
    assert pool.describe() == []


async def test_a_source_that_is_gone_is_unmapped_and_its_readers_go_on(pool, engine):
    p, q, d = engine("p"), engine("q"), engine("d")
    await pool.pull(local_job(p, d))
    await pool.pull(local_job(q, d))
    pid = mover_of(pool, "d").pid
    assert maps(pid, p.name)
    await pool.drop("p")
    assert holders(p.name, but=os.getpid()) == []
    assert maps(pid, q.name)
    await pool.pull(local_job(q, d, blocks=(1, 2)))
    assert_copied(q, d, (1, 2))
    assert mover_of(pool, "d").pid == pid
    assert mover_of(pool, "d").sources == 1


async def test_a_pull_from_a_source_that_is_gone_ends_as_peer_lost(pool_of, engine):
    p, d = engine("p"), engine("d")
    pool = pool_of(command=SCRIBBLING)
    await pool.pull(local_job(p, d))
    job = scribble_job(p, d, "polite")
    pull = asyncio.create_task(pool.pull(type(job)(
        target=job.target, source=p.memory, request=job.request,
        deadline_ms=job.deadline_ms, backend="scribble",
    )))  # fmt: skip
    await scribbling(d)
    await pool.drop("p")
    assert (await refused(pull)).reason == Reason.PEER_LOST
    assert holders(p.name, but=os.getpid()) == []


async def test_a_mover_that_cannot_let_go_of_a_source_is_killed(pool_of, engine):
    p, d = engine("p"), engine("d")
    pool = pool_of(command=SCRIBBLING, forget_seconds=0.3)
    job = scribble_job(p, d, "hoards")
    await pool.pull(type(job)(
        target=job.target, source=p.memory, request=job.request,
        deadline_ms=job.deadline_ms, backend="scribble",
    ))  # fmt: skip
    pid = mover_of(pool, "d").pid
    await pool.drop("p")
    assert is_gone(pid)
    assert holders(p.name, but=os.getpid()) == []


async def test_a_stopped_mover_does_not_keep_a_source(pool_of, engine):
    p, d = engine("p"), engine("d")
    pool = pool_of(forget_seconds=0.05)
    await pool.pull(local_job(p, d))
    pid = mover_of(pool, "d").pid
    os.kill(pid, signal.SIGSTOP)
    await pool.drop("p")
    assert is_gone(pid)
    assert holders(p.name, but=os.getpid()) == []


async def test_an_engine_may_come_back_under_its_old_name(pool, engine):
    p, d = engine("p"), engine("d")
    await pool.pull(local_job(p, d))
    await asyncio.gather(pool.drop("p"), pool.drop("d"))
    p2, d2 = engine("p"), engine("d")
    await pool.pull(local_job(p2, d2))
    assert_copied(p2, d2)
    assert holders(d.name, but=os.getpid()) == []


async def test_an_engine_that_goes_while_its_mover_starts_is_never_handed_over(pool, engine):
    p, d = engine("p"), engine("d")
    for gone in ("p", "d"):
        pull = asyncio.create_task(pool.pull(local_job(p, d)))
        await eventually(pool.describe, what="the mover starts")
        await pool.drop(gone)
        assert (await refused(pull)).reason == Reason.PEER_LOST
        assert holders(p.name, but=os.getpid()) == []
        await pool.drop("d")


async def test_dropping_is_done_even_when_whoever_asked_is_cancelled(pool_of, engine):
    p, d = engine("p"), engine("d")
    pool = pool_of(forget_seconds=0.3)
    await pool.pull(local_job(p, d))
    pid = mover_of(pool, "d").pid
    os.kill(pid, signal.SIGSTOP)
    dropping = asyncio.create_task(pool.drop("p"))
    await asyncio.sleep(0)
    dropping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dropping
    assert is_gone(pid)


async def test_a_served_engine_that_is_gone_takes_its_server_with_it(pool_of, engine):
    p = engine("p")
    pool = pool_of()
    await pool.offer(p.memory, "tcp", grant_for(p))
    assert holders(p.name, but=os.getpid())
    await pool.drop("p")
    assert holders(p.name, but=os.getpid()) == []
    assert pool.counts.ended == {(Kind.SERVE, Cause.ENGINE_GONE): 1}


async def test_dropping_what_nobody_knows_does_nothing(pool):
    await pool.drop("nobody")
    assert pool.describe() == []
