"""Collecting the summaries of all agents over HTTP, by long polls.

Each agent is followed by a task of its own, within common bounds on connections. An agent that
fails is left alone for a growing while; what it sent cannot disturb the others. Connections are
probed by TCP, so that a host that is gone is noticed while a poll is pending.
"""

import asyncio
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp
import structlog

from nearkv.bounded_reading import AnswerTooLargeError, read_at_most
from nearkv.certificates import ClientCertificates, tls_options
from nearkv.extender.view.polling import CollectLimits, PollPlan, pause_after, plan_polls
from nearkv.extender.view.summaries import (
    MAX_SUMMARY_BYTES,
    NodeReport,
    SummaryRefusedError,
    decode_summary,
)
from nearkv.http_failures import explain_failure, name_failure
from nearkv.keepalive import probed_socket
from nearkv.node_summary import SUMMARY_PATH, NodeSummary

_OK = 200
_NOT_MODIFIED = 304
_UNAUTHORIZED = 401
_REMEDIES = {
    _UNAUTHORIZED: ": agents.token is not the agents' token, or agents.tls has no certificate for "
    "them",
    404: ": is this an agent?",
}
_PROBE_AFTER_SECONDS = 15
_PROBE_EVERY_SECONDS = 5
_PROBES = 3

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AgentTarget:
    """An agent to follow; ``node`` is the one it may speak for, empty where that is open."""

    url: str
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTrust:
    """How agents know the collector, and how it knows those that serve over TLS.

    Without ``certificates`` the system's CAs count.
    """

    token: str | None = field(default=None, repr=False)
    certificates: ClientCertificates | None = None


class ReportSink(Protocol):
    """What takes the reports."""

    def report_arrived(self, report: NodeReport) -> None:
        """Take a report; raises :class:`SummaryRefusedError`."""

    def report_holds(self, node: str, source: str, now: float, promised_seconds: float) -> bool:
        """Take an agent's word that nothing has changed; False if there is nothing to hold."""

    def agent_lost(self, node: str, source: str) -> None:
        """Take note that an agent cannot be heard."""


