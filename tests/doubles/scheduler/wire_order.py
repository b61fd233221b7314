"""The order in which Go's structs of pods and nodes write their fields.

What an API server double hands out is a dict in any order; kube-scheduler reads it into structs and
writes those. So that bodies are equal byte for byte, objects are put into the order of the structs;
fields that a struct always writes are filled in, those not known here come last in their own order.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tests.doubles.scheduler.go_json import Json, sort_keys

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Struct:
    """A struct: its fields in order, what they hold, and those written even when empty."""

    order: tuple[str, ...]
    parts: Mapping[str, "Struct"] = field(default_factory=lambda: _NOTHING)
    maps: frozenset[str] = frozenset()
    always: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    dropped: frozenset[str] = frozenset()

    def arrange(self, value: Any) -> Any:
        """Return an object of this struct as it is written; lists item by item."""
        if isinstance(value, list):
            return [self.arrange(item) for item in value]
        if not isinstance(value, Mapping):
            return value
        given = {**self.always, **value}
        names = [name for name in self.order if name in given]
        names += [name for name in given if name not in self.order]
        return {name: self._arrange_field(name, given[name]) for name in names if self._kept(name)}

    def _kept(self, name: str) -> bool:
        return name not in self.dropped

    def _arrange_field(self, name: str, value: Any) -> Any:
        if name in self.maps and isinstance(value, Mapping):
            return sort_keys(value)
        part = self.parts.get(name)
        return value if part is None else part.arrange(value)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_META_ORDER = _names(
    "name generateName namespace selfLink uid resourceVersion generation creationTimestamp "
    "deletionTimestamp deletionGracePeriodSeconds labels annotations ownerReferences finalizers "
    "managedFields"
)
_META_MAPS = frozenset({"labels", "annotations"})
_MANAGED = Struct(_names("manager operation apiVersion time fieldsType fieldsV1 subresource"))
_META = Struct(_META_ORDER, parts={"managedFields": _MANAGED}, maps=_META_MAPS)
# The scheduler's informer strips them from pods, not from nodes.
_POD_META = Struct(_META_ORDER, maps=_META_MAPS, dropped=frozenset({"managedFields"}))
_RESOURCES = Struct(_names("limits requests claims"), maps=frozenset({"limits", "requests"}))
_CONTAINER = Struct(
    _names(
        "name image command args workingDir ports envFrom env resources resizePolicy restartPolicy "
        "restartPolicyRules volumeMounts volumeDevices livenessProbe readinessProbe startupProbe "
        "lifecycle terminationMessagePath terminationMessagePolicy imagePullPolicy securityContext"
    ),
    parts={"resources": _RESOURCES},
    always={"resources": {}},
)
_TOLERATION = Struct(_names("key operator value effect tolerationSeconds"))
_POD_SPEC = Struct(
    _names(
        "volumes initContainers containers ephemeralContainers restartPolicy "
        "terminationGracePeriodSeconds activeDeadlineSeconds dnsPolicy nodeSelector "
        "serviceAccountName serviceAccount automountServiceAccountToken nodeName hostNetwork "
        "hostPID hostIPC shareProcessNamespace securityContext imagePullSecrets hostname subdomain "
        "affinity schedulerName tolerations hostAliases priorityClassName priority dnsConfig "
        "readinessGates runtimeClassName enableServiceLinks preemptionPolicy overhead "
        "topologySpreadConstraints setHostnameAsFQDN os hostUsers schedulingGates resourceClaims "
        "resources"
    ),
    parts={
        "containers": _CONTAINER,
        "initContainers": _CONTAINER,
        "tolerations": _TOLERATION,
        "resources": _RESOURCES,
    },
    maps=frozenset({"nodeSelector", "overhead"}),
)
_POD_CONDITION = Struct(
    _names("type observedGeneration status lastProbeTime lastTransitionTime reason message"),
    always={"lastProbeTime": None, "lastTransitionTime": None},
)
_POD_STATUS = Struct(
    _names(
        "observedGeneration phase conditions message reason nominatedNodeName hostIP hostIPs podIP "
        "podIPs startTime initContainerStatuses containerStatuses qosClass "
        "ephemeralContainerStatuses resize resourceClaimStatuses"
    ),
    parts={"conditions": _POD_CONDITION},
)
POD = Struct(
    _names("metadata spec status"),
    parts={"metadata": _POD_META, "spec": _POD_SPEC, "status": _POD_STATUS},
    always={"metadata": {}, "spec": {}, "status": {}},
    dropped=frozenset({"apiVersion", "kind"}),
)
_NODE_SPEC = Struct(
    _names("podCIDR podCIDRs providerID unschedulable taints configSource externalID"),
    parts={"taints": Struct(_names("key value effect timeAdded"))},
)
_NODE_CONDITION = Struct(
    _names("type status lastHeartbeatTime lastTransitionTime reason message"),
    always={"lastHeartbeatTime": None, "lastTransitionTime": None},
)
_NODE_INFO_ORDER = _names(
    "machineID systemUUID bootID kernelVersion osImage containerRuntimeVersion kubeletVersion "
    "kubeProxyVersion operatingSystem architecture swap"
)
_NODE_STATUS = Struct(
    _names(
        "capacity allocatable phase conditions addresses daemonEndpoints nodeInfo images "
        "volumesInUse volumesAttached config runtimeHandlers features declaredFeatures"
    ),
    parts={
        "conditions": _NODE_CONDITION,
        "nodeInfo": Struct(_NODE_INFO_ORDER, always=dict.fromkeys(_NODE_INFO_ORDER[:-1], "")),
    },
    maps=frozenset({"capacity", "allocatable"}),
    always={"daemonEndpoints": {"kubeletEndpoint": {"Port": 0}}, "nodeInfo": {}},
)
NODE = Struct(
    _names("metadata spec status"),
    parts={"metadata": _META, "spec": _NODE_SPEC, "status": _NODE_STATUS},
    always={"metadata": {}, "spec": {}, "status": {}},
    dropped=frozenset({"apiVersion", "kind"}),
)


def arrange_pod(pod: Json) -> Json:
    """Return a pod as kube-scheduler writes it."""
    arranged: Json = POD.arrange(pod)
    return arranged


def arrange_node(node: Json) -> Json:
    """Return a whole node as kube-scheduler writes it."""
    arranged: Json = NODE.arrange(node)
    return arranged
