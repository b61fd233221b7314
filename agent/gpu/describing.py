"""Devices in the status, as plain JSON types (pure)."""

from typing import Any

import msgspec

from nearkv.agent.gpu.model import Device, Reading
from nearkv.agent.gpu.summarising import Pods


def describe_device(
    device: Device, pods: Pods | None, allocatable: frozenset[str] | None
) -> dict[str, Any]:
    """Return a device with every field; those that are null have a reason, or the device is gone.

    ``pods`` and ``allocatable`` are the kubelet's, ``None`` where it does not say.
    """
    described = _plain(device)
    for instance in described["mig_instances"] or ():
        instance.update(_of_kubelet(instance["uuid"], pods, allocatable))
    return {"id": device.id, **described, **_of_kubelet(device.id, pods, allocatable)}


def describe_pairs(reading: Reading) -> list[dict[str, Any]]:
    """Return how each two devices reach each other."""
    return [_plain(pair) for pair in reading.pairs]


def _of_kubelet(
    name: str | None, pods: Pods | None, allocatable: frozenset[str] | None
) -> dict[str, Any]:
    return {
        "pods": None if pods is None else [str(pod) for pod in pods.get(name or "", ())],
        "allocatable": None if allocatable is None else name in allocatable,
    }


def _plain(value: Any) -> Any:  # noqa: ANN401 (any value of the model)
    if isinstance(value, msgspec.Struct):
        fields = {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
        if "reasons" in fields:
            reasons = getattr(value, "reasons", {})
            fields["reasons"] = {name: str(missing) for name, missing in reasons.items()}
        if "gone" in fields:
            gone = getattr(value, "gone", None)
            fields["gone"] = None if gone is None else str(gone)
        return fields
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    return value
