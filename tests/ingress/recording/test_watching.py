"""What a watch notes of a request, and what is read from it."""

import msgspec
import pytest

from nearkv.ingress.recording.records import ages_ms, line_of
from tests.ingress.recording.request_records import (
    Clock,
    End,
    decision,
    pair,
    served,
    watch,
)


def line(record):
    return line_of(record, "s1")


def test_a_streamed_answer_has_all_its_times():
    found = line(served())
    assert (found.routed_ms, found.first_byte_ms, found.total_ms) == (10.0, 60.0, 260.0)
    assert (found.predicted_first_token_ms, found.first_token_ms) == (40.0, 50.0)
    assert found.first_token_error_ratio == pytest.approx(0.2)
    assert (found.outcome, found.status, found.output_tokens) == ("ok", 200, 7)
    assert (found.predicted_cached_tokens, found.reported_cached_tokens) == (64, 64)
    assert found.settings == "s1"


def test_ages_are_those_at_the_decision_and_unknown_is_not_zero():
    assert ages_ms(served().choice) == [100.0, None]


def test_an_answer_that_is_not_streamed_shows_no_first_token():
    record = served()
    record.stream = False
    assert line(record).first_token_ms is None
    assert line(record).first_token_error_ratio is None
    assert line(record).first_byte_ms == 60.0


def test_the_wait_for_room_ends_with_the_decision_that_had_some():
    clock = Clock()
    watched = watch(clock)
    watched.decided(decision(None, reason="no_kv_room"), now=0.0)
    watched.queued()
    clock.after(0.3)
    watched.decided(decision(None, reason="no_kv_room"), now=0.0)
    clock.after(0.2)
    watched.decided(decision("b"), now=0.0)
    clock.after(1.0)
    watched.close()
    assert line(watched.record).waited_ms == 500.0
    assert watched.record.choice.decision.engine == "b"


def test_a_decision_before_the_wait_does_not_end_it():
    clock = Clock()
    watched = watch(clock)
    watched.decided(decision("d", split=pair(), reason="pd"), now=0.0)
    clock.after(0.1)
    watched.failed("p", "timeout", leg="prefill")
    watched.queued()
    clock.after(0.3)
    watched.decided(decision("b"), now=0.0)
    watched.close()
    assert line(watched.record).waited_ms == 300.0


def test_a_spare_that_lost_is_not_the_decision_that_counted():
    clock = Clock()
    watched = watch(clock)
    watched.decided(decision("a", first_token_ms=40.0), now=0.0)
    clock.after(0.5)
    watched.decided(decision("b", attempt=1, first_token_ms=70.0), now=0.0)
    clock.after(0.1)
    watched.accepted(model="m", stream=True, tenant="", prefix_ids=())
    watched.served("a", "prefix_hit", predicted=64)
    watched.began()
    watched.ended(200, End())
    watched.close()
    found = line(watched.record)
    assert (found.engine, found.predicted_first_token_ms, found.first_token_ms) == (
        "a",
        40.0,
        600.0,
    )
    assert found.attempts == 1


def test_a_request_that_never_waited_has_no_wait():
    assert line(served()).waited_ms is None


def test_a_long_wait_keeps_few_decisions_and_the_last_one():
    clock = Clock()
    watched = watch(clock)
    for number in range(100):
        watched.decided(decision("a", attempt=number), now=0.0)
    assert len(watched.record.choices) == 16
    assert watched.record.choice.decision.attempt == 99


def test_two_engines_show_leg_path_and_bytes():
    clock = Clock()
    watched = watch(clock)
    watched.decided(decision("d", split=pair(), reason="pd"), now=0.0, pull=(4096, "tcp"))
    clock.after(0.08)
    watched.prefilled("ok")
    clock.after(0.02)
    watched.served("d", "pd", predicted=96, prefill_engine="p")
    watched.began()
    watched.ended(200, End())
    watched.close()
    found = line(watched.record)
    assert (found.engine, found.prefill_engine, found.prefill_ms) == ("d", "p", 80.0)
    transfer = found.transfer
    assert (transfer.source, transfer.target, transfer.path, transfer.bytes) == (
        "p",
        "d",
        "tcp",
        4096,
    )
    assert (transfer.local_ms, transfer.pair_ms, transfer.prefill) == (200.0, 100.0, "ok")
    assert found.predicted_first_token_ms is None


def test_an_engine_that_failed_is_named_with_its_reason():
    clock = Clock()
    watched = watch(clock)
    watched.decided(decision("a"), now=0.0)
    clock.after(0.5)
    watched.failed("a", "status 503")
    watched.decided(decision("b", attempt=1), now=0.0)
    watched.refused("engine_failed", 502, "x" * 1000)
    watched.close()
    found = line(watched.record)
    assert [(f.engine, f.why, f.after_ms) for f in found.failures] == [("a", "status 503", 500.0)]
    assert (found.outcome, found.attempts, len(found.error)) == ("refused", 1, 500)


def test_whoever_leaves_without_a_word_went_with_the_client():
    watched = watch(Clock())
    watched.close()
    assert (watched.record.outcome, watched.record.error) == ("broken", "client_gone")


def test_only_the_first_close_counts():
    seen = []
    watched = watch(Clock(), sinks=[seen.append])
    watched.close()
    watched.close()
    assert len(seen) == 1


@pytest.mark.parametrize("keeps_keys", [False, True])
def test_keys_are_kept_only_where_they_are_asked_for(keeps_keys):
    watched = watch(Clock(), keeps_keys=keeps_keys)
    watched.keyed([1, 2, 3], 16)
    record = watched.record
    assert (record.key_count, record.block_tokens) == (3, 16)
    assert list(record.keys) == ([1, 2, 3] if keeps_keys else [])


def test_sessions_are_kept_under_another_name():
    watched = watch(Clock())
    watched.accepted(model="m", stream=False, tenant="t", prefix_ids=("X-Session-ID:anna",))
    assert watched.record.session
    assert b"anna" not in msgspec.json.encode(line(watched.record))
