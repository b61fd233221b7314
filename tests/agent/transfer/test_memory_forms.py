"""What engines may say of their memory, and which way leads from one to the other."""

import os
import socket
import stat

import pytest

from nearkv.agent.movers.messages import HOST_MEMORY, MemoryForm
from nearkv.agent.transfer.memory_forms import (
    check_memory,
    path_within_node,
    paths_beyond_node,
    read_form,
)
from nearkv.agent.transfer.path_costs import PathPriors
from nearkv.path_cost import PathCost
from nearkv.transfer.backends.contract import Path
from nearkv.transfer.errors import PullError, Reason, TransferError
from nearkv.transfer.memory import create_memory
from tests.agent.transfer.test_registry import Desk, scheduler, worker

DEVICE = "GPU-0c0c0c0c-0000-0000-0000-000000000000"
VMM = MemoryForm(kind="cuda_vmm", device=DEVICE)
IPC = MemoryForm(kind="cuda_ipc", device=DEVICE, handle=b"h" * 64)


def registration(form, **fields):
    return worker(memory_kind=form.kind, device=form.device, handle=form.handle, **fields)


@pytest.fixture
def fds():
    """Descriptors that are closed in the end, as an agent does with what it was sent."""
    fds = []
    yield fds
    for fd in fds:
        os.close(fd)


def refusal(call):
    with pytest.raises(TransferError) as caught:
        call()
    return caught.value.reason, str(caught.value)


@pytest.mark.parametrize("form", [HOST_MEMORY, VMM, IPC], ids=lambda form: form.kind)
def test_what_was_registered_goes_on_to_the_movers(form):
    desk = Desk()
    desk.add(registration(form))
    desk.add(scheduler())
    (memory,) = desk.registry.find("e", "1").memories.values()
    assert memory.form == form


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"memory_kind": "hip"}, "memory_kind: 'hip'"),
        ({"memory_kind": "x" * 10_000}, "memory_kind"),
        ({"memory_kind": "cuda_vmm"}, "device"),
        ({"memory_kind": "cuda_vmm", "device": "d", "handle": b"h"}, "handle"),
        ({"memory_kind": "cuda_ipc", "device": "d"}, "handle"),
        ({"memory_kind": "cuda_ipc", "device": "d", "handle": b"h" * 63}, "handle"),
        ({"memory_kind": "cuda_ipc", "handle": b"h" * 64}, "device"),
        ({"handle": b"h" * 64}, "handle"),
        ({"memory_kind": "cuda_vmm", "device": "d" * 200}, "device"),
    ],
)
def test_memory_that_cannot_be_is_refused_by_the_registry(fields, names):
    desk = Desk()
    message = worker(**fields)
    assert desk.refusal(message) in (Reason.MEMORY, Reason.MALFORMED)
    _, text = refusal(lambda: read_form(message))
    assert names in text
    assert len(text) < 200


def test_a_memfd_must_be_sealed_as_ever(fds):
    message = worker()
    memory = create_memory(message.memory.size)
    fds.append(os.dup(memory.fd))
    check_memory(message, fds)
    memory.close()
    loose = [os.memfd_create("loose")]
    fds.extend(loose)
    assert refusal(lambda: check_memory(message, loose))[0] is Reason.MEMORY


@pytest.mark.parametrize("count", [0, 2])
def test_memory_brings_one_descriptor(fds, count):
    fds.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(count))
    for form in (HOST_MEMORY, VMM):
        assert refusal(lambda form=form: check_memory(registration(form), fds))[0] is (
            Reason.MALFORMED
        )


def test_a_devices_descriptor_is_a_file_of_its_driver_and_no_other(fds):
    fds.append(os.open(os.devnull, os.O_RDONLY))
    check_memory(registration(VMM), fds)
    ends = [*os.pipe(), *(end.detach() for end in socket.socketpair()), os.memfd_create("m")]
    ends.append(os.open("/", os.O_RDONLY))
    fds.extend(ends)
    for fd in ends:
        reason, text = refusal(lambda fd=fd: check_memory(registration(VMM), [fd]))
        assert reason is Reason.MEMORY
        assert "none of cuda_vmm memory" in text


def test_memory_with_a_handle_gets_a_descriptor_that_stands_for_it(fds):
    check_memory(registration(IPC), fds)
    assert len(fds) == 1
    assert stat.S_ISCHR(os.fstat(fds[0]).st_mode)
    assert not os.get_inheritable(fds[0])


def test_memories_of_one_kind_have_a_way_within_the_node():
    assert path_within_node(HOST_MEMORY, HOST_MEMORY) == "shm"
    for source in (VMM, IPC):
        for target in (VMM, IPC):
            assert path_within_node(source, target) == "cuda"


@pytest.mark.parametrize("pair", [(HOST_MEMORY, VMM), (IPC, HOST_MEMORY)])
def test_host_and_device_have_no_way_between_them(pair):
    with pytest.raises(PullError, match="no way from") as caught:
        path_within_node(*pair)
    assert caught.value.reason is Reason.NO_PATH


def test_a_path_on_devices_costs_what_a_path_within_the_node_costs_until_measured():
    near, far, slow = PathCost(0.001, 1e10), PathCost(0.002, 1e9), PathCost(0.003, 1e8)
    priors = PathPriors(same_node=near, rdma=far, tcp=slow)
    assert priors.of(Path(name="cuda")) == priors.of(Path(name="shm")) == near
    assert priors.of(Path(name="tcp")) == slow


def test_host_memory_goes_by_any_transport_and_device_memory_by_those_that_stage_it():
    assert paths_beyond_node(HOST_MEMORY, ("nixl", "ucx", "tcp")) == ["nixl", "ucx", "tcp"]
    for form in (VMM, IPC):
        assert paths_beyond_node(form, ("nixl", "tcp", "ucx")) == ["tcp"]
        with pytest.raises(PullError, match="none of nixl, ucx moves it") as caught:
            paths_beyond_node(form, ("nixl", "ucx"))
        assert caught.value.reason is Reason.NO_PATH
