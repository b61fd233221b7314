"""Preemption: which pods of lower priority would have to go (pure)."""

from collections.abc import Collection, Mapping

from tests.doubles.scheduler.extender_client import Victims
from tests.doubles.scheduler.objects import NodeInfo, PodInfo
from tests.doubles.scheduler.plugins import check


def find_candidates(
    pod: PodInfo,
    nodes: Collection[NodeInfo],
    hopeless: Collection[str],
    ignored_resources: Collection[str],
) -> dict[str, Victims]:
    """Return, by node, the fewest pods of lower priority whose going makes the pod fit.

    ``hopeless`` are nodes where preemption is no help. Extenders' filters are not asked.
    """
    if pod.spec.get("preemptionPolicy") == "Never":
        return {}
    found = {}
    for node in nodes:
        if node.name not in hopeless:
            victims = _victims_on(pod, node, ignored_resources)
            if victims:
                found[node.name] = Victims(victims)
    return found


def choose(candidates: Mapping[str, Victims]) -> str:
    """Return the node whose victims matter least."""

    def cost(name: str) -> tuple[int, int, int, int]:
        victims = candidates[name]
        priorities = [pod.priority for pod in victims.pods]
        return (
            victims.pdb_violations,
            max(priorities, default=0),
            sum(priorities),
            len(priorities),
        )

    return min(candidates, key=cost)


def _victims_on(pod: PodInfo, node: NodeInfo, ignored_resources: Collection[str]) -> list[PodInfo]:
    trial = NodeInfo(node.document)
    lower = []
    for one in node.pods.values():
        if one.priority < pod.priority:
            lower.append(one)
        else:
            trial.add(one)
    if not lower or check(pod, trial, ignored_resources) is not None:
        return []
    victims = []
    for one in sorted(lower, key=lambda it: -it.priority):
        trial.add(one)
        if check(pod, trial, ignored_resources) is not None:
            trial.remove(one.uid)
            victims.append(one)
    return victims
