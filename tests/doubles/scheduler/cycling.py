"""One scheduling cycle: filters, extenders' filters, scores, extenders' scores, the choice."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from random import Random

from tests.doubles.scheduler.cluster import Cluster
from tests.doubles.scheduler.configuration import SchedulerConfig
from tests.doubles.scheduler.extender_client import Extender, ExtenderError, Victims
from tests.doubles.scheduler.go_json import wrap_int64
from tests.doubles.scheduler.objects import NodeInfo, PodInfo
from tests.doubles.scheduler.plugins import Refusal, check, score
from tests.doubles.scheduler.preempting import choose, find_candidates
from tests.doubles.scheduler.sampling import nodes_to_find

_WORKERS = 16


class Outcome(Enum):
    """How a cycle ended."""

    PLACED = "placed"
    UNSCHEDULABLE = "Unschedulable"
    ERROR = "SchedulerError"


@dataclass(slots=True)
class Placement:
    """What a cycle found: a node, or why there is none.

    ``points`` are totals by node where scores were asked for; ``evaluated`` are the feasible nodes
    in the order in which extenders were asked about them.
    """

    pod: PodInfo
    cluster_nodes: int
    outcome: Outcome = Outcome.UNSCHEDULABLE
    node: str = ""
    message: str = ""
    by_extender: bool = False
    refusals: dict[str, Refusal] = field(default_factory=dict)
    evaluated: list[str] = field(default_factory=list)
    points: dict[str, int] = field(default_factory=dict)
    preempted: Victims | None = None
    nominated: str = ""

    def describe(self) -> str:
        """Return the message of the pod's event."""
        if self.outcome is Outcome.ERROR:
            return self.message
        counts: dict[str, int] = {}
        for refusal in self.refusals.values():
            counts[refusal.reason] = counts.get(refusal.reason, 0) + 1
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))
        return (
            f"0/{self.cluster_nodes} nodes are available: {reasons}."
            if reasons
            else f"0/{self.cluster_nodes} nodes are available."
        )


