"""Same node, devices: the mover has both memories mapped and has the device copy.

As with ``shm``, descriptors are handed over and not served, so links are made of memories that
are open here. The bytes never leave the devices: within one, or from one to another over
NVLink or PCIe where they can reach each other.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from nearkv.transfer.backends.contract import (
    Link,
    Path,
    Probe,
    PullReport,
    PullRequest,
    Region,
    Server,
    Source,
    Stop,
)
from nearkv.transfer.copying import check_within, order_reads
from nearkv.transfer.cuda.abi import Attribute
from nearkv.transfer.cuda.copy_queue import CopyQueue, end_process
from nearkv.transfer.cuda.driver import Driver, load_driver
from nearkv.transfer.cuda.regions import DeviceRegion
from nearkv.transfer.errors import LayoutError, PullError, Reason, TransferError
from nearkv.transfer.layout import Runs, cut_runs, plan_runs

CHUNK_BYTES = 32 << 20
"""Copied between two looks at ``stop``; twice this is what may be under way at once."""


class CudaBackend:
    """Copies between memories of devices; ``load`` brings the driver when it is needed."""

    def __init__(
        self,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        load: Callable[[], Driver] = load_driver,
        broken: Callable[[TransferError], NoReturn] = end_process,
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._load = load
        self._broken = broken

    @property
    def name(self) -> str:
        """The name in settings and metrics."""
        return "cuda"

    def probe(self) -> Probe:
        """Say which devices there are; makes no context on them."""
        try:
            driver = self._load()
            devices = [_describe(driver, n) for n in range(driver.device_count())]
            version = driver.version()
        except PullError as error:
            return Probe(name=self.name, usable=False, detail=str(error))
        if not devices:
            return Probe(name=self.name, usable=False, detail="no device is visible here")
        return Probe(name=self.name, usable=True, detail=f"CUDA {version}: {', '.join(devices)}")

    def link(self, source: Source, target: Region) -> Link:
        """Make a link between memories that are open here.

        Raises :class:`PullError` (``NO_PATH``) when one of them is not a device's, or the
        target's device cannot reach the source's.
        """
        origin = source.region
        if not isinstance(origin, DeviceRegion) or not isinstance(target, DeviceRegion):
            raise PullError(Reason.NO_PATH, "one of the memories does not lie on a device")
        if not target.writable:
            raise PullError(Reason.MEMORY, "the target's memory is mapped for reading only")
        ours, theirs = target.memory.context, origin.memory.context
        detail = "within one device"
        if ours.uuid != theirs.uuid:
            origin.memory.allow(ours.device)
            detail = "from device to device"
        path = Path(name=self.name, detail=detail)
        queue = CopyQueue(ours, broken=self._broken)
        return CudaLink(source, origin, target, path=path, queue=queue, chunk=self._chunk_bytes)

    def serve(self, source: Source) -> Server:  # noqa: ARG002 (the contract's form)
        """Refuse: device memory is handed over, not served."""
        raise PullError(Reason.NO_PATH, "device memory is handed over as a descriptor")

    def connect(self, offer: bytes, target: Region, stop: Stop) -> Link:  # noqa: ARG002 (as above)
        """Refuse: see :meth:`link`."""
        raise PullError(Reason.NO_PATH, "device memory is handed over as a descriptor")


def _describe(driver: Driver, ordinal: int) -> str:
    device = driver.device(ordinal)
    shares = all(
        driver.attribute(device, attribute)
        for attribute in (Attribute.VIRTUAL_MEMORY, Attribute.POSIX_DESCRIPTORS)
    )
    how = "memory by descriptor" if shares else "legacy IPC only"
    return f"{driver.device_name(device)} ({how})"


class CudaLink:
    """A link on which the target's device copies; one pull at a time."""

    def __init__(
        self,
        source: Source,
        origin: DeviceRegion,
        target: DeviceRegion,
        *,
        path: Path,
        queue: CopyQueue,
        chunk: int,
    ) -> None:
        self._source = source
        self._origin = origin
        self._target = target
        self._path = path
        self._queue = queue
        self._chunk_bytes = chunk

    @property
    def path(self) -> Path:
        """What the bytes go over."""
        return self._path

    def pull(self, request: PullRequest, stop: Stop) -> PullReport:
        """Copy blocks; the fence is checked before, between chunks, and after the last byte.

        However it ends, no copy is under way when it has ended.
        """
        started = time.monotonic()
        runs = self._plan(request)
        try:
            for chunk in cut_runs(runs, chunk_bytes=self._chunk_bytes):
                stop.check()
                request.fence.check(self._source.slots)
                self._submit(chunk)
        finally:
            self._queue.wait_all()
        # What the device has read it has read before its event, and that before this.
        order_reads()
        request.fence.check(self._source.slots)
        return PullReport(
            size_bytes=runs.total_bytes,
            seconds=time.monotonic() - started,
            path=self._path,
            pieces=len(runs),
        )

    def close(self) -> None:
        """Let go of the stream; the memories stay their owners'."""
        with suppress(PullError):  # nothing is under way, and the rest goes with the process
            self._queue.close()

    def _plan(self, request: PullRequest) -> Runs:
        if request.source_layout != self._origin.layout:
            raise LayoutError("the request's layout is not the source's")
        runs = plan_runs(
            self._origin.layout, self._target.layout, request.source_blocks, request.target_blocks
        )
        check_within(runs.source, runs.length, self._origin.memory.size_bytes, "source")
        check_within(runs.target, runs.length, self._target.memory.size_bytes, "target")
        return runs

    def _submit(self, runs: Runs) -> None:
        targets = (runs.target + self._target.memory.address).tolist()
        sources = (runs.source + self._origin.memory.address).tolist()
        lengths = runs.length.tolist()

        def copies(driver: Driver, stream: int) -> None:
            for target, source, length in zip(targets, sources, lengths, strict=True):
                driver.copy_on_device(target, source, length, stream)

        self._queue.submit(copies)
