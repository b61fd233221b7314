"""The mover against a stopped clock: here the test is the agent, and kills nothing itself."""

import asyncio
import os
import signal
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from nearkv.agent.movers.messages import (
    AddTarget,
    Cancel,
    FromMover,
    Pull,
    PullFinished,
    Ready,
    Setup,
)
from nearkv.agent.movers.process import MOVER_COMMAND
from nearkv.transfer.backends.contract import monotonic_ms
from nearkv.transfer.errors import Reason
from nearkv.transfer.framing import FrameReader, encode_frame, receive_with_fds, send_with_fds
from nearkv.transfer.messages import MOVER_GRACE_MS
from tests.agent.movers.engines import SCRIBBLING, request_of, scribbling


class Agent:
    """The agent's end of a mover, blocking and patient."""

    def __init__(self, command):
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(40)
        with theirs:
            fd = theirs.fileno()
            self.mover = subprocess.Popen([*command, str(fd)], pass_fds=(fd,))
        self._reader = FrameReader(FromMover)
        self._messages = []

    def send(self, message, *fds):
        send_with_fds(self.sock, encode_frame(message), fds)

    def receive(self):
        while not self._messages:
            data, fds = receive_with_fds(self.sock)
            assert data, "the mover hung up"
            self._messages += [message for message, _ in self._reader.feed(data, fds)]
        return self._messages.pop(0)

    def heard(self, reason):
        """Tell whether a pull ended for this reason, and not with its mover."""
        try:
            return self.receive().reason == reason
        except (AssertionError, OSError):
            return False

    def pull(self, engine, how, *, in_ms, number=1, threads=2):
        self.send(Setup(threads=threads, max_links=1))
        self.send(AddTarget(layout=engine.memory.layout), engine.kv.fd)
        self.send(
            Pull(
                id=number,
                request=request_of(engine, ticket=how),
                deadline_ms=monotonic_ms() + in_ms,
                backend="scribble",
                offer=b"x",
            )
        )


@pytest.fixture
def agent():
    with running(SCRIBBLING) as agent:
        yield agent


@contextmanager
def running(command):
    agent = Agent(command)
    try:
        yield agent
    finally:
        agent.sock.close()
        if agent.mover.poll() is None:
            agent.mover.kill()
        agent.mover.wait()


async def stopped(agent):
    """Wait until a stop signal has taken effect."""
    await asyncio.to_thread(os.waitid, os.P_PID, agent.mover.pid, os.WSTOPPED | os.WNOWAIT)


def exit_of(agent):
    return agent.mover.wait(40)


@pytest.mark.parametrize("how", [b"polite", b"stubborn", b"hogging"])
async def test_a_mover_stopped_in_a_pull_is_killed_by_the_kernel_and_never_writes_again(
    agent, engine, how
):
    d = engine("d")
    assert isinstance(agent.receive(), Ready)
    agent.pull(d, how, in_ms=1000)
    await scribbling(d)
    os.kill(agent.mover.pid, signal.SIGSTOP)
    await stopped(agent)
    stopped_at = bytes(d.kv.view)
    assert exit_of(agent) == -signal.SIGKILL
    # It did not run between the stop and its death, nor can anybody write now.
    assert bytes(d.kv.view) == stopped_at


async def test_a_mover_goes_on_when_it_was_stopped_and_continued_within_its_deadline(agent, engine):
    d = engine("d")
    agent.receive()
    agent.pull(d, b"polite", in_ms=20_000)
    await scribbling(d)
    os.kill(agent.mover.pid, signal.SIGSTOP)
    await stopped(agent)
    os.kill(agent.mover.pid, signal.SIGCONT)
    await scribbling(d)
    agent.send(Cancel(id=1))
    assert agent.receive().reason == Reason.CANCELLED
    assert agent.mover.poll() is None


async def test_a_mover_that_never_looks_at_its_deadline_is_killed_at_the_end_of_its_grace(
    agent, engine
):
    d = engine("d")
    agent.receive()
    began = monotonic_ms()
    agent.pull(d, b"stubborn", in_ms=600)
    await scribbling(d)
    assert exit_of(agent) == -signal.SIGKILL
    assert monotonic_ms() >= began + 600 + MOVER_GRACE_MS


async def test_a_mover_whose_pulls_are_done_in_time_outlives_their_deadlines(engine):
    for _ in range(5):
        with running(SCRIBBLING) as agent:
            d = engine("d")
            agent.receive()
            for number in (1, 2):
                agent.pull(d, b"works", in_ms=1000, number=number)
                assert isinstance(agent.receive(), PullFinished)
            began = monotonic_ms()
            agent.pull(d, b"polite", in_ms=300, number=3)
            if not agent.heard(Reason.DEADLINE) or monotonic_ms() - began > 300 + MOVER_GRACE_MS:
                continue  # the machine gave it no time within its grace
            await asyncio.sleep((1000 + MOVER_GRACE_MS) / 1000)
            assert agent.mover.poll() is None
            agent.pull(d, b"works", in_ms=20_000, number=4)
            assert agent.receive().id == 4
            return
    pytest.fail("never in time")


async def test_a_pull_that_waits_for_a_thread_does_not_set_the_timer(agent, engine):
    d = engine("d")
    agent.receive()
    agent.pull(d, b"polite", in_ms=20_000, threads=1)
    await scribbling(d)
    agent.pull(d, b"works", in_ms=100, number=2)
    await asyncio.sleep((100 + 2 * MOVER_GRACE_MS) / 1000)
    assert agent.mover.poll() is None
    agent.send(Cancel(id=1))
    assert (agent.receive().id, agent.receive().reason) == (1, Reason.DEADLINE)


async def test_the_end_of_the_control_socket_ends_a_pull_at_once(agent, engine):
    d = engine("d")
    agent.receive()
    agent.pull(d, b"stubborn", in_ms=20_000)
    await scribbling(d)
    agent.sock.close()
    assert exit_of(agent) == 0


@pytest.mark.parametrize(
    "junk", [b"\x05\0\0\0junk!", b"\xff\xff\xff\xff", encode_frame(AddTarget(layout=None))]
)
def test_nonsense_on_the_control_socket_ends_a_mover_with_a_word(junk):
    with running(MOVER_COMMAND) as agent:
        agent.receive()
        agent.sock.sendall(junk)
        assert exit_of(agent) == 70


def test_a_mover_leaves_no_core_dump_of_prompts():
    with running(MOVER_COMMAND) as agent:
        agent.receive()
        process = Path(f"/proc/{agent.mover.pid}")
        assert int((process / "coredump_filter").read_text(), 16) & 0b1111 == 0
        limits = (process / "limits").read_text().splitlines()
        (line,) = [line for line in limits if "core file" in line]
        assert line.split()[4] == "0"


def test_a_mover_inherits_nothing_but_its_socket():
    with running(MOVER_COMMAND) as agent:
        agent.receive()
        fds = Path(f"/proc/{agent.mover.pid}/fd").iterdir()
        (only,) = [str(fd.readlink()) for fd in fds if int(fd.name) > 2]
        assert only.startswith("socket:")