class _PollError(Exception):
    """A poll failed; ``reason`` is for counting."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class _Followed:
    """What is known of an agent that is followed."""

    target: AgentTarget
    node: str
    cursor: str = ""
    failures: int = 0
    said: str = ""

    @property
    def can_wait(self) -> bool:
        """Whether to wait for news; after a failure it must be clear first that it is there."""
        return bool(self.cursor) and not self.failures


class SummaryCollector:
    """Follows all agents; :meth:`set_targets` may be called at any time."""

    def __init__(
        self,
        sink: ReportSink,
        *,
        trust: AgentTrust | None = None,
        limits: CollectLimits | None = None,
        now: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Make a collector; ``draw`` returns random numbers from 0 to 1, for jitter."""
        self._sink = sink
        self._headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        self._trust = trust or AgentTrust()
        if self._trust.token:
            self._headers["Authorization"] = f"Bearer {self._trust.token}"
        self._limits = limits or CollectLimits()
        self._now = now
        self._draw = draw
        self._targets: dict[str, AgentTarget] = {}
        self._tasks: dict[AgentTarget, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._waiting = asyncio.Semaphore(self._limits.max_connections)
        self._fetching = asyncio.Semaphore(self._limits.fetching)
        self._failing: set[str] = set()
        self.failures: Counter[str] = Counter()
        self.polls = 0
        self.in_flight = 0

    @property
    def agents(self) -> int:
        """Agents that are to be followed."""
        return len(self._targets)

    @property
    def agents_failing(self) -> int:
        """Agents whose last poll failed."""
        return len(self._failing)

    def set_targets(self, targets: Iterable[AgentTarget]) -> None:
        """Follow these agents, and no others."""
        self._targets = {target.url: target for target in targets}
        self._news.set()

    async def run(self) -> None:
        """Follow until cancelled."""
        connector = aiohttp.TCPConnector(limit=0, socket_factory=_probed_socket)
        async with aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        ) as session:
            self._session = session
            try:
                while True:
                    self._news.clear()
                    await self._follow_targets()
                    await self._news.wait()
            finally:
                await self._stop(list(self._tasks))

    async def _follow_targets(self) -> None:
        wanted = set(self._targets.values())
        await self._stop([target for target in self._tasks if target not in wanted])
        for target in wanted - self._tasks.keys():
            self._tasks[target] = asyncio.create_task(self._follow(target))

    async def _stop(self, targets: Iterable[AgentTarget]) -> None:
        tasks = [self._tasks.pop(target) for target in targets]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- One agent -----------------------------------------------------------------------

    async def _follow(self, target: AgentTarget) -> None:
        followed = _Followed(target, node=target.node)
        try:
            while True:
                pause_seconds = await self._turn(followed)
                await asyncio.sleep(pause_seconds)
        finally:
            self._failing.discard(target.url)
            if followed.node:
                self._sink.agent_lost(followed.node, target.url)

    async def _turn(self, followed: _Followed) -> float:
        """Poll once; return how many seconds to pause."""
        plan = plan_polls(len(self._targets), self._limits)
        began_at = self._now()
        try:
            async with self._waiting if followed.can_wait else self._fetching:
                await self._poll(followed, plan)
        except _PollError as error:
            return self._failed(followed, plan, error.reason, str(error))
        except Exception as error:  # a defect must not end the others
            log.exception("agent_poll_defect", agent=followed.target.url)
            return self._failed(followed, plan, "defect", repr(error))
        followed.failures = 0
        followed.said = ""
        self._failing.discard(followed.target.url)
        if self._takes_turns:
            # Others are waiting for their turn; this one has had its own.
            pause_seconds = plan.cycle_seconds - plan.wait_seconds
        else:
            pause_seconds = plan.pause_seconds - (self._now() - began_at)
        return max(0.0, pause_seconds * (0.8 + 0.2 * self._draw()))

    @property
    def _takes_turns(self) -> bool:
        """Whether there are more agents than connections."""
        return len(self._targets) > self._limits.max_connections

    def _failed(self, followed: _Followed, plan: PollPlan, reason: str, detail: str) -> float:
        self.failures[reason] += 1
        followed.failures += 1
        self._failing.add(followed.target.url)
        if followed.node:
            self._sink.agent_lost(followed.node, followed.target.url)
        # Once for each trouble: an agent may be away for days.
        level = log.debug if followed.said == detail else log.info
        level("agent_not_heard", agent=followed.target.url, reason=reason, detail=detail)
        followed.said = detail
        return pause_after(followed.failures, plan, self._limits, self._draw())

    async def _poll(self, followed: _Followed, plan: PollPlan) -> None:
        wait_seconds = plan.wait_seconds * (0.8 + 0.2 * self._draw()) if followed.can_wait else 0.0
        self.polls += 1
        self.in_flight += 1
        try:
            summary = await self._ask(followed, wait_seconds)
        finally:
            self.in_flight -= 1
        source, now = followed.target.url, self._now()
        if summary is None:
            if not self._sink.report_holds(followed.node, source, now, plan.cycle_seconds):
                followed.cursor = ""
            return
        report = NodeReport(
            summary=summary,
            source=source,
            received_at=now,
            promised_seconds=max(plan.cycle_seconds, summary.interval_seconds),
        )
        try:
            self._sink.report_arrived(report)
        except SummaryRefusedError as error:
            followed.cursor = ""
            raise _PollError(error.reason, str(error)) from error
        followed.node = summary.node
        followed.cursor = f"{summary.boot}:{summary.seq}"

    async def _ask(self, followed: _Followed, wait_seconds: float) -> NodeSummary | None:
        """Return an agent's summary, ``None`` where there is no news; raises `_PollError`."""
        try:
            body = await self._fetch(followed, wait_seconds)
        except AnswerTooLargeError as error:
            raise _PollError("too_large", str(error)) from error
        except TimeoutError as error:
            raise _PollError("silent", "no answer in time") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _PollError(name_failure(error), explain_failure(error)) from error
        if body is None:
            return None
        try:
            return decode_summary(body, node=followed.target.node)
        except SummaryRefusedError as error:
            raise _PollError(error.reason, str(error)) from error

    async def _fetch(self, followed: _Followed, wait_seconds: float) -> bytes | None:
        assert self._session is not None  # noqa: S101 (set before any task is started)
        query = {"wait_seconds": f"{wait_seconds:.1f}"}
        if followed.cursor:
            query["after"] = followed.cursor
        timeout = aiohttp.ClientTimeout(
            total=self._limits.connect_seconds + wait_seconds + self._limits.answer_seconds,
            sock_connect=self._limits.connect_seconds,
        )
        # One that is kept for the agent's next turn would count for nobody's bound.
        headers = {"Connection": "close"} if self._takes_turns else None
        async with self._session.get(
            followed.target.url + SUMMARY_PATH,
            params=query,
            headers=headers,
            timeout=timeout,
            **tls_options(self._trust.certificates),
            # Another address must never see the token.
            allow_redirects=False,
        ) as response:
            if response.status == _NOT_MODIFIED and followed.cursor:
                return None
            if response.status != _OK:
                reason = "unauthorized" if response.status == _UNAUTHORIZED else "refused"
                remedy = _REMEDIES.get(response.status, "")
                raise _PollError(reason, f"status {response.status}{remedy}")
            return await read_at_most(response, MAX_SUMMARY_BYTES)


def _probed_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket on which the system notices by itself when the other host is gone."""
    return probed_socket(
        address,
        after_seconds=_PROBE_AFTER_SECONDS,
        every_seconds=_PROBE_EVERY_SECONDS,
        probes=_PROBES,
    )
