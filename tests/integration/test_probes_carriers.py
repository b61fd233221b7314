"""A probe's bytes over each transport: by the agent itself, or by movers."""

import asyncio
import importlib.util
import socket
from contextlib import asynccontextmanager

import msgspec
import pytest

from nearkv.agent.movers.pool import MoverPool
from nearkv.agent.probes.carriers import FENCE, Carriers, Way, new_grant
from nearkv.transfer.backends.contract import monotonic_ms
from nearkv.transfer.backends.tcp_wire import PROTOCOL, Offer
from nearkv.transfer.errors import PullError, Reason

PACKAGES = {"tcp": "nearkv", "ucx": "ucxx", "nixl": "nixl_cu12"}


@asynccontextmanager
async def carriers():
    pool = MoverPool()
    both = Carriers(pool, {})
    try:
        yield both, pool
    finally:
        await both.close()
        await pool.close()


@pytest.mark.parametrize(
    "backend", ["tcp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ucx", "nixl"))]
)
async def test_a_path_is_timed_without_an_engine(backend):
    if importlib.util.find_spec(PACKAGES[backend]) is None:
        pytest.skip(f"{PACKAGES[backend]} is not installed")
    async with carriers() as (both, pool):
        carrier = both.of(backend)
        grant = new_grant(20.0)
        offer = await carrier.offer(backend, grant)
        way = Way(backend, offer, grant.ticket, FENCE)
        timing = await carrier.measure(way, monotonic_ms() + 20_000)
        assert 0 < timing.small_seconds < timing.large_seconds < 10
        assert not timing.is_bound
        assert (timing.path.name == "tcp") == (backend == "tcp")
        assert bool(pool.counts.started) == (backend != "tcp")
        # Whoever comes later with the same ticket gets nothing.
        await carrier.withdraw(grant.ticket)
        assert all(mover.pid is None for mover in pool.describe())
        with pytest.raises(PullError) as refused:
            await carrier.measure(way, monotonic_ms() + 5000)
        assert refused.value.reason is not Reason.DEADLINE


@asynccontextmanager
async def silent_peer():
    """Yield a way to somebody who takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        offer = Offer(
            protocol=PROTOCOL,
            host="127.0.0.1",
            port=silent.getsockname()[1],
            lanes=1,
            chunk_bytes=1 << 20,
            checksums=True,
            tls=False,
        )
        yield Way("tcp", msgspec.msgpack.encode(offer), b"t" * 32, FENCE)


async def test_a_path_on_which_nothing_comes_ends_by_its_deadline():
    async with carriers() as (both, _), silent_peer() as way:
        with pytest.raises(PullError) as refused:
            await both.of("tcp").measure(way, monotonic_ms() + 100)
        assert refused.value.reason is Reason.DEADLINE


async def test_a_probe_that_is_cancelled_goes_on_no_more():
    async with carriers() as (both, _), silent_peer() as way:
        measuring = asyncio.create_task(both.of("tcp").measure(way, monotonic_ms() + 60_000))
        await asyncio.sleep(0)
        measuring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(measuring, 30)
