"""Mooncake's transfer engine moving the workload over TCP; run by .venv-bench's Python."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from mooncake.engine import TransferEngine  # type: ignore[import-not-found]
from transfer_workload import (  # type: ignore[import-not-found]
    CASES,
    POOL_BYTES,
    answer,
    die_with_parent,
    huge_page_pool,
    random_blocks,
)


def make_engine(fill: int) -> tuple[TransferEngine, int, object]:
    """Return an engine with a registered pool, the pool's address, and what keeps it."""
    pool, array = huge_page_pool(fill)
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("the engine does not start")
    address = array.ctypes.data
    if engine.register_memory(address, POOL_BYTES):
        raise RuntimeError("the pool is not registered")
    return engine, address, pool


def serve(inlet: int, outlet: int) -> None:
    """Be the other side, whose own threads do the work, until the input ends."""
    die_with_parent()
    engine, address, _pool = make_engine(7)
    os.write(outlet, f"127.0.0.1:{engine.get_rpc_port()} {address}".encode())
    os.read(inlet, 1)


def main() -> None:
    """Start the other side and measure on demand."""
    (inlet, _orders), (answers, outlet) = os.pipe(), os.pipe()
    if os.fork() == 0:
        serve(inlet, outlet)
        os._exit(0)
    engine, address, _pool = make_engine(0)
    remote, theirs = os.read(answers, 1 << 16).decode().split()
    random = np.random.default_rng(1)

    def measure(_method: str, case: str) -> float:
        block_bytes, count = CASES[case]
        targets = [address + b * block_bytes for b in random_blocks(random, block_bytes, count)]
        sources = [int(theirs) + b * block_bytes for b in random_blocks(random, block_bytes, count)]
        lengths = [block_bytes] * count
        start = time.perf_counter()
        failed = engine.batch_transfer_sync_read(remote, targets, sources, lengths)
        seconds = time.perf_counter() - start
        if failed:
            raise RuntimeError(f"status {failed}")
        return seconds

    answer(measure)


if __name__ == "__main__":
    main()
