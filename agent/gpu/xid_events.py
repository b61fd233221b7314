"""Errors that the driver reports of devices (Xid), waited for in a thread of their own."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

from nearkv.agent.gpu.calling import Calls, Library
from nearkv.agent.gpu.errors import NvmlError
from nearkv.agent.gpu.model import Device, Xid
from nearkv.agent.gpu.nvml import same_device
from nearkv.agent.gpu.raw import Handle
from nearkv.agent.gpu.reasons import Missing, Reason

EVENT_XID = 0x8
WAIT_MS = 250
"""How long one call waits; closing takes as long, at most."""
_PAUSE_SECONDS = 1.0
_UNKNOWN_DEVICE = "unknown"


class XidEvents:
    """Hands the Xids of devices on, from :meth:`start` to :meth:`stop`.

    ``on_xid`` is called on the thread. ``missing`` says why none would come: of a device that
    knows no such events, or of all.
    """

    def __init__(self, library: Library, calls: Calls, on_xid: Callable[[Xid], object]) -> None:
        self._library = library
        self._calls = calls
        self._on_xid = on_xid
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._set: Any = None
        self._known: list[tuple[Any, str]] = []
        self.missing: Missing | None = None

    def start(self, devices: Iterable[tuple[Device, Any]]) -> None:
        """Register for the devices, given with their handles, and begin to wait."""
        try:
            self._set = self._calls.make("nvmlEventSetCreate")
        except NvmlError as error:
            self.missing = error.missing
            return
        for device, handle in devices:
            self._register(device, handle)
        if self._known:
            self._thread = threading.Thread(target=self._run, name="xid-events", daemon=True)
            self._thread.start()

    def _register(self, device: Device, handle: Handle) -> None:
        index = device.index
        try:
            supported = self._calls.make(
                "nvmlDeviceGetSupportedEventTypes", handle, device_index=index
            )
            # Registering for what a device does not know is refused, as not supported.
            self._calls.make(
                "nvmlDeviceRegisterEvents",
                handle,
                EVENT_XID & supported,
                self._set,
                device_index=index,
            )
        except NvmlError as error:
            self.missing = Missing(error.missing.reason, f"{device.id}: {error.missing}")
            return
        if supported & EVENT_XID:
            self._known.append((handle, device.id))
        else:
            self.missing = Missing(Reason.NOT_SUPPORTED, device.id)

    def stop(self) -> bool:
        """Stop waiting; False when the thread is stuck, so that NVML must not be closed."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=4 * WAIT_MS / 1000)
            if self._thread.is_alive():
                return False
        if self._set is not None:
            try:
                self._calls.make("nvmlEventSetFree", self._set)
            except NvmlError:
                return True  # the process is about to end
        return True

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                event = self._library.call("nvmlEventSetWait_v2", self._set, WAIT_MS)
            except NvmlError as error:
                if error.missing.reason is Reason.TIMEOUT:
                    continue
                # A lost GPU ends every wait at once: do not spin on it.
                self.missing = error.missing
                self._stop.wait(_PAUSE_SECONDS)
                continue
            self.missing = None
            if event.eventType == EVENT_XID:
                self._on_xid(Xid(self._name_of(event.device), int(event.eventData)))

    def _name_of(self, handle: Handle) -> str:
        for known, name in self._known:
            if same_device(known, handle):
                return name
        return _UNKNOWN_DEVICE
