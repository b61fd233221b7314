"""The simulated KV cache, beside a plain model of what it should hold."""

from hypothesis import given
from hypothesis import strategies as st

from nearkv.replay.block_store import BlockStore


def fill(store, keys, *, extra=0):
    claim = store.claim(keys, most_reused=len(keys), blocks=len(keys) + extra)
    assert claim is not None
    return claim, store.name(claim)


def test_released_blocks_are_found_again():
    store = BlockStore(4)
    claim, stored = fill(store, [1, 2])
    assert stored == [1, 2]
    store.release(claim)
    assert store.used_blocks == 0
    again, stored = fill(store, [1, 2, 3])
    assert (again.depth, stored) == (2, [3])


def test_the_least_recently_used_goes_first_and_ends_before_beginnings():
    store = BlockStore(4)
    for keys in ([1, 2], [5, 6]):
        store.release(fill(store, keys)[0])
    fill(store, [9])
    assert store.take_removed() == [2]
    assert store.depth_of([1, 2], 2) == 1


def test_no_room_takes_nothing():
    store = BlockStore(3)
    fill(store, [1, 2])
    assert store.claim([7, 8], most_reused=2, blocks=2) is None
    assert store.used_blocks == 2
    assert not store.take_removed()


def test_shared_blocks_stay_until_the_last_user_goes():
    store = BlockStore(3)
    one, _ = fill(store, [1, 2])
    other, _ = fill(store, [1, 2])
    store.release(one)
    assert store.used_blocks == 2
    store.release(other)
    assert store.used_blocks == 0


def test_room_for_answers_is_given_back_without_a_name():
    store = BlockStore(4)
    claim, _ = fill(store, [1], extra=3)
    assert store.used_blocks == 4
    store.release(claim)
    assert store.used_blocks == 0
    assert store.depth_of([1], 1) == 1


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4), st.booleans()), max_size=40))
def test_stored_less_removed_is_what_it_holds(steps):
    store = BlockStore(6)
    known, open_claims = set(), []
    for group, length, releases in steps:
        keys = [group * 10 + place for place in range(length)]
        claim = store.claim(keys, most_reused=length, blocks=length + 1)
        known -= set(store.take_removed())
        if claim is not None:
            assert all(key in known for key in keys[: claim.depth])
            known |= set(store.name(claim))
            open_claims.append(claim)
        if (releases or claim is None) and open_claims:
            store.release(open_claims.pop(0))
        assert 0 <= store.used_blocks <= store.capacity_blocks
        assert all(store.depth_of([key], 1) == (key in known) for key in range(50))
    for claim in open_claims:
        store.release(claim)
    assert store.used_blocks == 0
