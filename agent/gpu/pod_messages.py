"""The kubelet's pod-resources API, version 1, as far as it is used here (pure).

Field numbers are those of ``k8s.io/kubelet/pkg/apis/podresources/v1``: pods (1) of the list
have a name (1), a namespace (2) and containers (3); these have devices of plugins (2: resource
1, device ids 2) and of DRA claims (5: resources 4, with driver 2 and device 4).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from nearkv.protobuf import messages_of, text_at

SERVICE = "/v1.PodResourcesLister/"
LIST = SERVICE + "List"
ALLOCATABLE = SERVICE + "GetAllocatableResources"
EMPTY_REQUEST = b""
"""A message without fields."""


@dataclass(frozen=True, slots=True)
class GivenDevice:
    """A device as the kubelet names it. ``resource`` is a plugin's resource or a DRA driver."""

    resource: str
    device: str


@dataclass(frozen=True, slots=True)
class PodDevices:
    """The devices of one pod, of all its containers."""

    namespace: str
    name: str
    devices: tuple[GivenDevice, ...]


def decode_list(data: bytes) -> tuple[PodDevices, ...]:
    """Return the pods that have devices; raises ``WireError``."""
    pods = (_decode_pod(pod) for pod in messages_of(memoryview(data), 1))
    return tuple(pod for pod in pods if pod.devices)


def decode_allocatable(data: bytes) -> tuple[GivenDevice, ...]:
    """Return the devices of plugins that pods may get; raises ``WireError``."""
    return tuple(
        given for devices in messages_of(memoryview(data), 1) for given in _of_plugin(devices)
    )


def _decode_pod(pod: memoryview) -> PodDevices:
    devices: list[GivenDevice] = []
    for container in messages_of(pod, 3):
        for plugin in messages_of(container, 2):
            devices.extend(_of_plugin(plugin))
        for claim in messages_of(container, 5):
            devices.extend(_of_claim(claim))
    unique = tuple(dict.fromkeys(devices))  # containers may share a claim
    return PodDevices(namespace=text_at(pod, 2), name=text_at(pod, 1), devices=unique)


def _of_plugin(devices: memoryview) -> Iterator[GivenDevice]:
    resource = text_at(devices, 1)
    for device in messages_of(devices, 2):
        yield GivenDevice(resource, str(device, "utf-8", "replace"))


def _of_claim(claim: memoryview) -> Iterator[GivenDevice]:
    for resource in messages_of(claim, 4):
        yield GivenDevice(text_at(resource, 2), text_at(resource, 4))
