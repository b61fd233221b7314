"""What every backend promises (``transfer/backends/contract.py``), run against each."""

import numpy as np
import pytest

from nearkv.transfer.backends.contract import Stop, monotonic_ms
from nearkv.transfer.errors import Reason
from tests.transfer.backends.rig import (
    PATIENCE_MS,
    UNTOUCHED,
    HookedStop,
    layout,
    patient,
    reason_of,
    slow_layout,
)

LAYOUTS = {
    "by layer": layout(),
    "interleaved": layout(interleaved=True),
    "with an offset": layout(offset=4096),
    "with gaps": layout(gap_bytes=64),
    "more blocks": layout(blocks=40),
    "interleaved with gaps": layout(interleaved=True, gap_bytes=100, offset=12, blocks=19),
}


@pytest.mark.parametrize("target", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS.values(), ids=LAYOUTS)
def test_a_pull_brings_the_blocks_and_nothing_else(make_rig, source, target):
    rig = make_rig(source, target)
    blocks, places = [3, 4, 5, 0, 11, 15, 14], [7, 8, 9, 1, 2, 14, 0]
    report = rig.pull(rig.grant(blocks), places)
    assert (rig.target_bytes == rig.expected(blocks, places)).all()
    assert report.size_bytes == 7 * 2 * 512
    assert report.pieces >= 1
    assert report.seconds >= 0


@pytest.mark.parametrize("count", [1, 2, 2500])
def test_one_block_and_thousands_arrive(make_rig, count):
    rig = make_rig(layout(blocks=2600, block_bytes=64), layout(blocks=2700, block_bytes=64))
    random = np.random.default_rng(count)
    blocks = random.permutation(2600)[:count].tolist()
    places = random.permutation(2700)[:count].tolist()
    rig.pull(rig.grant(blocks), places)
    assert (rig.target_bytes == rig.expected(blocks, places)).all()


def test_blocks_that_lie_together_arrive_as_well_as_scattered_ones(make_rig):
    rig = make_rig(slow_layout())
    count = rig.source.region.layout.blocks
    rig.pull(rig.grant(range(count)), range(count))
    assert (rig.target_bytes == rig.source_bytes).all()


def test_a_part_of_a_grant_can_be_pulled_and_then_the_rest_over_the_same_link(make_rig):
    rig = make_rig()
    grant = rig.grant([9, 8, 7, 6])
    link = rig.connect(grant)
    link.pull(rig.request(grant, [3], first=2), patient())
    assert (rig.target_bytes == rig.expected([7], [3])).all()
    link.pull(rig.request(grant, [0, 1], first=0), patient())
    link.pull(rig.request(grant, [2], first=3), patient())
    assert (rig.target_bytes == rig.expected([7, 9, 8, 6], [3, 0, 1, 2])).all()


def test_two_grants_of_one_source_are_pulled_by_two_links(make_rig):
    rig = make_rig()
    grants = [rig.grant([1, 2], slot=0), rig.grant([5], slot=1)]
    links = [rig.connect(grant) for grant in grants]
    links[1].pull(rig.request(grants[1], [9]), patient())
    links[0].pull(rig.request(grants[0], [0, 3]), patient())
    assert (rig.target_bytes == rig.expected([5, 1, 2], [9, 0, 3])).all()


def test_a_closed_slot_refuses_the_pull_and_nothing_is_written(make_rig):
    rig = make_rig()
    grant = rig.grant([1, 2])
    rig.engine_slots.close(0)
    assert reason_of(lambda: rig.pull(grant, [0, 1])) is Reason.STALE
    assert (rig.target_bytes == UNTOUCHED).all()


def test_a_slot_that_was_opened_again_is_another_lease(make_rig):
    rig = make_rig()
    grant = rig.grant([1, 2])
    rig.engine_slots.close(0)
    rig.engine_slots.open(0, expiry_ms=monotonic_ms() + PATIENCE_MS)
    assert reason_of(lambda: rig.pull(grant, [0, 1])) is Reason.STALE


def test_a_slot_closed_in_the_middle_of_a_pull_makes_it_stale(make_rig):
    rig = make_rig(slow_layout())
    count = rig.source.region.layout.blocks

    def reuse_blocks():
        rig.engine_slots.close(0)
        rig.source_bytes[:] = 0

    stop = HookedStop(monotonic_ms() + PATIENCE_MS, hook=reuse_blocks)
    grant = rig.grant(range(count))
    assert reason_of(lambda: rig.pull(grant, range(count), stop=stop)) is Reason.STALE
    assert stop.looks >= stop.nth


def test_a_slot_closed_right_after_the_first_look_makes_even_the_smallest_pull_stale(make_rig):
    """The look after the last byte is what counts, however few bytes there are."""
    rig = make_rig()
    grant = rig.grant([1])
    slots = rig.source.slots
    slots.nth, slots.hook = slots.looks + 1, lambda: rig.engine_slots.close(0)
    link = rig.connect(grant)
    assert reason_of(lambda: link.pull(rig.request(grant, [0]), patient())) is Reason.STALE


def test_a_slot_closed_before_the_last_look_makes_a_pull_stale(make_rig):
    rig = make_rig()
    slots = rig.source.slots
    rig.pull(rig.grant([1, 2]), [0, 1])
    looks = slots.looks
    rig.engine_slots.close(0)
    assert looks >= 2
    grant = rig.grant([1, 2])
    slots.looks, slots.nth, slots.hook = 0, looks - 1, lambda: rig.engine_slots.close(0)
    assert reason_of(lambda: rig.pull(grant, [0, 1])) is Reason.STALE


