"""Pods and nodes as the scheduler keeps them: the document, and what is read out of it once."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import ceil
from typing import Any

from tests.doubles.scheduler.go_json import Json

Amounts = Mapping[str, int]
"""Resources in thousandths, as the scheduler counts cpu; fast to add up."""

UNIT = 1000

_SUFFIXES = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
    "Ki": Fraction(2**10),
    "Mi": Fraction(2**20),
    "Gi": Fraction(2**30),
    "Ti": Fraction(2**40),
    "Pi": Fraction(2**50),
}
_FINISHED = frozenset({"Succeeded", "Failed"})


def parse_quantity(text: str | float) -> int:
    """Return a resource quantity in thousandths, rounded up."""
    written = str(text)
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        if written.endswith(suffix):
            return ceil(Fraction(written.removesuffix(suffix)) * _SUFFIXES[suffix] * UNIT)
    return ceil(Fraction(written) * UNIT)


def _amounts(resources: Mapping[str, Any] | None) -> dict[str, int]:
    return {name: parse_quantity(value) for name, value in (resources or {}).items()}


class PodInfo:
    """A pod."""

    def __init__(self, document: Json) -> None:
        self.document = document
        self.metadata: Json = document.get("metadata") or {}
        self.spec: Json = document.get("spec") or {}
        self.status: Json = document.get("status") or {}
        self.name: str = self.metadata.get("name", "")
        self.namespace: str = self.metadata.get("namespace", "default")
        self.uid: str = self.metadata.get("uid") or f"{self.namespace}/{self.name}"
        self.labels: Mapping[str, str] = self.metadata.get("labels") or {}
        self.priority: int = self.spec.get("priority") or 0

    @property
    def node_name(self) -> str:
        """The node it is bound to, or nothing."""
        return self.spec.get("nodeName") or ""

    @property
    def is_finished(self) -> bool:
        """Whether it takes nothing any more."""
        return self.status.get("phase") in _FINISHED

    @property
    def is_terminating(self) -> bool:
        """Whether it was asked to go."""
        return bool(self.metadata.get("deletionTimestamp"))

    @cached_property
    def requests(self) -> Amounts:
        """What its containers ask for: the sum, or an init container's if that is more."""
        total: dict[str, int] = {}
        for container in self.spec.get("containers") or ():
            for name, amount in _container_requests(container).items():
                total[name] = total.get(name, 0) + amount
        for container in self.spec.get("initContainers") or ():
            for name, amount in _container_requests(container).items():
                total[name] = max(total.get(name, 0), amount)
        return total

    @cached_property
    def named_resources(self) -> frozenset[str]:
        """Every resource that a container or init container names in requests or limits."""
        return frozenset(
            name
            for kind in ("containers", "initContainers")
            for container in self.spec.get(kind) or ()
            for part in (container.get("resources") or {},)
            for side in ("requests", "limits")
            for name in part.get(side) or ()
        )

    def without_status(self) -> Json:
        """Return what an update must change to be noticed."""
        meta = {
            key: value
            for key, value in self.metadata.items()
            if key not in {"resourceVersion", "generation", "managedFields"}
        }
        return {"metadata": meta, "spec": self.spec}


def _container_requests(container: Json) -> Amounts:
    resources = container.get("resources") or {}
    # The API server copies limits where a request is missing.
    return {**_amounts(resources.get("limits")), **_amounts(resources.get("requests"))}


@dataclass(slots=True)
class NodeInfo:
    """A node, its pods (assumed ones too) and what they ask for together."""

    document: Json
    pods: dict[str, PodInfo] = field(default_factory=dict)
    requested: dict[str, int] = field(default_factory=dict)
    allocatable: Amounts = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.replace(self.document)

    @property
    def name(self) -> str:
        """The node's name."""
        name: str = self.document["metadata"]["name"]
        return name

    @property
    def labels(self) -> Mapping[str, str]:
        """The node's labels."""
        labels: Mapping[str, str] = self.document["metadata"].get("labels") or {}
        return labels

    @property
    def taints(self) -> Iterator[Json]:
        """The node's taints, and the one that stands for ``unschedulable``."""
        spec = self.document.get("spec") or {}
        yield from spec.get("taints") or ()
        if spec.get("unschedulable"):
            yield {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}

    def replace(self, document: Json) -> None:
        """Take a newer document."""
        self.document = document
        self.allocatable = _amounts((document.get("status") or {}).get("allocatable"))

    def add(self, pod: PodInfo) -> None:
        """Count a pod in; a pod that is here already is replaced."""
        self.remove(pod.uid)
        self.pods[pod.uid] = pod
        for name, amount in pod.requests.items():
            self.requested[name] = self.requested.get(name, 0) + amount

    def remove(self, uid: str) -> PodInfo | None:
        """Count a pod off."""
        pod = self.pods.pop(uid, None)
        if pod is not None:
            for name, amount in pod.requests.items():
                self.requested[name] -= amount
        return pod

    def free(self, name: str) -> int:
        """Return how much of a resource no pod asks for, in thousandths."""
        return self.allocatable.get(name, 0) - self.requested.get(name, 0)
