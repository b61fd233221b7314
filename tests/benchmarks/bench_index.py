"""The prefix index and the agent's event path against their bars, beside Dynamo's RadixTree."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from nearkv.agent.block_table import BlockChanges, BlockTable
from nearkv.agent.kv_events import decode_batch
from nearkv.block_keys import pack_keys, unpack_keys
from nearkv.ingress.prefix_index import PrefixIndex
from tests.benchmarks.index_workload import Workload
from tests.benchmarks.reporting import median, report, resident_bytes, return_freed_memory

_ROOT = Path(__file__).resolve().parents[2]
_BENCH_PYTHON = _ROOT / ".venv-bench" / "bin" / "python"
_WORKLOAD = Workload()


def main() -> int:
    """Run all measurements and report."""
    figures = {
        **in_fresh_process("memory"),
        **in_fresh_process("speed"),
        **in_fresh_process("growth"),
        **in_fresh_process("drop"),
        **in_fresh_process("churn"),
        **in_fresh_process("event_path"),
    }
    return report("index", figures, {"dynamo": run_peer()})


def in_fresh_process(part: str) -> dict[str, float]:
    """Run one measurement with nothing else in memory."""
    output = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.bench_index", part],
        check=True, capture_output=True, cwd=_ROOT, timeout=300,
    ).stdout  # fmt: skip
    figures: dict[str, float] = json.loads(output)
    return figures


def run_peer() -> dict[str, float]:
    """Run Dynamo's index on the same workload."""
    script = Path(__file__).with_name("peer_dynamo_index.py")
    output = subprocess.run(
        [_BENCH_PYTHON, script], check=True, capture_output=True, timeout=300
    ).stdout
    figures: dict[str, float] = json.loads(output)
    return figures


def packed_stores(workload: Workload) -> list[list[bytes]]:
    """Return each engine's stores in the form they arrive in."""
    return [
        [pack_keys(keys) for _, keys in workload.stores(engine)]
        for engine in range(workload.engines)
    ]


def fill(stores: Sequence[Sequence[bytes]]) -> tuple[PrefixIndex, float, int]:
    """Build an index; returns it with the seconds spent applying decoded keys, and their number."""
    index = PrefixIndex()
    spent = 0.0
    applied = 0
    for events in stores:
        slot = index.open_slot()
        index.activate(slot)
        decoded = [unpack_keys(event) for event in events]
        start = time.perf_counter()
        for keys in decoded:
            index.add(slot, keys)
        spent += time.perf_counter() - start
        applied += sum(map(len, decoded))
    return index, spent, applied


def measure_memory() -> dict[str, float]:
    """Measure resident memory per (block, engine)."""
    stores = packed_stores(_WORKLOAD)
    return_freed_memory()
    before = resident_bytes()
    index, _, applied = fill(stores)
    return_freed_memory()
    grown = resident_bytes() - before
    return {
        "bytes_per_block_and_engine": grown / applied,
        "bytes_per_distinct_block": grown / index.size.blocks,
    }


def measure_speed() -> dict[str, float]:
    """Measure applying and matching."""
    stores = packed_stores(_WORKLOAD)
    rates = []
    for _ in range(5):
        index, spent, applied = fill(stores)
        rates.append(applied / spent)
    long_slot = index.open_slot()
    index.activate(long_slot)
    source = random.Random(3)
    long_prompt = [source.getrandbits(64) for _ in range(8192)]
    index.add(long_slot, long_prompt)
    return {
        "apply_blocks_per_second": median(rates),
        "match_256_p50_milliseconds": timed(index.match, _WORKLOAD.prompts(2000)) * 1e3,
        "miss_p50_microseconds": timed(index.match, _WORKLOAD.misses(2000)) * 1e6,
        "match_8192_p50_milliseconds": timed(index.match, [list(long_prompt)] * 50) * 1e3,
    }


