"""vLLM's one allocation on a device, answered with memory that can be shared.

That torch itself takes the memory is for ``make check-gpu`` to show.
"""

import sys
from functools import partial
from types import SimpleNamespace

import pytest

from nearkv.transfer.connector.allocation import KvAllocation, locate_blocks
from nearkv.transfer.cuda.allocation import allocate_kv
from nearkv.transfer.cuda.driver import Driver
from nearkv.transfer.cuda.engine_checks import why_not_shared
from nearkv.transfer.errors import PullError, Reason, TransferError
from tests.transfer.cuda.fake_machine import GRANULARITY
from tests.transfer.cuda.torch_stand_in import make_torch

SIZE = 3 * GRANULARITY + 512


@pytest.fixture
def torch(monkeypatch):
    torch = make_torch(current_device=1)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


@pytest.fixture
def library(machine):
    return machine.process()


@pytest.fixture
def allocation(library):
    driver = Driver(library)
    driver.initialise()
    allocation = KvAllocation(allocate_on_device=partial(allocate_kv, load=lambda: driver))
    yield allocation
    if allocation.memory is not None:
        allocation.memory.close()


def test_the_buffer_lies_in_memory_that_can_be_shared(torch, allocation, library, machine):
    with allocation.context():
        tensor = torch.zeros(SIZE, dtype=torch.int8, device="cuda:0")
    assert torch.plain == []
    assert tensor.data_ptr() == allocation.base_address == allocation.memory.address
    assert not any(library.bytes_at(tensor.data_ptr(), SIZE))
    assert allocation.size_bytes == SIZE
    shared = allocation.shared
    assert (shared.kind, shared.device) == ("cuda_vmm", machine.devices[0].name)
    assert (len(shared.fds), shared.handle) == (1, b"")
    assert tensor.owner.kv is allocation.memory  # as long as there is a tensor, there is memory


def test_a_device_without_a_number_is_torchs_current_one(torch, allocation, machine):
    with allocation.context():
        torch.zeros(SIZE, dtype=torch.int8, device=torch.device("cuda"))
    assert allocation.shared.device == machine.devices[1].name


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        ((2, SIZE), {"dtype": "int8", "device": "cuda"}),
        ((SIZE,), {"dtype": "float16", "device": "cuda"}),
        ((SIZE,), {"dtype": "int8", "device": "meta"}),
    ],
    ids=["not flat", "another type", "another device"],
)
def test_other_allocations_are_left_alone(torch, allocation, args, fields):
    with allocation.context():
        torch.zeros(*args, **fields)
    assert len(torch.plain) == 1
    assert allocation.memory is None
    with pytest.raises(PullError, match="not in shared memory") as caught:
        _ = allocation.shared
    assert caught.value.reason is Reason.MEMORY


def test_only_the_first_buffer_is_answered_so(torch, allocation):
    with allocation.context():
        torch.zeros(SIZE, dtype=torch.int8, device="cuda")
        torch.zeros(512, dtype=torch.int8, device="cuda")
    assert [tensor.size for tensor in torch.plain] == [512]


def test_nothing_is_answered_behind_the_context(torch, allocation):
    with allocation.context():
        pass
    torch.zeros(SIZE, dtype=torch.int8, device="cuda")
    assert allocation.memory is None


def refusal_of(allocation):
    with pytest.raises(TransferError) as caught:
        locate_blocks({}, [SimpleNamespace(layers=[])], 1, allocation)
    return caught.value


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        ({"cuMemCreate": 801, "cuIpcGetMemHandle": 801}, "cannot be shared here: cuda_vmm: "),
        ({"cuDeviceGetUuid_v2": 3}, "cuDeviceGetUuid_v2"),
    ],
    ids=["no way to share", "no device"],
)
def test_where_memory_cannot_be_shared_torch_allocates_and_the_reason_is_kept(
    torch, allocation, library, spoil, why
):
    library.fail.update(spoil)
    with allocation.context():
        tensor = torch.zeros(SIZE, dtype=torch.int8, device="cuda:0")
    assert torch.plain == [tensor]
    assert why in str(refusal_of(allocation))


def test_without_a_driver_torch_allocates(torch):
    allocation = KvAllocation()  # the real driver, which is not here
    with allocation.context():
        tensor = torch.zeros(SIZE, dtype=torch.int8, device="cuda:0")
    assert torch.plain == [tensor]
    assert refusal_of(allocation).reason in (Reason.NO_PATH, Reason.MEMORY)


@pytest.mark.parametrize("trouble", [RuntimeError("invalid pointer"), TypeError("what is that")])
def test_a_torch_that_does_not_take_the_memory_allocates_and_ours_is_freed(
    torch, allocation, machine, trouble
):
    torch.refuses = trouble
    with allocation.context():
        tensor = torch.zeros(SIZE, dtype=torch.int8, device="cuda:0")
    assert torch.plain == [tensor]
    assert machine.used(0) == 0
    assert "torch does not take the memory" in str(refusal_of(allocation))


def test_a_torch_that_copies_the_memory_allocates_and_ours_is_freed(torch, allocation, machine):
    torch.copies = True
    with allocation.context():
        tensor = torch.zeros(SIZE, dtype=torch.int8, device="cuda:0")
    assert torch.plain == [tensor]
    assert machine.used(0) == 0
    assert "made a copy" in str(refusal_of(allocation))


def test_memory_by_handle_is_registered_without_a_descriptor(torch, allocation, library):
    library.fail["cuMemCreate"] = 801
    with allocation.context():
        torch.zeros(SIZE, dtype=torch.int8, device="cuda:0")
    shared = allocation.shared
    assert (shared.kind, shared.fds, len(shared.handle)) == ("cuda_ipc", (), 64)


def config(device, **model):
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device), model_config=SimpleNamespace(**model)
    )


@pytest.mark.parametrize("name", ["enable_sleep_mode", "enable_cumem_allocator"])
def test_an_engine_that_may_sleep_is_refused_on_a_device(name):
    refusal = why_not_shared(config("cuda", **{name: True}))
    assert refusal.reason is Reason.MEMORY
    assert str(refusal).startswith(f"{name}: ")
    assert why_not_shared(config("cpu", **{name: True})) is None
    assert why_not_shared(config("cuda", **{name: False})) is None


def test_an_engine_that_never_heard_of_sleeping_is_not_refused():
    assert why_not_shared(config("cuda")) is None
