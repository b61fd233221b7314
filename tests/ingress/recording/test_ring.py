"""The ring: bounded by bytes, found by id."""

from nearkv.ingress.recording.ring import RecordRing
from tests.ingress.recording.request_records import served


def ids(ring):
    return [record.request_id for record in ring.latest()]


def ring_of(count, room):
    size = served().size_bytes
    ring = RecordRing(limit_bytes=size * room)
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
    ring = RecordRing(limit_bytes=served().size_bytes * 2)
    ring.add(served(id="x"))
    latest = served(id="x")
    ring.add(latest)
    ring.add(served(id="y"))
    assert ids(ring) == ["y", "x"]
    assert ring.get("x") is latest


def test_one_that_is_over_the_bound_is_not_kept():
    ring = RecordRing(limit_bytes=10)
    ring.add(served())
    assert (len(ring), ring.size_bytes, ring.get("r"), ring.oldest) == (0, 0, None, None)


def test_keys_and_candidates_count():
    small, large = served(), served()
    large.keys = range(1000)
    assert large.size_bytes == small.size_bytes + 8000
    assert served(candidates=[]).size_bytes < small.size_bytes
