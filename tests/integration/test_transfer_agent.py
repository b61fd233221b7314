"""Engines of one node: registration, leases, lookups and pulls through real movers."""

from tests.doubles.kv_engine import FakeEngine
from tests.integration.kv_nodes import kv_node

TOKENS = list(range(100, 124))


async def test_blocks_come_from_another_engine_of_the_node():
    async with (
        kv_node() as node,
        FakeEngine(node.socket, "p") as p,
        FakeEngine(node.socket, "d") as d,
    ):
        p.fill(range(10))
        address = await p.open_lease(TOKENS, [3, 9, 4, 5, 6])
        found = await d.lookup(address, TOKENS)
        assert (found.num_tokens, found.reason) == (20, "")
        done = await d.pull(address, [7, 8, 1], first_block=1)
        assert (done.reason, done.path) == ("", "shm")
        assert [d.read(b) for b in (7, 8, 1)] == [p.read(b) for b in (9, 4, 5)]


async def test_two():
    async with (
        kv_node("n1") as one,
        kv_node("n2") as two,
        FakeEngine(one.socket, "p") as p,
        FakeEngine(two.socket, "d") as d,
    ):
        p.fill(range(10))
        address = await p.open_lease(TOKENS, [3, 9, 4, 5, 6])
        found = await d.lookup(address, TOKENS)
        assert (found.num_tokens, found.reason) == (20, "")
        done = await d.pull(address, [7, 8, 1], first_block=1)
        assert (done.reason, done.path) == ("", "tcp"), done
        assert [d.read(b) for b in (7, 8, 1)] == [p.read(b) for b in (9, 4, 5)]
        d.give_back(address)
        import asyncio, json

        await asyncio.sleep(0.3)
        print(
            json.dumps(two.service.describe(), indent=1),
            one.service.describe()["leases"],
            one.service.problems(),
            p.releases,
        )
