"""Devices as the extender gets them (pure)."""

from collections.abc import Callable, Mapping, Sequence

from nearkv.agent.gpu.health import Verdict
from nearkv.agent.gpu.model import Device, Memory, MigInstance
from nearkv.agent.gpu.pod_devices import PodName
from nearkv.node_summary import DeviceSummary

PodUidOf = Callable[[PodName], str | None]
Pods = Mapping[str, tuple[PodName, ...]]


def summarise_device(
    device: Device, health: Verdict, pods: Pods, pod_uid_of: PodUidOf
) -> tuple[DeviceSummary, ...]:
    """Return what can be given to a pod: the device, or its MIG instances where it is split."""
    if device.mig is not None and device.mig.enabled and device.gone is None:
        return tuple(
            _summarise_instance(device, instance, health, pods, pod_uid_of)
            for instance in device.mig_instances or ()
        )
    memory = device.memory if device.gone is None else None
    return (_summary(device.id, memory, health, _uid(device.id, pods, pod_uid_of)),)


def _summarise_instance(
    device: Device, instance: MigInstance, health: Verdict, pods: Pods, pod_uid_of: PodUidOf
) -> DeviceSummary:
    name = instance.uuid or f"{device.id}/mig-{instance.index}"
    return _summary(name, instance.memory, health, _uid(name, pods, pod_uid_of))


def _summary(name: str, memory: Memory | None, health: Verdict, uid: str | None) -> DeviceSummary:
    return DeviceSummary(
        id=name,
        total_bytes=None if memory is None else memory.total_bytes,
        used_bytes=None if memory is None else taken_bytes(memory),
        health=health.health,
        why=health.why,
        pod_uid=uid,
    )


def taken_bytes(memory: Memory) -> int:
    """Return what a new process cannot have: used by anybody, or reserved by the driver.

    An engine compares free memory with a share of the total, so this is their difference.
    """
    return memory.total_bytes - memory.free_bytes


def _uid(name: str, pods: Pods, pod_uid_of: PodUidOf) -> str | None:
    uids: Sequence[str | None] = [pod_uid_of(pod) for pod in pods.get(name, ())]
    known = [uid for uid in uids if uid is not None]
    # More than one is a shared device, or a pod that has ended: whose memory it is is unknown.
    return known[0] if len(known) == 1 else None
