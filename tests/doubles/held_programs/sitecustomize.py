"""Holds movers in the middle of a copy, and lets the wall clock jump; for tests of faults.

Python imports this at its start where the folder is on PYTHONPATH. Nothing of a transfer is
replaced: with ``NEARKV_TEST_GATE``, a mover that has copied or received half of a piece
connects to that Unix socket and waits there until the test lets it go, as if it had been
scheduled away or its thread hung in the kernel. Where nobody listens it goes on at once.
With ``NEARKV_TEST_CLOCK=jumping``, ``time.time`` jumps by up to a day with every call.
"""

import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

_MOVER = "nearkv.agent.movers"
_LEAST_BYTES = 4096
_DAY_SECONDS = 86_400.0


def wait_at_gate(path: str, where: str) -> None:
    """Wait until the test lets go, or is gone."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        sock.sendall(json.dumps({"pid": os.getpid(), "where": where}).encode() + b"\n")
        sock.recv(1)


def hold_copies(path: str) -> None:
    """Hold copies between mapped memories."""
    from nearkv.transfer.copying import Copier  # noqa: PLC0415 - in movers only
    from nearkv.transfer.layout import Runs, cut_runs  # noqa: PLC0415 - as above

    whole = Copier.copy

    def copy(self: Copier, runs: Runs) -> None:
        if runs.total_bytes < _LEAST_BYTES:
            whole(self, runs)
            return
        for i, part in enumerate(cut_runs(runs, chunk_bytes=-(-runs.total_bytes // 2))):
            if i:
                wait_at_gate(path, "copy")
            whole(self, part)

    Copier.copy = copy  # type: ignore[method-assign] # that is the point


def hold_receiving(path: str) -> None:
    """Hold what comes from a socket."""
    from nearkv.transfer.backends.tcp_wire import PlainChannel  # noqa: PLC0415 - in movers only

    whole = PlainChannel.receive

    def receive(self: PlainChannel, parts: Sequence[memoryview], check: Callable[[], None]) -> None:
        if sum(map(len, parts)) < _LEAST_BYTES:
            whole(self, parts, check)
            return
        half = len(parts[0]) // 2
        whole(self, [parts[0][:half]], check)
        wait_at_gate(path, "receive")
        whole(self, [parts[0][half:], *parts[1:]], check)

    PlainChannel.receive = receive  # type: ignore[method-assign] # that is the point


def jumping(clock: Callable[[], Any], per_second: int) -> Callable[[], Any]:
    """Return a clock that nobody can rely on."""
    chance = random.Random(7)
    return lambda: clock() + int(chance.uniform(-_DAY_SECONDS, _DAY_SECONDS)) * per_second


def customise() -> None:
    """Change this process as its environment says."""
    gate = os.environ.get("NEARKV_TEST_GATE")
    if gate and _MOVER in sys.orig_argv:
        hold_copies(gate)
        hold_receiving(gate)
    if os.environ.get("NEARKV_TEST_CLOCK") == "jumping":
        time.time = jumping(time.time, 1)
        time.time_ns = jumping(time.time_ns, 1_000_000_000)


customise()
