"""``tcp`` from a source in another process, which is killed or stopped."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nearkv.transfer.backends.contract import Fence, PullRequest, Stop, monotonic_ms
from nearkv.transfer.errors import Reason
from tests.transfer.backends.rig import (
    PATIENCE_MS,
    HookedStop,
    patient,
    reason_of,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture
def source_process():
    command = [sys.executable, "-m", "tests.transfer.backends.tcp_source_program"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


@pytest.fixture
def remote(source_process, make_tcp):
    """Return a call that pulls everything from the other process."""
    offer = bytes.fromhex(source_process.stdout.readline().decode())
    rig = make_tcp()
    layout = rig.source.region.layout
    everything = tuple(range(layout.blocks))
    request = PullRequest(
        ticket=b"x" * 16, first_block=0, source_blocks=everything, source_layout=layout,
        target_blocks=everything, fence=Fence(0, 0),
    )  # fmt: skip

    def pull(stop):
        link = rig.backend.connect(offer, rig.target, stop)
        try:
            return link.pull(request, stop)
        finally:
            link.close()
            rig.target_bytes[:] = rig.target_bytes  # nobody else writes any more

    pull.rig = rig
    return pull


def test_a_pull_from_another_process(remote):
    remote(patient())
    assert (remote.rig.target_bytes == 0x5A).all()


def test_a_source_killed_in_the_middle_is_a_lost_peer(remote, source_process):
    def kill():
        source_process.kill()
        source_process.wait()

    stop = HookedStop(monotonic_ms() + PATIENCE_MS, hook=kill)
    assert reason_of(lambda: remote(stop)) is Reason.PEER_LOST
    assert stop.looks >= stop.nth


def test_a_source_that_was_killed_before_is_a_lost_peer(remote, source_process):
    source_process.kill()
    source_process.wait()
    assert reason_of(lambda: remote(patient())) is Reason.PEER_LOST


def test_a_source_that_is_stopped_in_the_middle_runs_into_the_deadline(remote, source_process):
    stop = HookedStop(monotonic_ms() + PATIENCE_MS)

    def freeze():
        os.kill(source_process.pid, signal.SIGSTOP)
        stop.deadline_ms = monotonic_ms() + 200

    stop.hook = freeze
    assert reason_of(lambda: remote(stop)) is Reason.DEADLINE


def test_a_pull_from_a_stopped_source_can_be_cancelled(remote, source_process):
    stopped = threading.Event()

    def freeze():
        os.kill(source_process.pid, signal.SIGSTOP)
        stopped.set()

    stop = HookedStop(monotonic_ms() + PATIENCE_MS, hook=freeze)

    def cancel_later():
        stopped.wait()
        stop.cancel()

    canceller = threading.Thread(target=cancel_later)
    canceller.start()
    assert reason_of(lambda: remote(stop)) is Reason.CANCELLED
    canceller.join()


def test_a_source_that_is_stopped_before_is_found_out_when_asked(remote, source_process):
    """The kernel still takes connections for it, so connecting tells nothing."""
    os.kill(source_process.pid, signal.SIGSTOP)
    assert reason_of(lambda: remote(Stop(monotonic_ms() + 200))) is Reason.DEADLINE
