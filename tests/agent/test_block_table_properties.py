"""The block table against simple models, over random events.

Blocks form a binary tree: block n stands below block n // 2, block 1 is a prompt's first.
"""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nearkv.agent.block_table import BlockChanges, BlockTable
from nearkv.agent.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from nearkv.block_keys import KeyNamespace, chain_keys, pack_tokens, root_key

ROOT = root_key(KeyNamespace("m"))


def ancestors(block):
    """The path from the first block to this one."""
    return [block >> shift for shift in reversed(range(block.bit_length()))]


def key_of(block):
    path = [token for step in ancestors(block) for token in (step, step)]
    return chain_keys(ROOT, pack_tokens(path), 2)[-1]


def store_of(run, place=("GPU", 0)):
    parent = None if run[0] == 1 else run[0] // 2
    tokens = [token for block in run for token in (block, block)]
    return BlockStored(run, parent, tokens, 2, place[0], group=place[1])


def replay(changes, seen):
    """What a consumer that had ``seen`` holds after the changes."""
    after = {} if changes.cleared else {tier: set(keys) for tier, keys in seen.items()}
    for tier, keys in changes.tiers.items():
        gone = {key for key, present in keys.items() if not present}
        after[tier] = (after.get(tier, set()) - gone) | (keys.keys() - gone)
    return {tier: keys for tier, keys in after.items() if keys}


def held_by(table):
    return {tier: set(keys) for tier, keys in table.keys_by_tier().items() if keys}


blocks = st.integers(1, 15)
runs = st.builds(
    lambda first, length: [first << i for i in range(length)], blocks, st.integers(1, 3)
)
places = st.sampled_from([("GPU", 0), ("GPU", 1), ("CPU", 0)])


class InOrderEngine(RuleBasedStateMachine):
    """An engine that stores a block only where its parent is held somewhere."""

    def __init__(self):
        super().__init__()
        self.table = BlockTable(key_model="m")
        self.changes = BlockChanges()
        self.seen = {}
        self.held = {}
        self.waiting = set()

    def apply(self, event):
        self.table.apply([event], self.changes)

    def is_held(self, block):
        return any(block in held for held in self.held.values())

    @rule(data=st.data(), length=st.integers(1, 3), place=places)
    def store(self, data, length, place):
        below = [block for block in range(2, 16) if self.is_held(block // 2)]
        first = data.draw(st.sampled_from([1, *below]))
        run = [first << i for i in range(length)]
        self.apply(store_of(run, place))
        self.held.setdefault(place, set()).update(run)
        for waiting in [w for w in self.waiting if w[1] in run]:
            self.waiting.discard(waiting)
            self.held.setdefault(waiting[0], set()).add(waiting[1])

    @rule(gone=st.lists(blocks, max_size=4), place=places)
    def remove(self, gone, place):
        self.apply(BlockRemoved(gone, *place))
        self.held.setdefault(place, set()).difference_update(gone)
        self.waiting.difference_update((place, block) for block in gone)

    @rule(block=blocks, place=places)
    def gain_tier(self, block, place):
        self.apply(BlockStored([block], None, [], 0, place[0], group=place[1]))
        if self.is_held(block):
            self.held.setdefault(place, set()).add(block)
        else:
            self.waiting.add((place, block))

    @rule()
    def clear(self):
        self.apply(AllBlocksCleared())
        self.held.clear()
        self.waiting.clear()

    @rule()
    def seal(self):
        self.seen = replay(self.changes, self.seen)
        self.changes = BlockChanges()

    @invariant()
    def table_and_consumer_agree_with_the_model(self):
        expected = {}
        for (tier, _group), held in self.held.items():
            expected.setdefault(tier, set()).update(map(key_of, held))
        expected = {tier: keys for tier, keys in expected.items() if keys}
        assert held_by(self.table) == expected
        assert replay(self.changes, self.seen) == expected
        assert self.table.block_count == sum(map(len, self.held.values()))
        assert self.table.orphan_count == 0


TestInOrderEngine = InOrderEngine.TestCase
TestInOrderEngine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

stores = st.tuples(st.just("store"), runs.filter(lambda run: run[0] != 1))
removals = st.tuples(st.just("remove"), st.lists(blocks, min_size=1, max_size=3))


@given(st.lists(stores | removals, max_size=25), st.integers(0, 25))
@settings(max_examples=300, deadline=None)
def test_orphans_end_as_if_their_parents_had_come_first(history, seal_at):
    table = BlockTable(key_model="m")
    changes, seen = BlockChanges(), {}
    ever, held = {1}, {1}
    for step, (what, named) in enumerate(history):
        if step == seal_at:
            changes, seen = BlockChanges(), replay(changes, seen)
        table.apply([store_of(named) if what == "store" else BlockRemoved(named)], changes)
        ever.update(named if what == "store" else ())
        held = held | set(named) if what == "store" else held - set(named) | {1}
    assert held_by(table) == {}

    table.apply([store_of([1])], changes)  # the parent of all comes last

    expected = {key_of(block) for block in held if ever.issuperset(ancestors(block))}
    assert held_by(table) == {"GPU": expected}
    assert replay(changes, seen) == {"GPU": expected}


@given(st.lists(runs, max_size=12), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_any_order_of_stores_ends_with_the_same_keys(parts, random):
    in_order, shuffled = BlockTable(key_model="m"), BlockTable(key_model="m")
    parts = sorted(parts)
    in_order.apply(map(store_of, parts), BlockChanges())
    random.shuffle(parts)
    shuffled.apply(map(store_of, parts), BlockChanges())
    assert held_by(shuffled) == held_by(in_order)
    assert shuffled.orphan_count == in_order.orphan_count
    assert shuffled.block_count == in_order.block_count
