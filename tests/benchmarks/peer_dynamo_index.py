"""Dynamo's RadixTree on the same workload; run by .venv-bench's Python, prints JSON.

Its wheel pins libraries that nearkv needs newer, hence an environment of its own.
"""

import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from dynamo._core import RadixTree  # type: ignore[import-not-found]
from index_workload import Workload  # type: ignore[import-not-found]


def main() -> None:
    """Apply the workload, look prompts up, drop an engine."""
    workload = Workload()
    tree = RadixTree()
    applied = 0
    spent = 0.0
    event_id = 0
    for engine in range(workload.engines):
        events = []
        for parent, keys in workload.stores(engine):
            event_id += 1
            blocks = [{"block_hash": key, "tokens_hash": key} for key in keys]
            stored = {"parent_hash": parent, "blocks": blocks}
            events.append(
                json.dumps(
                    {"event_id": event_id, "data": {"stored": stored}, "dp_rank": 0}
                ).encode()
            )
            applied += len(keys)
        start = time.perf_counter()
        for event in events:
            tree.apply_event(engine, event)
        tree.find_matches([1])  # waits for the tree's own thread
        spent += time.perf_counter() - start
    prompts = workload.prompts(400)
    figures = {
        "apply_blocks_per_second": applied / spent,
        "match_256_p50_milliseconds": timed(tree, prompts) * 1e3,
        "miss_p50_microseconds": timed(tree, workload.misses(400)) * 1e6,
    }
    start = time.perf_counter()
    tree.remove_worker(0)
    tree.find_matches([1])
    figures["drop_50k_blocks_milliseconds"] = (time.perf_counter() - start) * 1e3
    sys.stdout.write(json.dumps(figures))


def timed(tree: RadixTree, prompts: list[list[int]]) -> float:
    """Return the median seconds of a look-up."""
    samples = []
    for prompt in prompts:
        start = time.perf_counter()
        tree.find_matches(prompt)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


if __name__ == "__main__":
    main()
