"""Keeping the WorkerStatuses of a node: look at the engines, write what the plan says is due."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import msgspec
import structlog

from nearkv.agent.kubernetes.pod_engines import PodEngine
from nearkv.agent.kubernetes.service import KubernetesService
from nearkv.agent.node_state import NodeState
from nearkv.agent.settings import AgentSettings
from nearkv.agent.summary import HardwareReader, SummaryBuilder
from nearkv.agent.worker_status.composing import Json, NodeFacts, fit, news_of, urgent_of
from nearkv.agent.worker_status.observing import observe
from nearkv.agent.worker_status.phasing import phase_of
from nearkv.agent.worker_status.planning import Act, Errand, WriteLimits, WritePlan
from nearkv.agent.worker_status.prefixes import PrefixReader, no_prefixes
from nearkv.agent.worker_status.steadying import SteadyRatio, round_bytes
from nearkv.agent.worker_status.worker import Look, Worker
from nearkv.health import Readiness
from nearkv.kube.access import ApiAccess
from nearkv.kube.errors import ApiError, PatchError, Trouble
from nearkv.kube.objects import CUSTOM_GROUP, CUSTOM_VERSION, worker_statuses_path
from nearkv.kube.patching import Patcher, PatchLimits
from nearkv.node_summary import DeviceSummary
from nearkv.supervising import Job, supervised

FIELD_MANAGER = "nearkv-agent"
_CHECK = "worker_status"
_WRITES_AT_ONCE = 4
_LEAST_PAUSE_SECONDS = 0.05
_LONGEST_INTERVAL_SECONDS = 3600.0
_LONGEST_WHY = 60
_REFUSED = frozenset(
    {Trouble.NOT_FOUND, Trouble.FORBIDDEN, Trouble.REFUSED, Trouble.TOO_LARGE, Trouble.GARBAGE}
)
"""Troubles that are this object's own, or last until somebody changes something."""
_REMEDIES: Mapping[Trouble, str] = MappingProxyType(
    {
        Trouble.NOT_FOUND: "; is the CRD of deploy/crds installed?",
        Trouble.FORBIDDEN: "; the rights are in docs/worker-status.md",
    }
)

log = structlog.get_logger(__name__)


class _Owner(msgspec.Struct):
    uid: str = ""


class _Meta(msgspec.Struct, rename="camel"):
    owner_references: list[_Owner] | None = None


class _Answer(msgspec.Struct):
    """What is read of an object that was written."""

    metadata: _Meta = msgspec.field(default_factory=_Meta)
    status: dict[str, Any] | None = None

    def is_owned_by(self, uid: str) -> bool:
        """Tell whether it goes when this pod goes."""
        return any(owner.uid == uid for owner in self.metadata.owner_references or ())


