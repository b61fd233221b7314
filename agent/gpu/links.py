"""Reading what connects devices: NVLinks, MIG instances, pairs."""

from collections.abc import Sequence
from typing import Any

from nearkv.agent.gpu.calling import Calls, DeviceLostError, Field
from nearkv.agent.gpu.decoding import ancestor_of, bus_id_of, memory_of, p2p_of, remote_type_of
from nearkv.agent.gpu.model import Device, DevicePair, MigInstance, NvLink, Reasons
from nearkv.agent.gpu.raw import Handle
from nearkv.agent.gpu.reasons import Missing, Reason
from nearkv.agent.gpu.sources import MEMORY_CALLS, PROCESS_CALLS

MAX_NVLINKS = 36
"""What the newest header names as NVML_NVLINK_MAX_LINKS."""
_P2P_READ, _P2P_NVLINK = 0, 2
_NO_SUCH_LINK = (Reason.NOT_SUPPORTED, Reason.INVALID_ARGUMENT)


def read_nvlinks(
    calls: Calls, handle: Handle, index: int, reasons: Reasons
) -> tuple[NvLink, ...] | None:
    """Return a device's NVLinks; ``None``, with the reason noted, where there is not one."""
    links: list[NvLink] = []
    missing = Missing(Reason.NOT_SUPPORTED)
    for number in range(MAX_NVLINKS):
        field = Field(calls, index)
        active = field.read("active", ("nvmlDeviceGetNvLinkState",), bool, handle, number)
        if active is not None:
            links.append(_read_link(field, handle, number, active=active))
            continue
        missing = field.reasons["active"]
        if missing.reason is Reason.INVALID_ARGUMENT:
            break  # the device has no more of them
        if missing.reason not in _NO_SUCH_LINK:
            reasons["nvlinks"] = missing
            return None
    if not links:
        reasons["nvlinks"] = missing
        return None
    return tuple(links)


def _read_link(field: Field, handle: Handle, number: int, *, active: bool) -> NvLink:
    if not active:
        inactive = Missing(Reason.NO_DATA, "the link is down")
        names = ("version", "remote_type", "remote_bus_id")
        return NvLink(link=number, active=False, reasons=dict.fromkeys(names, inactive))
    return NvLink(
        link=number,
        active=True,
        version=field.read("version", ("nvmlDeviceGetNvLinkVersion",), int, handle, number),
        remote_type=field.read(
            "remote_type", ("nvmlDeviceGetNvLinkRemoteDeviceType",), remote_type_of, handle, number
        ),
        remote_bus_id=field.read(
            "remote_bus_id", ("nvmlDeviceGetNvLinkRemotePciInfo",), bus_id_of, handle, number
        ),
        reasons=field.reasons,
    )


def read_mig_instances(
    calls: Calls, handle: Handle, index: int, reasons: Reasons
) -> tuple[MigInstance, ...] | None:
    """Return the MIG devices of a device; ``None``, with the reason noted, if it cannot tell."""
    field = Field(calls, index)
    count = field.read("mig_instances", ("nvmlDeviceGetMaxMigDeviceCount",), int, handle)
    if count is None:
        reasons.update(field.reasons)
        return None
    instances: list[MigInstance] = []
    for place in range(count):
        field = Field(calls, index)
        instance = field.read(
            "handle", ("nvmlDeviceGetMigDeviceHandleByIndex",), lambda raw: raw, handle, place
        )
        if instance is not None:
            instances.append(_read_instance(field, instance, place))
        elif field.reasons["handle"].reason is not Reason.NOT_FOUND:
            reasons["mig_instances"] = field.reasons["handle"]
            return None
    return tuple(instances)


def _read_instance(field: Field, handle: Handle, place: int) -> MigInstance:
    return MigInstance(
        index=place,
        uuid=field.read("uuid", ("nvmlDeviceGetUUID",), str, handle),
        gpu_instance=field.read("gpu_instance", ("nvmlDeviceGetGpuInstanceId",), int, handle),
        compute_instance=field.read(
            "compute_instance", ("nvmlDeviceGetComputeInstanceId",), int, handle
        ),
        memory=field.read("memory", MEMORY_CALLS, memory_of, handle),
        process_count=field.read("process_count", PROCESS_CALLS, len, handle),
        reasons=field.reasons,
    )


def read_pairs(
    calls: Calls, devices: Sequence[Device], handles: dict[int, Any]
) -> tuple[DevicePair, ...]:
    """Return how each two devices reach each other; those with one that is gone are left out."""
    present = [device for device in devices if device.gone is None and device.index in handles]
    return tuple(
        _read_pair(calls, one, other, handles)
        for place, one in enumerate(present)
        for other in present[place + 1 :]
    )


def _read_pair(calls: Calls, one: Device, other: Device, handles: dict[int, Any]) -> DevicePair:
    field = Field(calls, one.index)
    both = (handles[one.index], handles[other.index])
    values: dict[str, str | None] = {}
    p2p = ("nvmlDeviceGetP2PStatus",)
    sources = (
        ("ancestor", ("nvmlDeviceGetTopologyCommonAncestor",), ancestor_of, both),
        ("p2p_read", p2p, p2p_of, (*both, _P2P_READ)),
        ("p2p_nvlink", p2p, p2p_of, (*both, _P2P_NVLINK)),
    )
    for name, names, decode, arguments in sources:
        try:
            values[name] = field.read(name, names, decode, *arguments)
        except DeviceLostError as error:
            field.reasons[name] = error.missing
    return DevicePair(a=one.id, b=other.id, reasons=field.reasons, **values)
