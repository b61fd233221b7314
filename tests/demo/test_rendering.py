import io
import json
import shlex

import pytest
from rich.console import Console

from nearkv.demo.engine_counters import PromptTokens
from nearkv.demo.rendering import (
    Screen,
    comparison_row,
    curl_line,
    duration,
    totals_row,
    turn_heading,
    turn_line,
)
from nearkv.demo.report import PolicyReport, TopicReport, TurnReport

FIRST = TurnReport(
    turn=1,
    engine="engine-a",
    reason="miss",
    prompt_tokens=2790,
    cached_tokens=0,
    predicted_cached_tokens=None,
    ttft_seconds=8.134,
)
SECOND = TurnReport(
    turn=2,
    engine="engine-b",
    reason="a reason much longer than its column",
    prompt_tokens=2850,
    cached_tokens=2784,
    predicted_cached_tokens=2784,
    ttft_seconds=0.0541,
)
TOPIC = TopicReport(
    document="handbook", turns=(FIRST, SECOND), counted=PromptTokens(computed=2856, cached=2784)
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(8.134, "8.13 s"), (0.0541, "54 ms"), (None, "-")],
    ids=["seconds", "milliseconds", "unknown"],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize("turn", [FIRST, SECOND], ids=["short-reason", "long-reason"])
def test_columns_of_a_turn_stand_below_their_heading(turn):
    assert len(turn_line(turn)) == len(turn_heading())


def test_unknown_prediction_is_not_shown_as_zero():
    assert turn_line(FIRST).split() == ["1", "engine-a", "miss", "2790", "0", "-", "8.13", "s"]


def test_rows_of_tables():
    assert totals_row(TOPIC) == ("2", "5,640", "2,856", "2,784", "49.4%", "8.13 s", "54 ms")
    assert comparison_row(TOPIC) == ("5,640", "2,856", "49.4%", "8.13 s", "54 ms", "1")


def test_curl_line_holds_json_for_the_shell():
    words = shlex.split(curl_line("http://127.0.0.1:8080", "tiny"))
    assert words[2] == "http://127.0.0.1:8080/v1/chat/completions"
    assert json.loads(words[-1])["model"] == "tiny"


def test_output_without_a_terminal_is_plain():
    text = io.StringIO()
    with Screen(Console(file=text, width=120)) as screen:
        screen.progress("engine-a: [loading] weights 1 s")
        screen.asking("handbook", 1)
        screen.answered("handbook", FIRST)
        screen.totals(PolicyReport(policy="prefix-first", topics=(TOPIC,)))
    assert "engine-a: [loading] weights 1 s\n" in text.getvalue()
    assert turn_line(FIRST) in text.getvalue()
    assert "predicted cached tokens were right in 1 of 1 requests" in text.getvalue()
    assert "\x1b" not in text.getvalue()


def test_terminal_shows_progress_in_place():
    text = io.StringIO()
    with Screen(Console(file=text, width=120, force_terminal=True)) as screen:
        screen.progress("engine-a: loading weights 1 s")
        screen.progress("engine-a: ready after 2 s")
    assert text.getvalue().count("\n") <= 2
    assert "engine-a: ready after 2 s" in text.getvalue()


def test_tables_fit_in_eighty_columns():
    text = io.StringIO()
    long_topic = TopicReport(
        document="storage handbook",
        turns=(FIRST, SECOND) * 20,
        counted=PromptTokens(computed=100_000, cached=12_800),
    )
    report = PolicyReport(policy="prefix-first", topics=(long_topic,))
    with Screen(Console(file=text, width=80)) as screen:
        screen.totals(report)
        screen.comparison([report])
    assert "…" not in text.getvalue()
    assert "TTFT later" in text.getvalue()
