"""The prefix index: matches, tiers, slots and sweeps, by example and against a naive model."""

from itertools import takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from nearkv.ingress import key_table, prefix_index
from nearkv.ingress.key_table import KeyTable
from nearkv.ingress.prefix_index import PrefixIndex

CHAIN = tuple(range(100, 110))


def opened(index, keys=()):
    slot = index.open_slot()
    index.activate(slot)
    index.add(slot, keys)
    return slot


def swept(index):
    return sum(1 for _ in index.sweep())


@pytest.mark.parametrize(
    ("held", "depth"),
    [
        pytest.param(CHAIN, 10, id="whole"),
        pytest.param(CHAIN[:4], 4, id="beginning"),
        pytest.param(CHAIN[:1], 1, id="first"),
        pytest.param((*CHAIN[:3], *CHAIN[4:]), 3, id="a hole ends it"),
        pytest.param(CHAIN[1:], None, id="no root, no match"),
        pytest.param((), None, id="nothing"),
    ],
)
def test_a_match_is_as_deep_as_the_leading_blocks_held(held, depth):
    index = PrefixIndex()
    slot = opened(index, held)
    assert index.match(CHAIN) == ({} if depth is None else {slot: depth})


def test_a_prompt_nobody_knows_matches_nobody():
    index = PrefixIndex()
    opened(index, CHAIN)
    assert index.match((1, 2, 3)) == {}
    assert index.match((1, *CHAIN)) == {}


@pytest.mark.parametrize("keys", [(), CHAIN], ids=["empty prompt", "empty index"])
def test_there_is_no_match_without_keys_or_slots(keys):
    assert PrefixIndex().match(keys) == {}


def test_a_prompt_longer_than_what_is_held_ends_where_the_blocks_end():
    index = PrefixIndex()
    slot = opened(index, range(200))
    assert index.match(tuple(range(1000))) == {slot: 200}


def test_each_slot_has_its_own_depth():
    index = PrefixIndex()
    shallow, deep = opened(index, CHAIN[:2]), opened(index, CHAIN[:7])
    opened(index, (1, 2))
    assert index.match(CHAIN) == {shallow: 2, deep: 7}


def test_two_hundred_slots_are_told_apart():
    index = PrefixIndex()
    chain = tuple(range(1000, 1200))
    slots = [opened(index, chain[: i + 1]) for i in range(200)]
    assert index.match(chain) == {slot: i + 1 for i, slot in enumerate(slots)}


def test_adding_twice_is_adding_once():
    index = PrefixIndex()
    slot = opened(index, CHAIN)
    index.add(slot, CHAIN)
    index.remove(slot, CHAIN[5:])
    assert index.match(CHAIN) == {slot: 5}
    assert index.size.blocks == 5


def test_removing_what_is_not_held_touches_nobody():
    index = PrefixIndex()
    first, second = opened(index, CHAIN[:3]), opened(index, CHAIN)
    index.remove(first, (*CHAIN[3:], 7))
    assert index.match(CHAIN) == {first: 3, second: 10}


def test_a_slot_counts_only_once_it_is_activated():
    index = PrefixIndex()
    slot = index.open_slot()
    index.add(slot, CHAIN)
    assert index.match(CHAIN) == {}
    index.activate(slot)
    assert index.match(CHAIN) == {slot: 10}


def test_a_closed_slot_is_gone_before_any_sweep():
    index = PrefixIndex()
    closed, kept = opened(index, CHAIN), opened(index, CHAIN[:4])
    index.close_slot(closed)
    assert index.match(CHAIN) == {kept: 4}
    assert index.size.blocks == 10
    assert index.needs_sweep


def test_a_sweep_gives_the_memory_and_the_slot_back_and_nothing_rises_again():
    index = PrefixIndex()
    closed, kept = opened(index, CHAIN), opened(index, CHAIN[:4])
    index.close_slot(closed)
    swept(index)
    assert index.size.blocks == 4
    assert not index.needs_sweep
    assert opened(index) == closed
    assert index.match(CHAIN) == {kept: 4}


def test_a_slot_is_not_given_out_again_before_it_is_swept():
    index = PrefixIndex()
    closed = opened(index, CHAIN)
    index.close_slot(closed)
    assert opened(index) != closed
    assert index.match(CHAIN) == {}