class WorkerStatusService:
    """Writes while :meth:`running`; use it on the event loop's thread only.

    ``prefixes`` gives the named prefixes that an engine holds; set it where names are known.
    """

    def __init__(  # noqa: PLR0913 (keyword-only, and most have a default)
        self,
        settings: AgentSettings,
        state: NodeState,
        kubernetes: KubernetesService,
        *,
        hardware: HardwareReader,
        look_seconds: float = 5.0,
        now: Callable[[], float] | None = None,
        time_of_day: Callable[[], float] = time.time,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Make a service; ``now`` is monotonic, by default the state's."""
        self.prefixes: PrefixReader = no_prefixes
        self.writes: Counter[str] = Counter()
        """Writes by outcome: ``introduced``, ``reported``, ``vanished``, or the trouble."""
        self._settings = settings
        self._state = state
        self._kubernetes = kubernetes
        self._hardware = hardware
        self._look_seconds = look_seconds
        self._now = now or state.now
        self._time_of_day = time_of_day
        self._builder = SummaryBuilder(state, node=settings.node, interval_seconds=look_seconds)
        self._workers: dict[str, Worker] = {}
        self._devices: dict[str, SteadyRatio] = {}
        self._has_started = False
        self._problem = ""
        self._decoder = msgspec.json.Decoder(_Answer)
        own = settings.worker_status
        self.plan = WritePlan(
            WriteLimits(
                heartbeat_seconds=own.heartbeat_seconds,
                urgent_spread_seconds=min(5.0, own.spread_seconds),
                seconds_per_write=own.seconds_per_write,
            ),
            phase=phase_of(
                settings.node,
                period_seconds=own.spread_seconds,
                now=self._now(),
                time_of_day=time_of_day(),
            ),
            now=self._now(),
            draw=draw,
        )

    @property
    def is_on(self) -> bool:
        """Whether objects are written."""
        return self._settings.worker_status.enabled != "off" and self._kubernetes.is_on

    @property
    def count(self) -> int:
        """How many objects are kept."""
        return len(self._workers)

    @asynccontextmanager
    async def running(self, access: ApiAccess, readiness: Readiness) -> AsyncIterator[None]:
        """Write while in the block; the agent's readiness depends on no defect only."""
        # One try: the plan knows when the next may be.
        limits = PatchLimits(attempts=1, deadline_seconds=10.0, attempt_seconds=10.0)
        patcher = Patcher(access, limits=limits)
        jobs = [Job(_CHECK, lambda: self._run(patcher))] if self.is_on else []
        async with supervised(jobs, readiness, check=_CHECK):
            yield

    def describe(self) -> dict[str, Any]:
        """Return the section of the status, as plain JSON types."""
        return {
            "enabled": self.is_on,
            "objects": self.count,
            "writes": dict(self.writes),
            "behind": self.plan.is_behind,
        }

    def problems(self) -> list[str]:
        """Return why objects are not written; empty where they are."""
        return [f"WorkerStatus: {self._problem}"] if self._problem else []

    async def _run(self, patcher: Patcher) -> None:
        while True:
            if self._kubernetes.is_known:
                self.look()
                await self._write_due(patcher)
            # A write that is late comes in a second that is another node's.
            due_seconds = self.plan.next_at(self._now()) - self._now()
            await asyncio.sleep(min(max(due_seconds, _LEAST_PAUSE_SECONDS), self._look_seconds))

    # -- Looking -----------------------------------------------------------------------------

    def look(self) -> None:
        """Look at all engines, and tell the plan what is new."""
        now = self._now()
        engines = self._kubernetes.engines
        self._take_engines(engines, now)
        look = Look(
            now=now,
            stamp=self._stamp(),
            node=self._settings.node,
            interval_seconds=min(self.plan.interval_seconds, _LONGEST_INTERVAL_SECONDS),
            limits=self._settings.freshness.limits,
            max_prefixes=self._settings.worker_status.max_prefixes,
        )
        # One object speaks for the node: it is enough, and its news are one write, not eight.
        speaker = min(engines, default=None)
        node_facts = self._node_facts(now) if engines else None
        for uid, worker in self._workers.items():
            worker.look(
                look,
                observe(self._state, worker.engine),
                prefixes=self.prefixes(uid),
                node_facts=node_facts if uid == speaker else None,
            )
            self.plan.offer(uid, news_of(worker.status), urgent_of(worker.status), now)

    def _take_engines(self, engines: Mapping[str, PodEngine], now: float) -> None:
        for uid in self._workers.keys() - engines.keys():
            del self._workers[uid]
            self.plan.drop(uid)
        if not self._has_started:
            self.plan.start(list(engines), now)
            self._has_started = True
        for uid, engine in engines.items():
            worker = self._workers.get(uid)
            if worker is None:
                self._workers[uid] = Worker(engine)
                self.plan.add(uid, now)
            else:
                worker.engine = engine

    def _node_facts(self, now: float) -> NodeFacts:
        summary = self._builder.build(self._hardware())
        devices = summary.devices
        if devices is None:
            return NodeFacts(rdma=summary.rdma, paths=summary.paths)
        self._devices = {each.id: self._devices.get(each.id) or SteadyRatio() for each in devices}
        return NodeFacts(
            devices=[self._steady(each, now) for each in devices],
            rdma=summary.rdma,
            paths=summary.paths,
        )

    def _steady(self, device: DeviceSummary, now: float) -> DeviceSummary:
        """Return a device with its memory in steps, and without remarks on one that is sound."""
        total, used = device.total_bytes, device.used_bytes
        share = None if used is None or not total else used / total
        shown = self._devices[device.id].take(share, now)
        return msgspec.structs.replace(
            device,
            used_bytes=round_bytes(shown, total),
            why="" if device.health == "ok" else device.why[:_LONGEST_WHY],
        )

    def _stamp(self) -> str:
        moment = datetime.fromtimestamp(self._time_of_day(), UTC)
        return moment.strftime("%Y-%m-%dT%H:%M:%SZ")

    # -- Writing -----------------------------------------------------------------------------

    async def _write_due(self, patcher: Patcher) -> None:
        for _ in range(_WRITES_AT_ONCE):
            errand = self.plan.next_errand(self._now())
            if errand is None:
                return
            await self._do(patcher, errand)

    async def _do(self, patcher: Patcher, errand: Errand) -> None:
        worker = self._workers[errand.key]
        try:
            if errand.act is Act.INTRODUCE:
                await self._introduce(patcher, worker)
            else:
                await self._report(patcher, worker)
        except PatchError as error:
            self._take_failure(errand, error)
        except msgspec.DecodeError as error:
            self._take_failure(errand, PatchError(Trouble.GARBAGE, f"the answer: {error}"))
        else:
            self._problem = ""

    async def _introduce(self, patcher: Patcher, worker: Worker) -> None:
        engine = worker.engine
        owner = {"apiVersion": "v1", "kind": "Pod", "name": engine.name, "uid": engine.uid}
        answer = self._decoder.decode(
            await patcher.apply(
                _path(engine),
                _object(engine, {"metadata": {"ownerReferences": [owner]}}),
                field_manager=FIELD_MANAGER,
            )
        )
        told = None
        if answer.status:
            worker.adopt(answer.status)
            told = (news_of(answer.status), urgent_of(answer.status))
        self.writes["introduced"] += 1
        self.plan.introduced(engine.uid, self._now(), told=told)

    async def _report(self, patcher: Patcher, worker: Worker) -> None:
        engine, status = worker.engine, worker.status
        answer = self._decoder.decode(
            await patcher.apply(
                f"{_path(engine)}/status",
                _object(engine, {"status": fit(status, name=engine.name)}),
                field_manager=FIELD_MANAGER,
            )
        )
        now = self._now()
        if answer.is_owned_by(engine.uid):
            self.writes["reported"] += 1
            self.plan.reported(engine.uid, news_of(status), urgent_of(status), now)
        else:
            # That of an earlier pod of this name, about to be collected with it.
            self.writes["vanished"] += 1
            self.plan.vanished(engine.uid, now)

    def _take_failure(self, errand: Errand, error: PatchError) -> None:
        now = self._now()
        if error.trouble is Trouble.NOT_FOUND and errand.act is Act.REPORT:
            self.writes["vanished"] += 1
            self.plan.vanished(errand.key, now)
            return
        self.writes[str(error.trouble)] += 1
        if error.trouble in _REFUSED:
            self.plan.refused(errand.key, now)
        else:
            cause = error.__cause__
            wished = cause.retry_after_seconds if isinstance(cause, ApiError) else None
            self.plan.failed(now, wished)
        text = f"{error}{_REMEDIES.get(error.trouble, '')}"
        # Once for each kind: an API server may be away for long.
        level = log.debug if self._problem == text else log.warning
        self._problem = text
        level("worker_status_not_written", pod=self._workers[errand.key].engine.pod, error=text)


def _path(engine: PodEngine) -> str:
    return f"{worker_statuses_path(engine.namespace)}/{engine.name}"


def _object(engine: PodEngine, fields: Json) -> Json:
    metadata = {"name": engine.name, "namespace": engine.namespace, **fields.pop("metadata", {})}
    return {
        "apiVersion": f"{CUSTOM_GROUP}/{CUSTOM_VERSION}",
        "kind": "WorkerStatus",
        "metadata": metadata,
        **fields,
    }
