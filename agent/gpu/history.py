"""What is remembered of devices between readings (pure): their Xids, and those that vanished."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from nearkv.agent.gpu.model import Device, Reading, Xid
from nearkv.agent.gpu.reasons import Missing, Reason

_MAX_DEVICES = 64
_MAX_XIDS = 16
"""Kept per device, the newest ones. A device rarely has two kinds."""
_OLD_NEWS_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class SeenXid:
    """An Xid, and when it came, in seconds of the agent's clock."""

    code: int
    at: float


class DeviceHistory:
    """Devices by id, as they were read last, and their Xids."""

    def __init__(self) -> None:
        self._devices: dict[str, Device] = {}
        self._xids: dict[str, deque[SeenXid]] = {}
        self.xid_counts: dict[tuple[str, int], int] = {}
        """How many Xids came, by device and code."""

    def is_news(self, xid: Xid, at: float) -> bool:
        """Tell whether an Xid did not come in the minute before."""
        seen = self._xids.get(xid.device, ())
        return not any(old.code == xid.code and at - old.at < _OLD_NEWS_SECONDS for old in seen)

    def note_xid(self, xid: Xid, at: float) -> None:
        """Remember an Xid."""
        if xid.device in self._xids or len(self._xids) < _MAX_DEVICES:
            seen = self._xids.setdefault(xid.device, deque(maxlen=_MAX_XIDS))
            # One line for each code: a storm of one must not push the others out.
            kept = [old for old in seen if old.code != xid.code]
            seen.clear()
            seen.extend([*kept, SeenXid(xid.code, at)])
        key = (xid.device, xid.code)
        if key in self.xid_counts or len(self.xid_counts) < _MAX_DEVICES * _MAX_XIDS:
            self.xid_counts[key] = self.xid_counts.get(key, 0) + 1

    def xids_of(self, device: str) -> tuple[SeenXid, ...]:
        """Return the Xids of a device, each code once, oldest first."""
        return tuple(self._xids.get(device, ()))

    def complete(self, reading: Reading) -> Reading:
        """Return a reading with the devices that it lacks, marked as gone, and remember it."""
        listed = [self._recognise(device) for device in reading.devices]
        present = {device.id for device in listed}
        absent = [
            _mark_gone(device, Missing(Reason.ABSENT, "NVML does not list it any more"))
            for name, device in self._devices.items()
            if name not in present
        ]
        devices = sorted([*listed, *absent], key=lambda device: device.index)
        for device in listed[: _MAX_DEVICES - len(self._devices)]:
            self._devices.setdefault(device.id, device)
        for device in devices:
            if device.id in self._devices:
                self._devices[device.id] = msgspec.structs.replace(device, gone=None)
        return msgspec.structs.replace(reading, devices=tuple(devices))

    def forget(self) -> None:
        """Forget devices that are gone, and all Xids: the GPUs were reset, or others are here."""
        self._devices.clear()
        self._xids.clear()

    def _recognise(self, device: Device) -> Device:
        """Give a device that was lost before NVML could name it its name, by its place."""
        if device.uuid is not None or device.gone is None:
            return device
        known = next((old for old in self._devices.values() if old.index == device.index), None)
        return device if known is None else _mark_gone(known, device.gone)


def _mark_gone(device: Device, why: Missing) -> Device:
    return msgspec.structs.replace(device, gone=why)


def may_come_back(devices: Sequence[Device]) -> bool:
    """Tell whether any of these is gone, and might be seen once NVML is opened anew.

    Those that are only left out, because their calls hang, would be left out again.
    """
    return any(
        device.gone is not None and device.gone.reason not in (Reason.HUNG, Reason.CRASHED)
        for device in devices
    )
