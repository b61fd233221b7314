"""The double's own filters and scores: a small part of kube-scheduler's defaults.

Filters: taints, node selector and required node affinity, room. Scores (0..100, times the weight
that kube-scheduler gives them): least allocated (1),
preferred node affinity (2), preferred pod affinity (2). Which resources count for the first is
configured; by default, as in kube-scheduler, devices do not.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tests.doubles.scheduler.go_json import Json
from tests.doubles.scheduler.objects import UNIT, NodeInfo, PodInfo

MAX_SCORE = 100
_FIT_WEIGHT = 1
_NODE_AFFINITY_WEIGHT = 2
_POD_AFFINITY_WEIGHT = 2


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a node cannot take a pod; ``helps`` says whether preemption could change it."""

    reason: str
    helps: bool


def check(pod: PodInfo, node: NodeInfo, ignored_resources: Collection[str]) -> Refusal | None:
    """Return why a node is not feasible, or nothing."""
    for taint in node.taints:
        if taint.get("effect") in {"NoSchedule", "NoExecute"} and not _tolerates(pod, taint):
            return Refusal(f"node(s) had untolerated taint {{{taint.get('key')}}}", helps=False)
    if not _selected(pod, node):
        return Refusal("node(s) didn't match Pod's node affinity/selector", helps=False)
    for name, amount in pod.requests.items():
        if name in ignored_resources or amount == 0:
            continue
        if amount > node.free(name):
            fits_empty = amount <= node.allocatable.get(name, 0)
            return Refusal(f"Insufficient {name}", helps=fits_empty)
    if "pods" in node.allocatable and (len(node.pods) + 1) * UNIT > node.allocatable["pods"]:
        return Refusal("Too many pods", helps=True)
    return None


def score(
    pod: PodInfo,
    nodes: Sequence[NodeInfo],
    cluster: Sequence[NodeInfo],
    resources: Sequence[str],
) -> list[int]:
    """Return the points of each node; ``cluster`` are all nodes, for pod affinity."""
    totals = [_FIT_WEIGHT * _least_allocated(pod, node, resources) for node in nodes]
    for weight, points in (
        (_NODE_AFFINITY_WEIGHT, _to_maximum([_preferred(pod, node) for node in nodes])),
        (_POD_AFFINITY_WEIGHT, _to_span(_pod_affinity(pod, nodes, cluster))),
    ):
        totals = [total + weight * point for total, point in zip(totals, points, strict=True)]
    return totals


def _tolerates(pod: PodInfo, taint: Json) -> bool:
    for toleration in pod.spec.get("tolerations") or ():
        if toleration.get("effect") not in {None, "", taint.get("effect")}:
            continue
        key = toleration.get("key")
        if toleration.get("operator") == "Exists":
            if key in {None, "", taint.get("key")}:
                return True
        elif key == taint.get("key") and toleration.get("value", "") == taint.get("value", ""):
            return True
    return False


def _selected(pod: PodInfo, node: NodeInfo) -> bool:
    wanted = (pod.spec.get("nodeSelector") or {}).items()
    if any(node.labels.get(key) != value for key, value in wanted):
        return False
    required = _node_affinity(pod).get("requiredDuringSchedulingIgnoredDuringExecution")
    if not required:
        return True
    return any(_matches(term, node) for term in required.get("nodeSelectorTerms") or ())


def _node_affinity(pod: PodInfo) -> Json:
    return (pod.spec.get("affinity") or {}).get("nodeAffinity") or {}


def _matches(term: Json, node: NodeInfo) -> bool:
    expressions = term.get("matchExpressions") or ()
    fields = term.get("matchFields") or ()
    if not expressions and not fields:
        return False
    return all(_holds(one, node.labels) for one in expressions) and all(
        _holds(one, {"metadata.name": node.name}) for one in fields
    )


def _holds(expression: Json, labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
    raise ValueError(f"operator {expression['operator']} is not played")


def _least_allocated(pod: PodInfo, node: NodeInfo, resources: Sequence[str]) -> int:
    parts = []
    for name in resources:
        capacity = node.allocatable.get(name, 0)
        if capacity:
            left = node.free(name) - pod.requests.get(name, 0)
            parts.append(max(0, left * MAX_SCORE // capacity))
    return sum(parts) // len(parts) if parts else 0


def _preferred(pod: PodInfo, node: NodeInfo) -> int:
    terms = _node_affinity(pod).get("preferredDuringSchedulingIgnoredDuringExecution") or ()
    return sum(term["weight"] for term in terms if _matches(term["preference"], node))


def _pod_affinity(
    pod: PodInfo, nodes: Sequence[NodeInfo], cluster: Sequence[NodeInfo]
) -> list[int]:
    affinity = (pod.spec.get("affinity") or {}).get("podAffinity") or {}
    points = [0] * len(nodes)
    for term in affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or ():
        wanted = term["podAffinityTerm"]
        key, labels = wanted["topologyKey"], wanted["labelSelector"]["matchLabels"].items()
        by_domain: dict[str, int] = {}
        for node in cluster:
            domain = node.labels.get(key)
            if domain is not None:
                count = sum(labels <= one.labels.items() for one in node.pods.values())
                by_domain[domain] = by_domain.get(domain, 0) + count * term["weight"]
        for index, node in enumerate(nodes):
            points[index] += by_domain.get(node.labels.get(key, ""), 0)
    return points


def _to_maximum(points: list[int]) -> list[int]:
    highest = max(points, default=0)
    return [point * MAX_SCORE // highest for point in points] if highest else points


def _to_span(points: list[int]) -> list[int]:
    lowest, highest = min(points, default=0), max(points, default=0)
    if highest == lowest:
        return [0] * len(points)
    return [MAX_SCORE * (point - lowest) // (highest - lowest) for point in points]
