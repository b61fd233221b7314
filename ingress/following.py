"""Following one agent's state stream, for ever and with manners.

A broken stream is resumed from its cursor; one that sends nonsense is closed, counted and
started over with a snapshot, after a pause that grows. Nothing an agent sends can disturb
another agent's engines.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import structlog

from nearkv.certificates import ClientCertificates, tls_options
from nearkv.http_failures import explain_failure, name_failure
from nearkv.ingress.fleet import Fleet, StreamProtocolError
from nearkv.state.codec import FrameReader, StateDecodeError
from nearkv.state.model import Cursor

_FIRST_PAUSE_SECONDS = 0.2
_UNAUTHORIZED = 401
_REMEDIES = {
    _UNAUTHORIZED: ": agent_token is not the agent's token, or agent_tls has no certificate for it",
    404: ": is this an agent?",
}

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FollowLimits:
    """How an agent is followed: deadlines, and how it is asked.

    ``certificates`` are for agents that serve over TLS; default: the system's CAs.
    """

    token: str | None = None
    certificates: ClientCertificates | None = None
    connect_seconds: float = 2.0
    silence_seconds: float = 5.0
    longest_pause_seconds: float = 5.0


class AgentFollower:
    """Keeps the fleet in step with one agent."""

    def __init__(
        self,
        url: str,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        *,
        now: Callable[[], float],
        count_error: Callable[[str], None],
        limits: FollowLimits,
    ) -> None:
        """Make a follower; ``count_error`` takes the reason of each broken stream."""
        self._url = url.rstrip("/")
        self._agent = fleet.add_agent(url)
        self._key = url
        self._fleet = fleet
        self._session = session
        self._now = now
        self._headers = {"Authorization": f"Bearer {limits.token}"} if limits.token else {}
        self._count_error = count_error
        self._limits = limits
        self._log = log.bind(agent=url)

    async def run(self) -> None:
        """Follow until cancelled."""
        pause_seconds = _FIRST_PAUSE_SECONDS
        said = ""
        while True:
            before = self._agent.cursor
            reason, detail = await self._follow_once()
            self._fleet.connection_lost(self._key, detail)
            self._count_error(reason)
            if self._agent.cursor != before:
                pause_seconds = _FIRST_PAUSE_SECONDS
                said = ""
            # Once for each trouble: an agent may be away for days.
            level = self._log.debug if detail == said else self._log.warning
            level("agent_stream_lost", reason=reason, detail=detail)
            said = detail
            await asyncio.sleep(random.uniform(0.5, 1.0) * pause_seconds)  # noqa: S311 (jitter)
            pause_seconds = min(pause_seconds * 2, self._limits.longest_pause_seconds)

    async def _follow_once(self) -> tuple[str, str]:
        """Follow one connection to its end; returns a reason and a text."""
        try:
            await self._read_stream(self._agent.cursor)
        except (StreamProtocolError, StateDecodeError) as error:
            self._agent.cursor = None
            return "garbage", str(error)
        except TimeoutError:
            return "silent", f"nothing heard for {self._limits.silence_seconds:g} s"
        except aiohttp.ClientResponseError as error:
            reason = "unauthorized" if error.status == _UNAUTHORIZED else "refused"
            return reason, f"status {error.status}{_REMEDIES.get(error.status, '')}"
        except (aiohttp.ClientError, OSError) as error:
            return name_failure(error), explain_failure(error)
        return "closed", "the agent ended the stream"

    async def _read_stream(self, cursor: Cursor | None) -> None:
        query = {"after": str(cursor)} if cursor else {}
        timeout = aiohttp.ClientTimeout(
            total=None,
            sock_connect=self._limits.connect_seconds,
            sock_read=self._limits.silence_seconds,
        )
        async with self._session.get(
            f"{self._url}/v1/state/stream",
            params=query,
            headers=self._headers,
            timeout=timeout,
            raise_for_status=True,
            **tls_options(self._limits.certificates),
        ) as response:
            reader = FrameReader()
            async for data in response.content.iter_any():
                for frame in reader.feed(data):
                    self._fleet.apply(self._key, frame, self._now())
                    if self._agent.staging is not None:
                        # A large snapshot must not keep requests waiting.
                        await asyncio.sleep(0)
                if not self._agent.connected:
                    self._agent.connected = self._agent.synced
                    self._agent.error = None
