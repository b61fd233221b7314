"""Keeping track of which pods have the node's GPUs."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence

import structlog

from nearkv.agent.gpu.errors import PodResourcesError
from nearkv.agent.gpu.model import Device
from nearkv.agent.gpu.pod_devices import PodName, devices_named, pods_by_device
from nearkv.agent.gpu.pod_messages import GivenDevice, PodDevices
from nearkv.agent.gpu.pod_resources import PodResources

_STALE_INTERVALS = 6

log = structlog.get_logger(__name__)


class PodWatch:
    """What the kubelet said last about devices, and why not where it said nothing.

    It is asked every ``interval_seconds``, while ``is_needed`` says so: not on nodes without
    GPUs. ``failures`` counts by reason.
    """

    def __init__(
        self,
        kubelet: PodResources,
        *,
        interval_seconds: float,
        is_needed: Callable[[], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failures: Counter[str] = Counter()
        self.read_at: float | None = None
        self._kubelet = kubelet
        self._interval_seconds = interval_seconds
        self._is_needed = is_needed
        self._now = now
        self._missing = "not_read"
        self._pods: tuple[PodDevices, ...] = ()
        self._allocatable: tuple[GivenDevice, ...] | None = None

    @property
    def missing(self) -> str | None:
        """Why the pods are not known; ``None`` where they are."""
        if self.read_at is None:
            return self._missing
        age = self._now() - self.read_at
        is_stale = age > _STALE_INTERVALS * self._interval_seconds
        return self._missing or "stale" if is_stale else None

    def pods_of(self, devices: Sequence[Device]) -> dict[str, tuple[PodName, ...]] | None:
        """Return the pods by GPU or MIG device; ``None`` where :attr:`missing` says why."""
        return None if self.missing else pods_by_device(devices, self._pods)

    def allocatable_of(self, devices: Sequence[Device]) -> frozenset[str] | None:
        """Return the devices that pods may get; ``None`` if the kubelet does not say."""
        if self.missing or self._allocatable is None:
            return None
        return devices_named(devices, self._allocatable)

    async def run(self) -> None:
        """Ask at an interval until cancelled."""
        try:
            while True:
                if self._is_needed():
                    await self.ask()
                await asyncio.sleep(self._interval_seconds)
        finally:
            await self._kubelet.close()

    async def ask(self) -> None:
        """Ask once; a failure is counted, and keeps what is known until that is too old."""
        try:
            pods = await self._kubelet.pods()
        except PodResourcesError as error:
            self._note_failure(error)
            return
        self._pods = pods
        self.read_at = self._now()
        if self._missing:
            log.info("pod_devices_read", pods=len(pods))
        self._missing = ""
        try:
            self._allocatable = await self._kubelet.allocatable()
        except PodResourcesError as error:
            self.failures[f"allocatable_{error.reason}"] += 1
            self._allocatable = None

    def _note_failure(self, error: PodResourcesError) -> None:
        self.failures[error.reason] += 1
        if error.reason == self._missing:
            return
        self._missing = error.reason
        if error.reason == "no_socket":  # not Kubernetes, or the folder is not mounted
            log.info("no_pod_devices", why=str(error))
        else:
            log.warning("pod_devices_not_read", why=str(error))
