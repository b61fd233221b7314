"""Why a request went where it did, in sentences."""

import pytest

from nearkv.freshness import Freshness
from nearkv.ingress.recording.explaining import ExplainRules, explain, gate_of
from nearkv.ingress.routing import Candidate, Gate
from tests.ingress.recording.request_records import (
    STALE,
    Clock,
    End,
    decision,
    pair,
    quote,
    served,
    watch,
)

RULES = ExplainRules("s1", Gate(2_000_000_000, 0.1), roles=True)
QUOTES = [
    quote("a", recompute=30.0, disturb=30.0, held=64),
    quote("b", wait=5.0, recompute=80.0, disturb=80.0),
]


def told(record, **kwargs):
    return explain(record, RULES, **{"limit": 20} | kwargs)


def test_the_chosen_engine_comes_first_and_the_others_say_what_was_dearer():
    found = told(served(quotes=QUOTES))
    chosen, other = found.engines
    assert (chosen.engine, chosen.chosen, other.engine) == ("a", True, "b")
    assert "60.0 ms: compute 30.0 for 36 tokens, trouble for others 30.0" in chosen.why
    assert other.why == (
        "105.0 ms dearer (165.0 ms): more trouble for others +50.0, more to compute +50.0, "
        "its queue +5.0"
    )
    assert (chosen.age_ms, other.age_ms) == (100.0, None)
    assert chosen.cost_ms == chosen.recompute_ms + chosen.disturb_ms == 60.0


def test_the_summary_and_the_story():
    found = told(served(quotes=QUOTES))
    assert found.summary == "a: it holds the prompt's beginning"
    assert found.story == [
        "the first byte came after 60 ms; from its dispatch 50 ms, predicted were 40 ms",
        "64 prompt tokens came from the cache, as predicted",
        "it ended ok after 260 ms with 7 tokens",
    ]


def test_a_prediction_that_failed_is_told():
    record = served()
    record.reported_cached_tokens = 32
    assert "32 prompt tokens came from the cache, predicted were 64" in told(record).story


def test_an_equal_engine_was_not_drawn_and_a_cheaper_one_was_outweighed():
    quotes = [quote("a", recompute=10.0), quote("b", recompute=10.0), quote("c", recompute=4.0)]
    candidates = [Candidate("a"), Candidate("b"), Candidate("c")]
    found = told(served(quotes=quotes, candidates=candidates, reason="hint"))
    by_engine = {verdict.engine: verdict.why for verdict in found.engines}
    assert "another one was drawn" in by_engine["b"]
    assert by_engine["c"].startswith("6.0 ms cheaper (4.0 ms)")


@pytest.mark.parametrize(
    ("candidate", "gate"),
    [
        (Candidate("x"), ""),
        (Candidate("x", avoid="draining"), "draining"),
        (Candidate("x", avoid="failing"), "failing"),
        (STALE, "no_state"),
        (Candidate("x", free_ratio=0.05), "no_kv_room"),
        (Candidate("x", role="prefill"), "prefill_only"),
        (Candidate("x", free_ratio=0.5, free_tokens=99), "tight"),
        (Candidate("x", free_ratio=0.5, free_tokens=100), ""),
        (Candidate("x", free_ratio=0.5, free_tokens=20, cached_tokens=80), ""),
        (Candidate("x", free_ratio=0.05, free_tokens=20, cached_tokens=80), ""),
        (Candidate("x", free_ratio=0.05, free_tokens=19, cached_tokens=80), "no_kv_room"),
    ],
)
def test_gates_have_reasons(candidate, gate):
    assert gate_of(candidate, decision(), RULES) == gate


def test_unurgent_requests_need_twice_the_room():
    candidate = Candidate("x", free_ratio=0.15)
    assert gate_of(candidate, decision(), RULES) == ""
    assert gate_of(candidate, decision(priority=-1), RULES) == "no_kv_room"


def test_a_gated_engine_says_why_it_was_out():
    candidates = [Candidate("a"), Candidate("b", free_ratio=0.01)]
    found = told(served(quotes=QUOTES, candidates=candidates))
    assert found.engines[1].gate == "no_kv_room"
    assert found.engines[1].why.startswith("its free KV is below the threshold; 165.0 ms: wait 5.0")


def test_without_quotes_load_and_room_speak():
    candidates = [Candidate("a", cached_tokens=64, free_ratio=0.5, queue=3), Candidate("b")]
    found = told(served(policy="prefix-first", candidates=candidates))
    assert found.engines[0].why == (
        "chosen: it holds the prompt's beginning; holds 64 tokens, 50% free, 3 requests"
    )
    assert found.engines[1].why == "holds 0 tokens, free KV unknown, 0 requests"


def test_the_limit_keeps_the_chosen_one_and_the_total():
    candidates = [Candidate(name) for name in "ZYXa"]
    found = told(served(candidates=candidates), limit=1)
    assert (found.engines_total, [v.engine for v in found.engines]) == (4, ["a"])


def test_old_state_is_said():
    candidates = [Candidate("a", freshness=Freshness.AGED)]
    assert "by aged" in told(served(rung="aged", candidates=candidates)).summary


def refused(*args):
    watched = watch(Clock())
    if args[0] == "no_kv_room":
        watched.decided(decision(None, reason="no_kv_room"), now=0.0)
    watched.refused(*args)
    watched.close()
    return watched.record


def test_refusals_say_which():
    found = told(refused("no_kv_room", 429, "no room"))
    assert found.summary == (
        "refused with 429, no_kv_room: every engine was below its free-KV threshold"
    )
    assert len(found.engines) == 2
    found = told(refused("bad_request", 400, "prompt: expected"))
    assert found.summary == "refused with 400, bad_request: prompt: expected"
    assert found.engines == []


def test_two_engines_and_a_failure_are_told_in_order():
    clock = Clock()
    watched = watch(clock)
    watched.decided(decision("d", split=pair(), reason="pd"), now=0.0, pull=(2_000_000, "shm"))
    clock.after(0.1)
    watched.prefilled("ok")
    watched.failed("d", "status 500")
    watched.served("d", "pd", predicted=96, prefill_engine="p")
    watched.began()
    watched.ended(200, End(error="engine_died"))
    watched.close()
    story = told(watched.record).story
    assert story[0] == (
        "p prefilled for d, 2.0 MB of KV by shm: alone 200.0 ms, by two 100.0 ms; "
        "its prefill was ok"
    )
    assert story[1] == "d failed before its first byte after 100 ms: status 500"
    assert story[-1] == "it ended broken (engine_died) after 100 ms"


def test_one_engine_alone_says_why_it_was_no_pair():
    split = pair(outcome="local", why="not_cheaper")
    story = told(served(split=split)).story
    assert story[0] == (
        "one engine served it alone, since not cheaper: alone 200.0 ms, by two 100.0 ms"
    )
