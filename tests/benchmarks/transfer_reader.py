"""The mover beside the target in bench_transfer: pulls on demand, and copies for reference.

Methods: ``memcpy`` (the reference: one thread, a C loop, private pools on huge pages), ``shm``
and ``memmove`` (ShmBackend with and without the extension), ``tcp``, ``bare`` (plain sockets),
``small`` and ``small_memcpy`` (64 KiB, for latency).
"""

import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from nearkv.transfer.backends.contract import (
    Fence,
    Link,
    PullRequest,
    Region,
    Source,
    Stop,
    monotonic_ms,
)
from nearkv.transfer.backends.shm import ShmBackend
from nearkv.transfer.backends.tcp import TcpBackend
from nearkv.transfer.copying import Copier, native_copy
from nearkv.transfer.layout import Runs
from nearkv.transfer.memory import open_region, open_slots
from tests.benchmarks.transfer_handover import HOUR_MS, layout, receive
from tests.benchmarks.transfer_source import granted
from tests.benchmarks.transfer_workload import (
    CASES,
    POOL_BYTES,
    answer,
    die_with_parent,
    huge_page_pool,
    random_blocks,
)

SMALL_BLOCKS = 2
"""So many blocks of 32 KiB are a small pull."""


class Reader:
    """All methods over one pair of pools."""

    def __init__(self, message: dict[str, Any], source: int, slots: int, target: int) -> None:
        self._random = np.random.default_rng(2)
        self._stop = Stop(deadline_ms=monotonic_ms() + HOUR_MS)
        self._fence = Fence(0, message["generation"])
        self._offers = message["offers"]
        self._memory = [huge_page_pool(1), huge_page_pool(0)]
        self._links: dict[tuple[str, str], Link] = {}
        self._granted = {case: granted(case) for case in CASES}
        self.views: list[memoryview] = []
        for case, (block_bytes, _) in CASES.items():
            theirs = open_region(source, layout(block_bytes), writable=False)
            ours = open_region(target, layout(block_bytes), writable=True)
            self.views = [theirs.view, ours.view]
            self._connect(case, Source(theirs, open_slots(slots, 1)), ours)
        self._bare = socket.create_connection(("127.0.0.1", message["bare"]))

    def _connect(self, case: str, source: Source, target: Region) -> None:
        self._links["memmove", case] = ShmBackend(native=False).link(source, target)
        self._links["shm", case] = ShmBackend().link(source, target)
        offer = bytes.fromhex(self._offers[case]["offer"])
        self._links["tcp", case] = TcpBackend().connect(offer, target, self._stop)

    def measure(self, method: str, case: str) -> float:
        """Return the seconds of one batch, of new random blocks."""
        if method.startswith("small"):
            return self._measure_blocks(method, "32k", SMALL_BLOCKS)
        return self._measure_blocks(method, case, CASES[case][1])

    def _measure_blocks(self, method: str, case: str, count: int) -> float:
        block_bytes = CASES[case][0]
        places = random_blocks(self._random, block_bytes, count)
        if method in ("memcpy", "small_memcpy"):
            blocks = random_blocks(self._random, block_bytes, count)
            return timed(self._memcpy(block_bytes, blocks, places))
        first = int(self._random.integers(0, POOL_BYTES // block_bytes - count))
        blocks = list(self._granted[case][first : first + count])
        if method == "bare":
            return timed(lambda: self._receive_bare(block_bytes, blocks, places))
        link = self._links["shm" if method == "small" else method, case]
        request = PullRequest(
            ticket=bytes.fromhex(self._offers[case]["ticket"]),
            first_block=first,
            source_blocks=tuple(blocks),
            source_layout=layout(block_bytes),
            target_blocks=tuple(places),
            fence=self._fence,
        )
        return timed(lambda: link.pull(request, self._stop))

    def _memcpy(self, block_bytes: int, blocks: list[int], places: list[int]) -> Callable[[], None]:
        """Return the reference: what remains of the extension without its special stores."""
        runs = Runs(
            np.array(blocks, np.int64) * block_bytes,
            np.array(places, np.int64) * block_bytes,
            np.full(len(blocks), block_bytes, np.int64),
        )
        source, target = (array for _, array in self._memory)
        return plain_copy(source, target, runs)

    def _receive_bare(self, block_bytes: int, blocks: list[int], places: list[int]) -> None:
        self._bare.sendall(np.array([block_bytes, len(blocks), *blocks], np.int64).tobytes())
        view = self.views[1]
        for place in places:
            part = view[place * block_bytes : (place + 1) * block_bytes]
            if self._bare.recv_into(part, 0, socket.MSG_WAITALL) != block_bytes:
                raise RuntimeError("a short read")

    def check(self) -> None:
        """Make sure that each way of pulling really brings the bytes."""
        source, target = (np.frombuffer(view, np.uint8) for view in self.views)
        for method, case in [*self._links, ("bare", "32k"), ("bare", "128k")]:
            block_bytes = CASES[case][0]
            target[:] = 0
            self._measure_blocks(method, case, CASES[case][1])
            # Every block of the source begins with its number among the smallest blocks.
            step = min(size for size, _ in CASES.values())
            theirs = source.reshape(-1, block_bytes)
            for place in np.flatnonzero(target[::block_bytes] | target[1::block_bytes])[:64]:
                begin = int(place) * block_bytes
                number = int(target[begin : begin + 8].view(np.int64)[0])
                if (
                    target[begin : begin + block_bytes] != theirs[number * step // block_bytes]
                ).any():
                    raise RuntimeError(f"{method} {case} brought other bytes")


def plain_copy(
    source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8], runs: Runs
) -> Callable[[], None]:
    """Return a call that copies with the C library's memcpy."""
    native = native_copy()
    if native is None:
        copier = Copier(source.data, target.data, native=False)
        return lambda: copier.copy(runs)
    return lambda: native(target, source, runs.target, runs.source, runs.length, "memcpy")


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    """Take the pools, connect, and measure on demand."""
    die_with_parent()
    benchmark = socket.socket(fileno=int(sys.argv[1]))
    message, (source, slots, target) = receive(benchmark, 3)
    reader = Reader(message, source, slots, target)
    reader.check()
    answer(reader.measure)


if __name__ == "__main__":
    main()
