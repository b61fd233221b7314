"""Which blocks go first: the ends of the chains used least."""

from hypothesis import given, settings
from hypothesis import strategies as st

from nearkv.agent.block_runs import BlockRuns


def evict_all(runs):
    gone = []
    while handles := runs.evict(1):
        gone += handles
    return gone


def test_a_chain_goes_from_its_end():
    runs = BlockRuns()
    runs.add([1, 2, 3], None, 0.0)
    runs.add([4], 3, 1.0)
    assert (runs.evict(2), len(runs)) == ([3, 4], 2)
    assert evict_all(runs) == [2, 1]


def test_the_chain_used_least_goes_first():
    runs = BlockRuns()
    runs.add([1, 2], None, 0.0)
    runs.add([3], None, 1.0)
    runs.add([4], 2, 2.0)
    assert evict_all(runs) == [3, 4, 2, 1]


def test_a_prefix_outlives_all_that_hangs_below_it():
    runs = BlockRuns()
    runs.add([1, 2, 3], None, 0.0)
    runs.add([10], 2, 1.0)
    runs.add([11], 2, 2.0)
    runs.add([20, 21], None, 3.0)
    assert evict_all(runs) == [3, 10, 11, 2, 1, 21, 20]


def test_what_is_cut_off_by_a_branch_keeps_its_place():
    runs = BlockRuns()
    runs.add([1, 2, 3], None, 0.0)
    runs.add([9], None, 1.0)
    runs.add([1, 2, 3], None, 2.0)
    runs.add([20], None, 3.0)
    runs.add([10], 2, 4.0)
    assert evict_all(runs) == [9, 3, 20, 10, 2, 1]


def test_blocks_stored_again_are_in_use():
    runs = BlockRuns()
    runs.add([1, 2], None, 0.0)
    runs.add([3], None, 1.0)
    runs.add([1, 2], None, 2.0)
    assert evict_all(runs) == [3, 2, 1]


def test_a_store_that_begins_with_known_blocks_goes_on_below_them():
    runs = BlockRuns()
    runs.add([1, 2], None, 0.0)
    runs.add([1, 5], None, 1.0)
    assert evict_all(runs) == [2, 5, 1]


def test_what_the_engine_removed_is_not_evicted():
    runs = BlockRuns()
    runs.add([1, 2, 3, 4], None, 0.0)
    for handle in (4, 2, 99):
        runs.remove(handle, 1.0)
    assert len(runs) == 2
    assert evict_all(runs) == [3, 1]


def test_a_parent_whose_children_the_engine_removed_counts_as_used_then():
    runs = BlockRuns()
    runs.add([1], None, 0.0)
    runs.add([2], 1, 0.0)
    runs.add([3], 1, 0.0)
    runs.add([9], None, 5.0)
    runs.remove(2, 6.0)
    runs.remove(3, 6.0)
    assert evict_all(runs) == [9, 1]


def test_an_empty_one_has_nothing_to_give():
    runs = BlockRuns()
    assert (runs.evict(5), runs.oldest_use_at) == ([], None)
    runs.add([1], None, 3.0)
    assert runs.oldest_use_at == 3.0
    runs.clear()
    assert (len(runs), runs.evict(1)) == (0, [])


numbers = st.integers(0, 12)
steps = st.one_of(
    st.tuples(st.just("add"), st.lists(numbers, min_size=1, max_size=4, unique=True), numbers),
    st.tuples(st.just("remove"), numbers, st.none()),
    st.tuples(st.just("evict"), st.integers(1, 3), st.none()),
)


@given(st.lists(steps, max_size=60))
@settings(max_examples=300, deadline=None)
def test_it_holds_what_was_added_and_neither_removed_nor_evicted(history):
    runs, held = BlockRuns(), set()
    for now, (what, value, parent) in enumerate(history):
        if what == "add":
            runs.add(value, parent if parent in held else None, float(now))
            held |= set(value)
        elif what == "remove":
            runs.remove(value, float(now))
            held.discard(value)
        else:
            evicted = runs.evict(value)
            assert held.issuperset(evicted)
            assert bool(evicted) == bool(held)
            held -= set(evicted)
        assert len(runs) == len(held)
    assert set(evict_all(runs)) == held


def test_a_long_chain_goes_from_its_end_and_takes_no_long_searches():
    runs = BlockRuns()
    runs.add(list(range(5000)), None, 0.0)
    runs.add(list(range(5000, 5100)), 4999, 1.0)
    assert max(len(run.handles) for run in runs._run_of.values()) <= 1024
    assert evict_all(runs) == list(range(5099, -1, -1))


def test_a_long_chain_can_be_removed_from_its_start():
    runs = BlockRuns()
    runs.add(list(range(3000)), None, 0.0)
    runs.add([9000], None, 1.0)
    for handle in range(2500):
        runs.remove(handle, 2.0)
    assert (len(runs), runs.evict(1)) == (501, [2999])
