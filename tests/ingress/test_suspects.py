"""Engines that just failed: cool-down, success, forgetting."""

import pytest

from nearkv.ingress.suspects import Suspects


@pytest.fixture
def suspects():
    return Suspects(cooldown_seconds=2.0, longest_seconds=30.0)


@pytest.mark.parametrize(
    ("failures", "pause"),
    [(1, 2.0), (2, 4.0), (3, 8.0), (4, 16.0), (5, 30.0), (5000, 30.0)],
    ids=lambda value: f"{value:g}",
)
def test_the_pause_doubles_up_to_a_bound(suspects, failures, pause):
    at = 0.0
    for _ in range(failures):
        at += 30.0  # each time after the last pause
        suspects.failed("e", "i", at)
    assert suspects.is_suspect("e", "i", at + pause - 0.01)
    assert not suspects.is_suspect("e", "i", at + pause)


def test_failures_of_one_burst_count_once(suspects):
    for _ in range(50):
        suspects.failed("e", "i", 100.0)
    assert not suspects.is_suspect("e", "i", 102.0)


def test_a_success_wipes_the_record(suspects):
    suspects.failed("e", "i", 0.0)
    suspects.failed("e", "i", 0.0)
    suspects.succeeded("e", "i")
    assert not suspects.is_suspect("e", "i", 0.0)
    suspects.failed("e", "i", 0.0)
    assert not suspects.is_suspect("e", "i", 2.0), "counting starts over"


def test_neither_others_nor_other_incarnations_are_suspect(suspects):
    suspects.failed("e", "i1", 0.0)
    suspects.succeeded("other", "i1")
    assert suspects.is_suspect("e", "i1", 1.0)
    assert not suspects.is_suspect("e", "i2", 1.0)
    assert not suspects.is_suspect("other", "i1", 1.0)


def test_what_no_longer_exists_is_forgotten(suspects):
    suspects.failed("gone", "i", 0.0)
    suspects.failed("here", "i", 0.0)
    suspects.forget({("here", "i")})
    assert not suspects.is_suspect("gone", "i", 1.0)
    assert suspects.is_suspect("here", "i", 1.0)
