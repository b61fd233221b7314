"""Waking pods that wait for room on this node, by one rare annotation on it.

A pod that the extender rejected is parked until something changes in the cluster, or for about
five minutes. When a device comes back that was taken by foreign memory or had failed, nothing in
Kubernetes changes by itself; so the agent changes an annotation. Every such write goes to all who
watch nodes, hence the limits. Pods that leave wake others without this.

The decision is pure (:class:`RoomWatch`), the shell thin (:class:`RoomAnnouncer`).
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog

from nearkv.agent.summary import DeviceReader
from nearkv.kube.errors import PatchError
from nearkv.kube.objects import node_path
from nearkv.kube.patching import Patcher
from nearkv.node_summary import DeviceSummary

ROOM_ANNOTATION = "nearkv.io/room-changed-at"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WakingLimits:
    """How rarely the node is written to, and how long room must have lasted, in seconds.

    ``settle_seconds`` gives the extender time to hear of the room first: a pod that is woken
    before would be rejected again. ``clean_ratio`` is the share of a device's memory up to which
    it counts as free.
    """

    min_seconds: float = 60.0
    settle_seconds: float = 2.0
    jitter_seconds: float = 2.0
    clean_ratio: float = 0.1


class RoomWatch:
    """Decides when to say that there is room; times are monotonic seconds (pure)."""

    def __init__(self, limits: WakingLimits) -> None:
        self._limits = limits
        self._blocked: frozenset[str] = frozenset()
        self._freed: dict[str, float] = {}
        self._written_at = float("-inf")

    def observe(self, devices: Sequence[DeviceSummary] | None, now: float) -> bool:
        """Take a reading of the devices and tell whether it shows new room.

        ``None`` says nothing about them.
        """
        if devices is None:
            return False
        clean_ratio = self._limits.clean_ratio
        blocked = {each.id for each in devices if is_blocked(each, clean_ratio=clean_ratio)}
        clean = {each.id for each in devices if is_clean(each, clean_ratio=clean_ratio)}
        new = (self._blocked & clean) - self._freed.keys()
        self._freed.update(dict.fromkeys(new, now))
        # What is neither, such as a device that a pod took, has no room to tell of any more;
        # but a reading that failed must not make a blocked device forgotten.
        self._freed = {device: at for device, at in self._freed.items() if device in clean}
        unread = {each.id for each in devices if is_unread(each)}
        self._blocked = frozenset(blocked | (self._blocked & unread))
        return bool(new)

    def is_due(self, now: float, draw: float) -> bool:
        """Tell whether to write now; ``draw`` (0 to 1) spreads nodes that are freed together."""
        if not self._freed or now < self._written_at + self._limits.min_seconds:
            return False
        settled_at = min(self._freed.values()) + self._limits.settle_seconds
        return now >= settled_at + draw * self._limits.jitter_seconds

    def written(self, now: float) -> None:
        """Take note of a write: all room that has settled by now is told, younger room is not."""
        settled_since = now - self._limits.settle_seconds
        self._freed = {device: at for device, at in self._freed.items() if at > settled_since}
        self._written_at = now

    def failed(self, now: float) -> None:
        """Take note of a write that failed: it is tried again, but not sooner than another."""
        self._written_at = now


def is_unread(device: DeviceSummary) -> bool:
    """Tell whether a reading says neither that a device has failed nor how full it is."""
    return device.health != "failed" and (not device.total_bytes or device.used_bytes is None)


def is_clean(device: DeviceSummary, *, clean_ratio: float) -> bool:
    """Tell whether a device is known to be empty and not known to have failed."""
    if device.health == "failed" or not device.total_bytes or device.used_bytes is None:
        return False
    return device.used_bytes <= clean_ratio * device.total_bytes


def is_blocked(device: DeviceSummary, *, clean_ratio: float) -> bool:
    """Tell whether a device has failed, or is taken by what is not known to be a pod."""
    if device.health == "failed":
        return True
    if is_unread(device) or device.pod_uid is not None:
        return False
    return not is_clean(device, clean_ratio=clean_ratio)


class RoomAnnouncer:
    """Reads the devices again and again, and changes the annotation when there is room."""

    def __init__(  # noqa: PLR0913 (keyword-only, and four have a default)
        self,
        patcher: Patcher,
        *,
        node: str,
        devices: DeviceReader,
        interval_seconds: float,
        limits: WakingLimits | None = None,
        publish: Callable[[], object] = lambda: None,
        count: Callable[[str], None] = lambda _: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an announcer; ``count`` takes ``written``, or why a write failed.

        ``publish`` is called when room appears, so that the extender hears of it in the time
        that the room has to settle.
        """
        self._patcher = patcher
        self._node = node
        self._devices = devices
        self._interval_seconds = interval_seconds
        self._now = now
        self._watch = RoomWatch(limits or WakingLimits())
        self._publish = publish
        self._count = count

    async def run(self) -> None:
        """Watch and write until cancelled."""
        draw = random.random()  # noqa: S311 (spreads load, guards nothing)
        while True:
            if self._watch.observe(self._devices(), self._now()):
                self._publish()
            if self._watch.is_due(self._now(), draw):
                await self._write()
                draw = random.random()  # noqa: S311 (see above)
            await asyncio.sleep(self._interval_seconds)

    async def _write(self) -> None:
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
        try:
            await self._patcher.annotate(node_path(self._node), {ROOM_ANNOTATION: stamp})
        except PatchError as error:
            self._count(str(error.trouble))
            self._watch.failed(self._now())
            log.warning("room_not_announced", node=self._node, error=str(error))
        else:
            self._count("written")
            self._watch.written(self._now())
            log.info("room_announced", node=self._node)
