"""Leases that end in the middle of a copy, wall clocks that jump, engines that do not fit.

What was copied under a lease that no longer held is never taken, however right it may look.
"""

import asyncio
import http.client
import json
import time
from contextlib import AsyncExitStack, asynccontextmanager, closing
from signal import SIGSTOP
from urllib.parse import urlsplit

import pytest

from tests.doubles.connector_engine import ConnectorEngine
from tests.doubles.kv_engine import KvShape
from tests.integration.kv_nodes import kv_node
from tests.integration.kv_programs import wait_until
from tests.integration.kv_site import Site
from tests.integration.stack import eventually

LARGE = {"layers": 2, "blocks": 24, "block_bytes": 1 << 20}
"""A pull of these blocks is more than the buffers of a connection take."""
PULL_SECONDS = 30.0
LEASE_SECONDS = 1.5
TOKENS = tuple(range(33))


@pytest.fixture(scope="module")
def sites():
    """One node, and two of them, whose leases are short."""
    options = {"lookup_seconds": 5.0, "lease_seconds": LEASE_SECONDS}
    sites = {1: Site(**options), 2: Site(nodes=2, shape=LARGE, **options)}
    yield sites
    for site in sites.values():
        site.close()


@pytest.fixture(params=[1, 2], ids=["one-node", "two-nodes"])
def site(request, sites):
    site = sites[request.param]
    with site.case():
        yield site


def caught(site, gate):
    """Begin a pull and catch it in the middle; returns the request and its lease."""
    before = site.d.status.tally
    params = site.prefill()
    request = site.d.ask("decode", tokens=site.tokens, params=params, pull_seconds=PULL_SECONDS)
    gate.next()
    return request, params, before


def release(agent, params):
    """End a lease as the ingress does for a client that has gone."""
    names = {"engine": "remote_engine_id", "epoch": "remote_epoch", "lease": "remote_lease_id"}
    body = json.dumps({ours: params[theirs] for ours, theirs in names.items()})
    with closing(http.client.HTTPConnection(urlsplit(agent.url).netloc, timeout=20)) as connection:
        connection.request("POST", "/v1/transfer/release", body)
        assert connection.getresponse().status == 202


def refused(request, site, before):
    """Return why all of a load was refused, and then computed."""
    outcome = request.result(40)
    assert (outcome.loaded, outcome.refused, outcome.right) == (0, site.blocks, True)
    after = site.d.status.tally
    (reason,) = {key for key in after if after[key] != before.get(key)} - {"lookup/found"}
    return reason, outcome.torn


def reuse_all(site):
    """Have P compute something else into all of its blocks."""
    wait_until(lambda: site.p.status.free == site.p.status.blocks, "P has its blocks back")
    others = [5] * (site.p.status.blocks * KvShape().block_size)
    assert site.p.get("decode", tokens=others, params=None).right


# -- Leases ----------------------------------------------------------------------------------


def test_blocks_that_are_reused_during_their_copy_are_stale(site):
    """P's agent is another one and stopped, or does not matter: the fence alone must tell."""
    with site.held() as gate:
        request, _, before = caught(site, gate)
        if site.p_agent is not site.d_agent:
            site.p_agent.strike(SIGSTOP)
        assert site.p.get("expire") == 1
        reuse_all(site)
        gate.open()
        reason, torn = refused(request, site, before)
        assert reason == "load/stale"
        assert torn


@pytest.mark.slow
def test_a_lease_that_is_released_during_its_copy_does_not_count(site):
    with site.held() as gate:
        request, params, before = caught(site, gate)
        release(site.p_agent, params)
        reuse_all(site)
        gate.open()
        reason, torn = refused(request, site, before)
        # To other nodes' readers the grant, which ends with the lease, may be the first to say no.
        assert reason in {"load/stale", "load/expired"}
        assert torn


def test_a_lease_that_expires_during_its_copy_does_not_count(site):
    """P is stopped, so it hears no renewals and does not close the lease either."""
    with site.held() as gate:
        request, _, before = caught(site, gate)
        site.p.strike(SIGSTOP)
        stopped_at = time.monotonic()
        wait_until(lambda: time.monotonic() - stopped_at > LEASE_SECONDS, "the lease has expired")
        gate.open()
        reason, _ = refused(request, site, before)
        assert reason == "load/expired"


