"""The in-flight ledger."""

from nearkv.ingress.ledger import EngineLoad, Ledger


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
