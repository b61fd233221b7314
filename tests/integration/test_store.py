"""The shared store with real movers behind a real agent: what is put there comes back."""

import asyncio
import os
import signal
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nearkv.transfer.errors import Reason
from nearkv.transfer.messages import in_store
from tests.doubles.kv_engine import FakeEngine, KvShape
from tests.integration.kv_nodes import kv_node
from tests.integration.stack import eventually
from tests.transfer.store.stores import RedisServer, redis_missing

TOKENS = list(range(42))
BLOCKS = list(range(3, 13))
WHOLE = 40
"""Tokens of the whole blocks of a prompt."""


class Store:
    """A place for a store, and how agents are told of it."""

    def __init__(self, url, folder=None, server=None):
        self.url = url
        self.folder = folder
        self.server = server

    def settings(self, **more):
        # Movers may start slowly where tests run.
        patient = {"lookup_seconds": 8, "put_seconds": 20}
        return {"url": self.url, "min_tokens": 8, "segment_blocks": 4, **patient, **more}

    @property
    def entries(self):
        if self.folder is not None:
            return len(list(self.folder.glob("??/*.kvsp")))
        with self.server.client() as client:
            return client.dbsize()

    def spoil(self):
        """Flip a bit at the end of every entry."""
        if self.folder is not None:
            for path in self.folder.glob("??/*.kvsp"):
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                path.write_bytes(data)
            return
        with self.server.client() as client:
            for key in client.keys("*"):
                end = client.strlen(key) - 1
                client.setrange(key, end, bytes([client.getrange(key, end, end)[0] ^ 1]))


@pytest.fixture
def make_redis():
    if redis_missing():
        pytest.skip(redis_missing())
    servers = []
    with tempfile.TemporaryDirectory(prefix="nkv-redis-", dir="/tmp") as folder:

        def make(*options):
            servers.append(RedisServer.start(Path(folder), *options))
            return Store(servers[-1].url, server=servers[-1])

        yield make
        for server in servers:
            server.process.send_signal(signal.SIGCONT)
            server.end()


@pytest.fixture(params=["files", "redis"])
def store(request, tmp_path):
    if request.param == "redis":
        return request.getfixturevalue("make_redis")()
    folder = tmp_path / "store"
    return Store(f"file://{folder}", folder=folder)


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "store"
    return Store(f"file://{folder}", folder=folder)


@asynccontextmanager
async def node_with(store, *, cluster_secret=None, transfer=None, **more):
    async with kv_node(
        store=store.settings(**more), cluster_secret=cluster_secret, **(transfer or {})
    ) as node:
        yield node


def told(node):
    """What the agent's status says of the store."""
    return node.service.describe()["store"]


async def stored(node, engine, *, tokens=TOKENS, blocks=BLOCKS, **options):
    """Fill blocks of an engine and have them stored; returns the address of the lease."""
    before = told(node)["puts"]
    engine.fill(blocks)
    address = await engine.open_lease(tokens, blocks, **options)
    await eventually(lambda: told(node)["puts"] == before + 1, what="it is stored")
    return address


def same(target, blocks, source, others, *, ranks=1):
    return all(
        target.read(a, rank=r) == source.read(b, rank=r)
        for a, b in zip(blocks, others, strict=True)
        for r in range(ranks)
    )


# -- Good --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
async def test_what_one_engine_leased_another_gets_after_it_is_gone(store, ranks):
    shape = KvShape(tp_size=ranks)
    async with node_with(store) as node, FakeEngine(node.socket, "d", shape=shape) as d:
        async with FakeEngine(node.socket, "p", shape=shape) as p:
            await stored(node, p)
            await p.disconnect()
            found = await d.lookup(in_store("r1"), TOKENS)
            assert (found.num_tokens, found.reason) == (WHOLE, "")
            for rank in range(ranks):
                done = await d.pull(in_store("r1"), range(20, 30), rank=rank)
                assert (done.reason, done.path) == ("", "store")
                assert done.size_bytes == 10 * 2 * 1024
            assert same(d, range(20, 30), p, BLOCKS, ranks=ranks)
        d.give_back(in_store("r1"))
        assert (await d.pull(in_store("r2"), [1])).reason == Reason.UNKNOWN_LEASE
        assert (told(node)["hits"], told(node)["pulls"]) == (1, ranks)
        assert store.entries == 3 * ranks
        assert not node.service.describe()["pairs"][1:]  # a store is no node


