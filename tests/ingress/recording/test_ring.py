"""The ring: bounded by bytes, found by id."""

import msgspec

from nearkv.ingress.recording.ring import RecordRing
from nearkv.ingress.tracing.context import TraceContext
from tests.ingress.recording.request_records import served


def ids(ring):
    return [record.request_id for record in ring.latest()]


def size_of(record):
    ring = RecordRing(limit_bytes=1 << 20)
    ring.add(record)
    return ring.size_bytes


def ring_of(count, room):
    ring = RecordRing(limit_bytes=size_of(served(id="r0")) * room)
    for number in range(count):
        ring.add(served(id=f"r{number}"))
    return ring


def test_the_oldest_go_first():
    ring = ring_of(5, room=3)
    assert ids(ring) == ["r4", "r3", "r2"]
    assert ring.get("r1") is None
    assert ring.get("r2").request_id == "r2"
    assert ring.oldest.request_id == "r2"
    assert ring.size_bytes <= ring.limit_bytes


def test_the_latest_of_equal_ids_is_found_and_outlives_the_older():
    ring = RecordRing(limit_bytes=size_of(served(id="x")) * 2 + 50)
    ring.add(served(id="x"))
    latest = served(id="x")
    latest.engine = "another"
    ring.add(latest)
    ring.add(served(id="y"))
    assert ids(ring) == ["y", "x"]
    assert ring.get("x").engine == "another"


def test_one_that_is_over_the_bound_is_not_kept():
    ring = RecordRing(limit_bytes=10)
    ring.add(served())
    assert (len(ring), ring.size_bytes, ring.get("r"), ring.oldest) == (0, 0, None, None)


def test_a_record_comes_back_as_it_was_but_for_its_keys():
    record = served()
    record.keys = range(1 << 63, (1 << 63) + 3)
    record.trace = TraceContext(1 << 127, 1 << 63, 2, 0, sampled=True)
    ring = RecordRing(limit_bytes=1 << 20)
    ring.add(record)
    found = ring.get(record.request_id)
    assert len(record.keys) == 3, "others read the record, too"
    assert found.trace == record.trace
    assert found == msgspec.structs.replace(record, keys=[])


def test_candidates_count():
    assert size_of(served(candidates=[])) < size_of(served())
