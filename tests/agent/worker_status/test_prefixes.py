"""Named prefixes: the most used, without taking turns."""

from nearkv.agent.worker_status.prefixes import NamedPrefix, choose_prefixes


def held(**uses):
    return [NamedPrefix(name, count) for name, count in uses.items()]


def test_the_most_used_in_alphabetical_order():
    assert choose_prefixes(held(c=3, a=1, b=2), (), limit=2) == ("b", "c")


def test_one_that_is_shown_stays_while_it_is_used_about_as_much():
    near = held(a=10, b=9, c=8, d=7)
    assert choose_prefixes(near, ("c", "d"), limit=2) == ("c", "d")
    assert choose_prefixes(held(a=10, b=9, c=8, e=8, d=7), ("c", "d"), limit=2) == ("a", "c")


def test_what_is_gone_goes_and_what_cannot_be_shown_is_passed_over():
    assert choose_prefixes([], ("a",), limit=2) == ()
    assert choose_prefixes(held(**{"x" * 65: 9, "": 9, "ok": 1}), (), limit=2) == ("ok",)
    assert choose_prefixes(held(a=1), (), limit=0) == ()