async def test_a_store_outlives_its_agents_and_serves_other_nodes(store):
    async with node_with(store) as node, FakeEngine(node.socket, "p") as p:
        await stored(node, p)
    async with (
        kv_node("n2", store=store.settings(write="none")) as other,
        FakeEngine(other.socket, "d") as d,
    ):
        assert (await d.lookup(in_store("r1"), TOKENS)).num_tokens == WHOLE
        assert (await d.pull(in_store("r1"), [1, 2])).reason == ""
        assert d.read(1) != bytes(2048)


async def test_only_what_is_missing_is_brought(files):
    async with (
        node_with(files) as node,
        FakeEngine(node.socket, "p") as p,
        FakeEngine(node.socket, "d") as d,
    ):
        await stored(node, p)
        assert (await d.lookup(in_store("r1"), TOKENS, first_block=3)).num_tokens == WHOLE
        before = d.read(29)
        done = await d.pull(in_store("r1"), [30, 31], first_block=3)
        assert done.reason == ""
        assert same(d, [30, 31], p, BLOCKS[3:5])
        assert d.read(29) == before


async def test_a_lease_that_is_gone_is_made_up_for_by_the_store(store):
    async with node_with(store) as node, FakeEngine(node.socket, "d") as d:
        async with FakeEngine(node.socket, "p") as p:
            address = await stored(node, p)
            p.obeys = False
            await p.disconnect()
            found = await d.lookup(address, TOKENS)
            assert found.num_tokens == WHOLE
            assert (await d.pull(address, range(20, 30))).path == "store"
            assert same(d, range(20, 30), p, BLOCKS)
        d.give_back(address)


async def test_two_prompts_with_one_lease_get_each_their_own(files):
    """All prompts of one call bring the same lease, which is about one of them at most."""
    other = list(range(1000, 1042))
    async with (
        node_with(files) as node,
        FakeEngine(node.socket, "d") as d,
        FakeEngine(node.socket, "p") as p,
    ):
        address = await stored(node, p)
        await stored(node, p, tokens=other, blocks=range(40, 50))
        await p.disconnect()
        first = await d.lookup(address, TOKENS)
        second = await d.lookup(address, other)
        assert (first.num_tokens, second.num_tokens) == (WHOLE, WHOLE)
        assert (await d.pull(address, range(20, 30), lookup=first.id)).reason == ""
        assert (await d.pull(address, range(30, 40), lookup=second.id)).reason == ""
        assert same(d, range(20, 30), p, BLOCKS)
        assert same(d, range(30, 40), p, range(40, 50))


async def test_a_lease_that_is_there_is_preferred(files):
    async with (
        node_with(files) as node,
        FakeEngine(node.socket, "p") as p,
        FakeEngine(node.socket, "d") as d,
    ):
        address = await stored(node, p)
        assert (await d.lookup(address, TOKENS)).num_tokens == WHOLE
        assert (await d.pull(address, range(20, 30))).path == "shm"
        assert told(node)["hits"] == 0


async def test_leases_for_the_store_alone_end_with_the_put(files):
    async with node_with(files, write="all") as node, FakeEngine(node.socket, "p") as p:
        await stored(node, p, for_store=True)
        await eventually(lambda: node.leases == {"open": 0, "closing": 0}, what="it is over")
        assert [release.why for release in p.releases] == ["stored"]


async def test_without_a_store_nobody_is_told_of_one():
    async with kv_node() as node, FakeEngine(node.socket, "p") as p:
        assert (p.greeting.store_min_tokens, p.greeting.store_all) == (0, False)
        assert node.service.describe()["store"] is None
        found = await p.lookup(in_store("r1"), TOKENS)
        assert (found.num_tokens, found.reason) == (0, Reason.NOT_STORED)
        assert node.service.describe()["movers"] == []


async def test_engines_are_told_what_is_worth_asking(files):
    async with (
        node_with(files, write="all", min_tokens=99) as node,
        FakeEngine(node.socket, "p") as p,
    ):
        assert (p.greeting.store_min_tokens, p.greeting.store_all) == (99, True)


