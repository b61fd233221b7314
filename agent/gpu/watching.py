"""Watching the node's GPUs: a reader process is kept running, and let go when told to."""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from nearkv.agent.gpu.errors import ReaderEndedError, ReaderFailedError, ReaderStuckError
from nearkv.agent.gpu.history import DeviceHistory, may_come_back
from nearkv.agent.gpu.mark import NO_DEVICE
from nearkv.agent.gpu.messages import Open
from nearkv.agent.gpu.model import Reading, Xid
from nearkv.agent.gpu.process import READER_COMMAND, ReaderLimits, ReaderProcess
from nearkv.agent.gpu.quarantine import Quarantine
from nearkv.agent.gpu.reasons import Missing, Reason

_NORMAL = (Reason.NO_DRIVER, Reason.NO_BINDING)
"""Reasons for having no GPUs that are no fault: told once, calmly."""
_BY_NATURE = (Reason.NOT_SUPPORTED, Reason.MISSING_SYMBOL, Reason.NO_DATA, Reason.MIG)
"""Reasons for a value not to be there that are no failure: not counted."""
_STALE_INTERVALS = 4
_DRIVER_FILES = ("/dev/nvidiactl", "/dev/nvgpu", "/dev/nvhost-gpu", "/dev/dxg")
"""What the driver has on servers, on Jetsons (both of its kinds), and under Windows."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WatchPlan:
    """How GPUs are watched; times in seconds.

    A pause after a failure doubles from ``retry_seconds`` to ``longest_retry_seconds``.
    ``library_dir`` is searched for the driver's library before the system's folders. Without
    it, NVML is not even tried where none of ``driver_files`` is there.
    """

    interval_seconds: float = 5.0
    thorough_seconds: float = 60.0
    retry_seconds: float = 5.0
    longest_retry_seconds: float = 300.0
    limits: ReaderLimits = field(default_factory=ReaderLimits)
    library_dir: Path | None = None
    driver_files: tuple[str, ...] = _DRIVER_FILES
    sysfs: Path = Path("/sys")
    command: Sequence[str] = READER_COMMAND


class GpuWatch:
    """The last reading of the node's GPUs, and what it takes to have one.

    All methods are called on the event loop's thread. ``now`` is a steady clock. ``opened``
    and ``ends`` (by reason) count for the metrics.
    """

    def __init__(
        self,
        plan: WatchPlan,
        *,
        now: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.plan = plan
        self.history = DeviceHistory()
        self.read_at: float | None = None
        self.opened = 0
        self.ends: Counter[str] = Counter()
        self.missing_fields: Counter[tuple[str, str]] = Counter()
        """How often a value could not be had, by field and reason."""
        self._now = now
        self._jitter = jitter
        self._reading: Reading | None = None
        self._process: ReaderProcess | None = None
        self._holds: set[str] = set()
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._resumed = asyncio.Event()
        self._quarantine = Quarantine()
        self._failures = 0
        self._missing = Missing(Reason.NOT_READ)
        self._told: Missing | None = None

    @property
    def reading(self) -> Reading | None:
        """The last reading; ``None``, with the reason in :attr:`missing`, without a fresh one."""
        return None if self._is_stale() else self._reading

    @property
    def missing(self) -> Missing | None:
        """Why there is no reading; ``None`` when there is one."""
        if not self._is_stale():
            return None
        return self._missing if self._reading is None else Missing(Reason.STALE)

    @property
    def holds(self) -> tuple[str, ...]:
        """Why NVML is closed on purpose; empty when it is not."""
        return tuple(sorted(self._holds))

    @property
    def reader_pid(self) -> int | None:
        """The process that has NVML open."""
        process = self._process
        return None if process is None or process.reaped.is_set() else process.pid

    async def release(self, why: str) -> bool:
        """Close NVML until :meth:`resume` is called for the same ``why``.

        Returns when the process that held it is gone, and every file of the driver with it;
        False when the kernel does not let it go, in a few seconds.
        """
        self.hold(why)
        process = self._process
        return True if process is None else await process.stop()

    def hold(self, why: str) -> None:
        """Want NVML closed from now on; :meth:`release` also closes it."""
        if why not in self._holds:
            log.info("nvml_released", why=why)
        self._holds.add(why)
        self._wanted.clear()
        self._drop(Missing(Reason.RELEASED, ", ".join(self.holds)))

    def resume(self, why: str) -> None:
        """Open NVML again, unless it is released for another reason, too.

        What was remembered of devices is forgotten: the driver is another, or they were reset.
        """
        if why not in self._holds:
            return
        self._holds.discard(why)
        if not self._holds:
            log.info("nvml_resumed", why=why)
            self.history.forget()
            self._quarantine.clear()
            self._failures = 0
            self._missing = Missing(Reason.NOT_READ)
            self._wanted.set()
            self._resumed.set()

    async def run(self) -> None:
        """Keep readings coming until cancelled."""
        try:
            while True:
                await self._wanted.wait()
                await self._pause(await self._read_on())
        finally:
            # One the kernel does not let go must not keep the agent from ending.
            await self._end_process(for_good=True)

    async def _read_on(self) -> float:
        """Read until something ends it; returns how long to wait before the next try."""
        self._resumed.clear()
        try:
            await self._open_and_look()
        except ReaderFailedError as error:
            self._note_end(error.missing.reason, error.missing)
            self._failures += 1
        except ReaderStuckError as error:
            if self._process is not None:
                self._process.kill()  # it would not hear that it is to end
            self._note_stuck(error)
        except ReaderEndedError as error:
            if not error.as_told:
                self._note_end(Reason.CRASHED, Missing(Reason.CRASHED, str(error)))
                self._failures += 1
        except OSError as error:
            self._note_end(Reason.FAILED, Missing(Reason.FAILED, f"cannot start: {error}"))
            self._failures += 1
        await self._end_process()
        return self._retry_seconds()

    async def _open_and_look(self) -> None:
        """Look at an interval; returns when NVML should be opened anew."""
        self._check_for_driver()
        process = ReaderProcess(
            command=self.plan.command,
            environment=_environment(os.environ, self.plan.library_dir),
            limits=self.plan.limits,
            on_xid=self._on_xid,
        )
        self._process = process
        opened_at = self._now()
        left_out = self._quarantine.left_out(opened_at)
        await process.open(Open(left_out, str(self.plan.sysfs)))
        self.opened += 1
        thorough_at = opened_at
        while self._wanted.is_set():
            began = self._now()
            thorough = began >= thorough_at
            if thorough:
                thorough_at = began + self.plan.thorough_seconds
            reading = self._publish(await process.look(thorough=thorough))
            if self._should_reopen(reading, opened_at):
                return
            await self._pause(self.plan.interval_seconds - (self._now() - began), process)

    def _check_for_driver(self) -> None:
        """Save nodes without GPUs a process; raises :class:`ReaderFailedError`."""
        if self.plan.library_dir is None and not any(map(os.path.exists, self.plan.driver_files)):
            names = ", ".join(self.plan.driver_files)
            raise ReaderFailedError(Missing(Reason.NO_DRIVER, f"none of {names}"))

    def _publish(self, reading: Reading) -> Reading:
        reading = self.history.complete(reading)
        self._reading = reading
        self.read_at = self._now()
        for device in reading.devices:
            for name, missing in device.reasons.items():
                if missing.reason not in _BY_NATURE:
                    self.missing_fields[name, missing.reason.value] += 1
        if not may_come_back(reading.devices):
            self._failures = 0
        if self._told is not None:
            self._told = None
            log.info("gpus_read", devices=len(reading.devices), driver=reading.driver_version)
        return reading

    def _should_reopen(self, reading: Reading, opened_at: float) -> bool:
        """Tell whether NVML has to be opened anew to see more.

        It lists the devices that were there when it was opened, and a reader leaves out the
        calls that it was told to.
        """
        now = self._now()
        if self._quarantine.is_due(opened_at, now):
            return True
        if may_come_back(reading.devices) and now - opened_at >= self._retry_seconds():
            self._failures += 1
            return True
        return False

    def _note_stuck(self, error: ReaderStuckError) -> None:
        self._note_end(error.reason, Missing(error.reason, str(error)))
        if error.call and error.device_index != NO_DEVICE:
            self._quarantine.add(error.device_index, error.call, error.reason, self._now())
        else:
            self._failures += 1

    def _note_end(self, reason: Reason, missing: Missing) -> None:
        self.ends[reason.value] += 1
        if self._holds:
            return  # that is why there is no reading
        if reason not in (Reason.HUNG, Reason.CRASHED):
            self._drop(missing)
        elif self._reading is None:
            self._missing = missing
        if missing == self._told:
            return
        self._told = missing
        if reason in _NORMAL:
            log.info("no_gpus", why=str(missing))
        else:
            log.warning("gpus_not_read", why=str(missing))

    def _drop(self, missing: Missing) -> None:
        self._reading = None
        self.read_at = None
        self._missing = missing

    def _on_xid(self, xid: Xid) -> None:
        # A faulty program may cause hundreds in a second; all of them are counted.
        if self.history.is_news(xid, self._now()):
            log.warning("gpu_xid", device=xid.device, xid=xid.code)
        self.history.note_xid(xid, self._now())

    async def _end_process(self, *, for_good: bool = False) -> None:
        """End the reader, and wait until the kernel has let it go: two would hang as one does.

        ``for_good`` waits once only, as there will not be another one.
        """
        process = self._process
        if process is None:
            return
        told = False
        while not await process.stop():
            if not told:
                log.error("gpu_reader_not_reaped", pid=process.pid)
                told = True
            if for_good:
                break
        self._process = None

    async def _pause(self, seconds: float, process: ReaderProcess | None = None) -> None:
        """Wait, but no longer than until the reader has ended, or until NVML is wanted again."""
        over = self._resumed if process is None else process.reaped
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await over.wait()

    def _retry_seconds(self) -> float:
        """Return the pause before the next try: none when nothing failed, else with jitter."""
        if not self._failures:
            return 0.0
        longest = self.plan.longest_retry_seconds
        seconds = min(self.plan.retry_seconds * 2.0 ** min(self._failures - 1, 16), longest)
        return seconds * (0.75 + 0.5 * self._jitter())

    def _is_stale(self) -> bool:
        if self.read_at is None:
            return True
        limit = _STALE_INTERVALS * self.plan.interval_seconds + self.plan.limits.look_seconds
        return self._now() - self.read_at > limit


def _environment(current: Mapping[str, str], library_dir: Path | None) -> dict[str, str]:
    """Return the reader's environment: the loader reads its search path at the start only."""
    environment = dict(current)
    if library_dir is not None:
        rest = current.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = f"{library_dir}:{rest}" if rest else str(library_dir)
    return environment
