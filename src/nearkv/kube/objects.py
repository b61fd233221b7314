"""The parts of Kubernetes objects that nearkv reads; msgspec skips all others while decoding.

Fields that may be missing or ``null`` read as empty. Names follow the Kubernetes API in Python's
spelling, e.g. ``metadata.deletion_timestamp`` for ``metadata.deletionTimestamp``.
"""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from nearkv.kube.quantities import whole_count

NODES_PATH = "/api/v1/nodes"
PODS_PATH = "/api/v1/pods"
CUSTOM_GROUP = "nearkv.io"
CUSTOM_VERSION = "v1alpha1"
WORKER_STATUSES_PATH = f"/apis/{CUSTOM_GROUP}/{CUSTOM_VERSION}/workerstatuses"
ENDED_PHASES = frozenset({"Succeeded", "Failed"})

Quantities = Mapping[str, str | int]


class _Part(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What all parts have in common: the API's camelCase, and no setting of fields."""


class ObjectMeta(_Part, frozen=True, kw_only=True):
    """``metadata`` of any object; ``resource_version`` is opaque."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None


class _Object(_Part, frozen=True, kw_only=True):
    metadata: ObjectMeta = ObjectMeta()

    @property
    def name(self) -> str:
        """``metadata.name``."""
        return self.metadata.name

    @property
    def namespace(self) -> str:
        """``metadata.namespace``; empty for what lives in none."""
        return self.metadata.namespace

    @property
    def uid(self) -> str:
        """``metadata.uid``: another one means another object of the same name."""
        return self.metadata.uid

    @property
    def labels(self) -> Mapping[str, str]:
        """``metadata.labels``."""
        return self.metadata.labels or {}

    @property
    def annotations(self) -> Mapping[str, str]:
        """``metadata.annotations``."""
        return self.metadata.annotations or {}

    @property
    def is_terminating(self) -> bool:
        """Whether its deletion was asked for."""
        return self.metadata.deletion_timestamp is not None


class Condition(_Part, frozen=True, kw_only=True):
    """One of ``status.conditions``; ``status`` is True, False or Unknown as text."""

    type: str = ""
    status: str = "Unknown"
    reason: str = ""
    message: str = ""


class NodeSpec(_Part, frozen=True, kw_only=True):
    """``spec`` of a Node."""

    unschedulable: bool | None = None


class NodeAddress(_Part, frozen=True, kw_only=True):
    """One of a Node's ``status.addresses``; ``type`` is InternalIP, Hostname and the like."""

    type: str = ""
    address: str = ""


class NodeStatus(_Part, frozen=True, kw_only=True):
    """``status`` of a Node."""

    allocatable: dict[str, str | int] | None = None
    capacity: dict[str, str | int] | None = None
    conditions: list[Condition] | None = None
    addresses: list[NodeAddress] | None = None


class Node(_Object, frozen=True, kw_only=True):
    """A Node: labels, what pods may take of it, whether it is ready."""

    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()

    @property
    def allocatable(self) -> Quantities:
        """``status.allocatable``: what pods may take."""
        return self.status.allocatable or {}

    @property
    def capacity(self) -> Quantities:
        """``status.capacity``: what there is."""
        return self.status.capacity or {}

    @property
    def unschedulable(self) -> bool:
        """Whether the node is cordoned."""
        return self.spec.unschedulable is True

    def condition(self, kind: str) -> Condition | None:
        """Return the condition of a type, ``Ready`` for one."""
        return next((c for c in self.status.conditions or () if c.type == kind), None)

    @property
    def is_ready(self) -> bool:
        """Whether its kubelet says that it is ready."""
        ready = self.condition("Ready")
        return ready is not None and ready.status == "True"

    @property
    def internal_ip(self) -> str:
        """Its first InternalIP, empty where there is none."""
        addresses = self.status.addresses or ()
        return next((a.address for a in addresses if a.type == "InternalIP"), "")


class ResourceNeeds(_Part, frozen=True, kw_only=True):
    """``resources`` of a container."""

    requests: dict[str, str | int] | None = None
    limits: dict[str, str | int] | None = None

    def count(self, resource: str) -> int:
        """Return how many of a whole resource are asked for.

        The API server fills requests in from limits; a pod that never was there may lack them.
        Raises ``ValueError`` for what is no quantity.
        """
        given = (self.requests or {}).get(resource)
        if given is None:
            given = (self.limits or {}).get(resource, 0)
        return whole_count(given)


class Container(_Part, frozen=True, kw_only=True):
    """A container; ``restart_policy`` Always makes an init container a sidecar."""

    name: str = ""
    resources: ResourceNeeds | None = None
    restart_policy: str | None = None

    def count(self, resource: str) -> int:
        """Return how many of a whole resource it asks for; raises ``ValueError``."""
        return 0 if self.resources is None else self.resources.count(resource)


class PodSpec(_Part, frozen=True, kw_only=True):
    """``spec`` of a Pod."""

    node_name: str | None = None
    scheduler_name: str = ""
    containers: list[Container] | None = None
    init_containers: list[Container] | None = None


class PodStatus(_Part, frozen=True, kw_only=True):
    """``status`` of a Pod."""

    phase: str = ""
    host_ip: str | None = msgspec.field(default=None, name="hostIP")
    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    conditions: list[Condition] | None = None


class Pod(_Object, frozen=True, kw_only=True):
    """A Pod: whose it is, where it runs, what it asks for."""

    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def node_name(self) -> str:
        """The node it is bound to, empty before."""
        return self.spec.node_name or ""

    @property
    def phase(self) -> str:
        """Pending, Running, Succeeded, Failed or Unknown."""
        return self.status.phase

    @property
    def has_ended(self) -> bool:
        """Whether it gave back what it had; a terminating pod has not until it is gone."""
        return self.status.phase in ENDED_PHASES

    @property
    def is_ready(self) -> bool:
        """Whether its Ready condition is True."""
        conditions = self.status.conditions or ()
        return any(c.type == "Ready" and c.status == "True" for c in conditions)

    def count(self, resource: str) -> int:
        """Return how many of a whole resource the scheduler counts for this pod.

        Containers and sidecars run together; each other init container runs alone beside the
        sidecars started before it. Raises ``ValueError`` for what is no quantity.
        """
        together = sum(container.count(resource) for container in self.spec.containers or ())
        sidecars = most_at_start = 0
        for container in self.spec.init_containers or ():
            asked = container.count(resource)
            if container.restart_policy == "Always":
                sidecars += asked
                asked = 0
            most_at_start = max(most_at_start, sidecars + asked)
        return max(together + sidecars, most_at_start)


class WorkerStatus(_Object, frozen=True, kw_only=True):
    """A WorkerStatus; ``status`` is left as JSON for whoever knows its form."""

    status: msgspec.Raw = msgspec.Raw(b"{}")


def count_devices(quantities: Quantities, resources: Iterable[str]) -> int:
    """Return how many devices a Node's allocatable or capacity has of all resources together.

    Raises ``ValueError`` for what is no quantity.
    """
    return sum(whole_count(quantities.get(resource, 0)) for resource in resources)


def requested_devices(pod: Pod, resources: Collection[str]) -> int:
    """Return how many devices of all resources together the scheduler counts for a pod.

    Raises ``ValueError`` for what is no quantity.
    """
    return sum(pod.count(resource) for resource in resources)


def node_path(name: str) -> str:
    """Return the path of a Node; names are DNS labels, which need no quoting."""
    return f"{NODES_PATH}/{name}"


def pods_path(namespace: str = "") -> str:
    """Return the path of the pods of a namespace, of all namespaces without one."""
    return f"/api/v1/namespaces/{namespace}/pods" if namespace else PODS_PATH


def worker_statuses_path(namespace: str = "") -> str:
    """Return the path of the WorkerStatuses of a namespace, of all without one."""
    if not namespace:
        return WORKER_STATUSES_PATH
    base = f"/apis/{CUSTOM_GROUP}/{CUSTOM_VERSION}"
    return f"{base}/namespaces/{namespace}/workerstatuses"
