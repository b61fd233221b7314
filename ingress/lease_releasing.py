"""Giving leases back to their agents, in the background.

A lease that nobody gives back ends by itself, after its time; giving it back frees an
engine's blocks at once. So this is best effort, with a deadline and a bound on how many are
under way. Every end is counted.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus

import aiohttp
import msgspec
import structlog

from nearkv.certificates import ClientCertificates, tls_options
from nearkv.http_failures import DISCONNECTED, name_failure
from nearkv.ingress.prefill_leg import lease_of

_MOST_AT_ONCE = 256
_PATH = "/v1/transfer/release"

log = structlog.get_logger(__name__)


class LeaseReleaser:
    """Tells agents that leases of their engines are no longer wanted."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        token: str | None,
        certificates: ClientCertificates | None = None,
        deadline_seconds: float,
        count: Callable[[str], None],
    ) -> None:
        """Make a releaser; ``count`` takes the outcome of each release.

        ``certificates`` are for agents that serve over TLS; default: the system's CAs.
        """
        self._session = session
        self._certificates = certificates
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._deadline_seconds = deadline_seconds
        self._count = count
        self._tasks: set[asyncio.Task[None]] = set()

    def release(self, agent_url: str, params: msgspec.Raw) -> None:
        """Start giving back the lease that an engine's parameters name, if they name one.

        Stock connectors have no such call: their leases end by themselves.
        """
        lease = lease_of(params)
        if lease is None or not agent_url:
            return
        if len(self._tasks) >= _MOST_AT_ONCE:
            self._count("dropped")
            return
        url = agent_url.rstrip("/") + _PATH
        task = asyncio.create_task(self._release(url, msgspec.json.encode(lease)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for what is under way; each has its deadline."""
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _release(self, url: str, body: bytes) -> None:
        outcome = await self._post(url, body)
        self._count(outcome)
        if outcome != "released":
            log.info("lease_not_released", url=url, outcome=outcome)

    async def _post(self, url: str, body: bytes) -> str:
        try:
            async with (
                asyncio.timeout(self._deadline_seconds),
                self._session.post(
                    url,
                    data=body,
                    headers=self._headers,
                    allow_redirects=False,
                    **tls_options(self._certificates),
                ) as answer,
            ):
                done = HTTPStatus.OK <= answer.status < HTTPStatus.MULTIPLE_CHOICES
                return "released" if done else "refused"
        except TimeoutError:
            return "timeout"
        except (aiohttp.ClientError, OSError) as error:
            reason = name_failure(error)
            return "failed" if reason == DISCONNECTED else reason
