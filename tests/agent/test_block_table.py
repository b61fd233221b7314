"""The block table: what an engine holds, from events in any order it may send them."""

import msgspec
import pytest

from nearkv.agent.block_table import BYTES_PER_BLOCK, BlockChanges, BlockTable
from nearkv.agent.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from nearkv.block_keys import KeyNamespace, chain_keys, fold_extra, pack_tokens, root_key

# One prompt of ten blocks of two tokens; the engine calls block i by the handle 100 + i.
PROMPT = list(range(20))


def keys_of(tokens, **namespace):
    root = root_key(KeyNamespace("m", **namespace), b"secret")
    return chain_keys(root, pack_tokens(tokens), 2)


KEYS = keys_of(PROMPT)


def handles(first, last):
    return list(range(100 + first, 101 + last))


def stored(first, last=None, **fields):
    """Blocks ``first`` to ``last`` of the prompt."""
    last = first if last is None else last
    parent = 100 + first - 1 if first else None
    tokens = PROMPT[2 * first : 2 * last + 2]
    return BlockStored(handles(first, last), fields.pop("parent", parent), tokens, 2, **fields)


def gained(first, last, medium="CPU", group=0):
    return BlockStored(handles(first, last), None, [], 0, medium, group=group)


def removed(first, last=None, **fields):
    return BlockRemoved(handles(first, first if last is None else last), **fields)


class Follower:
    """A table, and a consumer that sees nothing but its changes."""

    def __init__(self, limit_bytes=1 << 20):
        self.table = BlockTable(key_model="m", secret=b"secret", limit_bytes=limit_bytes)
        self.seen = {}

    def __call__(self, *events):
        """Apply events as one batch; return the keys by tier, checked against the changes."""
        changes = BlockChanges()
        self.table.apply(events, changes)
        if changes.cleared:
            self.seen.clear()
        for tier, keys in changes.tiers.items():
            held = self.seen.setdefault(tier, set())
            held.difference_update(key for key, present in keys.items() if not present)
            held.update(key for key, present in keys.items() if present)
        now = {tier: set(keys) for tier, keys in self.table.keys_by_tier().items() if keys}
        assert {tier: keys for tier, keys in self.seen.items() if keys} == now
        return now


@pytest.fixture
def apply():
    return Follower()


def gpu(*blocks):
    return {"GPU": {KEYS[i] for i in blocks}} if blocks else {}


def test_stored_blocks_have_the_keys_of_their_prompt(apply):
    assert apply(stored(0, 4), stored(5, 9)) == {"GPU": set(KEYS)}
    assert apply.table.block_size == 2
    assert apply.table.blocks_by_tier() == {"GPU": 10}


def test_a_store_is_an_insertion_and_one_removal_undoes_many(apply):
    assert apply(*[stored(0, 2)] * 3, removed(2)) == gpu(0, 1)
    assert apply.table.block_count == 2


def test_a_removed_block_can_be_stored_again(apply):
    assert apply(stored(0, 1), removed(1), stored(1)) == gpu(0, 1)


def test_a_removal_of_the_unknown_is_counted(apply):
    assert apply(stored(0), removed(5, 6)) == gpu(0)
    assert apply.table.counts.unknown_removed == 2


def test_a_removal_speaks_of_its_medium_only(apply):
    apply(stored(0, 1), gained(0, 1))
    assert apply(removed(0, medium="CPU")) == gpu(0, 1) | {"CPU": {KEYS[1]}}
    assert apply(removed(0, 1)) == {"CPU": {KEYS[1]}}


def test_a_block_of_two_groups_is_held_until_both_have_removed_it(apply):
    apply(stored(0, 1), stored(0, 1, group=1))
    assert apply.table.block_count == 4
    assert apply(removed(1, group=1)) == gpu(0, 1)
    assert apply(removed(1)) == gpu(0)
    assert apply.table.block_count == 2


def test_a_parent_may_be_known_from_another_place_only(apply):
    assert apply(stored(0, 1), stored(2, medium="CPU")) == gpu(0, 1) | {"CPU": {KEYS[2]}}


def test_bytes_are_handles_as_good_as_integers(apply):
    apply(
        BlockStored([b"a"], None, PROMPT[:2], 2),
        BlockStored([b"b"], b"a", PROMPT[2:4], 2),
    )
    assert apply(BlockRemoved([b"a"])) == gpu(1)


# -- Orphans ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order",
    [
        pytest.param([1, 0], id="child-first"),
        pytest.param([3, 2, 1, 0], id="backwards"),
        pytest.param([2, 3, 1, 0], id="inner-order-kept"),
        pytest.param([3, 1, 0, 2], id="gap-closed-last"),
    ],
)
def test_orphans_wait_for_their_parents(apply, order):
    *early, last = order
    apply(*(stored(i) for i in early))
    assert apply.table.orphan_count > 0
    assert apply(stored(last)) == gpu(*order)
    assert apply.table.orphan_count == 0
    assert apply.table.estimated_bytes == len(order) * BYTES_PER_BLOCK