class Algorithm:
    """The algorithm with what it keeps between cycles: where the next search starts."""

    def __init__(
        self,
        cluster: Cluster,
        config: SchedulerConfig,
        extenders: Sequence[Extender],
        random: Random,
    ) -> None:
        self._cluster = cluster
        self._share = config.percentage_of_nodes_to_score
        self._scored = config.scored_resources
        self._extenders = extenders
        self._random = random
        self._order = Random(random.random())
        self._start = 0
        self._ignored = frozenset(
            name for one in config.extenders for name in one.ignored_resources
        )

    async def place(self, pod: PodInfo) -> Placement:
        """Find a node for a pod; nothing is changed but where the next search starts."""
        placement = Placement(pod, len(self._cluster.nodes))
        if not self._cluster.nodes:
            placement.outcome, placement.message = Outcome.ERROR, "no nodes available"
            return placement
        try:
            feasible = await self._find_feasible(pod, placement)
        except ExtenderError as error:
            placement.outcome, placement.message = Outcome.ERROR, str(error)
            return placement
        if not feasible:
            await self._preempt(pod, placement)
            return placement
        placement.outcome = Outcome.PLACED
        if len(feasible) == 1:
            placement.node = feasible[0].name
        else:
            placement.points = await self._prioritize(pod, feasible)
            placement.node = self._choose(placement.points)
        return placement

    async def _find_feasible(self, pod: PodInfo, placement: Placement) -> list[NodeInfo]:
        nominated = self._cluster.nodes.get(pod.status.get("nominatedNodeName") or "")
        if nominated is not None:
            # An error here is only logged: all nodes are tried then.
            try:
                feasible = await self._ask_extenders(
                    pod, self._pass_filters(pod, [nominated], placement), placement
                )
            except ExtenderError:
                feasible = []
            if feasible:
                return feasible
        nodes = list(self._cluster.nodes.values())
        feasible = self._pass_filters(pod, nodes, placement)
        self._start = (self._start + len(feasible) + len(placement.refusals)) % len(nodes)
        left = await self._ask_extenders(pod, feasible, placement)
        placement.by_extender = len(left) != len(feasible)
        return left

    def _pass_filters(
        self, pod: PodInfo, nodes: list[NodeInfo], placement: Placement
    ) -> list[NodeInfo]:
        wanted = nodes_to_find(len(nodes), self._share)
        feasible: list[NodeInfo] = []
        for offset in range(len(nodes)):
            if len(feasible) >= wanted:
                break
            node = nodes[(self._start + offset) % len(nodes)]
            refusal = check(pod, node, self._ignored)
            if refusal is None:
                feasible.append(node)
            else:
                placement.refusals[node.name] = refusal
        feasible = self._race(feasible)
        placement.evaluated = [node.name for node in feasible]
        return feasible

    def _race(self, nodes: list[NodeInfo]) -> list[NodeInfo]:
        """Return nodes as workers side by side append them: in no order that means anything."""
        places = [index + self._order.uniform(0, _WORKERS) for index in range(len(nodes))]
        return [nodes[index] for index in sorted(range(len(nodes)), key=places.__getitem__)]

    async def _ask_extenders(
        self, pod: PodInfo, nodes: list[NodeInfo], placement: Placement
    ) -> list[NodeInfo]:
        """Ask one extender after the other about what the ones before it left."""
        for extender in self._extenders:
            if not nodes:
                break
            if not extender.is_interested(pod):
                continue
            try:
                filtered = await extender.filter(pod, nodes)
            except ExtenderError:
                if extender.config.ignorable:
                    continue
                raise
            for name, why in filtered.failed.items():
                placement.refusals[name] = Refusal(why, helps=True)
            for name, why in filtered.unresolvable.items():
                placement.refusals[name] = Refusal(why, helps=False)
            known = self._cluster.nodes
            nodes = [known[name] for name in filtered.nodes if name in known]
        return nodes

    async def _prioritize(self, pod: PodInfo, nodes: list[NodeInfo]) -> dict[str, int]:
        """Score; a failing extender adds nothing, and nobody hears of it."""
        own = score(pod, nodes, list(self._cluster.nodes.values()), self._scored)
        totals = {node.name: points for node, points in zip(nodes, own, strict=True)}
        asked = [one for one in self._extenders if one.is_interested(pod)]
        answers = await asyncio.gather(
            *(one.prioritize(pod, nodes) for one in asked), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, ExtenderError):
                continue
            if isinstance(answer, BaseException):
                raise answer
            for name, points in answer.items():
                if name in totals:
                    totals[name] = wrap_int64(totals[name] + points)
        return totals

    def _choose(self, points: dict[str, int]) -> str:
        highest = max(points.values())
        return self._random.choice([name for name, total in points.items() if total == highest])

    async def _preempt(self, pod: PodInfo, placement: Placement) -> None:
        hopeless = {name for name, refusal in placement.refusals.items() if not refusal.helps}
        nodes = self._cluster.nodes
        candidates = find_candidates(pod, nodes.values(), hopeless, self._ignored)
        for extender in self._extenders:
            if not candidates:
                return
            if not extender.config.preempt_verb or not extender.is_interested(pod):
                continue
            try:
                candidates = await self._ask_preempt(extender, pod, candidates)
            except ExtenderError as error:
                if extender.config.ignorable:
                    continue
                placement.message = str(error)
                return
        if candidates:
            placement.nominated = choose(candidates)
            placement.preempted = candidates[placement.nominated]

    async def _ask_preempt(
        self, extender: Extender, pod: PodInfo, candidates: dict[str, Victims]
    ) -> dict[str, Victims]:
        answer = await extender.preempt(pod, candidates, self._cluster.nodes)
        empty = [name for name, victims in answer.items() if not victims.pods]
        if empty and not extender.config.ignorable:
            raise ExtenderError(f"expected at least one victim pod on node {empty[0]}", "answer")
        return {name: victims for name, victims in answer.items() if victims.pods}
