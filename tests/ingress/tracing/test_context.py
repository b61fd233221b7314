"""W3C trace context, read, written and begun."""

import random

import pytest

from nearkv.ingress.tracing.context import (
    Parent,
    format_traceparent,
    parse_traceparent,
    start_context,
)

GIVEN = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PARENT = Parent(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, sampled=True)


def draw(seed=1):
    return random.Random(seed).getrandbits


@pytest.mark.parametrize("text", [GIVEN, f" {GIVEN} ", "cc" + GIVEN[2:] + "-more"])
def test_what_is_understood(text):
    assert parse_traceparent(text) == PARENT


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        GIVEN.upper(),
        GIVEN + "-more",
        "ff" + GIVEN[2:],
        "00-" + "0" * 32 + GIVEN[35:],
        GIVEN[:36] + "0" * 16 + "-01",
        GIVEN[:-1],
        "00-4bf92f3577b34da6a3ce929d0e0e473६-00f067aa0ba902b7-01",
    ],
)
def test_what_is_ignored(text):
    assert parse_traceparent(text) is None


def test_what_is_written_is_read_again():
    assert format_traceparent(PARENT.trace_id, PARENT.span_id, sampled=True) == GIVEN
    assert not parse_traceparent(format_traceparent(1, 2, sampled=False)).sampled


def test_a_client_s_trace_is_continued_and_its_flag_counts():
    context = start_context(PARENT, 0.0, draw())
    assert (context.trace_id, context.parent_id, context.sampled) == (*_ids(PARENT), True)
    assert parse_traceparent(context.header) == Parent(
        PARENT.trace_id, context.span_id, sampled=True
    )
    assert len({context.span_id, context.prefill_id, PARENT.span_id}) == 3
    unsampled = Parent(1, 2, sampled=False)
    assert not start_context(unsampled, 1.0, draw()).sampled


def _ids(parent):
    return parent.trace_id, parent.span_id


@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
def test_new_traces_are_taken_by_their_ratio(ratio):
    bits = draw()
    taken = sum(start_context(None, ratio, bits).sampled for _ in range(4000))
    assert taken / 4000 == pytest.approx(ratio, abs=0.02)


def test_ids_are_never_nothing():
    context = start_context(None, 1.0, lambda _bits: 0)
    assert context.trace_id == context.span_id == 1