@pytest.mark.slow
def test_a_reader_that_is_at_it_keeps_its_lease(site):
    with site.held() as gate:
        request, *_ = caught(site, gate)
        began_at = time.monotonic()
        wait_until(lambda: time.monotonic() - began_at > LEASE_SECONDS, "it would have expired")
        gate.open()
        assert request.result(40).loaded == site.blocks


# -- Clocks ----------------------------------------------------------------------------------


@pytest.fixture
def jumpy_site():
    """Two nodes whose agents, engines and movers have clocks that jump when they are read."""
    env = {"NEARKV_TEST_CLOCK": "jumping"}
    site = Site(nodes=2, shape=LARGE, env=env, lookup_seconds=5.0)
    yield site
    site.close()


def test_wall_clocks_may_jump(jumpy_site):
    site = jumpy_site
    with site.case(), site.held() as gate:
        request, *_ = caught(site, gate)
        gate.open()
        assert request.result(40).loaded == site.blocks
        wait_until(lambda: site.p.status.free == site.p.status.blocks, "the lease was given back")
        params = site.prefill()
        assert site.p.get("expire") == 1
        outcome = site.d.get("decode", tokens=site.tokens, params=params)
        assert (outcome.loaded, outcome.right) == (0, True)


# -- Engines that do not fit -----------------------------------------------------------------


@asynccontextmanager
async def two_engines(source, target, *, apart, paths=()):
    """Run engines p and d of these shapes, on one node or on two."""
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(kv_node("n1", paths=paths))
        there = await stack.enter_async_context(kv_node("n2", paths=paths)) if apart else here
        p = stack.enter_context(engine("p", here, source))
        d = stack.enter_context(engine("d", there, target))
        for one in (p, d):
            await eventually(lambda one=one: is_registered(one), what="it is registered")
        yield p, d


def engine(name, node, shape):
    extra = {"engine": name, "socket": str(node.socket), "lookup_seconds": 10.0}
    return ConnectorEngine(extra, shape)


def is_registered(one):
    return one.status().result(40).registered


@pytest.mark.parametrize("apart", [False, True], ids=["one-node", "two-nodes"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"config_hash": "other"}, "model"),
        ({"kv_dtype": "float16"}, "dtype"),
        ({"layout": "LBHNC"}, "layout"),
        ({"block_size": 8}, "layout"),
        ({"block_bytes": 2048}, "layout"),
        ({"layers": 3}, "layout"),
        ({"tp_size": 2}, "topology"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
async def test_kv_of_another_kind_is_not_loaded(change, reason, apart):
    async with two_engines(KvShape(**change), KvShape(), apart=apart) as (p, d):
        params = (await asyncio.wrap_future(p.prefill(TOKENS))).params
        outcome = await asyncio.wrap_future(d.decode(TOKENS, params))
        assert (outcome.right, outcome.loaded, outcome.refused) == (True, 0, 0)
        assert d.status().result(40).tally == {f"lookup/{reason}": 1}
        await eventually(lambda: p.status().result(40).free == 64, what="the lease is given back")


async def test_the_name_of_a_model_decides_nothing():
    async with two_engines(KvShape(model="a/b"), KvShape(model="/c"), apart=False) as (p, d):
        params = (await asyncio.wrap_future(p.prefill(TOKENS))).params
        assert (await asyncio.wrap_future(d.decode(TOKENS, params))).loaded == 8


async def test_engines_of_two_ranks_load_on_both():
    shape = KvShape(tp_size=2)
    async with two_engines(shape, shape, apart=True, paths=["tcp"]) as (p, d):
        params = (await asyncio.wrap_future(p.prefill(TOKENS))).params
        outcome = await asyncio.wrap_future(d.decode(TOKENS, params))
        assert (outcome.right, outcome.loaded) == (True, 8)


@pytest.mark.parametrize(
    ("change", "salt"),
    [({}, "other"), ({0: 99}, ""), ({31: 99}, "")],
    ids=["salt", "first-token", "last-token"],
)
async def test_kv_of_other_tokens_is_not_loaded(change, salt):
    asked = [change.get(i, token) for i, token in enumerate(TOKENS)]
    async with two_engines(KvShape(), KvShape(), apart=False) as (p, d):
        params = (await asyncio.wrap_future(p.prefill(TOKENS))).params
        outcome = await asyncio.wrap_future(d.decode(asked, params, salt=salt))
        assert outcome.right
        assert outcome.loaded == (7 if 31 in change else 0)
