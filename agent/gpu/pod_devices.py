"""Which GPU the kubelet means by a device id, and so which pod has which GPU (pure).

Ids are made by whoever offers the device: NVIDIA's device plugin uses UUIDs, or indices if it
is told to, and adds ``::n`` to shared ones; GKE's uses the name of the device file; NVIDIA's
DRA driver the minor number.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nearkv.agent.gpu.model import Device
from nearkv.agent.gpu.pod_messages import GivenDevice, PodDevices

_GPU_RESOURCE = re.compile(r"^(nvidia\.com/|gpu\.nvidia\.com$)")
_GKE = re.compile(r"^nvidia(\d+)(?:/gi(\d+))?(?:/vgpu\d+)?$")
_DRA = re.compile(r"^gpu-(\d+)$")
_OLD_MIG = re.compile(r"^MIG-(GPU-[0-9a-f-]+)/(\d+)/\d+$")


@dataclass(frozen=True, slots=True)
class PodName:
    """A pod as people name it."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def pods_by_device(
    devices: Sequence[Device], pods: Iterable[PodDevices]
) -> dict[str, tuple[PodName, ...]]:
    """Return the pods of each GPU or MIG device that has any, by its id.

    There may be more than one: shared devices, and pods that have ended, which kubelets before
    1.34 still list (kubernetes#132020).
    """
    found: dict[str, list[PodName]] = {}
    for pod in pods:
        name = PodName(pod.namespace, pod.name)
        for given in pod.devices:
            device = device_of(devices, given)
            if device is not None and name not in found.setdefault(device, []):
                found[device].append(name)
    return {device: tuple(names) for device, names in found.items()}


def devices_named(devices: Sequence[Device], given: Iterable[GivenDevice]) -> frozenset[str]:
    """Return the ids of those GPUs and MIG devices that the kubelet names."""
    named = (device_of(devices, one) for one in given)
    return frozenset(device for device in named if device is not None)


def device_of(devices: Sequence[Device], given: GivenDevice) -> str | None:
    """Return the GPU or MIG device that the kubelet means, ``None`` if it is none of these."""
    if not _GPU_RESOURCE.match(given.resource):
        return None
    text = given.device.partition("::")[0]
    if text in _ids_of(devices):
        return text
    for pattern, find in ((_OLD_MIG, _by_old_mig), (_GKE, _by_file), (_DRA, _by_minor)):
        if match := pattern.match(text):
            return find(devices, *match.groups())
    return next((device.id for device in devices if text == str(device.index)), None)


def _ids_of(devices: Sequence[Device]) -> set[str | None]:
    ids = {device.uuid for device in devices}
    return ids | {part.uuid for device in devices for part in device.mig_instances or ()}


def _by_minor(devices: Sequence[Device], minor: str) -> str | None:
    return next((device.id for device in devices if device.minor == int(minor)), None)


def _by_file(devices: Sequence[Device], minor: str, gpu_instance: str | None) -> str | None:
    if gpu_instance is None:
        return _by_minor(devices, minor)
    device = next((device for device in devices if device.minor == int(minor)), None)
    return _part_of(device, gpu_instance)


def _by_old_mig(devices: Sequence[Device], uuid: str, gpu_instance: str) -> str | None:
    device = next((device for device in devices if device.uuid == uuid), None)
    return _part_of(device, gpu_instance)


def _part_of(device: Device | None, gpu_instance: str) -> str | None:
    parts = () if device is None else device.mig_instances or ()
    return next((part.uuid for part in parts if part.gpu_instance == int(gpu_instance)), None)
