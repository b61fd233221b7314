"""The simulated engine's time: prefill in chunks, decode in steps, one queue."""

import pytest

from nearkv.replay.engine_model import Ended, FirstToken, SimulatedEngine, Work
from tests.core.replay.fleets import BLOCK, profile


def work(number=1, *, group=1, tokens=160, output_tokens=11, **fields):
    keys = [group * 1000 + n for n in range(tokens // BLOCK)]
    return Work(number, keys, tokens, output_tokens, **fields)


def run(engine, *works, at=0.0):
    """Submit all at once and return (time, change) until nothing happens any more."""
    changes = [(at, change) for each in works for change in engine.submit(each, at)]
    while (due := engine.next_at()) < float("inf"):
        changes += [(due, change) for change in engine.advance(due)]
    return changes


def times(changes, kind, number=1):
    return [at for at, c in changes if isinstance(c, kind) and c.work.number == number]


def test_an_idle_engine_prefills_at_its_rate_and_decodes_by_steps():
    changes = run(SimulatedEngine("e", profile()), work(tokens=160, output_tokens=11))
    assert times(changes, FirstToken) == pytest.approx([0.16])
    assert times(changes, Ended) == pytest.approx([0.16 + 10 * 0.01])


def test_prompts_wait_for_each_other():
    changes = run(SimulatedEngine("e", profile()), work(1), work(2, group=2))
    # The second prompt's chunks share their steps with the first one's decoding.
    assert times(changes, FirstToken, 2) == pytest.approx([0.16 + 1.6 * (0.1 + 0.01)])


def test_a_prefill_makes_decoding_slower():
    alone = run(SimulatedEngine("e", profile()), work(output_tokens=3))
    beside = run(SimulatedEngine("e", profile()), work(output_tokens=3), work(2, group=2))
    (first,), (ended,) = times(beside, FirstToken), times(beside, Ended)
    assert times(alone, Ended)[0] - times(alone, FirstToken)[0] == pytest.approx(0.02)
    assert ended - first == pytest.approx(1.6 * 0.11 + 0.4 * 0.01)


def test_cached_blocks_are_not_computed_but_for_the_last_token():
    engine = SimulatedEngine("e", profile())
    run(engine, work(1))
    again = work(2)
    changes = run(engine, again, at=10.0)
    assert again.cached_tokens == 144
    assert times(changes, FirstToken, 2) == pytest.approx([10.016])


def test_stored_and_removed_blocks_are_told():
    engine = SimulatedEngine("e", profile(blocks=12))
    (first,) = [c for _, c in run(engine, work(1, output_tokens=1)) if isinstance(c, FirstToken)]
    assert first.stored == work(1).keys
    changes = run(engine, work(2, group=2, output_tokens=1), at=5.0)
    (second,) = [c for _, c in changes if isinstance(c, FirstToken)]
    assert second.removed == work(1).keys[: -len(second.removed) - 1 : -1]
    assert len(second.removed) == 9


def test_without_room_a_request_waits_for_another_to_end():
    engine = SimulatedEngine("e", profile(blocks=12))
    changes = run(engine, work(1), work(2, group=2))
    assert times(changes, FirstToken, 2)[0] > times(changes, Ended, 1)[0]


def test_what_never_fits_ends_at_once():
    engine = SimulatedEngine("e", profile(blocks=5))
    (refused,) = engine.submit(work(), 0.0)
    assert isinstance(refused, Ended)
    assert not refused.fits


def test_at_most_so_many_run():
    engine = SimulatedEngine("e", profile(max_running=1))
    changes = run(engine, work(1), work(2, group=2))
    assert times(changes, FirstToken, 2)[0] > times(changes, Ended, 1)[0]


def test_a_pulled_prompt_computes_one_token():
    changes = run(SimulatedEngine("e", profile()), work(pulled_tokens=160))
    assert times(changes, FirstToken) == pytest.approx([0.001])


def test_a_prefill_for_another_engine_keeps_its_blocks_until_let_go():
    engine = SimulatedEngine("e", profile())
    kept = work(prefill_only=True)
    run(engine, kept)
    assert engine.store.used_blocks == 11
    engine.let_go(kept)
    assert engine.store.used_blocks == 0


def test_its_speed_is_told_once_it_prefilled():
    engine = SimulatedEngine("e", profile())
    assert engine.seconds_per_token is None
    run(engine, work())
    assert engine.seconds_per_token == pytest.approx(0.001)


def test_late_in_an_hour_rounding_stops_nothing():
    engine = SimulatedEngine("e", profile(prefill_tokens_per_second=8900.0))
    changes = run(engine, *(work(n, group=n, tokens=1600) for n in range(1, 6)), at=3599.123456789)
    assert len([c for _, c in changes if isinstance(c, Ended)]) == 5
