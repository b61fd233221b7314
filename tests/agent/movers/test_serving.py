"""Serving movers: pulls between two agents over sockets, offers, their ends; and probes."""

import asyncio
import dataclasses
import os
import signal

import pytest

from nearkv.agent.movers.handle import Cause
from nearkv.agent.movers.jobs import PullJob
from nearkv.agent.movers.purposes import Kind
from nearkv.transfer.backends.contract import monotonic_ms
from nearkv.transfer.errors import Reason
from tests.agent.movers.engines import (
    BLOCKS,
    SCRIBBLING,
    assert_copied,
    eventually,
    grant_for,
    holders,
    mover_of,
    refused,
    request_of,
    scribble_job,
)


def remote_job(source, target, grant, offer, backend="tcp"):
    return PullJob(
        target=target.memory,
        request=request_of(source, ticket=grant.ticket),
        deadline_ms=monotonic_ms() + 20_000,
        backend=backend,
        offer=offer,
    )


async def test_an_engine_is_read_from_another_agent_over_sockets(pool_of, engine):
    theirs, ours = pool_of(), pool_of()
    p, d = engine("p"), engine("d")
    grant = grant_for(p)
    offer = await theirs.offer(p.memory, "tcp", grant)
    report = await ours.pull(remote_job(p, d, grant, offer))
    assert_copied(p, d)
    assert report.path.name == "tcp"
    # Each side maps its own engine only.
    assert holders(p.name, but=os.getpid()) == [mover_of(theirs, "p", Kind.SERVE).pid]
    assert holders(d.name, but=os.getpid()) == [mover_of(ours, "d").pid]
    assert mover_of(theirs, "p", Kind.SERVE).grants == 1


async def test_a_withdrawn_grant_lets_nobody_read(pool_of, engine):
    theirs, ours = pool_of(), pool_of()
    p, d = engine("p"), engine("d")
    kept, ended = grant_for(p), grant_for(p)
    offers = [await theirs.offer(p.memory, "tcp", grant) for grant in (kept, ended)]
    await theirs.withdraw("p", ended.ticket)
    await theirs.withdraw("p", b"nobody knows this one")
    await theirs.withdraw("nobody", ended.ticket)
    error = await refused(ours.pull(remote_job(p, d, ended, offers[1])))
    assert error.reason in {Reason.AUTH, Reason.PEER_REFUSED}
    await ours.pull(remote_job(p, d, kept, offers[0]))
    assert_copied(p, d)


async def test_a_server_that_died_is_a_lost_peer_and_the_next_offer_starts_another(pool_of, engine):
    theirs, ours = pool_of(), pool_of()
    p, d = engine("p"), engine("d")
    grant = grant_for(p)
    offer = await theirs.offer(p.memory, "tcp", grant)
    await ours.pull(remote_job(p, d, grant, offer))
    os.kill(mover_of(theirs, "p", Kind.SERVE).pid, signal.SIGKILL)
    await eventually(lambda: theirs.counts.ended, what="the server's death was seen")
    error = await refused(ours.pull(remote_job(p, d, grant, offer)))
    assert error.reason == Reason.PEER_LOST
    offer = await theirs.offer(p.memory, "tcp", grant)
    await ours.pull(remote_job(p, d, grant, offer))
    assert_copied(p, d)


async def test_a_server_stays_while_it_has_grants_and_ends_when_they_have_expired(pool_of, engine):
    p = engine("p")
    pool = pool_of(idle_seconds=0.05)
    lasting = grant_for(p)
    await pool.offer(p.memory, "tcp", lasting)
    pid = mover_of(pool, "p", Kind.SERVE).pid
    await asyncio.sleep(0.2)  # that nothing happens takes time to see: several idle times
    assert mover_of(pool, "p", Kind.SERVE).pid == pid
    await pool.offer(p.memory, "tcp", grant_for(p, in_ms=1000))
    await pool.withdraw("p", lasting.ticket)
    await eventually(lambda: not pool.describe(), what="the server ended")
    assert pool.counts.ended == {(Kind.SERVE, Cause.IDLE): 1}


async def test_a_server_ends_when_its_grants_were_withdrawn(pool_of, engine):
    p = engine("p")
    pool = pool_of(idle_seconds=0.05)
    grant = grant_for(p)
    await pool.offer(p.memory, "tcp", grant)
    await pool.withdraw("p", grant.ticket)
    await eventually(lambda: not pool.describe(), what="the server ended")


