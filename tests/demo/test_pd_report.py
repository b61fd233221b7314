import pytest

from nearkv.demo.pd_report import PdReport, PdTurn, pd_report_json, pd_shortcomings
from nearkv.demo.rendering import pd_turn_heading, pd_turn_line


def turn(**fields):
    values = {
        "turn": 1,
        "prefill_engine": "engine-prefill",
        "decode_engine": "engine-decode",
        "reason": "pd",
        "prompt_tokens": 3000,
        "computed_tokens": 24,
        "cached_tokens": 0,
        "pulled_tokens": 2976,
        "path": "tcp",
        "size_bytes": 3_047_424,
        "seconds": 0.005,
        "ttft_seconds": 0.2,
    }
    return PdTurn(**{**values, **fields})


def report(*turns):
    return PdReport(model="tiny", block_size=32, turns=turns)


def test_turns_whose_prompt_was_moved_pass():
    assert pd_shortcomings(report(turn(), turn(turn=2, reason="pull"))) == []


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"reason": "prefix_miss", "prefill_engine": None}, "turn 1: was not split"),
        ({"prefill_engine": None}, "turn 1: was not split"),
        ({"computed_tokens": 33}, "turn 1: engine-decode computed 33 tokens itself"),
    ],
)
def test_what_went_otherwise_is_named(fields, what):
    (found,) = pd_shortcomings(report(turn(**fields)))
    assert found.startswith(what)


def test_the_report_tells_what_was_moved():
    content = pd_report_json(report(turn(), turn(turn=2, pulled_tokens=64)))
    assert content["passed"] is True
    assert content["pulled_tokens"] == 3040


def test_lines_stand_under_their_heading():
    heading, line = pd_turn_heading(), pd_turn_line(turn())
    for name, value in (("prompt", "3000"), ("pulled", "2976"), ("TTFT", "200 ms")):
        assert heading.index(name) + len(name) == line.index(value) + len(value)
    assert len(line) <= 110


def test_a_turn_without_a_transfer_has_a_line():
    line = pd_turn_line(turn(path=None, prefill_engine=None, size_bytes=0, seconds=0.0))
    assert "- -> engine-decode" in line
