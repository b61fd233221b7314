"""How bench_transfer's processes hand descriptors to each other, as engines and agents do."""

import json
import socket
from collections.abc import Sequence
from typing import Any

from nearkv.transfer.layout import KvMemory
from tests.benchmarks.transfer_workload import POOL_BYTES

HOUR_MS = 3_600_000


def layout(block_bytes: int) -> KvMemory:
    """Return a pool as memory of one layer."""
    return KvMemory(
        size=POOL_BYTES, layers=1, blocks=POOL_BYTES // block_bytes, layer_stride=POOL_BYTES,
        block_stride=block_bytes, block_bytes=block_bytes,
    )  # fmt: skip


def send(connection: socket.socket, message: dict[str, Any], fds: Sequence[int]) -> None:
    """Send a message with descriptors (SCM_RIGHTS)."""
    socket.send_fds(connection, [json.dumps(message).encode()], list(fds))


def receive(connection: socket.socket, fds: int) -> tuple[dict[str, Any], list[int]]:
    """Receive a message and so many descriptors; connections keep the messages apart."""
    data, received, _, _ = socket.recv_fds(connection, 1 << 16, fds)
    message: dict[str, Any] = json.loads(data)
    return message, received
