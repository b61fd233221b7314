"""The shared store's programs struck in turn: requests end with the right KV, nothing is left.

All are real processes; the connectors are the real ones. What must be true at the end of each
case is looked at by :meth:`Site.case`.
"""

import os
import random
import tempfile
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP

import pytest

from tests.integration.kv_programs import wait_until
from tests.integration.kv_site import Place, Site
from tests.transfer.store.stores import RedisServer, redis_missing

pytestmark = pytest.mark.skipif(bool(redis_missing()), reason=redis_missing())

LOOKUP_SECONDS = 1.5
PULL_SECONDS = 3.0


@pytest.fixture(scope="module")
def redis():
    with tempfile.TemporaryDirectory(prefix="nkv-redis-", dir="/tmp") as folder:
        servers = [RedisServer.start(Path(folder))]
        yield servers
        os.kill(servers[-1].process.pid, SIGCONT)
        servers[-1].end()


@pytest.fixture(scope="module")
def site(redis):
    """P and D under one agent that stores whatever they compute."""
    store = {
        "url": redis[0].url,
        "min_tokens": 8,
        "segment_blocks": 4,
        "write": "all",
        "lookup_seconds": 1.0,
    }
    site = Site(
        lookup_seconds=LOOKUP_SECONDS,
        pull_seconds=PULL_SECONDS,
        places={"n1": Place(transfer={"store": store})},
    )
    yield site
    site.close()


def prompt(label):
    numbers = random.Random(label)
    return [numbers.randrange(1000) for _ in range(33)]


def stored(site):
    """Wait until nothing is being stored; returns what the agent says of the store."""

    def quiet():
        store = site.p_agent.transfer["store"]
        return None if store["puts_under_way"] else store

    return wait_until(quiet, "nothing is being stored")


def compute(site, tokens):
    """Have P compute a prompt that nobody asked to be kept; returns once it is stored.

    The store may be left alone for a while after what the case before did to it.
    """
    before = stored(site)["puts"]

    def is_stored():
        assert site.p.get("decode", tokens=tokens, params=None).right
        return stored(site)["puts"] > before

    wait_until(is_stored, "it is stored", seconds=40)


def test_what_nobody_asked_to_be_kept_is_there_for_others(site):
    with site.case():
        tokens = prompt("all")
        compute(site, tokens)
        outcome = site.d.get("decode", tokens=tokens, params=None)
        assert (outcome.right, outcome.loaded) == (True, 8)
        assert site.d.status.tally["store/found"] >= 1


def test_the_store_makes_up_for_a_p_that_is_gone(site):
    with site.case():
        compute(site, prompt("first"))  # so that the store is known to work
        params = site.prefill()
        stored(site)
        inodes = site.p.status.inodes
        site.p.strike(SIGKILL)
        site.assert_let_go(inodes)
        outcome = site.d.get("decode", tokens=site.tokens, params=params)
        assert (outcome.right, outcome.loaded) == (True, site.blocks)


@pytest.mark.parametrize(
    ("victim", "how"),
    [
        pytest.param("agent", SIGKILL, id="agent-killed"),
        pytest.param("agent", SIGSTOP, id="agent-stopped"),
        pytest.param("asking", SIGKILL, id="asking-killed"),
        pytest.param("asking", SIGSTOP, id="asking-stopped"),
        pytest.param("pulling", SIGKILL, id="pulling-killed"),
        pytest.param("pulling", SIGSTOP, id="pulling-stopped"),
        pytest.param("redis", SIGSTOP, id="redis-stopped"),
    ],
)
def test_whoever_is_struck_the_request_is_right(site, redis, victim, how):
    with site.case():
        tokens = prompt(f"{victim} {how}")
        compute(site, tokens)
        site.d.get("decode", tokens=tokens, params=None)  # so that its movers run
        stored(site)
        _strike(site, redis, victim, how)
        outcome = site.d.get("decode", tokens=tokens, params=None)
        assert outcome.right
        if how == SIGSTOP:
            assert outcome.loaded == 0
        site.d.get("decode", tokens=prompt("next"), params=None)
        if victim == "redis":
            os.kill(redis[0].process.pid, SIGCONT)
        if victim == "agent":
            site.make_whole()
        works_again(site, tokens)


def _strike(site, redis, victim, how):
    if victim == "redis":
        os.kill(redis[0].process.pid, how)
        return
    if victim == "agent":
        site.d_agent.strike(how)
        return
    kinds = {"asking": ("store", ""), "pulling": ("pull", "d:")}
    kind, key = kinds[victim]
    for mover in site.d_agent.transfer["movers"]:
        is_meant = mover["key"].startswith(key) if key else not mover["key"]
        if mover["kind"] == kind and is_meant and mover["pid"]:
            os.kill(mover["pid"], how)


def works_again(site, tokens):
    """Wait until what is stored can be had again: movers and the store are tried again."""

    def loads():
        outcome = site.d.get("decode", tokens=tokens, params=None)
        assert outcome.right
        return outcome.loaded

    wait_until(loads, "the store is used again", seconds=40)


def test_aborts_leave_no_block_behind(site):
    with site.case():
        for round_ in range(10):
            asked = [
                engine.ask("decode", tokens=prompt(f"abort {round_} {i % 5}"), params=None)
                for i in range(10)
                for engine in (site.p, site.d)
            ]
            site.p.get("abort")
            site.d.get("abort")
            assert all(answer.result(40).right for answer in asked)
        stored(site)


def test_a_server_that_is_gone_is_done_without(site, redis):
    with site.case():
        redis[0].end()
        tokens = prompt("gone")
        for _ in range(3):
            outcome = site.d.get("decode", tokens=tokens, params=None)
            assert (outcome.right, outcome.loaded) == (True, 0)
        assert site.d_agent.transfer["store"]["usable"] is False
        redis[0] = RedisServer.start(redis[0].folder)
