"""What every way of moving bytes has to move in bench_transfer (needs nothing but numpy).

Random blocks of one GiB pool go to random blocks of another, new ones each time: what is moved
is never in a cache. Peers' programs are run by other environments and import this by its
file's name.
"""

import ctypes
import json
import mmap
import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

POOL_BYTES = 1 << 30
CASES = {"32k": (32 << 10, 4096), "128k": (128 << 10, 512)}
"""Block size in bytes and number of blocks."""

_MADV_HUGEPAGE = 14


def huge_page_pool(fill: int) -> tuple[mmap.mmap, npt.NDArray[np.uint8]]:
    """Return private memory that is populated, on huge pages where the kernel has them."""
    pool = mmap.mmap(-1, POOL_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pool.madvise(_MADV_HUGEPAGE)
    array = np.frombuffer(pool, np.uint8)
    array[:] = fill
    return pool, array


def random_blocks(random: np.random.Generator, block_bytes: int, count: int) -> list[int]:
    """Return different blocks of a pool."""
    chosen: list[int] = random.permutation(POOL_BYTES // block_bytes)[:count].tolist()
    return chosen


def answer(measure: Callable[[str, str], float]) -> None:
    """Run ``measure(method, case)`` for each line of input; print the seconds it took.

    Answers are lines that begin with ``=``: libraries may print what they like besides.
    """
    say("ready")
    for line in sys.stdin:
        method, case = line.split()
        say(json.dumps(measure(method, case)))


def say(text: str) -> None:
    """Print an answer."""
    sys.stdout.write(f"={text}\n")
    sys.stdout.flush()


def die_with_parent() -> None:
    """Have the kernel end this process when the one that started it has gone."""
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
