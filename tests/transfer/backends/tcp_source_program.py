"""A source in a process of its own, to be killed: prints its offer, ends with its input."""

import sys

import numpy as np

from nearkv.transfer.backends.contract import Fence, Grant, Source, monotonic_ms
from nearkv.transfer.backends.tcp import TcpBackend
from nearkv.transfer.lease import SlotTable
from nearkv.transfer.memory import create_memory, create_slots, open_region, open_slots
from tests.transfer.backends.kinds import CHUNK_BYTES
from tests.transfer.backends.rig import PATIENCE_MS, slow_layout


def main() -> None:
    """Serve all blocks under the ticket of 16 x."""
    layout = slow_layout()
    memory, slots = create_memory(layout.size), create_slots(1)
    np.frombuffer(memory.view, np.uint8)[:] = 0x5A
    expires_at_ms = monotonic_ms() + PATIENCE_MS
    generation = SlotTable(slots.view).open(0, expiry_ms=expires_at_ms)
    source = Source(open_region(memory.fd, layout, writable=False), open_slots(slots.fd, 1))
    server = TcpBackend(chunk_bytes=CHUNK_BYTES, buffer_bytes=CHUNK_BYTES).serve(source)
    grant = Grant(
        ticket=b"x" * 16,
        block_ids=tuple(range(layout.blocks)),
        fence=Fence(0, generation),
        expires_at_ms=expires_at_ms,
    )
    sys.stdout.write(server.offer(grant).hex() + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