def test_several_children_of_one_parent_are_adopted(apply):
    apply(stored(1, 2), BlockStored([7], 100, [9, 9], 2))
    assert apply(stored(0)) == {"GPU": {*KEYS[:3], *keys_of([0, 1, 9, 9])}}


def test_an_orphan_may_hang_below_the_middle_of_a_run(apply):
    apply(stored(2))
    assert apply(stored(0, 3)) == gpu(0, 1, 2, 3)


def test_an_orphan_removed_before_adoption_stays_out_but_serves_its_child(apply):
    apply(stored(1), stored(2), removed(1))
    assert apply(stored(0)) == gpu(0, 2)


@pytest.mark.parametrize(
    ("events", "held"),
    [
        pytest.param([stored(1), stored(1), removed(1)], (), id="stored-twice-then-removed"),
        pytest.param([stored(1), removed(1), stored(1)], (1,), id="stored-again"),
        pytest.param([stored(1), removed(1)] * 2, (), id="two-rounds"),
        pytest.param([stored(1, 2), stored(2, 3), removed(2)], (1, 3), id="overlapping-runs"),
        pytest.param([stored(1, 2), removed(1, 2), stored(1)], (1,), id="part-stored-again"),
    ],
)
def test_the_last_word_on_an_orphan_counts(apply, events, held):
    apply(*events)
    assert apply(stored(0)) == gpu(0, *held)
    assert apply.table.orphan_count == 0


def test_repeated_stores_of_an_orphan_take_memory_once(apply):
    apply(stored(1, 4))
    once = apply.table.estimated_bytes
    apply(*[stored(1, 4)] * 5)
    assert apply.table.estimated_bytes == once


def test_a_known_block_repeated_without_its_parent_can_still_be_removed(apply):
    apply(stored(0, 1), removed(0), stored(1))
    assert apply(removed(1), stored(0)) == gpu(0)


def test_a_removal_of_an_orphan_speaks_of_its_place_only(apply):
    apply(stored(1), stored(1, medium="CPU"), removed(1, medium="CPU"))
    assert apply(stored(0)) == gpu(0, 1)


def test_a_clear_forgets_orphans_and_tiers_too(apply):
    apply(stored(0), stored(5), gained(0, 0), gained(7, 7))
    assert apply(AllBlocksCleared()) == {}
    assert (apply.table.orphan_count, apply.table.estimated_bytes) == (0, 0)
    assert apply(stored(0, 4)) == gpu(0, 1, 2, 3, 4)
    assert apply(stored(7, parent=None)).keys() == {"GPU"}


def test_a_clear_within_a_batch_keeps_what_follows(apply):
    apply(stored(0, 1))
    assert apply(stored(2), AllBlocksCleared(), stored(0)) == gpu(0)


# -- Tiers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tier_first", [True, False], ids=["tier-first", "block-first"])
def test_a_tier_is_gained_before_or_after_the_block_is_known(apply, tier_first):
    events = [stored(0, 1), gained(0, 1)]
    assert apply(*(reversed(events) if tier_first else events)) == {
        "GPU": set(KEYS[:2]),
        "CPU": set(KEYS[:2]),
    }


def test_a_block_can_outlive_its_device_copy(apply):
    assert apply(stored(0), gained(0, 0), removed(0)) == {"CPU": {KEYS[0]}}


def test_a_tier_lost_before_its_block_is_known_stays_lost(apply):
    assert apply(gained(0, 1), removed(0, medium="CPU"), stored(0, 1)) == gpu(0, 1) | {
        "CPU": {KEYS[1]}
    }


def test_a_tier_gained_by_an_orphan_comes_with_its_parent(apply):
    apply(stored(1), gained(1, 1), removed(1))
    assert apply(stored(0)) == gpu(0) | {"CPU": {KEYS[1]}}


# -- Namespaces ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "namespace"),
    [
        pytest.param({}, {}, id="plain"),
        pytest.param({"extra_keys": [["s1"], None]}, {"salt": "s1"}, id="salt"),
        pytest.param({"lora": "sql"}, {"lora": "sql"}, id="lora"),
        pytest.param(
            {"lora": "sql", "extra_keys": [["sql"], ["sql"]]}, {"lora": "sql"}, id="lora-in-extra"
        ),
        pytest.param(
            {"lora": "sql", "extra_keys": [["sql", "s1"], ["sql"]]},
            {"lora": "sql", "salt": "s1"},
            id="lora-and-salt",
        ),
        pytest.param(
            {"lora": "sql", "extra_keys": [["sql", "sql"], ["sql"]]},
            {"lora": "sql", "salt": "sql"},
            id="salt-named-as-lora",
        ),
    ],
)
def test_keys_are_those_computed_from_the_prompt(apply, fields, namespace):
    expected = keys_of(PROMPT[:8], **namespace)
    later = {**fields, "extra_keys": [["sql"]] * 2 if "lora" in fields else None}
    assert apply(stored(0, 1, **fields), stored(2, 3, **later)) == {"GPU": set(expected)}


