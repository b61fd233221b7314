"""Reading ``/metrics`` of ingresses, agents and engines, once or twice."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from nearkv.bounded_reading import read_at_most
from nearkv.certificates import ClientCertificates, tls_options
from nearkv.http_failures import explain_failure
from nearkv.report.samples import Change, Scrape, between, parse_scrape, since_start

_MOST_BYTES = 64 << 20
_AT_ONCE = 32
_HTTP_OK = 200


@dataclass(frozen=True, slots=True)
class Target:
    """An endpoint to scrape; ``secret`` ones get the bearer token."""

    url: str
    secret: bool = False

    @property
    def metrics_url(self) -> str:
        """The URL of its metrics."""
        return f"{self.url.rstrip('/')}/metrics"


@dataclass(frozen=True, slots=True)
class Asking:
    """How to ask: deadline of each request, token, certificates; the wall clock."""

    timeout_seconds: float
    now: Callable[[], float]
    token: str | None = None
    certificates: ClientCertificates | None = None


@dataclass(slots=True)
class Gathered:
    """What was read, and what could not be, by URL."""

    changes: list[Change] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


async def scrape_all(
    targets: Sequence[Target], asking: Asking, *, interval_seconds: float
) -> Gathered:
    """Scrape all endpoints, and again after ``interval_seconds``; 0: once, since their start."""
    gathered = Gathered()
    timeout = aiohttp.ClientTimeout(total=asking.timeout_seconds)
    async with aiohttp.ClientSession(timeout=timeout) as client:
        first = await _round(client, targets, asking, gathered)
        if not interval_seconds:
            gathered.changes = [since_start(scrape) for scrape in first.values()]
            return gathered
        await asyncio.sleep(interval_seconds)
        again = [target for target in targets if target.metrics_url in first]
        second = await _round(client, again, asking, gathered)
        gathered.changes = [between(first[url], scrape) for url, scrape in second.items()]
    return gathered


async def _round(
    client: aiohttp.ClientSession,
    targets: Sequence[Target],
    asking: Asking,
    gathered: Gathered,
) -> dict[str, Scrape]:
    """Return the scrapes by URL; failures are noted."""
    slots = asyncio.Semaphore(_AT_ONCE)

    async def one(target: Target) -> Scrape | None:
        async with slots:
            try:
                return await _scrape(client, target, asking)
            except _FAILURES as error:
                gathered.failures[target.metrics_url] = _explain(error)
                return None

    scrapes = await asyncio.gather(*map(one, targets))
    return {scrape.url: scrape for scrape in scrapes if scrape is not None}


class _RefusedError(Exception):
    """An endpoint answered, but not with metrics."""


_FAILURES = (aiohttp.ClientError, TimeoutError, OSError, ValueError, _RefusedError)


async def _scrape(client: aiohttp.ClientSession, target: Target, asking: Asking) -> Scrape:
    headers = {}
    if target.secret and asking.token:
        headers["Authorization"] = f"Bearer {asking.token}"
    url = target.metrics_url
    async with client.get(url, headers=headers, **tls_options(asking.certificates)) as response:
        if response.status != _HTTP_OK:
            advice = "; set --token" if response.status in {401, 403} else ""
            raise _RefusedError(f"answers {response.status}{advice}")
        body = await read_at_most(response, _MOST_BYTES)
        return parse_scrape(url, body.decode(), asking.now())


def _explain(error: BaseException) -> str:
    if isinstance(error, _RefusedError):
        return str(error)
    if isinstance(error, TimeoutError):
        return "no answer in time; raise --timeout or look there"
    if isinstance(error, (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError)):
        return "is not an HTTP URL; write http://host:port"
    if isinstance(error, aiohttp.ClientError):
        return explain_failure(error)
    if isinstance(error, ValueError):
        return f"the answer is not Prometheus text: {error}"
    return str(error)
