"""What one process does in a check: it has memory of its own, opens others', copies, measures.

A player answers commands. It is the same in a process of its own (``roles``) and within a
test, where the driver is a stand-in.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import numpy as np

from nearkv.transfer.backends.contract import (
    Fence,
    Grant,
    Link,
    PullRequest,
    Source,
    Stop,
    monotonic_ms,
)
from nearkv.transfer.cuda.allocation import DeviceKv, allocate_kv
from nearkv.transfer.cuda.context import DeviceContext
from nearkv.transfer.cuda.device_backend import CudaBackend
from nearkv.transfer.cuda.driver import Driver, load_driver
from nearkv.transfer.cuda.ipc import IpcMemory, create_ipc
from nearkv.transfer.cuda.probe import find_sharing
from nearkv.transfer.cuda.regions import DeviceHandle, DeviceRegion, open_device_region
from nearkv.transfer.cuda.vmm import VmmMemory, create_vmm
from nearkv.transfer.layout import KvMemory
from nearkv.transfer.lease import SlotTable
from nearkv.transfer.memory import address_of, create_memory
from nearkv.transfer.messages import CUDA_VMM
from tests.gpu.patterns import as_layout, pattern, read_digest, write_pattern

Answer = tuple[dict[str, Any], tuple[int, ...]]
Command = Callable[..., Answer]
_TICKET = b"check-gpu ticket"
_PULL_SECONDS = 60.0


class Player:
    """Answers commands; ``ordinal`` is the device that it works on."""

    def __init__(self, *, ordinal: int = 0, load: Callable[[], Driver] = load_driver) -> None:
        self._ordinal = ordinal
        self._load = load
        self._loaded: Driver | None = None
        self._own: dict[str, DeviceKv] = {}
        self._regions: dict[str, DeviceRegion] = {}
        self._context: DeviceContext | None = None

    def answer(self, command: str, fields: Mapping[str, Any], fds: list[int]) -> Answer:
        """Do what a command says; ``fds`` stay the caller's. Raises whatever goes wrong."""
        call: Command = getattr(self, f"do_{command}")
        return call(**fields, fds=fds) if fds else call(**fields)

    def close(self) -> None:
        """Let go of everything."""
        for region in self._regions.values():
            region.close()
        self._regions.clear()
        self._own.clear()
        if self._context is not None:
            self._context.close()
            self._context = None

    @property
    def driver(self) -> Driver:
        """The driver, loaded when it is first needed."""
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    # -- Devices -----------------------------------------------------------------------

    def do_describe(self) -> Answer:
        """Say what device this is."""
        driver = self.driver
        device = driver.device(self._ordinal)
        sharing = find_sharing(driver, self._ordinal)
        return {
            "count": driver.device_count(),
            "name": driver.device_name(device),
            "uuid": driver.device_uuid(device),
            "cuda": driver.version(),
            "sharing": sharing.kind,
            "detail": sharing.detail,
        }, ()

    def do_hold_context(self) -> Answer:
        """Have a context, as every mover and engine does."""
        if self._context is None:
            self._context = DeviceContext(self.driver, self._ordinal)
        return {}, ()

    def do_free_bytes(self) -> Answer:
        """Return the device's free memory, of all processes."""
        self.do_hold_context()
        assert self._context is not None  # made above, for the type checker
        with self._context.use() as driver:
            return {"free_bytes": driver.free_bytes()}, ()

    # -- Memory ------------------------------------------------------------------------

    def do_allocate(self, *, name: str, kind: str, size_bytes: int, seed: int) -> Answer:
        """Allocate memory with a pattern in it; ``kind`` may be empty for whichever works."""
        return self.keep(name, self._allocate(kind, size_bytes), seed)

    def keep(self, name: str, kv: DeviceKv, seed: int | None) -> Answer:
        """Take over memory under a name; returns what it is registered by."""
        layout = as_layout(kv.size_bytes, 1, kv.size_bytes)
        self._own[name] = kv
        self._regions[name] = DeviceRegion(kv.memory, layout, writable=True)
        if seed is not None:
            write_pattern(self._regions[name], seed)
        registered = {"kind": kv.kind, "device": kv.device, "handle": kv.handle.hex()}
        return {**registered, "size_bytes": kv.size_bytes, "address": kv.address}, kv.fds

    def _allocate(self, kind: str, size_bytes: int) -> DeviceKv:
        driver = self.driver
        if not kind:
            return allocate_kv(self._ordinal, size_bytes, load=lambda: driver)
        device = driver.device_uuid(driver.device(self._ordinal))
        memory: VmmMemory | IpcMemory
        if kind == CUDA_VMM:
            memory = create_vmm(driver, self._ordinal, size_bytes)
        else:
            memory = create_ipc(driver, self._ordinal, size_bytes)
        return DeviceKv(kind, device, memory, kind)

    def do_open(
        self,
        *,
        name: str,
        kind: str,
        device: str,
        handle: str,
        size_bytes: int,
        writable: bool,
        fds: list[int] | None = None,
    ) -> Answer:
        """Open another process's memory."""
        (fd,) = fds or (-1,)
        described = DeviceHandle(kind=kind, device=device, fd=fd, handle=bytes.fromhex(handle))
        layout = as_layout(size_bytes, 1, size_bytes)
        region = open_device_region(self.driver, described, layout, writable=writable)
        self._regions[name] = region
        access = getattr(region.memory, "access", None)
        return {"access": "" if access is None else access.name}, ()

    def do_fill(self, *, name: str, seed: int) -> Answer:
        """Write a pattern."""
        write_pattern(self._regions[name], seed)
        return {}, ()

    def do_clear(self, *, name: str) -> Answer:
        """Write zeros."""
        region = self._regions[name]
        with region.memory.context.use() as driver:
            driver.fill(region.memory.address, 0, region.layout.size)
            driver.synchronise(0)
        return {}, ()

    def do_digest(self, *, name: str) -> Answer:
        """Return the digest of what lies there."""
        return {"digest": read_digest(self._regions[name])}, ()

    def do_close(self, *, name: str) -> Answer:
        """Let go of memory."""
        self._regions.pop(name).close()
        self._own.pop(name, None)
        return {}, ()

    # -- Copying -----------------------------------------------------------------------

    def do_raw_copy(self, *, source: str, target: str, rounds: int) -> Answer:
        """Measure one copy of everything by one call: the ceiling."""
        origin, region = self._regions[source], self._regions[target]
        size = region.layout.size
        with region.memory.context.use() as driver, _stream(driver) as stream:
            best = _best_seconds(
                lambda: driver.copy_on_device(
                    region.memory.address, origin.memory.address, size, stream
                ),
                driver,
                stream,
                rounds,
            )
        return {"bytes_per_second": size / best}, ()

    def do_pull(
        self,
        *,
        source: str,
        target: str,
        path: str,
        layers: int,
        block_bytes: int,
        in_order: bool,
        rounds: int,
    ) -> Answer:
        """Pull all blocks by our own code, under a lease; returns the best of some rounds."""
        layout = as_layout(self._regions[target].layout.size, layers, block_bytes)
        origin = self._as(source, layout)
        into = self._as(target, layout)
        order = np.arange(layout.blocks)
        if not in_order:
            order = np.random.default_rng(1).permutation(layout.blocks)
        blocks = tuple(order.tolist())
        with closing(create_memory(4096)) as slots_memory:
            slots = SlotTable(slots_memory.view)
            expires_at_ms = monotonic_ms() + int(_PULL_SECONDS * 2000)
            fence = Fence(0, slots.open(0, expiry_ms=expires_at_ms))
            request = PullRequest(
                ticket=_TICKET, first_block=0, source_blocks=blocks, source_layout=layout,
                target_blocks=blocks, fence=fence,
            )  # fmt: skip
            grant = Grant(
                ticket=_TICKET, block_ids=blocks, fence=fence, expires_at_ms=expires_at_ms
            )
            reports = self._pull(path, Source(origin, slots), into, grant, request, rounds)
            del slots
        best = min(reports, key=lambda report: report.seconds)
        return {
            "bytes_per_second": best.size_bytes / best.seconds,
            "pieces": best.pieces,
            "path": best.path.name,
            "detail": best.path.detail,
        }, ()

    def _pull(
        self,
        path: str,
        source: Source,
        target: DeviceRegion,
        grant: Grant,
        request: PullRequest,
        rounds: int,
    ) -> list[Any]:
        driver = self.driver
        stop = Stop(monotonic_ms() + int(_PULL_SECONDS * 1000))
        if path == "cuda":
            link = CudaBackend(load=lambda: driver).link(source, target)
            return self._rounds(link, request, stop, rounds)
        # The engine's environment, which torch's players run in, has no xxhash.
        from nearkv.transfer.backends.tcp import TcpBackend  # noqa: PLC0415 (see above)

        backend = TcpBackend()
        with closing(backend.serve(source)) as server:
            link = backend.connect(server.offer(grant), target, stop)
            return self._rounds(link, request, stop, rounds)

    def _rounds(self, link: Link, request: PullRequest, stop: Stop, rounds: int) -> list[Any]:
        with closing(link):
            return [link.pull(request, stop) for _ in range(rounds)]

    def _as(self, name: str, layout: KvMemory) -> DeviceRegion:
        """Return a memory with another layout; the memory itself stays who owns it."""
        region = self._regions[name]
        region.layout = layout
        return region

    def do_pinned(self, *, size_bytes: int, rounds: int) -> Answer:
        """Measure copies between a pinned memfd and the device, both ways."""
        self.do_hold_context()
        assert self._context is not None  # made above, for the type checker
        data = pattern(3, size_bytes).tobytes()
        with ExitStack() as undo:
            host = undo.enter_context(closing(create_memory(size_bytes)))
            driver = undo.enter_context(self._context.use())
            pointer = address_of(host.view)
            host.view[:] = data
            driver.pin(pointer, size_bytes)
            undo.callback(driver.unpin, pointer)
            device = driver.allocate(size_bytes)
            undo.callback(driver.free, device)
            stream = undo.enter_context(_stream(driver))
            to_device = _best_seconds(
                lambda: driver.copy_to_device(device, pointer, size_bytes, stream),
                driver,
                stream,
                rounds,
            )
            host.view[:] = bytes(size_bytes)
            to_host = _best_seconds(
                lambda: driver.copy_to_host(pointer, device, size_bytes, stream),
                driver,
                stream,
                rounds,
            )
            right = bytes(host.view) == data
        speeds = {"to_device": size_bytes / to_device, "to_host": size_bytes / to_host}
        return {**speeds, "right": right}, ()

    def do_pid(self) -> Answer:
        """Say which process this is, by its own count."""
        return {"pid": os.getpid()}, ()


@contextmanager
def _stream(driver: Driver) -> Iterator[int]:
    stream = driver.create_stream()
    try:
        yield stream
    finally:
        driver.destroy_stream(stream)


def _best_seconds(copy: Callable[[], None], driver: Driver, stream: int, rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        copy()
        driver.synchronise(stream)
        best = min(best, time.perf_counter() - began)
    return best