def measure_growth() -> dict[str, float]:
    """Measure cost per block at one and at four times the blocks, turn about."""
    workloads = [Workload(blocks_per_engine=blocks) for blocks in (25_000, 100_000)]
    stores = [packed_stores(workload) for workload in workloads]
    prompts = [workload.prompts(500) for workload in workloads]
    per_block: list[list[float]] = [[], []]
    match_seconds: list[list[float]] = [[], []]
    for _ in range(3):
        for i in range(2):
            index, spent, applied = fill(stores[i])
            per_block[i].append(spent / applied)
            match_seconds[i].append(timed(index.match, prompts[i]))
    return {
        "apply_growth_ratio": median(per_block[1]) / median(per_block[0]),
        "match_growth_ratio": median(match_seconds[1]) / median(match_seconds[0]),
    }


def measure_drop() -> dict[str, float]:
    """Measure dropping an engine of 200 k blocks: the drop itself, and each sweep slice."""
    index, _, _ = fill(packed_stores(_WORKLOAD))
    source = random.Random(5)
    slot = index.open_slot()
    index.activate(slot)
    index.add(slot, [source.getrandbits(64) for _ in range(200_000)])
    start = time.perf_counter()
    index.close_slot(slot)
    dropped = time.perf_counter() - start
    stalls = [dropped]
    slices = index.sweep()
    while True:
        start = time.perf_counter()
        done = next(slices, "done")
        stalls.append(time.perf_counter() - start)
        if done == "done":
            break
    return {
        "drop_200k_blocks_milliseconds": dropped * 1e3,
        "drop_longest_stall_milliseconds": max(stalls) * 1e3,
        "sweep_total_milliseconds": sum(stalls) * 1e3,
    }


def measure_churn() -> dict[str, float]:
    """Measure resident memory over a million blocks of churn at constant size."""
    index, _, _ = fill(packed_stores(_WORKLOAD))
    slot = index.open_slot()
    index.activate(slot)
    source = random.Random(11)
    batches = [[source.getrandbits(64) for _ in range(500)] for _ in range(100)]
    for batch in batches:
        index.add(slot, batch)
    churn(index, slot, batches, source, blocks=200_000)
    return_freed_memory()
    before = resident_bytes()
    churn(index, slot, batches, source, blocks=1_000_000)
    return_freed_memory()
    return {"churn_growth_ratio": resident_bytes() / before}


def churn(
    index: PrefixIndex, slot: int, batches: list[list[int]], source: random.Random, *, blocks: int
) -> None:
    """Replace the oldest batch by a new one until ``blocks`` went through."""
    for _ in range(blocks // 500):
        index.remove(slot, batches.pop(0))
        batches.append([source.getrandbits(64) for _ in range(500)])
        index.add(slot, batches[-1])


def measure_event_path() -> dict[str, float]:
    """Measure msgpack decoding, key chaining and the block table, with blocks of 16 tokens."""
    source = random.Random(13)
    payloads: list[bytes] = []
    handle = 0
    for _ in range(3000):
        handles = [source.getrandbits(64) for _ in range(16)]
        event = {
            "type": "BlockStored",
            "block_hashes": handles,
            "parent_block_hash": handle if len(payloads) % 12 else None,
            "token_ids": [source.randrange(128_000) for _ in range(256)],
            "block_size": 16,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * 16,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        handle = handles[-1]
        payloads.append(msgspec.msgpack.encode([0.0, [event], 0]))
    rates = []
    for _ in range(3):
        table = BlockTable(key_model="m")
        start = time.perf_counter()
        for payload in payloads:
            table.apply(decode_batch(payload).events, BlockChanges())
        rates.append(table.block_count / (time.perf_counter() - start))
    return {"event_path_blocks_per_second": median(rates)}


def timed(call: Callable[[Sequence[int]], object], prompts: Sequence[Sequence[int]]) -> float:
    """Return the median seconds of a call."""
    samples = []
    for prompt in prompts:
        start = time.perf_counter()
        call(prompt)
        samples.append(time.perf_counter() - start)
    return median(samples)


_PARTS = {
    "memory": measure_memory,
    "speed": measure_speed,
    "growth": measure_growth,
    "drop": measure_drop,
    "churn": measure_churn,
    "event_path": measure_event_path,
}

if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.stdout.write(json.dumps(_PARTS[sys.argv[1]]()))
    else:
        sys.exit(main())
