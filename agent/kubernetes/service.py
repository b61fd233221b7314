"""Engines that are pods of this node, for the rest of the agent: follow them, ask about them.

One watch of the pods with this node's name, whatever the number of engines. While the API server
is away, what is known stays as it is: engines are asked themselves how they do.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

import aiohttp
import msgspec
import structlog
import zmq.asyncio
from aiohttp import web

from nearkv.agent.discovering import EngineSpec
from nearkv.agent.engine_kinds_probing import EngineKindProbe
from nearkv.agent.gpu.driver_upgrade import UPGRADE_LABEL
from nearkv.agent.gpu.pod_devices import PodName
from nearkv.agent.kubernetes.fleet import EngineFleet
from nearkv.agent.kubernetes.own_node import FollowLabel, OwnNode, TakeLabels
from nearkv.agent.kubernetes.pod_engines import PodEngine, PodRules
from nearkv.agent.kubernetes.roster import PodRoster, Step
from nearkv.agent.node_state import NodeState
from nearkv.agent.probing import open_engine_session
from nearkv.agent.settings import AgentSettings
from nearkv.agent.subscribing import open_context
from nearkv.agent.transfer.abilities import TransferAbilities
from nearkv.agent.watching import EngineWatch
from nearkv.agent.watching import WatchLimits as EngineLimits
from nearkv.health import Readiness
from nearkv.kube.access import ApiAccess
from nearkv.kube.events import ChangeKind
from nearkv.kube.objects import Pod, pods_path
from nearkv.kube.watching import Watch, WatchLimits
from nearkv.settings import secret_bytes
from nearkv.supervising import Job, supervised

CHECK = "kubernetes"
_FIRST_LOOK_SECONDS = 5.0
_WITHHELD = ("/v1/state", "/v1/summary")

log = structlog.get_logger(__name__)


def agent_watch_limits() -> WatchLimits:
    """Return the bounds of a watch that every node of a cluster has: long ones."""
    return WatchLimits(watch_seconds=300.0, silence_seconds=650.0)


def _ignore(_labels: Mapping[str, str]) -> None:
    """Take labels that nobody asks for."""


class KubernetesService:
    """Follows pods while :meth:`running`; use it on the event loop's thread only.

    ``follow_upgrade`` is told the own Node's label of driver upgrades, ``take_node_labels`` all
    its labels; without both the Node is not watched.
    """

    def __init__(
        self,
        settings: AgentSettings,
        state: NodeState,
        modes: TransferAbilities,
        *,
        limits: WatchLimits | None = None,
    ) -> None:
        self._settings = settings
        self._state = state
        self._modes = modes
        self._limits = limits or agent_watch_limits()
        self._watches: dict[str, Watch[Any]] = {}
        self._fleet: EngineFleet | None = None
        self.follow_upgrade: FollowLabel | None = None
        self.take_node_labels: TakeLabels | None = None
        self.failures: Counter[tuple[str, str]] = Counter()
        """How often each watch failed, by its name and the trouble's."""
        self.is_known = False
        """Whether pods were listed once, and their engines asked."""
        own = settings.kubernetes
        self.roster = PodRoster(
            PodRules(
                group_labels=own.group_labels,
                role_labels=own.role_labels,
                every=bool(own.selector),
                port=own.port,
                api_key=own.api_key,
            ),
            node=settings.node,
            taken=[engine.id for engine in settings.engines],
        )

    @property
    def is_on(self) -> bool:
        """Whether the settings say to follow pods."""
        return self._settings.kubernetes.is_on

    @property
    def engines(self) -> Mapping[str, PodEngine]:
        """The engines by the UID of their pod."""
        return self.roster.engines

    @property
    def watches(self) -> Mapping[str, Watch[Any]]:
        """The watches that run, by name: ``pods``, ``node``."""
        return self._watches

    def uid_of(self, pod: PodName) -> str | None:
        """Return the UID of a pod of this node, where pods are followed."""
        return self.roster.uid_of(pod.namespace, pod.name)

    def open_access(self) -> ApiAccess:
        """Return an access to the API server, not open yet."""
        own = self._settings.kubernetes
        return ApiAccess.automatic(str(own.kubeconfig or ""), own.context or "")

    @asynccontextmanager
    async def running(self, access: ApiAccess, readiness: Readiness) -> AsyncIterator[None]:
        """Follow pods while in the block.

        It is entered once their engines were asked, or after a few seconds without: then state
        is withheld until it can be told (:meth:`withhold`).
        """
        readiness.set(CHECK, ok=False, why="pods are not listed yet")
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(open_engine_session())
            context = open_context()
            stack.callback(context.destroy, linger=0)
            fleet = EngineFleet(
                lambda spec: self._make_watch(spec, session, context),
                on_defect=lambda error: readiness.set(
                    CHECK, ok=False, why=f"a task failed: {error!r}"
                ),
            )
            stack.push_async_callback(fleet.close)
            self._fleet = fleet
            known = asyncio.Event()
            jobs = [
                Job("pods_watch", self._watch_pods(access).run),
                Job("pods_known", partial(self._get_known, fleet, readiness, known)),
            ]
            if self.follow_upgrade is not None or self.take_node_labels is not None:
                jobs.append(Job("node_watch", self._watch_node(access).run))
            await stack.enter_async_context(supervised(jobs, readiness, check=CHECK))
            with suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_LOOK_SECONDS):
                    await known.wait()
            yield

    @web.middleware
    async def withhold(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Any],
    ) -> web.StreamResponse:
        """Refuse to tell state before it is known: engines missing in it would count as gone."""
        if self.is_on and not self.is_known and request.path.startswith(_WITHHELD):
            raise web.HTTPServiceUnavailable(
                text="the pods of this node are not listed yet", headers={"Retry-After": "2"}
            )
        answer: web.StreamResponse = await handler(request)
        return answer

    def describe(self) -> dict[str, Any]:
        """Return the section of the status, as plain JSON types; unknown values are null."""
        pods = self._watches.get("pods")
        now = self._state.now()
        heard = None if pods is None or not pods.synced else now - pods.last_heard_at
        roster = self.roster
        return {
            "enabled": self.is_on,
            "listed": pods is not None and pods.synced,
            "heard_seconds_ago": None if heard is None else round(heard, 3),
            "engines": [
                {
                    "engine": engine.uid,
                    "pod": engine.pod,
                    "ready": engine.is_ready,
                    "leaving": engine.is_leaving,
                }
                for engine in sorted(roster.engines.values(), key=lambda each: each.pod)
            ],
            "waiting": {roster.pod_of(uid): phase for uid, phase in roster.waiting.items()},
        }

    def problems(self) -> list[str]:
        """Return what is wrong, a line for each pod and watch."""
        found = [f"{self.roster.pod_of(uid)}: {text}" for uid, text in self.roster.problems.items()]
        for name, watch in self._watches.items():
            if watch.problem:
                found.append(f"watching {name}: {watch.problem}")
        return sorted(found)

    # -- What runs -------------------------------------------------------------------------

    def _watch_pods(self, access: ApiAccess) -> Watch[Pod]:
        own = self._settings.kubernetes
        decoder = msgspec.json.Decoder(Pod)
        watch = Watch(
            access,
            pods_path(own.namespace),
            decode=decoder.decode,
            on_replace=lambda pods: self._apply(self.roster.replace(pods)),
            on_change=self._on_pod,
            label_selector=own.selector,
            field_selector=f"spec.nodeName={self._settings.node}",
            cached=True,
            limits=self._limits,
            count_failure=lambda trouble: self.failures.update([("pods", trouble)]),
            now=self._state.now,
        )
        self._watches["pods"] = watch
        return watch

    def _watch_node(self, access: ApiAccess) -> OwnNode:
        node = OwnNode(
            access,
            node=self._settings.node,
            label=UPGRADE_LABEL,
            follow=self.follow_upgrade,
            take_labels=self.take_node_labels or _ignore,
            limits=self._limits,
            count_failure=lambda trouble: self.failures.update([("node", trouble)]),
        )
        self._watches["node"] = node.watch
        return node

    async def _get_known(
        self, fleet: EngineFleet, readiness: Readiness, known: asyncio.Event
    ) -> None:
        await self._watches["pods"].wait_until_synced()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_LOOK_SECONDS):
                await fleet.first_looks()
        self.is_known = True
        readiness.set(CHECK, ok=True)
        known.set()
        log.info("pods_listed", engines=len(self.engines))

    def _on_pod(self, kind: ChangeKind, pod: Pod) -> None:
        self._apply(self.roster.drop(pod) if kind == "DELETED" else self.roster.put(pod))

    def _apply(self, steps: list[Step]) -> None:
        for step in steps:
            if step.after is not None:
                self._modes.set_mode(step.after.uid, step.after.transfer)
            elif step.before is not None:
                self._modes.forget_mode(step.before.uid)
            if self._fleet is not None:
                self._fleet.apply(step)

    def _make_watch(
        self, spec: EngineSpec, session: aiohttp.ClientSession, context: zmq.asyncio.Context
    ) -> EngineWatch:
        settings = self._settings
        probe = EngineKindProbe(
            spec.url,
            session,
            timeout_seconds=settings.scrape.timeout_seconds,
            bearer_token=spec.api_key,
            kind=spec.kind,
        )
        limits = EngineLimits(
            scrape_interval_seconds=settings.scrape.interval_seconds,
            table_limit_bytes=settings.state.table_limit_bytes,
            secret=secret_bytes(settings.cluster_secret),
        )
        return EngineWatch(
            spec, probe, self._state, node=settings.node, context=context, limits=limits
        )
