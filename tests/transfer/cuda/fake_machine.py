"""Devices that exist in Python only, with their memory: what all fake processes share."""

import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path

OK, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 0, 1, 2, 3
INVALID_DEVICE, INVALID_CONTEXT, INVALID_HANDLE, NOT_READY, NOT_SUPPORTED = 101, 201, 400, 600, 801
ILLEGAL_ADDRESS = 700
GRANULARITY = 1 << 16
READ, READ_WRITE = 1, 3


class Physical:
    """Memory of a device; it stays while anything refers to it."""

    def __init__(self, device, size, *, exportable):
        self.device = device
        self.bytes = bytearray(b"\xcd" * size)  # not zeroed, as the real one may not be
        self.exportable = exportable
        self.references = 0


@dataclass
class Device:
    uuid: bytes = field(default_factory=lambda: uuid.uuid4().bytes)
    total: int = 64 << 20
    virtual_memory: int = 1
    descriptors: int = 1
    peers: bool = True

    @property
    def name(self):
        digits = self.uuid.hex()
        return f"GPU-{uuid.UUID(digits)}"


class Devices:
    """Devices, the physical memory in use, and what was exported."""

    def __init__(self, devices=1):
        self.devices = [Device() for _ in range(devices)]
        self.memory = []
        self.exports = {}
        self.ipc = {}
        self.processes = []

    def used(self, device):
        return sum(len(m.bytes) for m in self.memory if m.device == device)

    def acquire(self, physical):
        physical.references += 1

    def release(self, physical):
        physical.references -= 1
        if not physical.references:
            self.memory.remove(physical)

    def descriptors_left(self):
        """Return how many descriptors of exported memory are open in this (real) process."""
        count = 0
        for path in Path("/proc/self/fd").iterdir():
            try:
                status = os.fstat(int(path.name))
            except OSError:
                continue
            count += (status.st_dev, status.st_ino) in self.exports
        return count

    def check(self):
        """Raise when anything was done wrong, or left behind."""
        for process in self.processes:
            process.check()
        left = self.descriptors_left()
        assert not left, f"{left} descriptors of device memory were left open"
        assert not self.memory, f"{len(self.memory)} pieces of device memory were not freed"


@dataclass
class Mapping:
    physical: Physical
    size: int
    kind: str
    handle: int = 0
    access: dict = field(default_factory=dict)
