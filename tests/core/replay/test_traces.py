"""Reading traces: both kinds, and what is refused."""

import pytest

from nearkv.replay.errors import ReplayError
from nearkv.replay.traces import parse_trace, read_trace, scaled, spread, without_sharing
from tests.core.replay.fleets import public_line, record_line


def parse(*lines, **options):
    return parse_trace(lines, name="t.jsonl", **options)


def test_a_public_trace_has_keys_for_full_blocks_only():
    (arrival,) = parse(public_line(input_length=1030, hash_ids=[1, 2, 3])).arrivals
    assert len(arrival.keys) == 2
    assert arrival.prompt_tokens == 1030


def test_equal_ids_behind_different_beginnings_are_different_blocks():
    one, other = parse(public_line(hash_ids=[1, 2, 3]), public_line(hash_ids=[9, 2, 3])).arrivals
    assert one.keys[1] != other.keys[1]


def test_times_are_seconds_from_the_first_arrival_in_order():
    trace = parse(public_line(timestamp=5000), public_line(timestamp=2000))
    assert [a.at for a in trace.arrivals] == [0.0, 3.0]


def test_decision_records_are_read_with_their_own_block_size():
    trace = parse(record_line(session="s", priority=2))
    (arrival,) = trace.arrivals
    assert trace.block_tokens == 16
    assert (arrival.prompt_tokens, arrival.output_tokens, len(arrival.keys)) == (40, 5, 2)
    assert (arrival.session, arrival.priority) == ("s", 2)


def test_an_unseen_length_of_an_answer_is_a_usual_one():
    lines = [record_line(output_tokens=20), record_line(output_tokens=None, output_chunks=None)]
    assert [a.output_tokens for a in parse(*lines).arrivals] == [20, 20]


def test_requests_without_tokens_are_left_out():
    trace = parse(record_line(), record_line(prompt_tokens=None, hash_ids=None))
    assert len(trace.arrivals) == 1


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        pytest.param([], "is empty", id="empty"),
        pytest.param([b"what"], "line 1: not a JSON object", id="no-json"),
        pytest.param([b'{"a": 1}'], "neither a public trace", id="other-json"),
        pytest.param([public_line(), b'{"input_length": 3}'], "line 2: .*missing", id="field"),
        pytest.param([public_line(hash_ids=[1])], "hash_ids has 1 ids", id="few-ids"),
        pytest.param([public_line(input_length=0)], "too small", id="no-prompt"),
        pytest.param([record_line(hash_ids=None)], "decisions.keys: true", id="no-keys"),
        pytest.param(
            [record_line(), record_line(model="n")],
            "several models, choose by --model",
            id="models",
        ),
        pytest.param([record_line(), record_line(block_tokens=32)], "mixes block", id="blocks"),
        pytest.param([record_line(prompt_tokens=None)], "no record with prompt_tokens", id="blind"),
    ],
)
def test_what_cannot_be_replayed_is_said_with_its_field(lines, said):
    with pytest.raises(ReplayError, match=said):
        parse(*lines)


def test_a_model_is_chosen_by_name():
    trace = parse(record_line(), record_line(model="n", prompt_tokens=70), model="n")
    assert [a.prompt_tokens for a in trace.arrivals] == [70]


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ReplayError, match=r"cannot read .*nowhere"):
        read_trace(tmp_path / "nowhere")


def test_rounded_times_are_spread_and_the_same_seed_spreads_alike():
    trace = parse(*(public_line(timestamp=t) for t in (0, 0, 0, 3000, 3000, 6000)))
    one, again, other = spread(trace, 1), spread(trace, 1), spread(trace, 2)
    assert one == again != other
    assert len({a.at for a in one.arrivals}) == 6
    assert all(a.at < 3.0 for a in one.arrivals[:3])


def test_a_faster_rate_shortens_all_gaps():
    trace = scaled(parse(public_line(), public_line(timestamp=4000)), 2.0)
    assert trace.seconds == 2.0


def test_without_sharing_no_block_is_anybody_elses():
    trace = without_sharing(parse(public_line(), public_line()))
    one, other = trace.arrivals
    assert not set(one.keys) & set(other.keys)
    assert len(one.keys) == 2
