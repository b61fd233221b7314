"""Engine ranks with real memory, and what tests of movers ask and look at."""

import asyncio
import os
import secrets
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from nearkv.agent.movers.jobs import EngineMemory, PullJob
from nearkv.agent.movers.purposes import Kind
from nearkv.transfer.backends.contract import Fence, Grant, PullRequest, monotonic_ms
from nearkv.transfer.errors import TransferError
from nearkv.transfer.layout import KvMemory
from nearkv.transfer.lease import SlotTable
from nearkv.transfer.memory import Memory, create_memory, create_slots

LAYOUT = KvMemory(
    size=2 * 16 * 512, layers=2, blocks=16, layer_stride=16 * 512, block_stride=512, block_bytes=512
)
BLOCKS = (3, 4, 9)
PATIENCE_MS = 20_000
SCRIBBLING = (sys.executable, "-P", str(Path(__file__).parent / "scribbling_mover.py"))
"""The command of a mover that has the transports of ``scribbling_mover``."""


def make_kv(name: str) -> Memory:
    """Return KV memory that can be found by name in ``/proc/PID/maps``."""
    return create_memory(LAYOUT.size, name=name)


@dataclass
class Engine:
    """One rank: memory filled with random bytes, and lease slot 0 open."""

    kv: Memory
    slots: Memory
    memory: EngineMemory
    fence: Fence
    name: str

    @property
    def bytes(self):
        return np.frombuffer(self.kv.view, np.uint8)

    def block(self, layer, block):
        begin = layer * LAYOUT.layer_stride + block * LAYOUT.block_stride
        return bytes(self.kv.view[begin : begin + LAYOUT.block_bytes])

    def close(self):
        self.kv.close()
        self.slots.close()


def make_engine(key: str) -> Engine:
    name = f"kv-{key}-{secrets.token_hex(4)}"
    kv = make_kv(name)
    kv.view[:] = os.urandom(LAYOUT.size)
    slots = create_slots(4)
    generation = SlotTable(slots.view).open(0, expiry_ms=monotonic_ms() + 10 * PATIENCE_MS)
    memory = EngineMemory(key, kv.fd, LAYOUT, slots.fd, 4)
    return Engine(kv, slots, memory, Fence(0, generation), name)


def request_of(source: Engine, *, ticket=b"", blocks=BLOCKS, to_blocks=None) -> PullRequest:
    return PullRequest(
        ticket=ticket,
        first_block=0,
        source_blocks=blocks,
        source_layout=LAYOUT,
        target_blocks=to_blocks or tuple(reversed(blocks)),
        fence=source.fence,
    )


def local_job(source: Engine, target: Engine, *, deadline_ms=None, **changes) -> PullJob:
    """Return a pull over shared memory."""
    return PullJob(
        target=target.memory,
        source=source.memory,
        request=request_of(source, **changes),
        deadline_ms=deadline_ms or monotonic_ms() + PATIENCE_MS,
    )


def scribble_job(source: Engine, target: Engine, how: str, *, in_ms=PATIENCE_MS, offer=b"x"):
    """Return a pull by the test transport; ``how`` is one of its ways."""
    return PullJob(
        target=target.memory,
        request=request_of(source, ticket=how.encode()),
        deadline_ms=monotonic_ms() + in_ms,
        backend="scribble",
        offer=offer,
    )


def grant_for(source: Engine, *, ticket=None, in_ms=PATIENCE_MS) -> Grant:
    return Grant(
        ticket=ticket or secrets.token_bytes(16),
        block_ids=BLOCKS,
        fence=source.fence,
        expires_at_ms=monotonic_ms() + in_ms,
    )


def assert_copied(source: Engine, target: Engine, blocks=BLOCKS):
    for layer in range(LAYOUT.layers):
        for ours, theirs in zip(blocks, reversed(blocks), strict=True):
            assert target.block(layer, theirs) == source.block(layer, ours)


async def eventually(condition, *, what: str, seconds=30.0):
    """Wait until a condition holds; fails with ``what`` when the time is up."""
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, f"never came true: {what}"
        await asyncio.sleep(0.005)


async def scribbling(engine: Engine):
    """Wait until somebody writes into an engine's memory."""
    before = bytes(engine.kv.view)
    await eventually(lambda: bytes(engine.kv.view) != before, what="somebody writes")


async def refused(awaitable) -> TransferError:
    """Return the error that awaiting ends with."""
    with pytest.raises(TransferError) as caught:
        await awaitable
    return caught.value


def mover_of(pool, key, kind=Kind.PULL):
    """Return the status of an engine's mover."""
    (status,) = [each for each in pool.describe() if (each.kind, each.key) == (kind, key)]
    return status


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def maps(pid: int | str, name: str) -> int:
    """Return how often a process maps the memfd of this name; 0 when it is gone."""
    try:
        return Path(f"/proc/{pid}/maps").read_text().count(name)
    except (FileNotFoundError, ProcessLookupError):
        return 0


def holders(name: str, *, but: int) -> list[int]:
    """Return the processes of ours that map a memfd, leaving out one."""
    found = []
    for path in Path("/proc").iterdir():
        # What may not be looked at is not ours.
        with suppress(PermissionError):
            if path.name.isdigit() and int(path.name) != but and maps(path.name, name):
                found.append(int(path.name))
    return found
