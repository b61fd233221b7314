"""Which followed blocks engines hold."""

from nearkv.agent.block_table import BlockChanges
from nearkv.agent.warming.residency import Residency

KEYS = [1, 2, 3]


def changes(*, added=(), removed=(), tier="GPU", cleared=False):
    change = BlockChanges(cleared=cleared)
    change.add(tier, added)
    change.remove(tier, removed)
    return change


def following():
    residency = Residency()
    residency.watch(KEYS)
    return residency


def test_only_leading_blocks_count():
    residency = following()
    residency.observe("e", changes(added=[1, 3, 9]))
    assert residency.leading("e", KEYS) == 1
    residency.observe("e", changes(added=[2]))
    assert (residency.leading("e", KEYS), residency.leading("other", KEYS)) == (3, 0)


def test_a_block_is_held_while_any_tier_holds_it():
    residency = following()
    residency.observe("e", changes(added=KEYS))
    residency.observe("e", changes(added=[1], tier="CPU"))
    residency.observe("e", changes(removed=[1]))
    assert residency.leading("e", KEYS) == 3
    residency.observe("e", changes(removed=[1], tier="CPU"))
    assert residency.leading("e", KEYS) == 0


def test_a_clear_forgets_and_what_comes_after_it_counts():
    residency = following()
    residency.observe("e", changes(added=KEYS))
    residency.observe("e", changes(cleared=True, added=[1]))
    assert residency.leading("e", KEYS) == 1


def test_what_was_held_before_is_found_by_a_look_at_all():
    residency = following()
    residency.scan("e", {"GPU": [1, 7], "CPU": [2, 3]})
    assert residency.leading("e", KEYS) == 3


def test_the_version_changes_with_what_is_held_and_with_nothing_else():
    residency = following()
    versions = [residency.version("e")]
    for change in (
        changes(added=[1]),
        changes(added=[99]),
        changes(removed=[1]),
        changes(cleared=True),
    ):
        residency.observe("e", change)
        versions.append(residency.version("e"))
    assert versions == [0, 1, 1, 2, 3]


def test_keys_of_two_prefixes_are_followed_until_both_are_gone():
    residency = following()
    residency.watch([1])
    residency.observe("e", changes(added=[1]))
    residency.unwatch(KEYS)
    assert residency.leading("e", [1]) == 1
    residency.unwatch([1])
    assert residency.leading("e", [1]) == 0
    residency.observe("e", changes(added=[1]))
    assert residency.leading("e", [1]) == 0
