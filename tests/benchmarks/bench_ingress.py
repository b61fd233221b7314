"""The ingress in front of four engine doubles: added latency, requests/s, bursts, tokenizations.

The ingress has core 0 to itself; engines, agent and this load generator share core 1. Every
figure is taken against direct calls, and beside a bare aiohttp pass-through, in one run.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from tests.benchmarks.http_load import LoadResult, load, post_bytes
from tests.benchmarks.reporting import median, percentile, report

_ROOT = Path(__file__).resolve().parents[2]
_ENGINES = 4
_START_SECONDS = 30.0
_WARM_UP = 2000
_PATH = "/v1/completions"
_SIZES = {"1kb": (1 << 10, 64, 600), "32kb": (32 << 10, 64, 300), "256kb": (256 << 10, 8, 96)}
_WORDS = (_ROOT / "LICENSE").read_text().split()


def main() -> int:
    """Start everything, measure, report."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        engines = started("tests.benchmarks.bench_engines", str(_ENGINES))
        urls = json.loads(stack.enter_context(engines))
        bare = stack.enter_context(started("tests.benchmarks.bare_proxy", *urls, core=0)).strip()
        agent = stack.enter_context(started_service("agent", folder, agent_config(urls), core=1))
        first = stack.enter_context(started_ingress(folder, agent, "prefix-first"))
        by_cost = stack.enter_context(started_ingress(folder / "cost", agent, "cost"))
        pin(1)
        figures, bare_figures = asyncio.run(measure(urls[0], bare, first))
        figures |= asyncio.run(passing_by_cost(by_cost))
    return report("ingress", figures, {"bare aiohttp": bare_figures})


@contextmanager
def started_ingress(folder: Path, agent: "Service", policy: str) -> Iterator["Service"]:
    """Run an ingress under one policy; the bars were set for ``prefix-first``."""
    folder.mkdir(exist_ok=True)
    settings = {"agents": [agent.url], "policy": policy}
    with started_service("ingress", folder, settings, core=0) as ingress:
        yield ingress


async def passing_by_cost(ingress: "Service") -> dict[str, float]:
    """Measure what a small request takes under the policy that weighs costs."""
    rates, costs = [], []
    for _ in range(3):
        before = ingress.cpu_seconds()
        result = await rate(ingress.url)
        rates.append(result.requests_per_second)
        costs.append((ingress.cpu_seconds() - before) / (len(result.latencies) + _WARM_UP))
    return {
        "requests_per_second_1kb_by_cost": median(rates),
        "cpu_microseconds_per_request_1kb_by_cost": median(costs) * 1e6,
    }


def agent_config(urls: Sequence[str]) -> dict[str, Any]:
    """Return the agent's configuration for these engines."""
    return {"engines": [{"id": f"e{i}", "url": url} for i, url in enumerate(urls)]}


def pin(core: int | None) -> None:
    """Keep this process on one core, where one is named and there is more than one."""
    if core is not None and (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {core})


@contextmanager
def started(module: str, *arguments: str, core: int = 1) -> Iterator[str]:
    """Run a helper program; yields the line it prints when it serves."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=_ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: pin(core),  # noqa: PLW1509 (single-threaded parent)
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process.stdout.readline()
    finally:
        process.terminate()
        process.wait(_START_SECONDS)


class Service:
    """A running nearkv component: its URL and its process."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.pid = pid

    def cpu_seconds(self) -> float:
        """Return the processor time used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def started_service(
    name: str, folder: Path, config: dict[str, Any], *, core: int | None
) -> Iterator[Service]:
    """Run a component on an ephemeral port; its log says which one."""
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps({"listen": "127.0.0.1:0", **config}))
    log = folder / f"{name}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", f"nearkv.{name}", "--config", file],
            cwd=_ROOT, stderr=stream, preexec_fn=lambda: pin(core),  # noqa: PLW1509 (as above)
        )  # fmt: skip
        try:
            yield Service(asyncio.run(_wait_ready(log, process)), process.pid)
        finally:
            process.terminate()
            process.wait(_START_SECONDS)


def _listening_url(log: Path) -> str | None:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return next((str(line["url"]) for line in lines if line["event"] == "listening"), None)


async def _wait_ready(log: Path, process: "subprocess.Popen[bytes]") -> str:
    async with asyncio.timeout(_START_SECONDS), aiohttp.ClientSession() as session:
        while True:
            assert process.poll() is None, f"the component ended; see {log}"
            url = _listening_url(log)
            if url is not None:
                async with session.get(f"{url}/readyz") as answer:
                    if answer.status == 200:
                        return url
            await asyncio.sleep(0.05)


async def measure(
    direct: str, bare: str, ingress: Service
) -> tuple[dict[str, float], dict[str, float]]:
    """Measure all figures, the ingress's and the bare proxy's."""
    figures: dict[str, float] = {}
    bare_figures: dict[str, float] = {}
    for name, (size, bodies, count) in _SIZES.items():
        requests = rotating(size, bodies, count)
        for url in (direct, bare, ingress.url):
            await load(url, requests[:bodies])  # everybody has seen every body
        base = median((await load(direct, requests)).latencies)
        for target, kept in ((bare, bare_figures), (ingress.url, figures)):
            added = median((await load(target, requests)).latencies) - base
            kept[f"added_p50_milliseconds_{name}"] = added * 1e3
        added = await added_with_new_tails(direct, ingress.url, size, bodies)
        figures[f"added_p50_milliseconds_{name}_new_tail"] = added * 1e3
        figures[f"unseen_p50_milliseconds_{name}"] = await unseen(direct, ingress.url, size)
    bare_rates, rates, costs = [], [], []
    for _ in range(3):  # turn about, so that a busy moment of the machine hits both
        bare_rates.append((await rate(bare)).requests_per_second)
        before = ingress.cpu_seconds()
        result = await rate(ingress.url)
        rates.append(result.requests_per_second)
        costs.append((ingress.cpu_seconds() - before) / (len(result.latencies) + _WARM_UP))
    bare_figures["requests_per_second_1kb"] = median(bare_rates)
    figures["requests_per_second_1kb"] = median(rates)
    figures["requests_per_second_of_bare_ratio"] = median(rates) / median(bare_rates)
    figures["cpu_microseconds_per_request_1kb"] = median(costs) * 1e6
    figures["burst_stall_milliseconds"] = await burst(ingress.url) * 1e3
    bare_figures["burst_stall_milliseconds"] = await burst(bare) * 1e3
    figures["tokenizations_per_request"] = await tokenizations(direct, ingress.url)
    return figures, bare_figures


def body_of(prompt: str, **fields: Any) -> bytes:
    """Return a completion request's body."""
    return json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 1, **fields}).encode()


