"""Memory of one process in another: by descriptor, by handle, and whichever works."""

import os

import pytest

from nearkv.transfer.cuda.abi import Access
from nearkv.transfer.cuda.allocation import allocate_kv
from nearkv.transfer.cuda.context import DeviceContext
from nearkv.transfer.cuda.ipc import create_ipc, open_ipc
from nearkv.transfer.cuda.probe import find_sharing
from nearkv.transfer.cuda.vmm import create_vmm, import_vmm
from nearkv.transfer.errors import PullError, Reason
from tests.transfer.cuda.fake_machine import GRANULARITY

SIZE = GRANULARITY + 5
"""Not a multiple of what the device allocates in."""


def library_of(driver):
    return driver._library


def fill(driver, memory, value):
    with memory.context.use():
        driver.fill(memory.address, value, memory.size_bytes)


def test_memory_made_here_is_seen_there_and_the_other_way_round(engine, mover):
    ours = create_vmm(engine, 0, SIZE)
    theirs = import_vmm(mover, 0, ours.fd, SIZE, writable=True)
    assert not any(library_of(mover).bytes_at(theirs.address, SIZE))  # it begins with zeros
    fill(engine, ours, 7)
    assert bytes(library_of(mover).bytes_at(theirs.address, SIZE)) == b"\x07" * SIZE
    fill(mover, theirs, 9)
    assert bytes(library_of(engine).bytes_at(ours.address, SIZE)) == b"\x09" * SIZE
    theirs.close()
    ours.close()


def test_sizes_are_rounded_to_what_the_device_allocates_in(engine, machine):
    memory = create_vmm(engine, 0, SIZE)
    assert (memory.size_bytes, memory.mapped_bytes) == (SIZE, 2 * GRANULARITY)
    assert machine.used(0) == 2 * GRANULARITY
    memory.close()
    assert machine.used(0) == 0


def test_the_descriptor_is_not_inherited_and_may_be_closed_once_it_was_opened(engine, mover):
    ours = create_vmm(engine, 0, SIZE)
    assert not os.get_inheritable(ours.fd)
    copy = os.dup(ours.fd)
    theirs = import_vmm(mover, 0, copy, SIZE, writable=True)
    os.close(copy)
    fill(mover, theirs, 1)
    theirs.close()
    ours.close()
    assert ours.fd == -1
    ours.close()
    theirs.close()


def test_a_source_is_mapped_for_reading_only(engine, mover):
    ours = create_vmm(engine, 0, SIZE)
    theirs = import_vmm(mover, 0, ours.fd, SIZE, writable=False)
    assert theirs.access is Access.READ
    with pytest.raises(PullError, match="cuMemsetD8_v2"):
        fill(mover, theirs, 1)
    theirs.close()
    ours.close()


def test_where_a_driver_knows_no_read_only_memory_both_are_allowed(engine, make_driver):
    mover, _ = make_driver(read_only=False)
    ours = create_vmm(engine, 0, SIZE)
    theirs = import_vmm(mover, 0, ours.fd, SIZE, writable=False)
    assert theirs.access is Access.READ_WRITE
    theirs.close()
    ours.close()


def test_memory_that_is_smaller_than_expected_is_refused(engine, mover):
    ours = create_vmm(engine, 0, SIZE)
    with pytest.raises(PullError, match="cuMemMap") as caught:
        import_vmm(mover, 0, ours.fd, 3 * GRANULARITY, writable=False)
    assert caught.value.reason is Reason.MEMORY
    ours.close()


def test_other_descriptors_are_refused(mover):
    ends = os.pipe()
    memfd = os.memfd_create("not-a-devices")
    for fd in (*ends, memfd):
        with pytest.raises(PullError, match="cuMemImportFromShareableHandle") as caught:
            import_vmm(mover, 0, fd, SIZE, writable=False)
        assert caught.value.reason is Reason.MEMORY
        os.close(fd)


@pytest.mark.parametrize("size", [0, -1])
def test_no_memory_at_all_is_refused(engine, size):
    for create in (create_vmm, create_ipc):
        with pytest.raises(PullError, match="bytes of device memory"):
            create(engine, 0, size)


def test_more_memory_than_there_is_is_refused(engine):
    for create in (create_vmm, create_ipc):
        with pytest.raises(PullError, match="OUT_OF_MEMORY") as caught:
            create(engine, 0, 1 << 30)
        assert caught.value.reason is Reason.MEMORY


CREATING = [
    "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuMemGetAllocationGranularity",
    "cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemsetD8_v2",
    "cuStreamSynchronize", "cuMemExportToShareableHandle",
]  # fmt: skip
IMPORTING = [*CREATING[:3], "cuMemImportFromShareableHandle", *CREATING[4:7]]


@pytest.mark.parametrize("call", CREATING)
def test_whatever_fails_while_it_is_made_nothing_is_left(make_driver, call):
    driver, library = make_driver()
    library.fail[call] = 999
    with pytest.raises(PullError, match=call):
        create_vmm(driver, 0, SIZE)


@pytest.mark.parametrize("call", IMPORTING)
def test_whatever_fails_while_it_is_opened_nothing_is_left(engine, make_driver, call):
    driver, library = make_driver()
    ours = create_vmm(engine, 0, SIZE)
    library.fail[call] = 999
    with pytest.raises(PullError, match=call):
        import_vmm(driver, 0, ours.fd, SIZE, writable=False)
    ours.close()


@pytest.mark.parametrize(
    "call", ["cuMemAlloc_v2", "cuMemsetD8_v2", "cuStreamSynchronize", "cuIpcGetMemHandle"]
)
def test_whatever_fails_with_a_handle_nothing_is_left(make_driver, call):
    driver, library = make_driver()
    library.fail[call] = 999
    with pytest.raises(PullError, match=call):
        create_ipc(driver, 0, SIZE)