def test_changes_go_on_between_the_slices_of_a_sweep(monkeypatch):
    monkeypatch.setattr(key_table, "_LEAST_SLOTS", 64)
    monkeypatch.setattr(prefix_index, "_SWEEP_SLOTS", 8)
    index = PrefixIndex()
    closed, kept = opened(index, CHAIN), opened(index, CHAIN)
    index.close_slot(closed)
    slices = index.sweep()
    next(slices)
    late = opened(index, (*CHAIN, 7))
    index.close_slot(kept)
    index.remove(late, CHAIN[6:])
    assert index.match(CHAIN) == {late: 6}
    assert sum(1 for _ in slices) >= 3
    assert index.needs_sweep, "the slot closed in between waits for the next sweep"
    assert opened(index) == closed
    swept(index)
    assert index.match(CHAIN) == {late: 6}
    assert index.size.blocks == 7


LIMIT_BYTES = 100_000
HASHES = tuple(i * 0x9E3779B97F4A7C15 % (1 << 64) for i in range(1, 20_001))
"""Keys spread like hashes, as real ones are."""


def batches(keys):
    return (keys[start : start + 500] for start in range(0, len(keys), 500))


def filled():
    """Return an index that was given more than it may hold, and the slot that holds it."""
    index = PrefixIndex(limit_bytes=LIMIT_BYTES)
    slot = opened(index)
    for batch in batches(HASHES):
        index.add(slot, batch)
    return index, slot


def test_a_removal_during_a_sweep_hides_nothing_from_it(monkeypatch):
    monkeypatch.setattr(prefix_index, "_SWEEP_SLOTS", 256)
    index = PrefixIndex()
    # Both keys want the last place of the first slice; the second one stands in the next.
    kept, closed = opened(index, [255]), opened(index, [255 + (1 << 20)])
    index.close_slot(closed)
    slices = index.sweep()
    next(slices)
    index.remove(kept, [255])
    for _ in slices:
        pass
    assert opened(index) == closed
    assert index.match([255 + (1 << 20)]) == {}
    assert index.size.blocks == 0


def test_beyond_the_limit_the_newest_keys_are_refused_and_counted():
    index, slot = filled()
    size = index.size
    assert size.refused > 0
    assert size.blocks + size.refused == len(HASHES)
    assert size.estimated_bytes <= size.limit_bytes == LIMIT_BYTES
    assert index.match(HASHES) == {slot: size.blocks}, "the oldest are kept"


def test_at_the_limit_what_is_known_can_still_be_shared():
    index, first = filled()
    blocks, refused = index.size.blocks, index.size.refused
    second = opened(index, HASHES[:blocks])
    assert index.size.refused == refused
    assert index.match(HASHES) == {first: blocks, second: blocks}


def test_room_that_came_back_is_used_again():
    index, slot = filled()
    refused = index.size.refused
    index.remove(slot, HASHES)
    index.add(slot, HASHES[-1000:])
    assert index.match(HASHES[-1000:]) == {slot: 1000}
    assert index.size.refused == refused


def test_churn_leaves_the_size_as_it_was():
    index = PrefixIndex()
    slot = opened(index, HASHES[:500])
    before = index.size
    for batch in batches(HASHES[500:]):
        index.add(slot, batch)
        index.remove(slot, batch)
    assert index.size.blocks == before.blocks
    assert index.size.estimated_bytes <= 2 * before.estimated_bytes
    assert index.match(HASHES) == {slot: 500}


def test_a_prefix_goes_on_through_linked_tiers():
    index = PrefixIndex()
    gpu, cpu = opened(index, (*CHAIN[:3], *CHAIN[6:8])), opened(index, CHAIN[3:6])
    other = opened(index, CHAIN[:5])
    index.link_tier(gpu, cpu)
    depths = index.match(CHAIN)
    assert depths[gpu] == 8
    assert depths[other] == 5


def test_a_tier_linked_late_counts_from_then_on():
    index = PrefixIndex()
    index.link_tier(opened(index), opened(index))
    gpu, cpu = opened(index, CHAIN[:3]), opened(index, CHAIN[3:6])
    assert index.match(CHAIN)[gpu] == 3
    index.link_tier(gpu, cpu)
    assert index.match(CHAIN)[gpu] == 6


def test_a_closed_tier_continues_nobodys_prefix():
    index = PrefixIndex()
    gpu, cpu = opened(index, CHAIN[:3]), opened(index, CHAIN[3:6])
    index.link_tier(gpu, cpu)
    index.close_slot(cpu)
    assert index.match(CHAIN) == {gpu: 3}
    swept(index)
    reused = opened(index, CHAIN[3:6])
    assert reused == cpu
    assert index.match(CHAIN) == {gpu: 3}, "the slot's new owner is not linked"


class CountingTable(KeyTable):
    """Counts the keys that are looked up."""

    lookups = 0

    def get(self, key):
        self.lookups += 1
        return super().get(key)

    def find(self, wanted):
        self.lookups += len(wanted)
        return super().find(wanted)


