"""The double's block pool: reuse, eviction order, events, tiers."""

import pytest

from tests.doubles.engine.block_cache import BlockCache, BlockTable, CacheScope, chain_hashes
from tests.doubles.engine.events import AllBlocksCleared, BlockRemoved, BlockStored

SIZE = 4


@pytest.fixture
def cache():
    return BlockCache(num_blocks=9, block_size=SIZE)


def prompt(start, length):
    return list(range(start, start + length))


def run(cache, tokens, scope=CacheScope(), generated=()):  # noqa: B008 - a frozen value
    """Serve one sequence to its end and return its table and events."""
    table = BlockTable(list(tokens), scope)
    assert cache.admit(table)
    if generated:
        assert cache.extend(table, generated)
    cache.release(table)
    return table, cache.take_events()


@pytest.mark.parametrize(
    ("length", "hit"),
    [
        pytest.param(3, 0, id="partial-block"),
        pytest.param(4, 0, id="last-token-of-the-only-block"),
        pytest.param(5, 4, id="one-block"),
        pytest.param(8, 4, id="last-token-of-the-second"),
        pytest.param(9, 8, id="two-blocks"),
    ],
)
def test_hit_leaves_at_least_one_token(cache, length, hit):
    run(cache, prompt(0, 12))
    table, _ = run(cache, prompt(0, length))
    assert table.hit_tokens == hit


def test_hit_stops_at_the_first_difference(cache):
    run(cache, prompt(0, 12))
    table, events = run(cache, [*prompt(0, 8), 99, 99, 99, 99, 1])
    assert table.hit_tokens == 8
    assert [event.parent for event in events] == [table.hashes[1]]


def test_store_carries_the_new_blocks_only(cache):
    _, first = run(cache, prompt(0, 9))
    _, again = run(cache, prompt(0, 9))
    assert [(len(event.hashes), event.token_ids) for event in first] == [(2, prompt(0, 8))]
    assert again == []


def test_generated_tokens_fill_blocks(cache):
    table, events = run(cache, prompt(0, 6), generated=prompt(6, 2))
    assert [event.token_ids for event in events] == [prompt(0, 4), prompt(4, 4)]
    assert events[1].parent == table.hashes[0]
    assert run(cache, prompt(0, 9))[0].hit_tokens == 8


def test_tail_of_the_oldest_sequence_goes_first(cache):
    old, _ = run(cache, prompt(0, 12))
    new, _ = run(cache, prompt(100, 12))
    _, events = run(cache, prompt(200, 12))
    removed = [event.hashes[0] for event in events if isinstance(event, BlockRemoved)]
    assert removed == [old.hashes[2]]
    assert isinstance(events[-1], BlockStored)
    assert set(new.hashes) <= cache.device_hashes


def test_reuse_makes_a_prefix_recent(cache):
    old, _ = run(cache, prompt(0, 12))
    new, _ = run(cache, prompt(100, 12))
    run(cache, prompt(0, 13))
    run(cache, prompt(200, 12))
    assert set(old.hashes) <= cache.device_hashes
    assert not set(new.hashes) <= cache.device_hashes


def test_running_blocks_are_never_taken(cache):
    running = BlockTable(prompt(0, 20))
    assert cache.admit(running)
    assert not cache.admit(BlockTable(prompt(100, 13)))
    assert cache.admit(BlockTable(prompt(100, 12)))
    assert not cache.extend(running, [1])
    assert cache.used_ratio == 1.0


def test_refusal_changes_nothing(cache):
    run(cache, prompt(0, 12))
    assert not cache.admit(BlockTable(prompt(0, 40)))
    assert cache.used_ratio == 0.0
    assert cache.take_events() == []


def test_uncached_blocks_are_used_before_cached_ones(cache):
    for start in range(0, 1000, 100):
        run(cache, prompt(start, 3))
    _, first = run(cache, prompt(2000, 16))
    _, second = run(cache, prompt(3000, 15))
    assert not [event for event in first + second if isinstance(event, BlockRemoved)]


