"""NIXL moving the workload, in its best setting; run by .venv-bench's Python.

No progress thread (three pollers on two cores are slower), pools on huge pages. A transfer is
prepared before the clock starts, so that only the moving counts. What UCX uses is set by the
environment that bench_transfer starts this with: left alone, it finds process_vm_readv best.
"""

import os
import select
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config
from transfer_workload import (  # type: ignore[import-not-found]
    CASES,
    POOL_BYTES,
    answer,
    die_with_parent,
    huge_page_pool,
    random_blocks,
)


def make_agent(name: str, fill: int) -> tuple[Any, int, object]:
    """Return an agent with a registered pool, the pool's address, and what keeps it."""
    pool, array = huge_page_pool(fill)
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    address = array.ctypes.data
    agent.register_memory([(address, POOL_BYTES, 0, "")], "DRAM")
    return agent, address, pool


def serve(inlet: int, outlet: int) -> None:
    """Be the other side: make progress while a transfer runs, else sleep."""
    die_with_parent()
    agent, address, _pool = make_agent("source", 7)
    metadata = agent.get_agent_metadata()
    os.write(outlet, address.to_bytes(8, "little") + metadata)
    while os.read(inlet, 1) == b"+":
        while not select.select([inlet], [], [], 0)[0]:
            agent.get_new_notifs()
        os.read(inlet, 1)


def descriptors(address: int, block_bytes: int) -> Any:
    """Return all blocks of a pool, as NIXL wants them."""
    rows = np.zeros((POOL_BYTES // block_bytes, 3), np.uint64)
    rows[:, 0] = address + np.arange(len(rows), dtype=np.uint64) * block_bytes
    rows[:, 1] = block_bytes
    return rows


def main() -> None:
    """Start the other side, connect, and measure on demand."""
    (inlet, orders), (answers, outlet) = os.pipe(), os.pipe()
    if os.fork() == 0:
        serve(inlet, outlet)
        os._exit(0)
    agent, address, _pool = make_agent("target", 0)
    reply = os.read(answers, 1 << 16)
    remote = agent.add_remote_agent(reply[8:])
    prepared = {}
    for case, (block_bytes, _) in CASES.items():
        theirs = descriptors(int.from_bytes(reply[:8], "little"), block_bytes)
        prepared[case] = (
            agent.prep_xfer_dlist("NIXL_INIT_AGENT", descriptors(address, block_bytes), "DRAM"),
            agent.prep_xfer_dlist(remote, theirs, "DRAM"),
        )
    random = np.random.default_rng(1)

    def measure(method: str, case: str) -> float:
        block_bytes, count = CASES[case]
        ours, theirs = prepared[case]
        handle = agent.make_prepped_xfer(
            method.upper(),
            ours, random_blocks(random, block_bytes, count),
            theirs, random_blocks(random, block_bytes, count),
        )  # fmt: skip
        os.write(orders, b"+")
        start = time.perf_counter()
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        seconds = time.perf_counter() - start
        os.write(orders, b"-")
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(state)
        return seconds

    answer(measure)


if __name__ == "__main__":
    main()