def text(source: random.Random, size: int) -> str:
    """Return about ``size`` bytes of words."""
    words: list[str] = []
    length = 0
    while length < size:
        words.append(source.choice(_WORDS))
        length += len(words[-1]) + 1
    return " ".join(words)[:size]


def rotating(size: int, bodies: int, count: int) -> list[bytes]:
    """Return requests over some bodies in turn that share a quarter of their prompts."""
    source = random.Random(size)
    shared = text(source, size // 4)
    prepared = [
        post_bytes(_PATH, body_of(shared + " " + text(source, size - size // 4)))
        for _ in range(bodies)
    ]
    return [prepared[i % bodies] for i in range(count)]


async def added_with_new_tails(direct: str, ingress: str, size: int, count: int) -> float:
    """Measure prompts that the ingress has seen but for a sentence at the end.

    The engine sees each prompt beforehand, so that its own tokenizing is in neither figure.
    """
    source = random.Random(size + 1)
    stem = text(source, size)
    requests = [post_bytes(_PATH, body_of(f"{stem} {text(source, 120)}")) for _ in range(count)]
    await load(ingress, [post_bytes(_PATH, body_of(stem))])
    await load(direct, requests)
    base = median((await load(direct, requests)).latencies)
    return median((await load(ingress, requests)).latencies) - base


async def unseen(direct: str, ingress: str, size: int) -> float:
    """Measure prompts that nobody has seen: milliseconds added, tokenizing included."""
    source = random.Random(size + 2)
    requests = [post_bytes(_PATH, body_of(text(source, size))) for _ in range(12)]
    await load(direct, requests)
    base = median((await load(direct, requests)).latencies)
    return (median((await load(ingress, requests)).latencies) - base) * 1e3


async def rate(url: str) -> LoadResult:
    """Measure requests/s over 32 connections with 1 KB prompts."""
    requests = rotating(1 << 10, 64, 60_000)
    await load(url, requests[:_WARM_UP], connections=32)
    result = await load(url, requests, connections=32, seconds=4.0)
    assert not result.failed, f"{result.failed} requests failed"
    return result


async def burst(url: str) -> float:
    """Measure the time from first to last byte of 16 events sent at once, worst of the usual."""
    body = body_of("burst", stream=True).replace(b'"max_tokens": 1', b'"max_tokens": 16')
    result = await load(url, [post_bytes(_PATH, body)] * 200)
    return percentile(result.bursts, 0.99)


async def tokenizations(direct: str, ingress: str) -> float:
    """Count the engines' tokenizations for prompts that nobody has seen."""
    source = random.Random(99)
    requests = [post_bytes(_PATH, body_of(text(source, 1500))) for _ in range(50)]
    async with aiohttp.ClientSession() as session:
        before = await _asked(session, ingress)
        await load(ingress, requests)
        return (await _asked(session, ingress) - before) / len(requests)


async def _asked(session: aiohttp.ClientSession, ingress: str) -> int:
    """Count tokenizations over all engines, by their own record."""
    async with session.get(f"{ingress}/v1/status") as answer:
        urls = [engine["url"] for engine in (await answer.json())["engines"]]
    total = 0
    for url in urls:
        async with session.get(f"{url}/double/requests") as answer:
            counts = (await answer.json())["counts"]
        total += sum(n for path, n in counts.items() if path.endswith(("/render", "/tokenize")))
    return total


if __name__ == "__main__":
    sys.exit(main())
