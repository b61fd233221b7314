"""A mover's parts with engines whose memory is on devices that exist in Python only."""

import os
import queue

import numpy as np
import pytest

from nearkv.agent.movers.backends import Backends
from nearkv.agent.movers.memories import SourceMemory, TargetMemory
from nearkv.agent.movers.messages import (
    AddSource,
    AddTarget,
    Forget,
    Forgotten,
    MemoryForm,
    Pull,
    PullFinished,
)
from nearkv.agent.movers.pulling import Puller
from nearkv.transfer.backends.contract import Fence, PullRequest, monotonic_ms
from nearkv.transfer.cuda import driver as driver_module
from nearkv.transfer.cuda.driver import Driver
from nearkv.transfer.errors import PullError, Reason
from nearkv.transfer.lease import SlotTable
from nearkv.transfer.memory import create_slots
from tests.agent.movers.engines import BLOCKS, LAYOUT, PATIENCE_MS
from tests.transfer.cuda.device_rig import Engine
from tests.transfer.cuda.fake_cuda import Machine


class Timer:
    """Takes the place of the kernel's timer, which would end the tests."""

    def arm(self, deadline_ms):
        pass

    def disarm(self):
        pass


class DeviceEngine:
    """One rank with KV memory on a device, and lease slot 0 open."""

    def __init__(self, machine, ordinal=0):
        self._engine = Engine(machine, LAYOUT.size, ordinal)
        self.bytes = self._engine.bytes
        self.bytes[:] = np.frombuffer(os.urandom(LAYOUT.size), np.uint8)
        self.slots = create_slots(4)
        generation = SlotTable(self.slots.view).open(0, expiry_ms=monotonic_ms() + PATIENCE_MS)
        self.fence = Fence(0, generation)
        kv = self._engine.kv
        self.form = MemoryForm(kind=kv.kind, device=kv.device, handle=kv.handle)

    def kv_fd(self):
        """Return a descriptor for a mover to own; of a handle's memory, one that stands for it."""
        (fd,) = self._engine.kv.fds or (None,)
        return os.open(os.devnull, os.O_RDONLY) if fd is None else os.dup(fd)

    def slots_fd(self):
        return os.dup(self.slots.fd)

    def block(self, layer, block):
        begin = layer * LAYOUT.layer_stride + block * LAYOUT.block_stride
        return self.bytes[begin : begin + LAYOUT.block_bytes].tobytes()

    def close(self):
        self.bytes = None
        self._engine.close()
        self.slots.close()


@pytest.fixture
def machine():
    machine = Machine(devices=2)
    yield machine
    machine.check()


@pytest.fixture(params=["by descriptor", "by handle"])
def engines(request, machine):
    for device in machine.devices:
        device.descriptors = int(request.param == "by descriptor")
    engines = [DeviceEngine(machine), DeviceEngine(machine)]
    yield engines
    for engine in engines:
        engine.close()


@pytest.fixture
def mover(machine, monkeypatch):
    """The driver's library of this process, which is a mover for the test."""
    library = machine.process()
    driver = Driver(library)
    driver.initialise()
    monkeypatch.setattr(driver_module, "load_driver", lambda: driver)
    return library


def test_memory_is_opened_when_it_is_needed_and_closed_when_told(engines, mover):
    p = engines[0]
    memory = SourceMemory(p.kv_fd(), p.slots_fd(), LAYOUT, 4, p.form)
    assert "cuDevicePrimaryCtxRetain" not in mover.calls
    assert memory.source().region.layout == LAYOUT
    assert mover.contexts
    assert memory.unmap()
    assert not mover.mappings
    assert memory.unmap()


def test_memory_that_the_driver_does_not_let_go_of_is_told(engines, mover):
    p = engines[0]
    memory = SourceMemory(p.kv_fd(), p.slots_fd(), LAYOUT, 4, p.form)
    memory.source()
    mover.fail.update(cuMemUnmap=999, cuIpcCloseMemHandle=999)
    assert not memory.unmap()
    mover.fail.clear()
    mover.faults.clear()
    mover.die()


def test_a_device_that_the_mover_does_not_see_is_told_each_time(engines, mover):
    d = engines[1]
    form = MemoryForm(kind=d.form.kind, device="GPU-of-another-pod", handle=d.form.handle)
    fd = d.kv_fd()
    memory = TargetMemory(fd, LAYOUT, form)
    for _ in range(2):
        with pytest.raises(PullError, match="GPU-of-another-pod") as caught:
            memory.region()
        assert caught.value.reason is Reason.NO_PATH
    os.close(fd)  # kept for the next try; a mover's end closes it


def test_a_mover_pulls_on_the_device_and_lets_go_of_a_source_that_leaves(engines, mover):
    p, d = engines
    answers = queue.SimpleQueue()
    puller = Puller(Backends(), Timer(), answers.put, threads=1, max_links=2)
    puller.add_target(AddTarget(layout=LAYOUT, form=d.form), [d.kv_fd()])
    puller.add_source(
        AddSource(key="p", layout=LAYOUT, slots=4, form=p.form), [p.kv_fd(), p.slots_fd()]
    )
    request = PullRequest(
        ticket=b"", first_block=0, source_blocks=BLOCKS, source_layout=LAYOUT,
        target_blocks=BLOCKS[::-1], fence=p.fence,
    )  # fmt: skip
    for number, backend in enumerate(["cuda", "cuda", "shm"]):
        deadline_ms = monotonic_ms() + PATIENCE_MS
        puller.pull(
            Pull(
                id=number, request=request, deadline_ms=deadline_ms, backend=backend, source_key="p"
            )
        )
        finished = answers.get(timeout=PATIENCE_MS / 1000)
        assert isinstance(finished, PullFinished)
        if backend == "shm":
            assert finished.reason == Reason.NO_PATH
            assert "moves host memory only" in finished.message
        else:
            assert (finished.reason, finished.message) == ("", "")
            assert finished.report.path.name == "cuda"
    for layer in range(LAYOUT.layers):
        for theirs, ours in zip(BLOCKS, BLOCKS[::-1], strict=True):
            assert d.block(layer, ours) == p.block(layer, theirs)
    assert len(mover.streams) == 1  # the link was kept for the second pull
    puller.forget(Forget(id=9, key="p"))
    assert answers.get(timeout=PATIENCE_MS / 1000) == Forgotten(id=9, unmapped=True)
    assert len(mover.mappings) == 1  # the target's
    assert not mover.streams
    puller._target.region().close()