def test_a_lease_that_expired_is_refused(make_rig):
    rig = make_rig()
    grant = rig.grant([1], ttl_ms=0, grant_ms=PATIENCE_MS)
    assert reason_of(lambda: rig.pull(grant, [0])) is Reason.EXPIRED


def test_a_lease_that_expires_in_the_middle_of_a_pull_does_not_count(make_rig):
    rig = make_rig(slow_layout())
    count = rig.source.region.layout.blocks
    grant = rig.grant(range(count))

    def expire():
        rig.engine_slots.extend(0, grant.fence.generation, expiry_ms=monotonic_ms())

    stop = HookedStop(monotonic_ms() + PATIENCE_MS, hook=expire)
    assert reason_of(lambda: rig.pull(grant, range(count), stop=stop)) is Reason.EXPIRED


def test_a_cancelled_pull_ends_and_nothing_is_written_afterwards(make_rig):
    rig = make_rig(slow_layout())
    count = rig.source.region.layout.blocks
    stop = HookedStop(monotonic_ms() + PATIENCE_MS)
    stop.hook = stop.cancel
    grant = rig.grant(range(count))
    link = rig.connect(grant)
    assert reason_of(lambda: link.pull(rig.request(grant, range(count)), stop)) is Reason.CANCELLED
    rig.target_bytes[:] = 0x11
    link.close()
    if rig.server is not None:
        rig.server.close()
    assert (rig.target_bytes == 0x11).all()


def test_a_cancel_before_the_pull_ends_it_before_anything_is_written(make_rig):
    rig = make_rig()
    grant = rig.grant([1])
    link = rig.connect(grant)
    stop = patient()
    stop.cancel()
    assert reason_of(lambda: link.pull(rig.request(grant, [0]), stop)) is Reason.CANCELLED
    assert (rig.target_bytes == UNTOUCHED).all()


def test_a_deadline_that_has_passed_ends_the_pull(make_rig):
    rig = make_rig()
    grant = rig.grant([1])
    link = rig.connect(grant)
    late = Stop(deadline_ms=monotonic_ms() - 1)
    assert reason_of(lambda: link.pull(rig.request(grant, [0]), late)) is Reason.DEADLINE
    assert (rig.target_bytes == UNTOUCHED).all()


def test_a_deadline_that_passes_in_the_middle_ends_the_pull(make_rig):
    rig = make_rig(slow_layout())
    count = rig.source.region.layout.blocks
    stop = HookedStop(monotonic_ms() + PATIENCE_MS)

    def pass_deadline():
        stop.deadline_ms = monotonic_ms()

    stop.hook = pass_deadline
    grant = rig.grant(range(count))
    assert reason_of(lambda: rig.pull(grant, range(count), stop=stop)) is Reason.DEADLINE


def test_the_next_pull_over_a_new_link_works_after_one_that_failed(make_rig):
    rig = make_rig(slow_layout())
    count = rig.source.region.layout.blocks
    stop = HookedStop(monotonic_ms() + PATIENCE_MS)
    stop.hook = stop.cancel
    grant = rig.grant(range(count))
    reason_of(lambda: rig.pull(grant, range(count), stop=stop))
    rig.pull(grant, range(count))
    assert (rig.target_bytes == rig.source_bytes).all()


def test_the_path_is_reported(make_rig, kind):
    rig = make_rig()
    grant = rig.grant([1])
    link = rig.connect(grant)
    report = link.pull(rig.request(grant, [0]), patient())
    assert report.path == link.path
    assert (link.path.name, link.path.rdma) == (kind.path_name, kind.rdma)


def test_a_probe_says_that_the_backend_is_usable(kind):
    backend = kind.make()
    probe = backend.probe()
    assert probe.name == backend.name
    assert probe.usable
    assert probe.rdma == kind.rdma


def test_links_and_servers_can_be_closed_twice(make_rig):
    rig = make_rig()
    link = rig.connect(rig.grant([1]))
    for _ in range(2):
        link.close()
        if rig.server is not None:
            rig.server.close()


@pytest.mark.parametrize("places", [[0, 16], [-1, 0], [2, 2]], ids=str)
def test_places_that_are_none_are_refused(make_rig, places):
    rig = make_rig()
    assert reason_of(lambda: rig.pull(rig.grant([1, 2]), places)) in (Reason.LAYOUT, Reason.RANGE)
    assert (rig.target_bytes == UNTOUCHED).all()


def test_another_layout_than_the_targets_is_refused(make_rig):
    rig = make_rig(layout(block_bytes=512), layout(block_bytes=256))
    assert reason_of(lambda: rig.pull(rig.grant([1]), [0])) is Reason.LAYOUT
    assert (rig.target_bytes == UNTOUCHED).all()


def test_more_blocks_than_places_are_refused(make_rig):
    rig = make_rig()
    grant = rig.grant([1, 2, 3])
    request = rig.request(grant, [0], source_blocks=(1, 2))
    link = rig.connect(grant)
    assert reason_of(lambda: link.pull(request, patient())) in (Reason.LAYOUT, Reason.RANGE)
    assert (rig.target_bytes == UNTOUCHED).all()
