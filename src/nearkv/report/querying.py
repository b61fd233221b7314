"""Asking a Prometheus server for the same series over a window."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from nearkv.bounded_reading import read_at_most
from nearkv.certificates import tls_options
from nearkv.http_failures import explain_failure
from nearkv.report.errors import ReportError
from nearkv.report.evidence import Evidence
from nearkv.report.samples import Histogram, histogram_of
from nearkv.report.scraping import Asking
from nearkv.report.series import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    PREFILL_SECONDS,
    PROCESS_LABELS,
    Series,
)

_MOST_BYTES = 16 << 20
_AT_ONCE = 4


class _Value(msgspec.Struct):
    metric: dict[str, str]
    value: tuple[float, str]


class _Data(msgspec.Struct):
    result: list[_Value]


class _Answer(msgspec.Struct):
    status: str
    data: _Data | None = None
    error: str = ""


_decode = msgspec.json.Decoder(_Answer)


@dataclass(frozen=True, slots=True)
class Window:
    """How far to look back, and which series: ``match`` are label matchers, as in PromQL."""

    seconds: float
    match: str = ""


async def query_all(url: str, window: Window, asking: Asking) -> Evidence:
    """Return the evidence of a window; raises :class:`ReportError` where the server fails."""
    timeout = aiohttp.ClientTimeout(total=asking.timeout_seconds)
    headers = {"Authorization": f"Bearer {asking.token}"} if asking.token else {}
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as client:
        server = _Server(client, url, asking)
        return await _gather(server, url, window)


class _Server:
    """One Prometheus server; a few questions at a time."""

    def __init__(self, client: aiohttp.ClientSession, url: str, asking: Asking) -> None:
        self._client = client
        self._url = f"{url.rstrip('/')}/api/v1/query"
        self._asking = asking
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def ask(self, query: str) -> list[tuple[Mapping[str, str], float]]:
        """Return labels and values of an instant query, without those that are no numbers."""
        async with self._slots:
            try:
                answer = await self._fetch(query)
            except TimeoutError as error:
                raise ReportError(f"--prometheus: {self._url}: no answer in time") from error
            except (aiohttp.ClientError, OSError) as error:
                reason = explain_failure(error)
                raise ReportError(f"--prometheus: {self._url}: {reason}") from error
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ReportError(
                    f"--prometheus: {self._url} does not answer as a Prometheus server: {error}"
                ) from error
        if answer.data is None or answer.status != "success":
            raise ReportError(f"--prometheus: {query}: {answer.error or answer.status}")
        values = [(each.metric, float(each.value[1])) for each in answer.data.result]
        return [(labels, value) for labels, value in values if math.isfinite(value)]

    async def _fetch(self, query: str) -> _Answer:
        tls = tls_options(self._asking.certificates)
        async with self._client.post(self._url, data={"query": query}, **tls) as response:
            return _decode.decode(await read_at_most(response, _MOST_BYTES))


async def _gather(server: _Server, url: str, window: Window) -> Evidence:
    counters = asyncio.gather(*(_counter(server, each, window) for each in COUNTERS))
    gauges = asyncio.gather(*(_gauge(server, each, window) for each in GAUGES))
    histograms = asyncio.gather(*(_histogram(server, each, window) for each in HISTOGRAMS))
    engines = asyncio.gather(*(_engines(server, each, window) for each in PREFILL_SECONDS))
    found = await asyncio.gather(counters, gauges, histograms, engines)
    count = max(found[3], default=0)
    return Evidence(
        where=url,
        counters={s: v for s, v in zip(COUNTERS, found[0], strict=True) if v is not None},
        gauges={s: v for s, v in zip(GAUGES, found[1], strict=True) if v},
        histograms={s: h for s, h in zip(HISTOGRAMS, found[2], strict=True) if h is not None},
        engines=count,
        engine_seconds=count * window.seconds if count else None,
    )


def selector(series: Series, suffix: str, window: Window) -> str:
    """Return a range selector in PromQL."""
    matchers = [f'{name}="{value}"' for name, value in series.labels]
    if window.match:
        matchers.append(window.match)
    return f"{series.name}{suffix}{{{','.join(matchers)}}}[{window.seconds:.0f}s]"


def _once(function: str, series: Series, suffix: str, window: Window) -> str:
    """Return a function over a window, processes of one engine taken together."""
    labels = ", ".join(PROCESS_LABELS)
    return f"max without ({labels}) ({function}({selector(series, suffix, window)}))"


async def _counter(server: _Server, series: Series, window: Window) -> float | None:
    found = await server.ask(f"sum({_once('increase', series, '', window)})")
    return found[0][1] if found else None


async def _gauge(server: _Server, series: Series, window: Window) -> Sequence[float]:
    found = await server.ask(_once("avg_over_time", series, "", window))
    return [value for _, value in found]


async def _histogram(server: _Server, series: Series, window: Window) -> Histogram | None:
    buckets, total = await asyncio.gather(
        server.ask(f"sum by (le) ({_once('increase', series, '_bucket', window)})"),
        server.ask(f"sum({_once('increase', series, '_sum', window)})"),
    )
    if not buckets or not total:
        return None
    bounds = [(float(labels.get("le", "inf")), value) for labels, value in buckets]
    return histogram_of(bounds, total[0][1])


async def _engines(server: _Server, series: Series, window: Window) -> int:
    found = await server.ask(f"count({_once('last_over_time', series, '_sum', window)})")
    return int(found[0][1]) if found else 0
