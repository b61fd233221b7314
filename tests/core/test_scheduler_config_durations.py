"""Durations as Go reads them."""

import pytest

from nearkv.scheduler_config.durations import parse_go_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("200ms", 0.2),
        ("1s", 1.0),
        ("1.5s", 1.5),
        (".5s", 0.5),
        ("1m30s", 90.0),
        ("1h", 3600.0),
        ("50us", 5e-5),
        ("50\N{MICRO SIGN}s", 5e-5),
        ("1ns", 1e-9),
        ("0", 0.0),
        ("-1s", -1.0),
        ("+2s", 2.0),
    ],
)
def test_durations(text, seconds):
    assert parse_go_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "200", "ms", "1 s", "1d", "1s2", "--1s", "1,5s", "1sms"])
def test_what_go_refuses(text):
    with pytest.raises(ValueError, match="not a duration"):
        parse_go_duration(text)
