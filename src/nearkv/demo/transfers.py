"""What the agents say of KV that moved: bytes and seconds by path, and who is ready to move."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from nearkv.demo.errors import ScenarioError

TIMEOUT_SECONDS = 10.0
PAIR_DEADLINE_SECONDS = 60.0
POLL_SECONDS = 0.1
BYTES_SERIES = "nearkv_agent_transfer_bytes_total"
SECONDS_SERIES = "nearkv_agent_transfer_seconds_sum"


@dataclass(frozen=True, slots=True)
class Transfers:
    """Totals by path, as an agent counts the pulls into its node."""

    bytes_by_path: dict[str, int] = field(default_factory=dict)
    seconds_by_path: dict[str, float] = field(default_factory=dict)

    def __sub__(self, other: "Transfers") -> "Transfers":
        return Transfers(
            {p: n - other.bytes_by_path.get(p, 0) for p, n in self.bytes_by_path.items()},
            {p: s - other.seconds_by_path.get(p, 0.0) for p, s in self.seconds_by_path.items()},
        )

    @property
    def size_bytes(self) -> int:
        """Bytes over all paths."""
        return sum(self.bytes_by_path.values())

    @property
    def seconds(self) -> float:
        """Seconds over all paths."""
        return sum(self.seconds_by_path.values())

    @property
    def path(self) -> str | None:
        """The path that most bytes took; None when there were none."""
        used = {path: count for path, count in self.bytes_by_path.items() if count}
        return max(used, key=lambda path: used[path]) if used else None


class _Engine(msgspec.Struct):
    id: str
    complete: bool


class _Transfer(msgspec.Struct):
    engines: list[_Engine] = []


class _Status(msgspec.Struct):
    node: str
    transfer: _Transfer | None = None


def parse_transfers(metrics_text: str) -> Transfers:
    """Read the totals from an agent's ``/metrics``; a path never used is not there."""
    found = Transfers()
    for family in text_string_to_metric_families(metrics_text):
        for sample in family.samples:
            path = sample.labels.get("path", "")
            if sample.name == BYTES_SERIES:
                found.bytes_by_path[path] = int(sample.value)
            elif sample.name == SECONDS_SERIES:
                found.seconds_by_path[path] = sample.value
    return found


async def read_transfers(session: aiohttp.ClientSession, agent_url: str) -> Transfers:
    """Ask an agent for its totals; raises ``ScenarioError`` when it does not answer."""
    return parse_transfers((await _get(session, f"{agent_url}/metrics")).decode())


async def wait_for_engines(session: aiohttp.ClientSession, agent_urls: Sequence[str]) -> None:
    """Wait until every agent has an engine whose KV can move.

    Raises ``ScenarioError`` when one has not within the deadline.
    """
    end = time.monotonic() + PAIR_DEADLINE_SECONDS
    for url in agent_urls:
        while True:
            status = msgspec.json.decode(await _get(session, f"{url}/v1/status"), type=_Status)
            if status.transfer and any(engine.complete for engine in status.transfer.engines):
                break
            if time.monotonic() > end:
                raise ScenarioError(f"no engine of {status.node} has registered to move its KV")
            await asyncio.sleep(POLL_SECONDS)


async def _get(session: aiohttp.ClientSession, url: str) -> bytes:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    try:
        async with session.get(url, timeout=timeout) as response:
            response.raise_for_status()
            return await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ScenarioError(f"cannot read {url}: {error!r}") from error