def test_an_unmap_that_fails_is_told_and_the_rest_is_done(make_driver):
    driver, library = make_driver()
    memory = create_vmm(driver, 0, SIZE)
    library.fail["cuMemUnmap"] = 999
    with pytest.raises(PullError, match="cuMem"):
        memory.close()
    assert "cuMemRelease" in library.calls
    assert not library.contexts
    library.fail.clear()
    library.faults.clear()
    library.die()


def test_memory_of_an_engine_that_died_stays_until_its_reader_lets_go(machine, make_driver, mover):
    driver, library = make_driver()
    ours = create_vmm(driver, 0, SIZE)
    theirs = import_vmm(mover, 0, ours.fd, SIZE, writable=False)
    os.close(ours.fd)
    library.die()
    assert machine.used(0) == 2 * GRANULARITY
    theirs.close()
    assert machine.used(0) == 0


def test_the_kernel_takes_back_everything_of_a_mover_that_died(machine, engine, make_driver):
    driver, library = make_driver()
    ours = create_vmm(engine, 0, SIZE)
    import_vmm(driver, 0, ours.fd, SIZE, writable=False)
    library.die()
    ours.close()
    assert machine.used(0) == 0


def test_a_handle_opens_memory_in_another_process(engine, mover):
    ours = create_ipc(engine, 0, SIZE)
    theirs = open_ipc(mover, 0, ours.handle, SIZE)
    fill(engine, ours, 3)
    assert bytes(library_of(mover).bytes_at(theirs.address, SIZE)) == b"\x03" * SIZE
    theirs.close()
    ours.close()
    theirs.close()
    ours.close()


def test_handles_that_are_none_are_refused(engine, mover):
    ours = create_ipc(engine, 0, SIZE)
    for handle, message in (
        (b"", "has 64 bytes, this one 0"),
        (b"x" * 64, "INVALID_HANDLE"),
        (ours.handle[:-1] + bytes([ours.handle[-1] ^ 1]), "INVALID_HANDLE"),
    ):
        with pytest.raises(PullError, match=message) as caught:
            open_ipc(mover, 0, handle, SIZE)
        assert caught.value.reason is Reason.MEMORY
    with pytest.raises(PullError, match="INVALID_HANDLE"):
        open_ipc(engine, 0, ours.handle, SIZE)  # its own process
    ours.close()


def test_an_allocation_smaller_than_the_layout_is_refused(engine, mover):
    ours = create_ipc(engine, 0, SIZE)
    with pytest.raises(PullError, match=f"has {SIZE} bytes, the layout needs {SIZE + 1}"):
        open_ipc(mover, 0, ours.handle, SIZE + 1)
    ours.close()


def test_descriptors_are_the_first_choice(engine):
    found = find_sharing(engine, 0)
    assert (found.kind, found.detail) == ("cuda_vmm", "cuda_vmm works")


@pytest.mark.parametrize(
    ("lacking", "why"), [("virtual_memory", "no virtual"), ("descriptors", "no posix")]
)
def test_handles_are_the_second_choice_of_a_device_that_lacks_something(
    machine, engine, lacking, why
):
    setattr(machine.devices[0], lacking, 0)
    found = find_sharing(engine, 0)
    assert found.kind == "cuda_ipc"
    assert why in found.detail


@pytest.mark.parametrize("call", ["cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"])
def test_handles_are_the_second_choice_where_descriptors_do_not_work(make_driver, call):
    driver, library = make_driver()
    library.fail[call] = 304
    found = find_sharing(driver, 0)
    assert found.kind == "cuda_ipc"
    assert f"{call}: CUDA error 304" in found.detail


def test_where_neither_works_both_reasons_are_told(make_driver):
    driver, library = make_driver()
    library.fail.update(cuMemCreate=801, cuIpcGetMemHandle=800)
    found = find_sharing(driver, 0)
    assert found.kind == ""
    for text in ("cuMemCreate", "cuIpcGetMemHandle", "NOT_SUPPORTED", "NOT_PERMITTED"):
        assert text in found.detail
    with pytest.raises(PullError, match=r"cannot be shared here: .*cuMemCreate") as caught:
        allocate_kv(0, SIZE, load=lambda: driver)
    assert caught.value.reason is Reason.MEMORY


def test_a_device_that_is_not_there_ends_the_probe_without_an_error(engine):
    assert find_sharing(engine, 7).kind == ""


@pytest.mark.parametrize("kind", ["cuda_vmm", "cuda_ipc"])
def test_kv_memory_says_how_it_is_registered(make_driver, machine, kind):
    driver, library = make_driver()
    if kind == "cuda_ipc":
        library.fail["cuMemCreate"] = 801
    kv = allocate_kv(1, SIZE, load=lambda: driver)
    assert (kv.kind, kv.device, kv.size_bytes) == (kind, machine.devices[1].name, SIZE)
    assert len(kv.fds) == (kind == "cuda_vmm")
    assert len(kv.handle) == (64 if kind == "cuda_ipc" else 0)
    assert not any(library.bytes_at(kv.address, SIZE))
    kv.close()


def test_a_failed_allocation_leaves_nothing_of_the_probe(make_driver, machine):
    driver, _ = make_driver()
    with pytest.raises(PullError, match="OUT_OF_MEMORY"):
        allocate_kv(0, 1 << 30, load=lambda: driver)
    assert machine.used(0) == 0


def test_a_context_that_another_part_of_the_process_holds_stays(engine):
    torchs = DeviceContext(engine, 0)
    create_vmm(engine, 0, SIZE).close()
    with torchs.use() as driver:
        assert driver.free_bytes() == 64 << 20
    torchs.close()
