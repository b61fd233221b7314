"""How much of a prefix a store has."""

import pytest

from nearkv.transfer.store.packing import Packer, Segment
from nearkv.transfer.store.searching import count_stored
from tests.transfer.store.stores import OWN, SEGMENT, SOURCE, Engine, prefix, stop


def count(kind, prefix_, first_block=0, tenant=""):
    packer = Packer(OWN, SOURCE, tenant=tenant)
    return count_stored(
        kind.tier, packer, prefix_, stop(), segment_blocks=SEGMENT, first_block=first_block
    )


@pytest.mark.parametrize(
    ("stored", "asked", "found"),
    [(11, 11, 11), (11, 15, 11), (8, 8, 8), (8, 15, 8), (3, 3, 3), (3, 9, 3), (11, 10, 8)],
)
def test_whole_segments_and_a_shorter_last_one_count(kind, stored, asked, found):
    Engine(kind.tier, seed=1).put(prefix(stored), range(stored))
    assert count(kind, prefix(asked)) == found


def test_an_empty_store_has_nothing(kind):
    assert count(kind, prefix(9)) == 0
    assert count(kind, prefix(0)) == 0


def test_a_hole_ends_it_unless_the_reader_has_what_is_missing(kind):
    Engine(kind.tier, seed=1).put(prefix(11), range(11))
    kind.tier.remove(Packer(OWN, SOURCE).key(prefix(11), Segment(0, 4)), stop())
    assert count(kind, prefix(11)) == 0
    assert count(kind, prefix(11), first_block=3) == 0
    assert count(kind, prefix(11), first_block=4) == 11


def test_what_the_reader_has_itself_is_no_find(kind):
    Engine(kind.tier, seed=1).put(prefix(6), range(6))
    assert count(kind, prefix(6), first_block=5) == 6
    assert count(kind, prefix(6), first_block=6) == 0
    assert count(kind, prefix(9), first_block=7) == 0


def test_what_is_counted_can_be_pulled(kind):
    Engine(kind.tier, seed=1).put(prefix(11), range(11))
    found = count(kind, prefix(14), first_block=5)
    report = Engine(kind.tier).pull(prefix(14), range(found - 5), skip_blocks=5)
    assert (report.blocks, report.reason) == (found, None)


def test_tenants_do_not_see_each_other(kind):
    Engine(kind.tier, seed=1, tenant="a").put(prefix(4), range(4))
    assert count(kind, prefix(4), tenant="b") == 0
    assert count(kind, prefix(4), tenant="a") == 4
