"""Prefix ids: least recently used, bounded in bytes."""

from nearkv.ingress.hints import PrefixHint, PrefixHints


def hint(keys=(), engine="e"):
    return PrefixHint(tuple(keys), engine, "i")


def test_the_latest_request_under_a_name_counts():
    hints = PrefixHints()
    assert hints.get("doc") is None
    hints.learn("doc", hint([1], "a"))
    hints.learn("doc", hint([1, 2], "b"))
    assert hints.get("doc") == hint([1, 2], "b")
    assert len(hints) == 1


def test_what_was_used_least_recently_goes_first():
    hints = PrefixHints(limit_bytes=1300)  # three entries
    for name in "abc":
        hints.learn(name, hint())
    hints.get("a")
    hints.learn("d", hint())
    assert [name for name in "abcd" if hints.get(name)] == ["a", "c", "d"]


def test_the_bound_is_in_bytes_and_counts_keys():
    hints = PrefixHints(limit_bytes=100_000)
    for i in range(100):
        hints.learn(f"session-{i}", hint(range(1000)))
    assert 0 < len(hints) <= 100_000 // 8000


def test_learning_a_name_again_and_again_costs_it_once():
    hints = PrefixHints(limit_bytes=100_000)
    hints.learn("kept", hint())
    for _ in range(100):
        hints.learn("doc", hint(range(1000)))
    assert hints.get("kept")


def test_the_keys_of_one_name_are_bounded():
    hints = PrefixHints()
    hints.learn("doc", hint(range(10_000)))
    assert list(hints.get("doc").keys) == list(range(4096))


def test_an_entry_over_the_limit_is_not_kept():
    hints = PrefixHints(limit_bytes=1000)
    hints.learn("doc", hint(range(1000)))
    assert len(hints) == 0
