"""Leases: the fence in shared memory, and the agent's book."""

import mmap
import os

import pytest

from nearkv.transfer.errors import LeaseError, Reason
from nearkv.transfer.lease import SLOT_BYTES, LeaseBook, SlotState, SlotTable, check_fence

FAR = 1 << 40


def refused(reason, call, *arguments, **options):
    with pytest.raises(LeaseError) as error:
        call(*arguments, **options)
    assert error.value.reason is reason


@pytest.fixture
def table():
    return SlotTable(bytearray(4 * SLOT_BYTES))


def test_a_reader_passes_while_the_slot_is_open(table):
    generation = table.open(1, expiry_ms=FAR)
    check_fence(table, 1, generation, now_ms=0)
    table.close(1)
    refused(Reason.STALE, check_fence, table, 1, generation, now_ms=0)


def test_blocks_reused_between_the_checks_are_seen_even_when_leased_again(table):
    generation = table.open(1, expiry_ms=FAR)
    check_fence(table, 1, generation, now_ms=0)  # before the copy
    table.close(1)
    again = table.open(1, expiry_ms=FAR)
    assert again != generation
    refused(Reason.STALE, check_fence, table, 1, generation, now_ms=0)  # after it


def test_an_expired_slot_does_not_count(table):
    generation = table.open(0, expiry_ms=1000)
    refused(Reason.EXPIRED, check_fence, table, 0, generation, now_ms=1000)
    table.extend(0, generation, expiry_ms=2000)
    check_fence(table, 0, generation, now_ms=1999)


def test_a_closed_slot_cannot_be_extended(table):
    generation = table.open(0, expiry_ms=1000)
    table.close(0)
    refused(Reason.STALE, table.extend, 0, generation, expiry_ms=2000)


def test_a_slot_is_open_once(table):
    table.open(0, expiry_ms=1)
    refused(Reason.RANGE, table.open, 0, expiry_ms=1)


@pytest.mark.parametrize("index", [-1, 4, 1 << 40])
def test_slots_outside_the_table_are_refused(table, index):
    refused(Reason.RANGE, table.read, index)


@pytest.mark.parametrize("size", [0, 15, 17])
def test_a_table_of_an_odd_size_is_refused(size):
    refused(Reason.MALFORMED, SlotTable, bytearray(size))


def test_generations_wrap(table):
    table._write(2, table.read(2).__class__((1 << 32) - 1, SlotState.CLOSED, 0))
    generation = table.open(2, expiry_ms=FAR)
    table.close(2)
    assert table.read(2).generation == 0
    assert generation == (1 << 32) - 1


def test_the_table_is_shared_through_a_memfd():
    descriptor = os.memfd_create("leases")
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        with (
            mmap.mmap(descriptor, mmap.PAGESIZE) as writer,
            mmap.mmap(descriptor, mmap.PAGESIZE, prot=mmap.PROT_READ) as reader,
            memoryview(writer) as written,
            memoryview(reader) as seen,
        ):
            engine, mover = SlotTable(written), SlotTable(seen)
            generation = engine.open(3, expiry_ms=FAR)
            check_fence(mover, 3, generation, now_ms=0)
            engine.close(3)
            refused(Reason.STALE, check_fence, mover, 3, generation, now_ms=0)
            engine._view.release()
            mover._view.release()
    finally:
        os.close(descriptor)


@pytest.fixture
def book():
    return LeaseBook(ttl_seconds=30.0, limit=3)


def opened(book, name="l", now=0.0, engine="p", epoch="e1"):
    return book.open(name, engine=engine, epoch=epoch, slot=0, generation=1, now=now)


def test_a_lease_is_used_until_its_time_is_up(book):
    opened(book)
    assert book.use("l", epoch="e1", now=29.9).engine == "p"
    refused(Reason.EXPIRED, book.use, "l", epoch="e1", now=30.0)


def test_renewal_counts_from_now(book):
    opened(book)
    book.renew("l", epoch="e1", now=20.0)
    assert book.expire(40.0) == []
    assert [lease.id for lease in book.expire(50.0)] == ["l"]
    refused(Reason.UNKNOWN_LEASE, book.use, "l", epoch="e1", now=50.0)


def test_another_boot_has_no_claim(book):
    opened(book)
    refused(Reason.EPOCH, book.use, "l", epoch="e2", now=1.0)
    refused(Reason.EPOCH, book.renew, "l", epoch="e2", now=1.0)


def test_release_is_idempotent(book):
    opened(book)
    assert book.release("l") is not None
    assert book.release("l") is None


def test_a_dead_engine_s_leases_end_with_it(book):
    opened(book, "a", engine="p1")
    opened(book, "b", engine="p2")
    assert [lease.id for lease in book.drop_engine("p1")] == ["a"]
    assert len(book) == 1


def test_the_book_has_a_limit_and_ids_are_unique(book):
    for name in "abc":
        opened(book, name)
    refused(Reason.RANGE, opened, book, "d")
    refused(Reason.RANGE, opened, book, "a")
