"""The parity check: predicted against reported cached tokens."""

import pytest

from nearkv.ingress.parity import ParityCheck, ParityMode


@pytest.fixture
def parity():
    return ParityCheck(window_requests=20, enough_requests=10)


def observe(parity, times, *, predicted=100, reported=100, incarnation="i"):
    return [
        parity.observe("e", incarnation, predicted=predicted, reported=reported)
        for _ in range(times)
    ]


def test_an_engine_is_taken_at_its_word_until_there_is_enough_evidence(parity):
    assert parity.mode("e", "i") is ParityMode.EXACT
    observe(parity, 9, reported=0)
    assert parity.mode("e", "i") is ParityMode.EXACT
    assert parity.trust_ratio("e", "i") == 1.0


def test_an_engine_that_disagrees_is_demoted_once(parity):
    changes = observe(parity, 12, reported=0)
    assert changes == [False] * 9 + [True] + [False] * 2
    assert parity.mode("e", "i") is ParityMode.APPROXIMATE


def test_a_few_misses_demote_nobody(parity):
    observe(parity, 16)
    observe(parity, 4, reported=0)
    assert parity.mode("e", "i") is ParityMode.EXACT


@pytest.mark.parametrize(
    ("predicted", "reported", "trust"),
    [
        pytest.param(100, 25, 0.25, id="a quarter came true"),
        pytest.param(100, 0, 0.0, id="nothing came true"),
        pytest.param(100, 300, 1.0, id="more than promised"),
        pytest.param(0, 50, 0.0, id="nothing was promised"),
    ],
)
def test_a_demoted_engine_is_trusted_by_its_record(parity, predicted, reported, trust):
    observe(parity, 10, predicted=predicted, reported=reported)
    assert parity.trust_ratio("e", "i") == trust


def test_an_engine_is_promoted_once_its_predictions_come_true_again(parity):
    observe(parity, 10, reported=0)
    changes = observe(parity, 20)
    assert changes.count(True) == 1
    assert changes[18], "19 of the window's 20 agree"
    assert parity.trust_ratio("e", "i") == 1.0


def test_between_the_thresholds_the_mode_stays(parity):
    observe(parity, 10, reported=0)
    observe(parity, 18)
    assert parity.mode("e", "i") is ParityMode.APPROXIMATE


def test_only_the_window_counts(parity):
    observe(parity, 1000)
    observe(parity, 5, reported=0)
    assert parity.mode("e", "i") is ParityMode.APPROXIMATE


def test_a_new_incarnation_starts_afresh_and_the_old_can_be_forgotten(parity):
    observe(parity, 10, reported=0)
    assert parity.mode("e", "i2") is ParityMode.EXACT
    parity.forget({("e", "i2")})
    assert parity.mode("e", "i") is ParityMode.EXACT
