"""The node's GPUs for the rest of the agent: run it, ask it, let go of the driver."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import structlog

from nearkv.agent.gpu.describing import describe_device, describe_pairs
from nearkv.agent.gpu.driver_upgrade import must_release
from nearkv.agent.gpu.health import Verdict, verdict
from nearkv.agent.gpu.model import Device
from nearkv.agent.gpu.pod_devices import PodName
from nearkv.agent.gpu.pod_resources import PodResources
from nearkv.agent.gpu.pod_watching import PodWatch
from nearkv.agent.gpu.reasons import Missing, Reason
from nearkv.agent.gpu.settings import GpuSettings
from nearkv.agent.gpu.summarising import Pods, PodUidOf, summarise_device
from nearkv.agent.gpu.watching import GpuWatch, WatchPlan
from nearkv.health import Readiness
from nearkv.node_summary import DeviceSummary
from nearkv.supervising import Job, supervised

HOLD_LABEL = "driver-upgrade"
HOLD_SIGNAL = "SIGUSR1"
_CHECK = "gpus"

log = structlog.get_logger(__name__)


def _no_uid(_pod: PodName) -> str | None:
    return None


class GpuService:
    """Reads the GPUs while :meth:`running`. Use it on the event loop's thread only.

    ``pod_uid_of`` gives the UID of a pod, which the kubelet does not say; set it where pods
    are watched.
    """

    def __init__(
        self, settings: GpuSettings, *, plan: WatchPlan, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.pod_uid_of: PodUidOf = _no_uid
        self._settings = settings
        self._now = now
        self.watch = GpuWatch(plan, now=now)
        socket = settings.pod_resources_socket
        self.pods = (
            None
            if socket is None
            else PodWatch(
                PodResources(socket, timeout_seconds=settings.pod_resources_timeout_seconds),
                interval_seconds=settings.pod_resources_interval_seconds,
                is_needed=lambda: bool(self.devices()),
                now=now,
            )
        )
        self._reopening: asyncio.TimerHandle | None = None
        self._releases: set[asyncio.Task[bool]] = set()

    @property
    def is_off(self) -> bool:
        """Whether the settings say not to read GPUs."""
        return self._settings.enabled == "off"

    @property
    def missing(self) -> Missing | None:
        """Why the GPUs are not known; ``None`` where they are."""
        if self.is_off:
            return Missing(Reason.OFF)
        return self.watch.missing

    def devices(self) -> tuple[Device, ...]:
        """Return the devices, those that are gone among them; empty if they are not known."""
        reading = self.watch.reading
        return () if reading is None else reading.devices

    def verdict_of(self, device: Device) -> Verdict:
        """Return whether a device can be used."""
        xids = [seen.code for seen in self.watch.history.xids_of(device.id)]
        return verdict(device, xids, self._settings.ignored_xids)

    def summaries(self) -> Sequence[DeviceSummary] | None:
        """Return what the extender gets; ``None``, and :attr:`missing` says why, if not known."""
        if self.missing is not None:
            return None
        pods = self._pods_of(self.devices()) or {}
        return [
            summary
            for device in self.devices()
            for summary in summarise_device(device, self.verdict_of(device), pods, self.pod_uid_of)
        ]

    async def follow_upgrade(self, state: str | None) -> None:
        """Close or open NVML by the value of the Node's label ``UPGRADE_LABEL``."""
        if must_release(state):
            await self.release(HOLD_LABEL)
        else:
            self.resume(HOLD_LABEL)

    async def release(self, why: str) -> bool:
        """Close NVML; see :meth:`GpuWatch.release`."""
        return await self.watch.release(why)

    def resume(self, why: str) -> None:
        """Open NVML again; see :meth:`GpuWatch.resume`."""
        self.watch.resume(why)

    def release_for_a_while(self) -> None:
        """Close NVML for ``release_seconds``, from now on if it is closed so already."""
        self.watch.hold(HOLD_SIGNAL)
        task = asyncio.get_running_loop().create_task(self.release(HOLD_SIGNAL))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        if self._reopening is not None:
            self._reopening.cancel()
        self._reopening = asyncio.get_running_loop().call_later(
            self._settings.release_seconds, self.resume, HOLD_SIGNAL
        )

    @asynccontextmanager
    async def running(self, readiness: Readiness) -> AsyncIterator[None]:
        """Read while in the block, and close NVML on SIGUSR1.

        The agent's readiness does not depend on GPUs, only on these tasks not failing.
        """
        jobs = [] if self.is_off else [Job("gpu", self.watch.run)]
        if self.pods is not None and not self.is_off:
            jobs.append(Job("gpu_pods", self.pods.run))
        loop = asyncio.get_running_loop()
        # Signals are the main thread's alone. Where GPUs are off the signal does no harm, too.
        with suppress(ValueError, RuntimeError, NotImplementedError):
            loop.add_signal_handler(signal.SIGUSR1, self._on_signal)
        try:
            async with supervised(jobs, readiness, check=_CHECK):
                yield
        finally:
            with suppress(ValueError, RuntimeError, NotImplementedError):
                loop.remove_signal_handler(signal.SIGUSR1)
            if self._reopening is not None:
                self._reopening.cancel()
            await asyncio.gather(*self._releases, return_exceptions=True)

    def describe(self) -> dict[str, Any]:
        """Return the section of the status, as plain JSON types; unknown values are null."""
        reading = self.watch.reading
        devices = self.devices()
        pods = self._pods_of(devices)
        allocatable = None if self.pods is None else self.pods.allocatable_of(devices)
        at = self.watch.read_at
        return {
            "missing": None if self.missing is None else str(self.missing),
            "age_seconds": None if at is None else round(self._now() - at, 3),
            "released_for": list(self.watch.holds),
            "reader_pid": self.watch.reader_pid,
            "driver_version": reading and reading.driver_version,
            "nvml_version": reading and reading.nvml_version,
            "cuda_version": reading and reading.cuda_version,
            "xid_events_missing": reading and reading.events and str(reading.events),
            "pods_missing": "off" if self.pods is None else self.pods.missing,
            "devices": [self._describe(device, pods, allocatable) for device in devices],
            "pairs": None if reading is None else describe_pairs(reading),
        }

    def problems(self) -> list[str]:
        """Return what is wrong with devices, a line for each."""
        verdicts = [(device, self.verdict_of(device)) for device in self.devices()]
        return [
            f"GPU {device.index} ({device.id}) {found.health}: {found.why}"
            for device, found in verdicts
            if found.why
        ]

    def _describe(
        self, device: Device, pods: Pods | None, allocatable: frozenset[str] | None
    ) -> dict[str, Any]:
        now = self._now()
        seen = self.watch.history.xids_of(device.id)
        found = self.verdict_of(device)
        return {
            **describe_device(device, pods, allocatable),
            "health": found.health,
            "why": found.why,
            "xids": [{"xid": xid.code, "age_seconds": round(now - xid.at, 3)} for xid in seen],
        }

    def _pods_of(self, devices: Sequence[Device]) -> Pods | None:
        return None if self.pods is None else self.pods.pods_of(devices)

    def _on_signal(self) -> None:
        if not self.is_off:
            self.release_for_a_while()


def plan_of(settings: GpuSettings) -> WatchPlan:
    """Return how GPUs are watched under these settings."""
    return WatchPlan(interval_seconds=settings.interval_seconds, library_dir=settings.library_dir)
