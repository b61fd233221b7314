"""One connection: messages whole however they arrive, and no descriptor lost, whatever comes."""

import asyncio
import contextlib
import os
import random
import socket
from pathlib import Path

import pytest

from nearkv.agent.transfer.connection import Connection, close_fds
from nearkv.transfer.framing import encode_frame, send_with_fds
from nearkv.transfer.messages import CancelPull, PullDone
from tests.doubles.kv_engine import FakeEngine
from tests.integration.stack import eventually


class Rig:
    """A connection over a socket pair, and what it said."""

    def __init__(self):
        self.theirs, ours = socket.socketpair()
        self.messages, self.causes = [], []
        self.connection = Connection(ours, on_message=self._take, on_end=self.causes.append)

    def _take(self, message, fds):
        self.messages.append(message)
        close_fds(fds)

    def close(self):
        self.connection.close()
        self.theirs.close()


@pytest.fixture
async def rig():
    made = Rig()
    yield made
    made.close()


def descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_messages_arrive_in_whatever_pieces_they_come(rig):
    data = b"".join(encode_frame(CancelPull(id=number)) for number in range(50))
    rng = random.Random(1)
    while data:
        size = rng.randint(1, 20)
        rig.theirs.sendall(data[:size])
        data = data[size:]
        await asyncio.sleep(0)
    await eventually(lambda: len(rig.messages) == 50, what="all arrive")
    assert [message.id for message in rig.messages] == list(range(50))


async def test_a_fault_of_ours_ends_the_connection_and_loses_no_descriptor(rig):
    def fail(message, fds):
        close_fds(fds)
        raise LookupError(message)

    rig.connection._on_message = fail
    engine = FakeEngine(Path("/nowhere"))
    hello = encode_frame(engine.scheduler_hello())
    before = descriptors()
    for _ in range(3):
        send_with_fds(rig.theirs, hello, [rig.theirs.fileno()])
    await eventually(lambda: rig.causes, what="it ends")
    assert rig.causes == ["defect"]
    await eventually(lambda: descriptors() < before, what="all are closed, and the connection")
    await engine.close()


async def test_what_is_sent_waits_for_room_and_keeps_its_order(rig):
    done = PullDone(id=1, message="x" * 100_000)
    for _ in range(20):
        rig.connection.send(done)
    loop = asyncio.get_running_loop()
    rig.theirs.settimeout(0)
    expected = encode_frame(done) * 20
    received = bytearray()
    async with asyncio.timeout(30):
        while len(received) < len(expected):
            received += await loop.sock_recv(rig.theirs, 1 << 20)
    assert received == expected


async def test_the_end_is_told_once(rig):
    rig.theirs.close()
    await eventually(lambda: rig.causes == ["eof"], what="the end is seen")
    rig.connection.close()
    rig.connection.send(CancelPull(id=1))
    assert rig.causes == ["eof"]


async def test_sending_to_an_end_that_is_gone_ends_when_it_is_read(rig):
    rig.theirs.close()
    rig.connection.send(CancelPull(id=1))
    assert rig.causes == []
    await eventually(lambda: rig.causes == ["eof"], what="the end is seen")


async def test_random_damage_never_leaks_a_descriptor():
    engine = FakeEngine(Path("/nowhere"))
    hello = encode_frame(engine.worker_hello())
    rng = random.Random(7)
    before = descriptors()
    for _ in range(200):
        damaged = bytearray(hello * rng.randint(1, 3))
        for _ in range(rng.randint(0, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        rig = Rig()
        fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(rng.randint(0, 8))]
        with contextlib.suppress(OSError):
            send_with_fds(rig.theirs, bytes(damaged), fds)
        close_fds(fds)
        rig.theirs.shutdown(socket.SHUT_WR)
        await eventually(lambda rig=rig: rig.causes, what="it ends")
        rig.close()
    assert descriptors() == before
    await engine.close()