def test_equal_tokens_in_other_namespaces_never_meet(apply):
    kinds = [
        {},
        {"lora": "a"},
        {"lora": "b"},
        {"extra_keys": [["a"]]},
        {"lora": "a", "extra_keys": [["a", "b"]]},
        {"extra_keys": [[["image", 0]]]},
        {"extra_keys": [[["image", 1]]]},
    ]
    events = [BlockStored([n], None, [1, 2], 2, **kind) for n, kind in enumerate(kinds)]
    assert len(apply(*events)["GPU"]) == len(kinds)


def test_an_image_changes_its_block_and_all_after_it(apply):
    plain = keys_of(PROMPT[:6])
    image = fold_extra(plain[1], msgspec.msgpack.encode([["image", 0]]))
    after = chain_keys(image, pack_tokens(PROMPT[4:6]), 2)
    extra = [None, [["image", 0]], None]
    assert apply(stored(0, 2, extra_keys=extra)) == {"GPU": {plain[0], image, *after}}


def test_extra_keys_shorter_than_the_blocks_are_none_for_the_rest(apply):
    expected = set(keys_of(PROMPT[:6], salt="s"))
    assert apply(stored(0, 2, extra_keys=[["s"]])) == {"GPU": expected}


def test_an_orphan_keeps_its_salted_parents_namespace(apply):
    apply(stored(1, 2))
    salted = set(keys_of(PROMPT[:6], salt="s"))
    assert apply(stored(0, extra_keys=[["s"]])) == {"GPU": salted}


# -- Bounds and nonsense ---------------------------------------------------------------------


def test_blocks_beyond_the_bound_are_refused_and_counted():
    apply = Follower(limit_bytes=4 * BYTES_PER_BLOCK)
    assert apply(stored(0, 2), stored(3, 4)) == gpu(0, 1, 2)
    assert apply.table.counts.refused == 2
    assert apply(stored(3)) == gpu(0, 1, 2, 3)
    assert apply.table.estimated_bytes <= 4 * BYTES_PER_BLOCK


def test_a_full_table_takes_repeats_and_refills_after_removals():
    apply = Follower(limit_bytes=3 * BYTES_PER_BLOCK)
    assert apply(stored(0, 2), stored(0, 2)) == gpu(0, 1, 2)
    assert apply.table.counts.refused == 0
    assert apply(removed(2), stored(2)) == gpu(0, 1, 2)


@pytest.mark.parametrize("tier_first", [True, False], ids=["tier-first", "block-first"])
def test_gained_tiers_respect_the_bound(tier_first):
    apply = Follower(limit_bytes=5 * BYTES_PER_BLOCK)
    events = [stored(0, 3), gained(0, 3)]
    apply(*(reversed(events) if tier_first else events))
    assert apply.table.block_count == 5
    assert apply.table.counts.refused == 3


def test_orphans_have_a_bound_of_their_own():
    apply = Follower(limit_bytes=1600)  # room for 11 orphan tokens
    apply(stored(1, 5), stored(7, 8))
    assert apply.table.orphan_count == 5
    assert apply.table.counts.orphans_dropped == 2


def test_orphans_refused_at_adoption_leave_nothing_behind():
    apply = Follower(limit_bytes=3 * BYTES_PER_BLOCK)
    apply(stored(1))
    apply(BlockStored([1, 2], None, [5, 6, 7, 8], 2), stored(0))
    assert apply.table.counts.refused == 1
    assert (apply.table.orphan_count, apply.table.block_count) == (0, 3)


@pytest.mark.parametrize("token", [-1, 2**32, "x", None, 1.5], ids=repr)
@pytest.mark.parametrize("parent", [None, 7], ids=["root", "orphan"])
def test_blocks_with_bad_tokens_are_counted_not_kept(apply, token, parent):
    assert apply(BlockStored([1], parent, [1, token], 2), stored(0)) == gpu(0)
    assert apply.table.counts.bad_tokens == 1
    assert apply.table.orphan_count == 0


def test_a_block_that_is_its_own_parent_does_no_harm(apply):
    apply(BlockStored([7, 8], 8, [1, 2, 3, 4], 2))
    assert apply(stored(0)) == gpu(0)


def test_there_is_a_bound_on_tiers_and_groups(apply):
    for number in range(100):
        apply(stored(0, 1, medium=f"m{number}"))
    assert len(apply.table.blocks_by_tier()) == 64
    assert apply.table.counts.refused == 2 * 36
    apply(*(removed(0, 1, medium=f"m{number}") for number in range(10)))
    apply(stored(0, 1, medium="new"))
    assert apply.table.blocks_by_tier()["new"] == 2


def test_tiers_of_unknown_blocks_have_a_bound_and_count_as_memory(apply):
    apply(*(gained(0, 4, group=group) for group in range(100)))
    assert apply.table.counts.unresolved_tier == 5 * 64
    assert apply.table.estimated_bytes > 5 * 300
    assert apply.table.evict(1, BlockChanges()) == apply.table.evict(1, BlockChanges()) + 5 * 400
    assert apply(stored(0, 4)) == gpu(*range(5))
