"""nearkv beside other routers, on the same engine doubles in one run.

Two questions. How do conversations fare that share system prompts, with little KV memory and
with enough: hit rate and time to the first token. And what does a request through each router
cost: added latency, and processor time of the router's own process.

``ROUTERS=nearkv,envoy:ring_hash`` takes some only; ``SEED=`` another workload.
"""

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.bench_ingress import Service, rotating
from tests.benchmarks.conversations import Conversation, Played, Workload, conversations, play
from tests.benchmarks.http_load import load
from tests.benchmarks.reporting import median, percentile, report
from tests.benchmarks.routers import (
    StartRouter,
    dynamo_selector,
    engines,
    envoy_ring_hash,
    envoy_with_picker,
    nearkv,
    sglang_router,
    vllm_router,
)

_OURS = "nearkv"
_ENGINES = 4
_BLOCK_TOKENS = 16
_BLOCKS = {"tight": 1536, "roomy": 4096}
_TIMES = {"prefill_tokens_per_second": 12_000.0, "decode_seconds_per_token": 0.025}
_ROUTERS: Mapping[str, StartRouter] = {
    _OURS: nearkv,
    "vllm:cache_aware": vllm_router("cache_aware"),
    "vllm:consistent_hash": vllm_router("consistent_hash"),
    "sglang:cache_aware": sglang_router("cache_aware"),
    "envoy:ring_hash": envoy_ring_hash,
    "dynamo:select": dynamo_selector(_BLOCK_TOKENS),
}
_DATA_PATHS: Mapping[str, StartRouter] = {**_ROUTERS, "envoy+nearkv": envoy_with_picker}
_INSTANT = {
    "block_size": _BLOCK_TOKENS,
    "num_blocks": 40_000,
    "max_model_len": 400_000,
    "response_tokens": 1,
}
_SIZES = {"1kb": (1 << 10, 64, 400), "256kb": (256 << 10, 8, 64)}
_CONNECTIONS = 32


def main() -> int:
    """Play the workload to every router, then measure each one's own cost, and report."""
    named = os.environ.get("ROUTERS")
    chosen = list(_DATA_PATHS) if not named else named.split(",")
    workload = conversations(Workload(), seed=int(os.environ.get("SEED", "1")))
    figures: dict[str, dict[str, float]] = {name: {} for name in chosen}
    for memory, blocks in _BLOCKS.items():
        for name in chosen:
            if name in _ROUTERS:
                _say(f"{name}, {memory}: {len(workload)} conversations")
                figures[name] |= _conversing(_ROUTERS[name], workload, memory, blocks)
    for name in chosen:
        _say(f"{name}: cost of a request")
        figures[name] |= _passing(_DATA_PATHS[name])
    ours = figures.pop(_OURS, {})
    return report("peers", ours, figures)


def _conversing(
    router: StartRouter, workload: Sequence[Conversation], memory: str, blocks: int
) -> dict[str, float]:
    with _site(router, block_size=_BLOCK_TOKENS, num_blocks=blocks + 1, **_TIMES) as service:
        played = asyncio.run(play(service.url, workload, model="tiny"))
    if played.failed:
        _say(f"{len(played.failed)} requests failed, the first with {played.failed[0]}")
    return {f"{memory}_{name}": value for name, value in _figures(played).items()}


def _figures(played: Played) -> dict[str, float]:
    return {
        "hit_ratio": played.hit_ratio,
        "first_token_p50_milliseconds": percentile(played.first_tokens, 0.50) * 1e3,
        "first_token_p99_milliseconds": percentile(played.first_tokens, 0.99) * 1e3,
        "failed": float(len(played.failed)),
    }


def _passing(router: StartRouter) -> dict[str, float]:
    """Measure what a request through a router takes more than a direct one."""
    figures: dict[str, float] = {}
    for name, (size, bodies, count) in _SIZES.items():
        with _engines(**_INSTANT) as (urls, folder), router(urls, folder) as service:
            taken = asyncio.run(_pass(service, urls[0], rotating(size, bodies, count)))
        figures |= {f"{figure}_{name}": value for figure, value in taken.items()}
    return figures


async def _pass(service: Service, direct: str, requests: Sequence[bytes]) -> dict[str, float]:
    for url in (direct, service.url):
        await load(url, requests)  # everybody has seen every body
    base = median((await load(direct, requests)).latencies)
    added = median((await load(service.url, requests)).latencies) - base
    many = [*requests] * 8
    before = service.cpu_seconds()
    result = await load(service.url, many, connections=_CONNECTIONS)
    return {
        "added_p50_milliseconds": added * 1e3,
        "requests_per_second": result.requests_per_second,
        "cpu_microseconds_per_request": (service.cpu_seconds() - before) / len(many) * 1e6,
    }


@contextmanager
def _site(router: StartRouter, **settings: float) -> Iterator[Service]:
    with _engines(**settings) as (urls, folder), router(urls, folder) as service:
        yield service


@contextmanager
def _engines(**settings: float) -> Iterator[tuple[list[str], Path]]:
    with TemporaryDirectory() as folder, engines(_ENGINES, **settings) as urls:
        yield urls, Path(folder)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
