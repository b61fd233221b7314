import msgspec
import pytest

from nearkv.demo.engine_counters import PromptTokens
from nearkv.demo.report import (
    PolicyReport,
    TopicReport,
    TurnReport,
    correct_predictions,
    report_json,
    required_reduction_ratio,
    shortcomings,
)


def turn(number, *, engine="engine-a", cached=0, predicted=0, ttft_seconds=0.5, tokens=100):
    return TurnReport(
        turn=number,
        engine=engine,
        reason="prefix-hit",
        prompt_tokens=tokens,
        cached_tokens=cached,
        predicted_cached_tokens=predicted,
        ttft_seconds=ttft_seconds,
    )


def policy_report(*, turns, computed):
    counted = PromptTokens(computed=computed, cached=100 * len(turns) - computed)
    topic = TopicReport(document="handbook", turns=tuple(turns), counted=counted)
    return PolicyReport(policy="prefix-first", topics=(topic,))


TEN_TURNS = tuple(turn(number) for number in range(1, 11))


def test_reduction_compares_with_all_prompt_tokens():
    report = policy_report(turns=TEN_TURNS, computed=120)
    assert report.main.without_reuse_tokens == 1000
    assert report.main.reduction_ratio == pytest.approx(0.88)


def test_follow_up_time_is_a_median_without_the_first_turn():
    times = (8.0, 0.5, 0.7, 0.6)
    turns = [turn(number, ttft_seconds=time) for number, time in enumerate(times, 1)]
    topic = policy_report(turns=turns, computed=100).main
    assert topic.ttft_first_seconds == 8.0
    assert topic.ttft_follow_up_seconds == 0.6


@pytest.mark.parametrize(
    ("rounds", "ratio"),
    [(10, 0.85), (40, 0.85), (2, 0.4722)],
    ids=["full", "more-rounds", "fewer-rounds"],
)
def test_bar_shrinks_with_what_the_rounds_can_save(rounds, ratio):
    assert required_reduction_ratio(rounds) == pytest.approx(ratio, abs=1e-4)


def test_good_run_has_no_shortcomings():
    assert shortcomings(policy_report(turns=TEN_TURNS, computed=150)) == []


def test_too_much_computing_is_a_shortcoming():
    [reason] = shortcomings(policy_report(turns=TEN_TURNS, computed=151))
    assert "84.9%" in reason
    assert "85.0%" in reason


def test_stray_follow_up_is_a_shortcoming_with_its_reason():
    turns = (*TEN_TURNS[:9], turn(10, engine="engine-b"))
    [reason] = shortcomings(policy_report(turns=turns, computed=100))
    assert reason == (
        "handbook, turn 10: went to engine-b (prefix-hit), but engine-a holds the document"
    )


def test_only_turns_with_both_numbers_are_compared():
    turns = [
        turn(1, cached=0, predicted=0),
        turn(2, cached=64, predicted=32),
        turn(3, cached=None, predicted=32),
        turn(4, cached=32, predicted=None),
    ]
    assert correct_predictions(turns) == (1, 2)


def test_report_is_json():
    report = policy_report(turns=TEN_TURNS, computed=120)
    text = msgspec.json.encode(report_json(engine="double", model="tiny", reports=[report]))
    decoded = msgspec.json.decode(text)
    assert decoded["passed"] is True
    document = decoded["policies"][0]["documents"][0]
    assert document["reduction_ratio"] == 0.88
    assert document["turns"][0]["engine"] == "engine-a"
