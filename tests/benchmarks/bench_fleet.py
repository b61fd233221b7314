"""One ingress index and one extender view over 10, 100 and 1,000 simulated agents.

How long each takes to know them all, what it takes of memory and processor from then on, and what
is sent for it. Agents have core 1, what is measured has core 0. Writes to the API server are
those of the agents' real plan, over an hour of simulated time.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp

from tests.benchmarks.bench_ingress import Service, pin, started, started_service
from tests.benchmarks.fleet_writes import writes_per_second
from tests.benchmarks.reporting import report

_ROOT = Path(__file__).resolve().parents[2]
_COUNTS = (10, 100, 1000)
_STEADY_SECONDS = 20.0
_NEWS_SECONDS = 300.0
_LARGE_CLUSTER = 5000


def main() -> int:
    """Measure at each size, report."""
    pin(1)
    figures: dict[str, float] = {}
    for count in _COUNTS:
        figures |= {f"{name}_{count}": value for name, value in _measure(count).items()}
    largest, smaller = _COUNTS[-1], _COUNTS[-2]
    for part in ("ingress", "extender"):
        grown = figures[f"{part}_cores_{largest}"] / max(figures[f"{part}_cores_{smaller}"], 1e-3)
        figures[f"{part}_cores_growth_ratio"] = grown * smaller / largest
    _, busiest = writes_per_second(_LARGE_CLUSTER, news_seconds=_NEWS_SECONDS)
    figures[f"api_server_writes_in_busiest_second_{_LARGE_CLUSTER}"] = busiest
    return report("fleet", figures, {})


def _measure(count: int) -> dict[str, float]:
    with (
        started("tests.benchmarks.fleet_agents", str(count)) as line,
        TemporaryDirectory() as folder,
    ):
        url = line.strip()
        config = {
            "agents": [f"{url}/n/{number}" for number in range(count)],
            "deadlines": {"sync_seconds": 120.0},
        }
        began = time.perf_counter()
        with started_service("ingress", Path(folder), config, core=0) as ingress:
            figures = {"ingress_sync_seconds": time.perf_counter() - began}
            figures |= {f"ingress_{k}": v for k, v in _steady(ingress, url, "state").items()}
        with _view(url, count) as (view, seconds):
            figures["extender_sync_seconds"] = seconds
            figures |= {f"extender_{k}": v for k, v in _steady(view, url, "summary").items()}
    figures["api_server_writes_per_second"], _ = writes_per_second(
        count, news_seconds=_NEWS_SECONDS
    )
    return figures


def _steady(service: Service, url: str, kind: str) -> dict[str, float]:
    """Measure what goes on once everything is known."""
    time.sleep(2.0)
    cpu, sent, began = service.cpu_seconds(), asyncio.run(_sent_bytes(url, kind)), time.time()
    time.sleep(_STEADY_SECONDS)
    took = time.time() - began
    return {
        "cores": (service.cpu_seconds() - cpu) / took,
        "kilobytes_per_second": (asyncio.run(_sent_bytes(url, kind)) - sent) / took / 1e3,
        "resident_megabytes": _resident_bytes(service) / 1e6,
    }


async def _sent_bytes(url: str, kind: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/bench/bytes") as answer:
        sent: dict[str, int] = await answer.json()
    return sent[kind]


@contextmanager
def _view(url: str, count: int) -> Iterator[tuple[Service, float]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.fleet_view", url, str(count)],
        cwd=_ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: pin(0),  # noqa: PLW1509 (single-threaded parent)
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield Service("", process.pid), float(process.stdout.readline())
    finally:
        process.terminate()
        process.wait(30)


def _resident_bytes(service: Service) -> int:
    pages = int(Path(f"/proc/{service.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