def test_equal_running_prompts_are_announced_and_removed_each(cache):
    tables = [BlockTable(prompt(0, 4)), BlockTable(prompt(0, 4))]
    assert all(cache.admit(table) for table in tables)
    for table in tables:
        cache.release(table)
    stored = [event.hashes for event in cache.take_events()]
    _, events = run(cache, prompt(100, 31))
    removed = [event.hashes for event in events if isinstance(event, BlockRemoved)]
    assert removed == stored == [tuple(tables[0].hashes)] * 2


@pytest.mark.parametrize(
    ("scope", "extra"),
    [
        pytest.param(CacheScope(), [None, None], id="shared"),
        pytest.param(CacheScope("s1"), [["s1"], None], id="salt"),
        pytest.param(CacheScope(None, "sql", 1), [["sql"], ["sql"]], id="lora"),
        pytest.param(CacheScope("s1", "sql", 1), [["sql", "s1"], ["sql"]], id="both"),
    ],
)
def test_scope_separates_blocks_and_shows_in_extra_keys(cache, scope, extra):
    run(cache, prompt(0, 8), CacheScope("other"))
    table, events = run(cache, prompt(0, 9), scope)
    assert table.hit_tokens == 0
    assert events[0].extra_keys == extra
    assert run(cache, prompt(0, 9), scope)[0].hit_tokens == 8


def test_full_report_announces_reused_blocks(cache):
    run(cache, prompt(0, 12))
    table = BlockTable(prompt(0, 9))
    assert cache.admit(table, report_full=True)
    assert [event.hashes for event in cache.take_events()] == [tuple(table.hashes)]


def test_clear_waits_for_running_sequences(cache):
    table = BlockTable(prompt(0, 5))
    assert cache.admit(table)
    assert not cache.clear()
    cache.release(table)
    cache.take_events()
    assert cache.clear()
    assert cache.take_events() == [AllBlocksCleared()]
    assert run(cache, prompt(0, 5))[0].hit_tokens == 0


def test_hashes_continue_a_known_prefix():
    tokens = prompt(0, 17)
    whole = chain_hashes(tokens, block_size=SIZE)
    assert len(whole) == 4
    assert chain_hashes(tokens, block_size=SIZE, known=whole[:2]) == whole
    assert chain_hashes(tokens, block_size=SIZE, scope=CacheScope("s"))[1:] != whole[1:]


class TestHostTier:
    @pytest.fixture
    def cache(self):
        return BlockCache(num_blocks=5, block_size=SIZE, host_blocks=3)

    def test_eviction_moves_blocks_to_the_host_first(self, cache):
        old, _ = run(cache, prompt(0, 8))
        _, events = run(cache, prompt(100, 12))
        kinds = [(type(event).__name__, event.medium) for event in events]
        assert kinds == [("BlockStored", "CPU"), ("BlockRemoved", "GPU"), ("BlockStored", "GPU")]
        assert events[0].hashes == events[1].hashes == (old.hashes[1],)
        assert events[0].token_ids == []

    def test_host_evicts_its_oldest(self, cache):
        for start in range(0, 300, 100):
            run(cache, prompt(start, 8))
        _, events = run(cache, prompt(300, 16))
        removed = [event for event in events if isinstance(event, BlockRemoved)]
        assert [event.medium for event in removed if event.medium == "CPU"] == ["CPU"] * 3

    def test_hits_continue_on_the_host_and_load_to_the_device(self, cache):
        run(cache, prompt(0, 8))
        run(cache, prompt(100, 12))
        table, events = run(cache, prompt(0, 9))
        assert (table.device_hit_tokens, table.host_hit_tokens) == (4, 4)
        assert events[-1].hashes == (table.hashes[1],)
        assert events[-1].token_ids == prompt(4, 4)