# -- Not for everybody -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "secret"),
    [
        ({"shape": KvShape(config_hash="f00d")}, "s"),
        ({"shape": KvShape(kv_dtype="float16")}, "s"),
        ({"tenant": "blue"}, "s"),
        ({}, "other"),
    ],
    ids=["model", "dtype", "tenant", "secret"],
)
async def test_others_find_nothing(files, fields, secret):
    ours = {"cluster_secret": "s"}
    async with node_with(files, **ours) as node, FakeEngine(node.socket, "p") as p:
        await stored(node, p)
    async with (
        node_with(files, cluster_secret=secret) as node,
        FakeEngine(node.socket, "d", **fields) as d,
    ):
        found = await d.lookup(in_store("r1"), TOKENS)
        assert (found.num_tokens, found.reason) == (0, Reason.NOT_STORED)


@pytest.mark.parametrize("fields", [{"cache_salt": "s"}, {"lora": "l"}], ids=str)
async def test_salt_and_adapter_count(files, fields):
    async with node_with(files) as node, FakeEngine(node.socket, "p") as p:
        await stored(node, p, **fields)
        assert (await p.lookup(in_store("r1"), TOKENS)).num_tokens == 0
        assert (await p.lookup(in_store("r2"), TOKENS, **fields)).num_tokens == WHOLE


async def test_a_model_under_another_name_is_the_same(files):
    async with (
        node_with(files) as node,
        FakeEngine(node.socket, "p") as p,
        FakeEngine(node.socket, "d", shape=KvShape(model="/another/path")) as d,
    ):
        await stored(node, p)
        assert (await d.lookup(in_store("r1"), TOKENS)).num_tokens == WHOLE


# -- Bad ---------------------------------------------------------------------------------------


async def test_a_spoilt_entry_is_refused_and_removed(store):
    async with (
        node_with(store) as node,
        FakeEngine(node.socket, "p") as p,
        FakeEngine(node.socket, "d") as d,
    ):
        await stored(node, p)
        store.spoil()
        assert (await d.lookup(in_store("r1"), TOKENS)).num_tokens == WHOLE
        before = [d.read(block) for block in range(20, 30)]
        done = await d.pull(in_store("r1"), range(20, 30))
        assert done.reason == Reason.CORRUPT
        assert [d.read(block) for block in range(20, 30)] == before
        assert (told(node)["pulls_failed"], told(node)["usable"]) == (1, True)
        assert (await d.lookup(in_store("r2"), TOKENS)).num_tokens == 0


async def test_blocks_that_were_reused_are_not_stored(files):
    async with node_with(files) as node, FakeEngine(node.socket, "p") as p:
        p.fill(BLOCKS)
        lease = p.lease(TOKENS, BLOCKS)
        p.end_lease(lease.lease)
        p.scheduler.send(lease)
        await eventually(lambda: told(node)["puts_failed"] == 1, what="it is over")
        assert files.entries == 0
        await eventually(lambda: told(node)["usable"] is not None, what="it was tried")
        assert told(node)["usable"]


async def test_a_full_store_is_counted_and_harms_nobody(make_redis):
    store = make_redis("--maxmemory", "1kb", "--maxmemory-policy", "noeviction")
    async with node_with(store) as node, FakeEngine(node.socket, "p") as p:
        p.fill(BLOCKS)
        address = await p.open_lease(TOKENS, BLOCKS)
        await eventually(lambda: told(node)["puts_failed"] == 1, what="it is over")
        await eventually(lambda: told(node)["usable"], what="what is there can be read")
        found = await p.lookup(in_store("r1"), TOKENS)
        assert (found.num_tokens, found.reason) == (0, Reason.NOT_STORED)
        assert (await p.lookup(address, TOKENS)).num_tokens == WHOLE


async def test_files_give_way_to_newer_ones(files):
    async with node_with(files, max_bytes=40_000) as node, FakeEngine(node.socket, "p") as p:
        for first in (0, 1000, 2000):
            tokens = [first + i for i in range(42)]
            await stored(node, p, tokens=tokens)
        assert sum(path.stat().st_size for path in files.folder.glob("??/*")) <= 40_000
        assert (await p.lookup(in_store("r1"), tokens)).num_tokens == WHOLE


