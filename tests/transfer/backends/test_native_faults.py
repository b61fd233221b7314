"""Peers of UCX and NIXL that die, stop, or talk nonsense; run by ``test_native_contract.py``."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from nearkv.transfer.backends.contract import Fence, Link, PullRequest, Region, monotonic_ms
from nearkv.transfer.backends.native_transport import check_alone
from nearkv.transfer.errors import PullError, Reason, TransferError
from nearkv.transfer.memory import create_memory, open_region
from tests.transfer.backends.native_source_program import FILLED, TICKET
from tests.transfer.backends.rig import PATIENCE_MS, HookedStop, layout, patient
from tests.transfer.backends.test_contract import slow_layout


@dataclass
class Peer:
    """A source in another process, and a link to it."""

    process: subprocess.Popen
    link: Link
    target: Region
    bytes: np.ndarray

    def pull(self, stop):
        """Pull everything that it has."""
        theirs = slow_layout()
        return self.link.pull(
            PullRequest(
                ticket=TICKET,
                first_block=0,
                source_blocks=tuple(range(theirs.blocks)),
                source_layout=theirs,
                target_blocks=tuple(range(theirs.blocks)),
                fence=Fence(0, 0),
            ),
            stop,
        )


@pytest.fixture
def peer(kind):
    command = [sys.executable, "-m", "tests.transfer.backends.native_source_program", kind.name]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    memory = create_memory(slow_layout().size)
    target = open_region(memory.fd, slow_layout(), writable=True)
    view = np.frombuffer(memory.view, np.uint8)
    link = None
    try:
        offer = bytes.fromhex(process.stdout.readline().decode().strip())
        link = kind.make().connect(offer, target, patient())
        yield Peer(process, link, target, view)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
        if link is not None:
            link.close()


def reason_of(call):
    with pytest.raises(TransferError) as caught:
        call()
    return caught.value.reason


def test_a_source_in_another_process_is_pulled_from(peer, kind):
    report = peer.pull(patient())
    assert (peer.bytes == FILLED).all()
    assert report.path.name == kind.name


def test_the_path_names_the_transport_that_the_bytes_took(peer):
    detail = peer.pull(patient()).path.detail
    if os.environ.get("UCX_TLS") == "tcp":
        assert detail.startswith("tcp/lo: ")
    else:  # CMA needs a permission, and shared memory is next
        assert detail.startswith(("cma/memory: ", "sysv/memory: ", "posix/memory: ", "tcp/lo: "))


def test_a_source_killed_in_the_middle_is_lost_at_once(peer):
    def kill():
        peer.process.kill()
        peer.process.wait()

    stop = HookedStop(monotonic_ms() + PATIENCE_MS, hook=kill)
    assert reason_of(lambda: peer.pull(stop)) in (Reason.PEER_LOST, Reason.NO_PATH)
    peer.bytes[:] = 0x11
    peer.link.close()
    assert (peer.bytes == 0x11).all()


def test_a_source_that_is_stopped_costs_no_more_than_the_deadline(peer):
    stop = HookedStop(monotonic_ms() + PATIENCE_MS)

    def halt():
        peer.process.send_signal(signal.SIGSTOP)
        stop.deadline_ms = monotonic_ms() + 200

    stop.hook = halt
    # Over CMA the reader needs nobody: then all of it may arrive, but nobody says that it counts.
    assert reason_of(lambda: peer.pull(stop)) is Reason.DEADLINE
    peer.bytes[:] = 0x11
    peer.process.send_signal(signal.SIGCONT)
    peer.link.close()
    assert (peer.bytes == 0x11).all()


def test_cancelled_pulls_leave_nothing_behind_that_adds_up(make_rig):
    rig = make_rig(slow_layout())
    count = rig.source.region.layout.blocks
    grant = rig.grant(range(count))
    for _ in range(40):
        stop = HookedStop(monotonic_ms() + PATIENCE_MS)
        stop.hook = stop.cancel
        link = rig.connect(grant)
        with pytest.raises(TransferError) as caught:
            link.pull(rig.request(grant, range(count)), stop)
        assert caught.value.reason is Reason.CANCELLED
        link.close()
    rig.pull(grant, range(count))
    assert (rig.target_bytes == rig.source_bytes).all()


@pytest.mark.parametrize(
    "nonsense", [b"", b"\xff" * 8, b"\x01\x00\x00\x00\xc1", b"GET / HTTP/1.1\r\n\r\n"], ids=repr
)
def test_a_server_that_hears_nonsense_serves_others_still(make_rig, nonsense):
    rig = make_rig(layout())
    grant = rig.grant([1])
    offer = msgspec.msgpack.decode(rig.offer_of(grant))
    with socket.create_connection((offer["host"], offer["port"]), timeout=10) as sock:
        sock.sendall(nonsense)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
    rig.pull(grant, [0])
    assert (rig.target_bytes == rig.expected([1], [0])).all()


def test_the_probe_says_why_there_is_no_rdma(kind):
    probe = kind.make().probe()
    assert probe.usable
    assert not probe.rdma
    assert "no RDMA" in probe.detail or "without RDMA" in probe.detail


def test_the_other_library_is_refused_in_the_same_process(kind):
    kind.make().probe()
    other = "nixl" if kind.name == "ucx" else "ucx"
    with pytest.raises(PullError, match=f"has loaded {kind.name}") as caught:
        check_alone(other)
    assert caught.value.reason is Reason.NO_PATH