@pytest.mark.parametrize(
    ("backend", "reason"), [("shm", Reason.NO_PATH), ("nonsense", Reason.NO_PATH)]
)
async def test_what_cannot_be_served_is_refused(pool, engine, backend, reason):
    p = engine("p")
    assert (await refused(pool.offer(p.memory, backend, grant_for(p)))).reason == reason


async def test_a_poor_ticket_is_refused(pool, engine):
    p = engine("p")
    error = await refused(pool.offer(p.memory, "tcp", grant_for(p, ticket=b"short")))
    assert error.reason == Reason.AUTH


async def test_a_source_without_slots_is_not_served(pool, engine):
    p = engine("p")
    bare = dataclasses.replace(p.memory, slots_fd=None, slots=0)
    assert (await refused(pool.offer(bare, "tcp", grant_for(p)))).reason == Reason.NO_SOURCE


async def test_what_a_server_throws_is_told_as_internal(pool_of, engine):
    p = engine("p")
    pool = pool_of(command=SCRIBBLING)
    grant = grant_for(p, ticket=b"fails and is long enough")
    error = await refused(pool.offer(p.memory, "scribble", grant))
    assert error.reason == Reason.INTERNAL
    assert await pool.offer(p.memory, "scribble", grant_for(p, ticket=b"fine")) == b"offer fine"


async def test_a_server_that_hangs_is_killed_and_the_next_offer_gets_another(pool_of, engine):
    p = engine("p")
    pool = pool_of(command=SCRIBBLING, offer_seconds=0.5)
    error = await refused(pool.offer(p.memory, "scribble", grant_for(p, ticket=b"hangs")))
    assert error.reason == Reason.DEADLINE
    assert pool.counts.ended == {(Kind.SERVE, Cause.KILLED): 1}
    pool._limits = dataclasses.replace(pool._limits, offer_seconds=20.0)
    assert await pool.offer(p.memory, "scribble", grant_for(p, ticket=b"fine")) == b"offer fine"


async def test_options_reach_the_transports(pool_of, engine):
    p = engine("p")
    pool = pool_of(command=SCRIBBLING, options={"scribble": {"prefix": "optional "}})
    assert await pool.offer(p.memory, "scribble", grant_for(p, ticket=b"x")) == b"optional x"


async def test_an_option_that_a_transport_does_not_know_is_named(pool_of, engine):
    p = engine("p")
    pool = pool_of(options={"tcp": {"lames": 2}})
    error = await refused(pool.offer(p.memory, "tcp", grant_for(p)))
    assert error.reason == Reason.INTERNAL
    assert "lames" in str(error)


async def test_a_probe_runs_in_a_process_of_its_own_that_ends(pool_of):
    pool = pool_of(command=SCRIBBLING)
    probe = await pool.probe("scribble")
    assert probe.usable
    assert probe.detail != f"in process {os.getpid()}"
    assert pool.describe() == []
    assert pool.counts.ended == {(Kind.PROBE, Cause.DONE): 1}


async def test_every_built_in_transport_can_be_asked_for(pool):
    assert (await pool.probe("shm")).usable
    assert (await pool.probe("tcp")).usable


@pytest.mark.parametrize(
    ("backend", "detail"),
    [("dying", "SIGABRT"), ("raising", "its library is missing"), ("nonsense", "no backend")],
)
async def test_a_probe_that_goes_wrong_says_so(pool_of, backend, detail):
    pool = pool_of(command=SCRIBBLING)
    probe = await pool.probe(backend)
    assert not probe.usable
    assert detail in probe.detail
    assert pool.describe() == []


async def test_a_mover_may_pull_from_here_and_there_at_once(pool_of, engine):
    theirs, ours = pool_of(), pool_of(command=SCRIBBLING)
    p, q, d = engine("p"), engine("q"), engine("d")
    grant = grant_for(p)
    offer = await theirs.offer(p.memory, "tcp", grant)
    local = PullJob(
        target=d.memory,
        source=q.memory,
        request=request_of(q, blocks=(10, 11)),
        deadline_ms=monotonic_ms() + 20_000,
    )
    await asyncio.gather(
        ours.pull(remote_job(p, d, grant, offer)),
        ours.pull(local),
        ours.pull(scribble_job(p, d, "works")),
    )
    assert_copied(p, d, BLOCKS)
    assert_copied(q, d, (10, 11))
