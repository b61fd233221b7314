"""A source of a native transport in a process of its own, to be killed or stopped.

Prints its offer, ends with its input. Takes the name of a kind.
"""

import os
import sys

import numpy as np

from nearkv.transfer.backends.contract import Fence, Grant, Source, monotonic_ms
from nearkv.transfer.lease import SlotTable
from nearkv.transfer.memory import create_memory, create_slots, open_memory, open_region
from tests.transfer.backends.kinds import NATIVE_KINDS
from tests.transfer.backends.rig import PATIENCE_MS
from tests.transfer.backends.test_contract import slow_layout

FILLED = 0x5A
TICKET = b"x" * 16


def main() -> None:
    """Serve all blocks under the ticket of 16 x."""
    layout = slow_layout()
    memory, slots = create_memory(layout.size), create_slots(1)
    np.frombuffer(memory.view, np.uint8)[:] = FILLED
    expires_at_ms = monotonic_ms() + PATIENCE_MS
    generation = SlotTable(slots.view).open(0, expiry_ms=expires_at_ms)
    source = Source(
        open_region(memory.fd, layout, writable=False),
        SlotTable(open_memory(slots.fd, len(slots.view), writable=False)),
    )
    server = NATIVE_KINDS[sys.argv[1]].make().serve(source)
    grant = Grant(
        ticket=TICKET,
        block_ids=tuple(range(layout.blocks)),
        fence=Fence(0, generation),
        expires_at_ms=expires_at_ms,
    )
    sys.stdout.write(server.offer(grant).hex() + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    sys.stdout.flush()
    os._exit(0)  # as movers end


if __name__ == "__main__":
    main()