async def test_a_store_that_is_not_there_is_named_and_left_alone(tmp_path):
    store = Store(f"unix://{tmp_path / 'none.sock'}")
    async with node_with(store) as node, FakeEngine(node.socket, "p") as p:
        await eventually(lambda: told(node)["usable"] is False, what="it was tried")
        (problem,) = [text for text in node.service.problems() if "store" in text]
        assert str(tmp_path) in problem
        found = await p.lookup(in_store("r1"), TOKENS)
        assert (found.num_tokens, found.reason) == (0, Reason.NO_PATH)
        await p.open_lease(TOKENS, BLOCKS)
        await eventually(lambda: told(node)["puts_skipped"] == 1, what="it was skipped")


async def test_a_server_that_hangs_costs_one_deadline_and_is_used_again_later(make_redis):
    store = make_redis()
    async with node_with(store, lookup_seconds=2) as node, FakeEngine(node.socket, "p") as p:
        await stored(node, p)
        assert (await p.lookup(in_store("r0"), TOKENS)).num_tokens == WHOLE
        os.kill(store.server.process.pid, signal.SIGSTOP)
        pulled = asyncio.create_task(p.pull(in_store("r0"), range(20, 30), seconds=2.5))
        found = await p.lookup(in_store("r1"), TOKENS)
        assert (found.num_tokens, found.reason) == (0, Reason.DEADLINE)
        found = await p.lookup(in_store("r2"), TOKENS)
        assert (found.num_tokens, found.reason) == (0, Reason.NO_PATH)
        # Whose time is up first: the pull's, or that of the store's own client.
        assert (await pulled).reason in (Reason.DEADLINE, Reason.PEER_LOST, Reason.NO_PATH)
        os.kill(store.server.process.pid, signal.SIGCONT)

        async def works():
            return (await p.lookup(in_store("r3"), TOKENS)).num_tokens == WHOLE

        async with asyncio.timeout(30):
            while not await works():  # noqa: ASYNC110 (until the pause is over)
                await asyncio.sleep(0.05)
        assert told(node)["usable"]


async def test_a_reader_that_is_done_waits_for_the_put_and_no_longer(files):
    async with (
        node_with(files) as node,
        FakeEngine(node.socket, "p") as p,
        FakeEngine(node.socket, "d") as d,
    ):
        await stored(node, p)
        (mover,) = [m for m in node.service.describe()["movers"] if m["key"].startswith("p:")]
        os.kill(mover["pid"], signal.SIGSTOP)
        tokens = [7, *TOKENS]
        address = await p.open_lease(tokens, BLOCKS)
        assert (await d.lookup(address, tokens)).num_tokens == WHOLE
        assert (await d.pull(address, range(20, 30))).path == "shm"
        d.give_back(address)
        assert (await d.lookup(address, tokens)).num_tokens == WHOLE  # it was read by now
        assert (p.releases, told(node)["puts_under_way"]) == ([], 1)
        os.kill(mover["pid"], signal.SIGCONT)
        await eventually(lambda: p.releases, what="it is let go")
        assert p.releases[0].why == "pulled"
        assert told(node)["puts"] == 2


async def test_a_mover_that_dies_in_a_put_costs_the_put(files):
    async with node_with(files, write="all") as node, FakeEngine(node.socket, "p") as p:
        await stored(node, p)
        (mover,) = [m for m in node.service.describe()["movers"] if m["key"].startswith("p:")]
        os.kill(mover["pid"], signal.SIGSTOP)
        p.fill(BLOCKS, seed=2)
        await p.open_lease([7, *TOKENS], BLOCKS, for_store=True)
        await eventually(lambda: told(node)["puts_under_way"] == 1, what="it has begun")
        os.kill(mover["pid"], signal.SIGKILL)
        await eventually(lambda: told(node)["puts_failed"] == 1, what="it is over")
        await eventually(lambda: node.leases == {"open": 1, "closing": 0}, what="it let go")


async def test_the_agent_maps_nothing_and_lets_go_of_dead_engines(files):
    async with node_with(files) as node:
        async with FakeEngine(node.socket, "p") as p:
            await stored(node, p)
            kinds = {m["kind"] for m in node.service.describe()["movers"]}
            assert kinds == {"store"}
        await eventually(
            lambda: not [m for m in node.service.describe()["movers"] if m["key"]],
            what="nobody maps the engine's memory any more",
        )
