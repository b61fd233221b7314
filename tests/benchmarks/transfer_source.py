"""The mover beside the source in bench_transfer: serves the handed-over pool over TCP.

Also the bare sockets that everything over TCP is compared with: the simplest program that sends
blocks in the order asked for.
"""

import secrets
import socket
import sys
import threading

import numpy as np

from nearkv.transfer.backends.contract import Fence, Grant, Source, monotonic_ms
from nearkv.transfer.backends.tcp import TcpBackend
from nearkv.transfer.memory import open_region, open_slots
from tests.benchmarks.transfer_handover import HOUR_MS, layout, receive, send
from tests.benchmarks.transfer_workload import CASES, POOL_BYTES, die_with_parent, random_blocks

SENDMSG_BYTES = 1 << 20


def main() -> None:
    """Serve until the connection to the benchmark ends."""
    die_with_parent()
    benchmark = socket.socket(fileno=int(sys.argv[1]))
    message, (memory, slots) = receive(benchmark, 2)
    offers = {}
    view = memoryview(b"")
    for case, (block_bytes, _) in CASES.items():
        region = open_region(memory, layout(block_bytes), writable=False)
        server = TcpBackend(idle_seconds=3600).serve(Source(region, open_slots(slots, 1)))
        grant = Grant(
            ticket=secrets.token_bytes(16),
            block_ids=granted(case),
            fence=Fence(0, message["generation"]),
            expires_at_ms=monotonic_ms() + HOUR_MS,
        )
        offers[case] = {"offer": server.offer(grant).hex(), "ticket": grant.ticket.hex()}
        view = region.view
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=send_bare, args=(listener, view), daemon=True).start()
    send(benchmark, {"offers": offers, "bare": listener.getsockname()[1]}, [])
    benchmark.recv(1)


def granted(case: str) -> tuple[int, ...]:
    """Return the order in which a grant lists all blocks: random, the same for both ends."""
    block_bytes = CASES[case][0]
    return tuple(random_blocks(np.random.default_rng(11), block_bytes, POOL_BYTES // block_bytes))


def send_bare(listener: socket.socket, view: memoryview) -> None:
    """Send blocks whose numbers come as int64s, behind their size and count."""
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while head := connection.recv(16, socket.MSG_WAITALL):
        block_bytes, count = np.frombuffer(head, np.int64).tolist()
        asked = connection.recv(8 * count, socket.MSG_WAITALL)
        blocks = np.frombuffer(asked, np.int64).tolist()
        per_call = SENDMSG_BYTES // block_bytes
        for first in range(0, count, per_call):
            parts = [view[b * block_bytes :][:block_bytes] for b in blocks[first:][:per_call]]
            if connection.sendmsg(parts) != len(parts) * block_bytes:
                raise RuntimeError("a short write")


if __name__ == "__main__":
    main()