def counted(keys):
    """Return an index of these keys, and its table with the count at zero."""
    index = PrefixIndex()
    index._table = table = CountingTable()
    opened(index, keys)
    table.lookups = 0
    return index, table


@pytest.mark.parametrize(
    ("prompt", "most"),
    [
        pytest.param(range(10_000, 18_192), 1, id="miss"),
        pytest.param([*range(8), *range(10_000, 18_192)], 8 + 256, id="shallow"),
    ],
)
def test_a_match_costs_what_it_finds_not_what_is_asked(prompt, most):
    index, table = counted(range(100))
    index.match(tuple(prompt))
    assert table.lookups <= most


COLLIDING = [8 * i - 1 for i in range(1, 13)]
"""In a table of up to 32 places these push each other aside, and around its end."""
KEYS = st.lists(st.sampled_from(COLLIDING), max_size=12)


class IndexAgainstSets(RuleBasedStateMachine):
    """Engines of one or two tiers, against one set of keys per slot."""

    engines = Bundle("engines")

    @initialize()
    def start(self):
        self.index = PrefixIndex()
        self.held = {}
        self.active = []
        self.sweeping = iter(())

    @rule(target=engines, first=KEYS, second=st.none() | KEYS, active=st.booleans())
    def open(self, first, second, active):
        engine = tuple(self.index.open_slot() for keys in (first, second) if keys is not None)
        assert not set(engine) & self.held.keys(), "a slot in use was given out again"
        for slot, keys in zip(engine, (first, second), strict=False):
            self.held[slot] = set(keys)
            self.index.add(slot, keys)
        if active:
            self._activate(engine)
        return engine

    @rule(engine=engines)
    def activate_later(self, engine):
        if engine not in self.active:
            self._activate(engine)

    def _activate(self, engine):
        for slot in engine:
            self.index.activate(slot)
        for extra in engine[1:]:
            self.index.link_tier(engine[0], extra)
        self.active.append(engine)

    @rule(engine=engines, keys=KEYS, tier=st.integers(0, 1))
    def add(self, engine, keys, tier):
        slot = engine[tier % len(engine)]
        self.index.add(slot, keys)
        self.held[slot] |= set(keys)

    @rule(engine=engines, keys=KEYS, tier=st.integers(0, 1))
    def remove(self, engine, keys, tier):
        slot = engine[tier % len(engine)]
        self.index.remove(slot, keys)
        self.held[slot] -= set(keys)

    @rule(engine=consumes(engines))
    def close(self, engine):
        for slot in engine:
            self.index.close_slot(slot)
            del self.held[slot]
        if engine in self.active:
            self.active.remove(engine)

    @rule(slices=st.integers(1, 8), engine=engines, keys=KEYS)
    def remove_in_the_middle_of_a_sweep(self, slices, engine, keys):
        for _ in range(slices):
            if next(self.sweeping, self) is self:
                self.sweeping = self.index.sweep()
        self.remove(engine, keys, 0)

    @rule()
    def sweep_to_the_end(self):
        for sweep in (self.sweeping, self.index.sweep()):
            for _ in sweep:
                pass
        self.sweeping = iter(())
        assert not self.index.needs_sweep
        assert self.index.size.blocks == len(set().union(*self.held.values()))

    @rule(prompt=KEYS)
    def match(self, prompt):
        self._check(prompt)

    @invariant()
    def match_the_whole_range(self):
        if hasattr(self, "index"):
            self._check(COLLIDING)

    def _check(self, prompt):
        depths = self.index.match(tuple(prompt))
        for engine in self.active:
            keys = set().union(*(self.held[slot] for slot in engine))
            expected = sum(1 for _ in takewhile(keys.__contains__, prompt))
            assert depths.get(engine[0], 0) == expected
        assert depths.keys() <= {slot for engine in self.active for slot in engine}


def test_the_index_agrees_with_plain_sets(monkeypatch):
    # Small, so that a dozen keys make several slices, chunks, rebuilds and recycled numbers.
    monkeypatch.setattr(key_table, "_LEAST_SLOTS", 4)
    monkeypatch.setattr(prefix_index, "_SWEEP_SLOTS", 3)
    monkeypatch.setattr(prefix_index, "_FEW_BLOCKS", 2)
    monkeypatch.setattr(prefix_index, "_FIRST_CHUNK", 2)
    monkeypatch.setattr(prefix_index, "_CHUNK_BLOCKS", 3)
    monkeypatch.setattr(prefix_index, "_SPARE_SETS", 4)
    run_state_machine_as_test(
        IndexAgainstSets,
        settings=settings(max_examples=60, stateful_step_count=40, deadline=None),
    )
