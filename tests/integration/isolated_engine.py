"""A fake engine as a program of its own, so that it can live in namespaces of its own.

``python -m tests.integration.isolated_engine source|target SOCKET``: a source registers, leases
blocks with known content and prints the lease's address; a target reads addresses, one per
line, pulls, and prints what became of it. Both go on until their standard input ends.
"""

import asyncio
import sys
from pathlib import Path

import msgspec

from nearkv.transfer.messages import LeaseAddress
from tests.doubles.kv_engine import FakeEngine, KvShape

SHAPE = KvShape(layers=8, blocks=256, block_size=4, block_bytes=32768)
BLOCKS = tuple(range(128))
TOKENS = tuple(range(len(BLOCKS) * SHAPE.block_size + 1))
SEED = 7


def say(content):
    """Print one line of JSON."""
    sys.stdout.write(msgspec.json.encode(content).decode() + "\n")
    sys.stdout.flush()


async def lines():
    """Yield the lines of standard input."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        yield line


async def be_source(path):
    """Lease blocks again for each line."""
    async with FakeEngine(path, "p", shape=SHAPE) as engine:
        engine.fill(BLOCKS, seed=SEED)
        say({"ready": True})
        async for _ in lines():
            say(await engine.open_lease(TOKENS, BLOCKS))


async def be_target(path):
    """Pull what each line says."""
    async with FakeEngine(path, "d", shape=SHAPE) as engine:
        say({"ready": True})
        async for line in lines():
            address = msgspec.json.decode(line, type=LeaseAddress)
            found = await engine.lookup(address, TOKENS)
            if found.reason:
                say({"reason": found.reason, "message": found.message})
                continue
            done = await engine.pull(address, BLOCKS, seconds=4.0)
            expected = FakeEngine(path, "x", shape=SHAPE)
            expected.fill(BLOCKS, seed=SEED)
            equal = all(engine.read(block) == expected.read(block) for block in BLOCKS)
            await expected.close()
            engine.give_back(address)
            say({"reason": done.reason, "path": done.path, "equal": equal, "message": done.message})


if __name__ == "__main__":
    role, socket = sys.argv[1:]
    asyncio.run((be_source if role == "source" else be_target)(Path(socket)))
