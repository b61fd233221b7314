"""InferencePool and its pods, as far as membership needs them (pure).

``inference.networking.k8s.io/v1``: the pods of the pool's own namespace whose labels match
``selector.matchLabels``, on each of ``targetPorts``.
"""

import ipaddress
from collections.abc import Iterable

import msgspec

from nearkv.ingress.extproc.endpoints import Membership
from nearkv.kube.objects import ObjectMeta, Pod

POOL_GROUP = "inference.networking.k8s.io"
_HIGHEST_PORT = 65535


class TargetPort(msgspec.Struct, frozen=True):
    """One of a pool's ports."""

    number: int


class Selector(msgspec.Struct, frozen=True, rename="camel"):
    """Which pods belong."""

    match_labels: dict[str, str] = {}


class PoolSpec(msgspec.Struct, frozen=True, rename="camel"):
    """``spec`` of an InferencePool."""

    selector: Selector = Selector()
    target_ports: tuple[TargetPort, ...] = ()


class InferencePool(msgspec.Struct, frozen=True):
    """An InferencePool."""

    metadata: ObjectMeta = ObjectMeta()
    spec: PoolSpec = PoolSpec()

    @property
    def label_selector(self) -> str:
        """The selector as the API server wants it, always in the same order."""
        return ",".join(f"{k}={v}" for k, v in sorted(self.spec.selector.match_labels.items()))

    @property
    def ports(self) -> tuple[int, ...]:
        """The target ports."""
        return tuple(port.number for port in self.spec.target_ports)


def pools_path(namespace: str) -> str:
    """Return the path of a namespace's pools."""
    return f"/apis/{POOL_GROUP}/v1/namespaces/{namespace}/inferencepools"


def pods_path(namespace: str) -> str:
    """Return the path of a namespace's pods."""
    return f"/api/v1/namespaces/{namespace}/pods"


def why_unusable(pool: InferencePool) -> str:
    """Return what keeps a pool from having members, empty where nothing does.

    An empty selector would select every pod of the namespace, which nobody means.
    """
    if not pool.spec.selector.match_labels:
        return "spec.selector.matchLabels is empty"
    if not pool.ports:
        return "spec.targetPorts is empty"
    wrong = [port for port in pool.ports if not 0 < port <= _HIGHEST_PORT]
    return f"spec.targetPorts has {wrong[0]}" if wrong else ""


def members(pool: InferencePool, pods: Iterable[Pod]) -> Membership:
    """Return the pool's membership: ready pods that have an address and are not leaving."""
    ports: dict[str, tuple[int, ...]] = {}
    names: dict[str, str] = {}
    for pod in sorted(pods, key=lambda pod: pod.name):
        ip = pod.status.pod_ip
        fits = pod.labels.items() >= pool.spec.selector.match_labels.items()
        if ip and fits and _is_address(ip) and pod.is_ready and not pod.is_terminating:
            ports[ip] = pool.ports
            names[ip] = pod.name
    return Membership(ports, names)


def _is_address(ip: str) -> bool:
    try:
        ipaddress.ip_address(ip)
    except ValueError:
        return False
    return True
