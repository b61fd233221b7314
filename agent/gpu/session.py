"""NVML while it is open: which devices there are, and reading them."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from nearkv.agent.gpu.calling import Calls, DeviceLostError, Field
from nearkv.agent.gpu.decoding import cuda_version_of
from nearkv.agent.gpu.errors import NvmlError
from nearkv.agent.gpu.links import read_mig_instances, read_nvlinks, read_pairs
from nearkv.agent.gpu.model import Device, DevicePair, MigMode, Reading, Reasons
from nearkv.agent.gpu.raw import Handle
from nearkv.agent.gpu.reasons import Missing, Reason
from nearkv.agent.gpu.sources import IDENTITY, OFTEN, SELDOM, Source

_NODE_FIELDS = (
    ("driver_version", "nvmlSystemGetDriverVersion", str),
    ("nvml_version", "nvmlSystemGetNVMLVersion", str),
    ("cuda_version", "nvmlSystemGetCudaDriverVersion_v2", cuda_version_of),
)


class Session:
    """One time of NVML being open. ``sysfs`` tells the NUMA node of a PCIe slot.

    A device that was gone already when NVML was opened has no handle, and stays gone.
    """

    def __init__(self, calls: Calls, sysfs: Path) -> None:
        self._calls = calls
        self._sysfs = sysfs
        self._devices: list[Device] = []
        self._pairs: tuple[DevicePair, ...] | None = None
        self._node: dict[str, Any] = {}
        self.handles: dict[int, Any] = {}
        """Devices by their place in NVML's list."""

    @property
    def devices(self) -> Sequence[Device]:
        """The devices as they were read last."""
        return self._devices

    def open(self) -> None:
        """Open NVML and find the devices; raises :class:`NvmlError` when there is no such thing."""
        self._calls.make("nvmlInit")
        field = Field(self._calls, -1)
        for name, call, decode in _NODE_FIELDS:
            self._node[name] = field.read(name, (call,), decode)
        self._node["reasons"] = field.reasons
        count = self._calls.make("nvmlDeviceGetCount")
        self._devices = [self._find(index) for index in range(count)]

    def close(self) -> None:
        """Close NVML; raises :class:`NvmlError`."""
        self._calls.make("nvmlShutdown")

    def read(self, *, thorough: bool) -> Reading:
        """Read all devices; ``thorough``, and the first time, what seldom changes as well."""
        began = time.monotonic()
        thorough = thorough or self._pairs is None
        self._devices = [self._look(device, thorough=thorough) for device in self._devices]
        if self._pairs is None:
            self._pairs = read_pairs(self._calls, self._devices, self.handles)
        return Reading(
            devices=tuple(self._devices),
            pairs=self._pairs,
            seconds=time.monotonic() - began,
            **self._node,
        )

    def _find(self, index: int) -> Device:
        try:
            handle = self._calls.make("nvmlDeviceGetHandleByIndex", index, device_index=index)
        except NvmlError as error:
            return Device(index=index, gone=error.missing)
        reasons: Reasons = {}
        try:
            values = self._read_fields(IDENTITY, handle, index, reasons)
        except DeviceLostError as error:
            return Device(index=index, gone=error.missing)
        self.handles[index] = handle
        numa_node = self._numa_node(values["bus_id"], reasons)
        return Device(index=index, numa_node=numa_node, reasons=reasons, **values)

    def _look(self, device: Device, *, thorough: bool) -> Device:
        handle = self.handles.get(device.index)
        if handle is None:
            return device
        reasons: Reasons = {}
        try:
            values = self._read_fields(OFTEN, handle, device.index, reasons)
            if thorough:
                values |= self._read_fields(SELDOM, handle, device.index, reasons)
                values["nvlinks"] = read_nvlinks(self._calls, handle, device.index, reasons)
            self._look_at_mig(values.get("mig", device.mig), handle, device.index, values, reasons)
        except DeviceLostError as error:
            return msgspec.structs.replace(device, gone=error.missing)
        kept = {name: why for name, why in device.reasons.items() if name not in values}
        return msgspec.structs.replace(device, gone=None, reasons=kept | reasons, **values)

    def _look_at_mig(
        self,
        mig: MigMode | None,
        handle: Handle,
        index: int,
        values: dict[str, Any],
        reasons: Reasons,
    ) -> None:
        """Add the MIG instances, and take away what the whole does not have then.

        Utilisation of a device in MIG mode is 0 or refused, whatever runs in its instances.
        """
        values["mig_instances"] = None
        if mig is None or not mig.enabled:
            why = Reason.NOT_SUPPORTED if mig is None else Reason.NO_DATA
            reasons["mig_instances"] = Missing(why, "MIG is not on")
            return
        values["mig_instances"] = read_mig_instances(self._calls, handle, index, reasons)
        values["utilisation"] = None
        reasons["utilisation"] = Missing(Reason.MIG)

    def _read_fields(
        self, sources: Sequence[Source], handle: Handle, index: int, reasons: Reasons
    ) -> dict[str, Any]:
        field = Field(self._calls, index)
        values = {
            source.field: field.read(
                source.field, source.names, source.decode, handle, *source.arguments
            )
            for source in sources
        }
        reasons.update(field.reasons)
        return values

    def _numa_node(self, bus_id: str | None, reasons: Reasons) -> int | None:
        if bus_id is None:
            reasons["numa_node"] = reasons["bus_id"]
            return None
        try:
            text = (self._sysfs / "bus/pci/devices" / bus_id / "numa_node").read_text()
            node = int(text)
        except (OSError, ValueError) as error:
            reasons["numa_node"] = Missing(Reason.NOT_FOUND, str(error))
            return None
        if node < 0:
            reasons["numa_node"] = Missing(Reason.NOT_SUPPORTED, "the kernel does not know it")
            return None
        return node
