"""The view of the cluster: watches of the API server and the agents' summaries, as snapshots."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from nearkv.extender.model import Snapshot
from nearkv.extender.presets import Level
from nearkv.extender.view.collecting import AgentTrust, SummaryCollector
from nearkv.extender.view.directory import AgentDirectory, AgentDiscovery, SeenAgent, read_agent
from nearkv.extender.view.nodes import NodeFacts, NodeRules, read_node
from nearkv.extender.view.pods import PodRules, read_pod
from nearkv.extender.view.polling import CollectLimits
from nearkv.extender.view.state import ClusterState, PodLedger, SeenPod, StateLimits
from nearkv.extender.view.statuses import SeenStatus, read_status
from nearkv.kube.access import ApiAccess
from nearkv.kube.events import ChangeKind
from nearkv.kube.objects import (
    NODES_PATH,
    PODS_PATH,
    WORKER_STATUSES_PATH,
    Node,
    Pod,
    WorkerStatus,
    pods_path,
)
from nearkv.kube.watching import Watch, WatchLimits

_NOT_ENDED = "status.phase!=Succeeded,status.phase!=Failed"
_DELETED: ChangeKind = "DELETED"


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewConfig:
    """What is watched and how it is read; times are in seconds.

    A snapshot is at most ``publish_seconds`` behind what was seen. ``worker_statuses`` asks for
    WorkerStatus objects, which needs the CRD to be there.
    """

    levels: Sequence[Level]
    nodes: NodeRules
    pods: PodRules = field(default_factory=PodRules)
    node_selector: str = ""
    agents: AgentDiscovery = field(default_factory=AgentDiscovery)
    agents_trust: AgentTrust = field(default_factory=AgentTrust)
    worker_statuses: bool = True
    publish_seconds: float = 0.1
    sweep_seconds: float = 1.0
    watch: WatchLimits = field(default_factory=WatchLimits)
    collect: CollectLimits = field(default_factory=CollectLimits)
    state: StateLimits = field(default_factory=StateLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewStats:
    """The view in figures; ``heard_at`` is monotonic, -inf for never.

    ``watch_failures`` counts by (what is watched, reason), the others by reason.
    """

    nodes: int
    pods: int
    groups: int
    reports: int
    measured_pairs: int
    agents: int
    agents_failing: int
    polls: int
    poll_failures: Mapping[str, int]
    reports_refused: Mapping[str, int]
    watch_failures: Mapping[tuple[str, str], int]
    groups_left_out: int
    nodes_heard_at: float
    pods_heard_at: float
    problems: tuple[str, ...]


def levels_reader(levels: Sequence[Level]) -> Callable[[Mapping[str, str]], tuple[str, ...]]:
    """Return the function that reads a node's value for each level."""
    fixed = tuple(levels)

    def read(labels: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(level.value_of(labels) for level in fixed)

    return read


class ClusterView:
    """Follows the cluster while :meth:`run` runs."""

    def __init__(
        self,
        access: ApiAccess,
        config: ViewConfig,
        ledger: PodLedger,
        *,
        now: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Make a view over an access that is open while the view runs."""
        self._access = access
        self._config = config
        self._now = now
        self._draw = draw
        self._state = ClusterState(config.levels, ledger, config.state)
        self._directory = AgentDirectory(config.agents)
        self._collector = SummaryCollector(
            self._state, trust=config.agents_trust, limits=config.collect, now=now, draw=draw
        )
        self._watch_failures: Counter[tuple[str, str]] = Counter()
        self._nodes = self._watch_nodes()
        self._pods = self._watch_pods()
        self._snapshot: Snapshot | None = None
        self._synced = asyncio.Event()

    @property
    def synced(self) -> bool:
        """Whether nodes and pods were listed completely, and a snapshot shows them."""
        return self._snapshot is not None

    async def wait_until_synced(self) -> None:
        """Return once there is a snapshot."""
        await self._synced.wait()

    def snapshot(self) -> Snapshot | None:
        """Return the newest snapshot, ``None`` before the first."""
        return self._snapshot

    def stats(self) -> ViewStats:
        """Return the view in figures."""
        snapshot = self._snapshot
        return ViewStats(
            nodes=len(self._state.nodes),
            pods=len(self._state.pods),
            groups=0 if snapshot is None else len(snapshot.groups),
            reports=len(self._state.summaries),
            measured_pairs=self._state.measured_pairs,
            agents=self._collector.agents,
            agents_failing=self._collector.agents_failing,
            polls=self._collector.polls,
            poll_failures=dict(self._collector.failures),
            reports_refused=dict(self._state.refused),
            watch_failures=dict(self._watch_failures),
            groups_left_out=self._state.groups_left_out,
            nodes_heard_at=self._nodes.last_heard_at,
            pods_heard_at=self._pods.last_heard_at,
            problems=tuple(
                f"{what}: {watch.problem}"
                for what, watch in (("nodes", self._nodes), ("pods", self._pods))
                if watch.problem
            ),
        )

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._nodes.run())
            tasks.create_task(self._pods.run())
            if self._config.agents.by_pods:
                tasks.create_task(self._watch_agents().run())
            if self._config.worker_statuses:
                tasks.create_task(self._watch_statuses().run())
            tasks.create_task(self._collector.run())
            tasks.create_task(self._keep_sweeping())
            await self._keep_publishing()

    async def _keep_publishing(self) -> None:
        while True:
            if self._nodes.synced and self._pods.synced:
                first = self._snapshot is None
                if first or self._state.has_changes:
                    self._snapshot = self._state.publish(self._now())
                if first:
                    self._synced.set()
            await asyncio.sleep(self._config.publish_seconds)

    async def _keep_sweeping(self) -> None:
        while True:
            self._state.sweep(self._now())
            if self._directory.changed:
                self._collector.set_targets(self._directory.targets(self._state.nodes))
            await asyncio.sleep(self._config.sweep_seconds)

    def _count(self, what: str) -> Callable[[str], None]:
        def count(reason: str) -> None:
            self._watch_failures[what, reason] += 1

        return count

    # -- Nodes ---------------------------------------------------------------------------

    def _watch_nodes(self) -> Watch[NodeFacts]:
        decoder = msgspec.json.Decoder(Node)
        rules = self._config.nodes
        return Watch(
            self._access,
            NODES_PATH,
            decode=lambda raw: read_node(decoder.decode(raw), rules),
            on_replace=self._replace_nodes,
            on_change=self._change_node,
            label_selector=self._config.node_selector,
            limits=self._config.watch,
            count_failure=self._count("nodes"),
            now=self._now,
            draw=self._draw,
        )

    def _replace_nodes(self, nodes: list[NodeFacts]) -> None:
        self._state.nodes_listed(nodes)
        self._directory.changed |= self._config.agents.by_nodes

    def _change_node(self, kind: ChangeKind, facts: NodeFacts) -> None:
        changed = (
            self._state.node_deleted(facts.name)
            if kind == _DELETED
            else self._state.node_seen(facts)
        )
        self._directory.changed |= changed and self._config.agents.by_nodes

    # -- Pods ----------------------------------------------------------------------------

    def _watch_pods(self) -> Watch[SeenPod]:
        decoder = msgspec.json.Decoder(Pod)
        rules = self._config.pods

        def decode(raw: bytes) -> SeenPod:
            pod = decoder.decode(raw)
            return SeenPod(pod.uid, read_pod(pod, rules), is_over=pod.has_ended)

        return Watch(
            self._access,
            PODS_PATH,
            decode=decode,
            on_replace=self._replace_pods,
            on_change=self._change_pod,
            field_selector=_NOT_ENDED,
            limits=self._config.watch,
            count_failure=self._count("pods"),
            now=self._now,
            draw=self._draw,
        )

    async def _replace_pods(self, pods: list[SeenPod]) -> None:
        """Take a list in parts: a scheduler does not wait for a hundred thousand pods."""
        for _ in self._state.listing_pods(pods, self._now()):
            await asyncio.sleep(0)

    def _change_pod(self, kind: ChangeKind, pod: SeenPod) -> None:
        if kind == _DELETED:
            pod = SeenPod(pod.uid, None, is_over=True)
        self._state.pod_seen(pod, self._now())

    # -- Agents --------------------------------------------------------------------------

    def _watch_agents(self) -> Watch[SeenAgent]:
        decoder = msgspec.json.Decoder(Pod)
        return Watch(
            self._access,
            pods_path(self._config.agents.namespace),
            decode=lambda raw: read_agent(decoder.decode(raw)),
            on_replace=self._directory.replace,
            on_change=self._change_agent,
            label_selector=self._config.agents.selector,
            limits=self._config.watch,
            count_failure=self._count("agents"),
            now=self._now,
            draw=self._draw,
        )

    def _change_agent(self, kind: ChangeKind, agent: SeenAgent) -> None:
        if kind == _DELETED:
            self._directory.drop(agent.uid)
        else:
            self._directory.put(agent)

    # -- WorkerStatus --------------------------------------------------------------------

    def _watch_statuses(self) -> Watch[SeenStatus]:
        decoder = msgspec.json.Decoder(WorkerStatus)
        return Watch(
            self._access,
            WORKER_STATUSES_PATH,
            decode=lambda raw: read_status(decoder.decode(raw)),
            on_replace=lambda seen: self._state.statuses_listed(seen, self._now()),
            on_change=self._change_status,
            limits=self._config.watch,
            count_failure=self._count("workerstatuses"),
            now=self._now,
            draw=self._draw,
        )

    def _change_status(self, kind: ChangeKind, seen: SeenStatus) -> None:
        if kind == _DELETED:
            self._state.status_deleted(seen)
        else:
            self._state.status_seen(seen, self._now())
