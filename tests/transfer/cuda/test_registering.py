"""How a worker registers device memory with the agent, on a real socket."""

import os
import tempfile
from pathlib import Path

import pytest

from nearkv.transfer.connector.allocation import SharedMemory
from nearkv.transfer.connector.settings import read_settings
from nearkv.transfer.connector.worker_side import WorkerSide
from nearkv.transfer.cuda.allocation import allocate_kv
from nearkv.transfer.messages import RegisterWorker
from tests.transfer.connector.conftest import QuietAgent
from tests.transfer.connector.test_worker_side import MEMORY, SAME


@pytest.fixture
def agent():
    with tempfile.TemporaryDirectory(prefix="nk-") as folder:
        agent = QuietAgent(Path(folder) / "agent.sock")
        yield agent
        agent.close()


@pytest.mark.parametrize("kind", ["cuda_vmm", "cuda_ipc"])
def test_device_memory_is_registered_by_what_opens_it(agent, machine, make_driver, kind):
    driver, library = make_driver()
    if kind == "cuda_ipc":
        library.fail["cuMemCreate"] = 801
    kv = allocate_kv(1, MEMORY.size, load=lambda: driver)
    side = WorkerSide(
        read_settings({"engine": "d", "socket": str(agent.path)}, {}), now_ms=lambda: 1000
    )
    shared = SharedMemory(kv.fds, kv.kind, kv.device, kv.handle)
    side.register(epoch="e1", shared=shared, memory=MEMORY, compatibility=SAME)
    hello = agent.register()
    side.close()
    assert isinstance(hello, RegisterWorker)
    assert (hello.memory_kind, hello.device) == (kind, machine.devices[1].name)
    assert (hello.handle, hello.fds) == (kv.handle, len(agent.fds)) == (kv.handle, len(kv.fds))
    for fd in agent.fds:
        assert os.path.sameopenfile(fd, kv.fds[0])
    while agent.fds:
        os.close(agent.fds.pop())
    kv.close()
