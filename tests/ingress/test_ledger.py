"""The in-flight ledger."""

import pytest

from nearkv.ingress.ledger import EngineLoad, Ledger, TokenTally


def test_requests_and_tokens_are_counted_until_they_end():
    ledger = Ledger()
    first, second = ledger.open("e", "i", 10), ledger.open("e", "i", 5)
    assert ledger.at("e", "i") == EngineLoad(2, 15)
    ledger.close(first)
    assert ledger.at("e", "i") == EngineLoad(1, 5)
    ledger.close(second)
    assert ledger.at("e", "i") == EngineLoad(0, 0)
    assert ledger.total_requests == 0


def test_a_new_incarnation_starts_with_nothing_in_flight():
    ledger = Ledger()
    old = ledger.open("e", "i1", 10)
    assert ledger.at("e", "i2") == EngineLoad()
    ledger.open("e", "i2", 3)
    ledger.close(old)
    assert ledger.at("e", "i2") == EngineLoad(1, 3)


def test_the_total_is_over_all_engines():
    ledger = Ledger()
    ledger.open("a", "i", 1)
    ledger.open("b", "i", 1)
    assert ledger.total_requests == 2


def test_a_tally_counts_for_as_long_as_a_block_lasts():
    tally = TokenTally()
    with tally.counting("e", "i", 100):
        with tally.counting("e", "i", 50):
            assert tally.at("e", "i") == 150
        assert tally.at("e", "i") == 100
        assert tally.at("e", "i2") == 0
    assert tally.at("e", "i") == 0


def test_a_tally_is_even_after_a_failure():
    tally = TokenTally()
    with pytest.raises(RuntimeError), tally.counting("e", "i", 100):
        raise RuntimeError
    assert tally.at("e", "i") == 0
