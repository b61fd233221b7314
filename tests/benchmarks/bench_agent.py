"""A node's agent under the events of eight engines: losses, latency, processor, memory; and idle.

The agent has core 0 to itself; the engines and four consumers share core 1 with this process, so
that latency is from a message's way into an engine's socket to a consumer's knowing of its blocks.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from tests.benchmarks.agent_load import Consumer, Engine, engines, publish
from tests.benchmarks.bench_ingress import Service, pin, started_service
from tests.benchmarks.reporting import percentile, report

_ENGINES = 8
_CONSUMERS = 4
_EVENTS_PER_SECOND = 20_000.0
_FILL_BLOCKS_PER_ENGINE = 20_480
_SETTLE_SECONDS = 3.0
_DEADLINE_SECONDS = 30.0
_TABLES_LIMIT_BYTES = 96 << 20
_RING_LIMIT_BYTES = 16 << 20
_OVERFLOW_BLOCKS_PER_ENGINE = 122_880


def main() -> int:
    """Measure, report. The number of seconds under load may be given."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    pin(1)
    with TemporaryDirectory() as folder:
        figures = asyncio.run(_measure(Path(folder), seconds))
    return report("agent", figures, {})


async def _measure(folder: Path, seconds: float) -> dict[str, float]:
    async with engines(_ENGINES) as sources:
        with ExitStack() as stack:
            agent = await _start(stack, folder, sources)
            figures = await _idle(agent, seconds)
            figures |= await _under_load(agent, sources, seconds)
            figures |= await _overflow(agent, sources)
    return figures


async def _start(stack: ExitStack, folder: Path, sources: list[Engine]) -> Service:
    config: dict[str, Any] = {
        "engines": [{"id": engine.name, "url": engine.url} for engine in sources],
        "state": {
            "tables_limit_bytes": _TABLES_LIMIT_BYTES,
            "ring_limit_bytes": _RING_LIMIT_BYTES,
        },
    }
    agent: Service = await asyncio.to_thread(
        lambda: stack.enter_context(started_service("agent", folder, config, core=0))
    )
    for engine in sources:
        await engine.source.wait_for_subscribers(1, timeout_seconds=_DEADLINE_SECONDS)
    return agent


async def _idle(agent: Service, seconds: float) -> dict[str, float]:
    """Measure what an agent takes whose engines do nothing."""
    await asyncio.sleep(_SETTLE_SECONDS)
    cpu, began = agent.cpu_seconds(), time.perf_counter()
    await asyncio.sleep(min(20.0, seconds))
    return {
        "idle_cores": (agent.cpu_seconds() - cpu) / (time.perf_counter() - began),
        "idle_resident_megabytes": _resident_bytes(agent) / 1e6,
    }


async def _under_load(agent: Service, sources: list[Engine], seconds: float) -> dict[str, float]:
    sent_at: dict[int, float] = {}
    for engine in sources:
        for payload in (*engine.script.fill(_FILL_BLOCKS_PER_ENGINE), *engine.script.prelude):
            engine.source.send(payload)
            await asyncio.sleep(0)
    await _applied(agent, sources)
    consumers = [Consumer(sent_at) for _ in range(_CONSUMERS)]
    async with asyncio.TaskGroup() as tasks:
        following = [tasks.create_task(each.follow(agent.url)) for each in consumers]
        await _eventually(lambda: all(_knows(each, sources) for each in consumers))
        filled = {name: set(keys) for name, keys in consumers[0].held.items()}
        await publish(sources, sent_at, per_second=_EVENTS_PER_SECOND, seconds=min(5.0, seconds))
        await asyncio.sleep(1.0)
        for each in consumers:
            each.latencies_seconds.clear()
            each.bytes_read = each.deltas = 0
        before = sum(engine.sent for engine in sources)
        cpu, began = agent.cpu_seconds(), time.perf_counter()
        own_cpu = time.process_time()
        rate = await publish(sources, sent_at, per_second=_EVENTS_PER_SECOND, seconds=seconds)
        took = time.perf_counter() - began
        cores = (agent.cpu_seconds() - cpu) / took
        own_cores = (time.process_time() - own_cpu) / took
        sent = sum(engine.sent for engine in sources) - before
        await _applied(agent, sources)
        await asyncio.sleep(1.0)
        lost = _lost(consumers, sources, filled)
        missing = _CONSUMERS * sent - sum(len(each.latencies_seconds) for each in consumers)
        for task in following:
            task.cancel()
    latencies = [s for each in consumers for s in each.latencies_seconds]
    return {
        "events_per_second": rate,
        "events_lost": float(lost + missing),
        "event_to_consumer_p50_milliseconds": 1e3 * percentile(latencies, 0.5),
        "event_to_consumer_p99_milliseconds": 1e3 * percentile(latencies, 0.99),
        "event_to_consumer_max_milliseconds": 1e3 * max(latencies),
        "cores": cores,
        "load_cores": own_cores,
        "resident_megabytes": _resident_bytes(agent) / 1e6,
        "deltas_per_second": consumers[0].deltas / took,
        "consumer_kilobytes_per_second": consumers[0].bytes_read / took / 1e3,
        "snapshots_per_consumer": sum(each.snapshots for each in consumers) / _CONSUMERS,
    }


def _knows(consumer: Consumer, sources: list[Engine]) -> bool:
    return all(
        len(consumer.held.get(engine.name, ())) >= _FILL_BLOCKS_PER_ENGINE for engine in sources
    )


def _lost(consumers: list[Consumer], sources: list[Engine], filled: dict[str, set[int]]) -> int:
    """Count the blocks that any consumer knows wrongly."""
    wrong = 0
    for engine in sources:
        staying = filled[engine.name] - engine.script.held_after(0)
        right = staying | engine.script.held_after(engine.sent)
        wrong += sum(len(each.held[engine.name] ^ right) for each in consumers)
    return wrong


async def _overflow(agent: Service, sources: list[Engine]) -> dict[str, float]:
    """Have engines store three times what the tables may hold; memory must stay in bounds."""
    for engine in sources:
        for payload in engine.script.fill(_OVERFLOW_BLOCKS_PER_ENGINE):
            engine.source.send(payload)
            await asyncio.sleep(0.002)
    await _applied(agent, sources)
    metrics = await _metrics(agent)
    table_bytes = sum(metrics["nearkv_agent_block_table_bytes"])
    return {
        "overflow_resident_megabytes": _resident_bytes(agent) / 1e6,
        "overflow_table_of_limit_ratio": table_bytes / _TABLES_LIMIT_BYTES,
        "overflow_blocks_evicted": sum(metrics["nearkv_agent_blocks_evicted_total"]),
    }


async def _applied(agent: Service, sources: list[Engine]) -> None:
    """Wait until the agent has applied all that was sent."""
    sent = sum(engine.source.next_sequence for engine in sources)
    give_up_at = time.monotonic() + _DEADLINE_SECONDS
    while sum((await _metrics(agent))["nearkv_agent_event_messages_total"]) < sent:
        assert time.monotonic() < give_up_at, "the agent lags behind"
        await asyncio.sleep(0.2)


async def _metrics(agent: Service) -> dict[str, list[float]]:
    async with aiohttp.ClientSession() as session, session.get(agent.url + "/metrics") as answer:
        text = await answer.text()
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            head, _, value = line.rpartition(" ")
            found.setdefault(head.partition("{")[0], []).append(float(value))
    return found


async def _eventually(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + _DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < give_up_at, "never came true"
        await asyncio.sleep(0.05)


def _resident_bytes(agent: Service) -> int:
    pages = int(Path(f"/proc/{agent.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
