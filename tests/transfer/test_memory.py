"""Memfds: what the creator makes, and what a reader insists on before it maps one."""

import fcntl
import gc
import mmap
import os
import resource
import tempfile
from pathlib import Path

import numpy as np
import pytest

from nearkv.transfer.errors import LeaseError, PullError, Reason
from nearkv.transfer.layout import KvMemory
from nearkv.transfer.lease import SLOT_BYTES, SlotTable
from nearkv.transfer.memory import (
    HUGE_PAGE_BYTES,
    address_of,
    create_memory,
    create_slots,
    open_region,
    open_slots,
)

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def layout(size=8192):
    return KvMemory(
        size=size, layers=1, blocks=2, layer_stride=size, block_stride=size // 2,
        block_bytes=size // 2,
    )  # fmt: skip


@pytest.fixture
def memory():
    memory = create_memory(8192)
    yield memory
    memory.close()


@pytest.fixture
def make_fd():
    fds = []

    def make(size, seals=SEALS, flags=os.MFD_ALLOW_SEALING):
        fds.append(os.memfd_create("nearkv-test", flags))
        os.ftruncate(fds[-1], size)
        if seals:
            fcntl.fcntl(fds[-1], fcntl.F_ADD_SEALS, seals)
        return fds[-1]

    yield make
    for fd in fds:
        os.close(fd)


def mapped_memfds():
    gc.collect()  # what other tests left behind must not go in the middle of this one
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:" in line]


def test_two_mappings_show_the_same_bytes(memory):
    region = open_region(memory.fd, layout(), writable=True)
    memory.view[5] = 77
    region.view[8191] = 78
    assert (region.view[5], memory.view[8191]) == (77, 78)
    assert len(region.view) == len(memory.view) == 8192


def test_sources_are_mapped_for_reading_only(memory):
    region = open_region(memory.fd, layout(), writable=False)
    assert region.view.readonly
    with pytest.raises(TypeError):
        region.view[0] = 1


def test_created_memory_can_neither_shrink_nor_grow_nor_lose_its_seals(memory):
    for size in (4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_created_memory_is_not_inherited_by_programs(memory):
    assert not os.get_inheritable(memory.fd)


@pytest.mark.parametrize("size", [2, 4098, HUGE_PAGE_BYTES + 6, 3 * HUGE_PAGE_BYTES])
def test_created_memory_is_all_there_and_zero_and_on_a_huge_page_boundary(size):
    memory = create_memory(size)
    assert os.fstat(memory.fd).st_blocks * 512 >= size
    region = open_region(memory.fd, layout(size), writable=True)
    assert not np.frombuffer(memory.view, np.uint8).any()
    assert memory.huge_bytes in (0, size - size % HUGE_PAGE_BYTES)
    for view in (memory.view, region.view):
        assert len(view) == size
        assert address_of(view) % HUGE_PAGE_BYTES == 0
    memory.close()


@pytest.mark.parametrize("writable", [False, True])
def test_mapped_memory_costs_no_page_faults(writable):
    size = HUGE_PAGE_BYTES // 2  # too small for a huge page, which would be one fault
    memory = create_memory(size)
    region = open_region(memory.fd, layout(size), writable=writable)
    array = np.frombuffer(region.view, np.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    if writable:
        array[:: mmap.PAGESIZE] = 1
    else:
        array[:: mmap.PAGESIZE].sum()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 8
    memory.close()


def test_closing_unmaps_and_may_be_done_twice():
    before = len(mapped_memfds())
    memory = create_memory(8192)
    region = open_region(memory.fd, layout(), writable=True)
    assert len(mapped_memfds()) == before + 2
    memory.close()
    memory.close()
    assert len(mapped_memfds()) == before + 1
    region.view[0] = 1  # the reader's mapping outlives the creator's
    region.view.release()
    assert len(mapped_memfds()) == before


@pytest.mark.parametrize("size", [0, -1, 1 << 62, 1 << 70], ids=str)
def test_memory_that_cannot_be_is_refused(size):
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(PullError) as caught:
        create_memory(size)
    assert caught.value.reason is Reason.MEMORY
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


@pytest.mark.parametrize(
    ("seals", "missing"),
    [
        (0, "shrink, grow"),
        (fcntl.F_SEAL_SHRINK, "grow"),
        (fcntl.F_SEAL_GROW, "shrink"),
    ],
)
def test_memory_that_could_be_resized_is_refused(make_fd, seals, missing):
    assert_refused(make_fd(8192, seals), f"not sealed against: {missing}$")


def assert_refused(fd, message):
    before = len(mapped_memfds())
    for writable in (False, True):
        with pytest.raises(PullError, match=message) as caught:
            open_region(fd, layout(), writable=writable)
        assert caught.value.reason is Reason.MEMORY
    with pytest.raises(PullError, match=message):
        open_slots(fd, 8192 // SLOT_BYTES)
    assert len(mapped_memfds()) == before


@pytest.mark.parametrize("size", [0, 4096, 8191])
def test_memory_smaller_than_its_layout_is_refused(make_fd, size):
    assert_refused(make_fd(size), f"has {size} bytes, the layout needs 8192")


def test_a_memfd_shrunk_before_it_was_sealed_is_refused(make_fd):
    fd = make_fd(8192, seals=0)
    os.ftruncate(fd, 100)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    assert_refused(fd, "has 100 bytes")


def test_a_file_is_refused():
    with tempfile.TemporaryFile() as file:
        file.truncate(8192)
        assert_refused(file.fileno(), "not a memfd|not sealed")


def test_a_file_in_dev_shm_is_refused():
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(8192)
        assert_refused(file.fileno(), "not sealed against: shrink, grow")


def test_other_kinds_of_descriptors_are_refused():
    ends = os.pipe()
    null = os.open("/dev/null", os.O_RDWR)
    try:
        for fd in (ends[0], null):
            assert_refused(fd, "not a memfd")
    finally:
        for fd in (*ends, null):
            os.close(fd)
    assert_refused(ends[0], "Bad file descriptor")


def test_a_read_only_descriptor_maps_as_a_source_only(memory):
    fd = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY)
    try:
        open_region(fd, layout(), writable=False)
        with pytest.raises(PullError, match="cannot be mapped") as caught:
            open_region(fd, layout(), writable=True)
        assert caught.value.reason is Reason.MEMORY
    finally:
        os.close(fd)


def test_slots_are_shared_with_a_reader_that_cannot_write_them():
    memory = create_slots(4)
    engine, reader = SlotTable(memory.view), open_slots(memory.fd, 4)
    generation = engine.open(3, expiry_ms=123)
    assert (len(reader), reader.read(3).expiry_ms) == (4, 123)
    engine.close(3)
    assert reader.read(3).generation == generation + 1
    with pytest.raises((TypeError, LeaseError)):
        reader.close(3)
    del engine
    memory.close()
