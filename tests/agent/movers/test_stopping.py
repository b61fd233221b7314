"""Nobody writes any more: after a cancel, a deadline, a stop signal, or the agent's end."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from nearkv.agent.movers.handle import Cause
from nearkv.agent.movers.purposes import Kind
from nearkv.transfer.errors import Reason
from tests.agent.movers.engines import (
    PATIENCE_MS,
    SCRIBBLING,
    assert_copied,
    eventually,
    is_gone,
    local_job,
    maps,
    mover_of,
    refused,
    scribble_job,
    scribbling,
)

HOST = Path(__file__).parent / "pool_host.py"
ROOT = Path(__file__).parents[3]


async def nobody_writes(engine):
    """Look at the memory for a while: whoever writes changes it within microseconds."""
    before = bytes(engine.kv.view)
    for _ in range(20):
        await asyncio.sleep(0.005)
        assert bytes(engine.kv.view) == before


@pytest.fixture
async def pull_under_way(pool_of, engine):
    """Return a function that starts a pull by the test transport, seen to write."""
    d = engine("d")

    async def start(how, *, in_ms=PATIENCE_MS, **given):
        pool = pool_of(command=SCRIBBLING, **given)
        await pool.pull(scribble_job(engine("p"), d, "works"))  # so that it has started
        pid = mover_of(pool, "d").pid
        pull = asyncio.create_task(pool.pull(scribble_job(engine("p"), d, how, in_ms=in_ms)))
        await scribbling(d)
        return pool, d, pull, pid

    return start


async def test_a_cancelled_pull_is_acknowledged_and_its_mover_lives(pull_under_way):
    pool, d, pull, pid = await pull_under_way("polite")
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    await nobody_writes(d)
    assert mover_of(pool, "d").pid == pid
    assert mover_of(pool, "d").in_flight == 0


@pytest.mark.parametrize("how", ["stubborn", "hogging"])
async def test_a_mover_that_does_not_acknowledge_a_cancel_is_killed(pull_under_way, how):
    pool, d, pull, pid = await pull_under_way(how, cancel_seconds=0.05)
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    assert is_gone(pid)
    await nobody_writes(d)
    assert pool.counts.ended == {(Kind.PULL, Cause.KILLED): 1}


async def test_being_cancelled_again_and_again_does_not_cut_the_cancel_short(pull_under_way):
    _, d, pull, pid = await pull_under_way("stubborn", cancel_seconds=0.2)
    while not pull.done():
        pull.cancel()
        await asyncio.sleep(0.01)
    assert pull.cancelled()
    assert is_gone(pid)
    await nobody_writes(d)


async def test_a_stopped_mover_is_killed_when_it_does_not_acknowledge_a_cancel(pull_under_way):
    _, d, pull, pid = await pull_under_way("polite", cancel_seconds=0.05)
    os.kill(pid, signal.SIGSTOP)
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    assert is_gone(pid)
    await nobody_writes(d)


async def test_cancelling_a_pull_that_waits_leaves_the_others_alone(pool_of, engine):
    p, d = engine("p"), engine("d")
    pool = pool_of(command=SCRIBBLING, threads=1)
    first = asyncio.create_task(pool.pull(scribble_job(p, d, "polite")))
    await scribbling(d)
    second = asyncio.create_task(pool.pull(scribble_job(p, d, "stubborn")))
    await eventually(lambda: mover_of(pool, "d").in_flight == 2, what="the second was sent")
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert not first.done()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await nobody_writes(d)
    assert pool.counts.ended == {}


async def test_a_pull_cancelled_before_its_mover_was_ready_is_never_begun(pool_of, engine):
    p, d = engine("p"), engine("d")
    pool = pool_of(command=SCRIBBLING)
    pull = asyncio.create_task(pool.pull(scribble_job(p, d, "stubborn")))
    await eventually(pool.describe, what="the mover starts")
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    await pool.pull(scribble_job(p, d, "works"))
    await nobody_writes(d)


async def test_a_pull_ends_at_its_deadline_and_its_mover_lives(pull_under_way):
    for _ in range(5):
        pool, d, pull, pid = await pull_under_way("polite", in_ms=1000)
        assert (await refused(pull)).reason == Reason.DEADLINE
        await nobody_writes(d)
        if not pool.counts.ended:  # else the machine gave it no time within its grace
            break
    assert mover_of(pool, "d").pid == pid


async def test_a_pull_that_waits_beyond_its_deadline_does_not_cost_the_running_one(pool_of, engine):
    p, d = engine("p"), engine("d")
    pool = pool_of(command=SCRIBBLING, threads=1)
    first = asyncio.create_task(pool.pull(scribble_job(p, d, "polite")))
    await scribbling(d)
    late = await refused(pool.pull(scribble_job(p, d, "works", in_ms=100)))
    assert late.reason == Reason.DEADLINE
    # Beyond its grace as well: a pull that writes nothing must not get the mover killed.
    await asyncio.wait({first}, timeout=0.5)
    assert not first.done()
    assert pool.counts.ended == {}
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


@pytest.mark.parametrize("how", ["stubborn", "hogging"])
async def test_a_mover_that_goes_on_beyond_deadline_and_grace_dies(pull_under_way, how):
    pool, d, pull, pid = await pull_under_way(how, in_ms=1000)
    assert (await refused(pull)).reason == Reason.DEADLINE
    assert is_gone(pid)
    await nobody_writes(d)
    assert pool.counts.ended == {(Kind.PULL, Cause.OVERDUE): 1}


async def test_a_deadline_that_has_passed_starts_nothing(pool, engine):
    p, d = engine("p"), engine("d")
    error = await refused(pool.pull(local_job(p, d, deadline_ms=1)))
    assert error.reason == Reason.DEADLINE
    assert pool.describe() == []


async def test_a_terminal_or_service_manager_does_not_end_a_mover_before_the_agent(pool, engine):
    p, d = engine("p"), engine("d")
    await pool.pull(local_job(p, d))
    pid = mover_of(pool, "d").pid
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    await pool.pull(local_job(p, d, blocks=(1, 2)))
    assert_copied(p, d, (1, 2))
    assert mover_of(pool, "d").pid == pid


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
@pytest.mark.parametrize("how", ["stubborn", "hogging"])
async def test_an_agent_that_is_killed_leaves_no_mover(engine, how, stopped):
    d = engine("d")
    host = await asyncio.create_subprocess_exec(
        sys.executable,
        HOST,
        *(str(d.kv.fd), how),
        cwd=ROOT,
        pass_fds=(d.kv.fd,),
        stdout=asyncio.subprocess.PIPE,
    )
    mover = None
    try:
        mover = json.loads(await host.stdout.readline())["mover"]
        await scribbling(d)
        if stopped:
            os.kill(mover, signal.SIGSTOP)
        host.kill()
        await host.wait()
        await eventually(lambda: not maps(mover, d.name), what="the mover is gone")
        mover = None
        await nobody_writes(d)
    finally:
        if host.returncode is None:
            host.kill()
        await host.wait()
        if mover is not None:
            os.kill(mover, signal.SIGKILL)
        host._transport.close()
