"""Putting together what follows the agents: from settings to what runs in the background."""

import asyncio
import time

import aiohttp
import structlog

from nearkv.certificates import ClientCertificates
from nearkv.health import Readiness
from nearkv.ingress.agent_sync import AgentList, judge
from nearkv.ingress.agent_watching import make_agent_watch
from nearkv.ingress.fleet import Fleet
from nearkv.ingress.followers import Followers
from nearkv.ingress.following import FollowLimits
from nearkv.ingress.metrics import IngressMetrics
from nearkv.ingress.settings import IngressSettings
from nearkv.supervising import Job

CHECK_SYNC = "agents_synced"
_SYNC_POLL_SECONDS = 0.05

log = structlog.get_logger(__name__)


class AgentJoin:
    """Follows the agents of the settings, and those found in Kubernetes."""

    def __init__(
        self,
        settings: IngressSettings,
        fleet: Fleet,
        metrics: IngressMetrics,
        *,
        session: aiohttp.ClientSession,
        certificates: ClientCertificates,
    ) -> None:
        self._fleet = fleet
        self._configured = settings.agents
        self._longest_seconds = settings.deadlines.sync_seconds
        token = settings.agent_token
        self._followers = Followers(
            fleet,
            session,
            now=time.monotonic,
            count_error=metrics.stream_errors.add,
            limits=FollowLimits(
                token=None if token is None else token.get_secret_value(),
                certificates=certificates,
                connect_seconds=settings.deadlines.connect_seconds,
                silence_seconds=settings.deadlines.agent_silence_seconds,
            ),
            keep_seconds=settings.agent_service.keep_seconds,
        )
        self._watch = make_agent_watch(
            settings.agent_service,
            on_agents=lambda urls: self._followers.follow({*self._configured, *urls}),
            count_failure=metrics.agent_list_failures.add,
        )

    def jobs(self, readiness: Readiness) -> list[Job]:
        """Return what has to run for as long as the ingress does."""
        self._followers.follow(self._configured)
        jobs = [
            Job("followers", self._followers.run),
            Job("report_sync", lambda: self._report_sync(readiness)),
        ]
        if self._watch is not None:
            jobs.append(Job("agent_watch", self._watch.run))
        return jobs

    async def _report_sync(self, readiness: Readiness) -> None:
        """Become ready once every agent's snapshot is here, or after a while without."""
        give_up_at = time.monotonic() + self._longest_seconds
        while True:
            verdict = judge(
                self._followers.listed,
                self._listing(),
                engines=len(self._fleet.engines),
                out_of_time=time.monotonic() >= give_up_at,
            )
            readiness.set(CHECK_SYNC, ok=verdict.ok, why=verdict.why)
            if verdict.final:
                if verdict.why:
                    log.warning("serving_without_agents", why=verdict.why)
                return
            await asyncio.sleep(_SYNC_POLL_SECONDS)

    def _listing(self) -> AgentList:
        if self._watch is None:
            return AgentList()
        return AgentList(self._watch.was_read, may_be_empty=False, problem=self._watch.problem)
