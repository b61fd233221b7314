"""The agent's end of a control socket, against a peer that reads late, or talks nonsense."""

import asyncio
import os
import socket

import pytest

from nearkv.agent.movers.channel import Channel
from nearkv.agent.movers.messages import AddTarget, Pull, Ready, ToMover
from nearkv.transfer.errors import ProtocolError
from nearkv.transfer.framing import FrameReader, encode_frame, receive_with_fds
from tests.agent.movers.engines import LAYOUT, eventually, request_of


class Ends:
    def __init__(self):
        ours, self.peer = socket.socketpair()
        self.messages = []
        self.lost = 0
        self.channel = Channel(ours, on_message=self.messages.append, on_lost=self.lose)

    def lose(self):
        self.lost += 1


@pytest.fixture
async def ends():
    ends = Ends()
    yield ends
    ends.channel.close()
    ends.peer.close()


async def read(peer, count):
    """Return ``count`` messages as the peer reads them, each with the inode of its descriptor."""
    reader = FrameReader(ToMover)
    got = []
    while len(got) < count:
        data, fds = await asyncio.to_thread(receive_with_fds, peer)
        for message, its_fds in reader.feed(data, fds):
            got.append((message, [os.fstat(fd).st_ino for fd in its_fds]))
            for fd in its_fds:
                os.close(fd)
    return got


async def test_order_and_descriptors_survive_a_peer_that_reads_late(ends, engine):
    blocks = tuple(range(100_000))
    sent = []
    for number in range(20):
        fd = os.memfd_create(f"n{number}")
        ends.channel.send(AddTarget(layout=LAYOUT), (fd,))
        sent.append(os.fstat(fd).st_ino)
        os.close(fd)
        request = request_of(engine("p"), blocks=blocks)
        ends.channel.send(Pull(id=number, request=request, deadline_ms=1, backend="shm"))
    got = await read(ends.peer, 40)
    assert [inode for _, inodes in got[::2] for inode in inodes] == sent
    assert [message.id for message, _ in got[1::2]] == list(range(20))
    assert {message.request.source_blocks for message, _ in got[1::2]} == {blocks}


async def test_what_was_not_sent_leaks_no_descriptors(ends, engine):
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count is all that is wanted
    request = request_of(engine("p"), blocks=tuple(range(1_000_000)))
    opened = len(os.listdir("/proc/self/fd")) - before  # noqa: PTH208 - as above
    ends.channel.send(Pull(id=1, request=request, deadline_ms=1, backend="shm"))
    for _ in range(5):
        ends.channel.send(AddTarget(layout=LAYOUT), (0,))
    ends.channel.close()
    ends.channel.send(AddTarget(layout=LAYOUT), (0,))
    assert len(os.listdir("/proc/self/fd")) == before + opened - 1  # noqa: PTH208 - as above


async def test_a_bad_descriptor_is_an_error_and_the_channel_goes_on(ends):
    with pytest.raises(OSError, match="descriptor"):
        ends.channel.send(AddTarget(layout=LAYOUT), (0, -1))
    ends.channel.send(AddTarget(layout=LAYOUT), (0,))
    assert len(await read(ends.peer, 1)) == 1


async def test_a_message_that_is_too_large_is_an_error(ends, engine):
    request = request_of(engine("p"), ticket=bytes(65 << 20))
    with pytest.raises(ProtocolError):
        ends.channel.send(Pull(id=1, request=request, deadline_ms=1, backend="shm"))


async def test_messages_arrive_and_the_end_is_told_once(ends):
    ends.peer.sendall(encode_frame(Ready()) * 2)
    await eventually(lambda: len(ends.messages) == 2, what="both arrived")
    ends.peer.close()
    await eventually(lambda: ends.lost, what="the end was seen")
    ends.channel.close()
    ends.channel.send(AddTarget(layout=LAYOUT), (0,))
    assert ends.lost == 1


@pytest.mark.parametrize("junk", [b"\xff\xff\xff\xff", b"\x04\0\0\0junk"])
async def test_nonsense_is_the_end(ends, junk):
    ends.peer.sendall(encode_frame(Ready()) + junk)
    await eventually(lambda: ends.lost, what="the nonsense was seen")
    assert ends.lost == 1


async def test_a_peer_that_is_gone_is_noticed_when_sending(ends):
    ends.peer.close()
    ends.channel.send(AddTarget(layout=LAYOUT), (0,))
    await eventually(lambda: ends.lost, what="the end was seen")
