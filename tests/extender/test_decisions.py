"""The ring of decisions: bounds, order, and what a rejection shows."""

from hypothesis import given
from hypothesis import strategies as st

from nearkv.extender.decisions import Decision, Decisions, Rejection


def decision(number, *, pod="n/p", uid="u", size_bytes=10):
    return Decision(
        pod=pod,
        uid=uid,
        verb="filter",
        at=float(number),
        size_bytes=size_bytes,
        describe=lambda limit: {"number": number, "limit": limit},
    )


def test_the_latest_come_first_by_pod_or_uid():
    kept = Decisions(max_count=10, max_bytes=1000)
    for number in range(4):
        kept.add(decision(number, pod=f"n/{number % 2}", uid=str(number)))
    assert [found.at for found in kept.latest(pod="n/1")] == [3, 1]
    assert [found.at for found in kept.latest(uid="2")] == [2]
    assert list(kept.latest()) == []


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(0, 8), st.integers(0, 120))
def test_neither_bound_is_ever_passed(sizes, max_count, max_bytes):
    kept = Decisions(max_count=max_count, max_bytes=max_bytes)
    for number, size in enumerate(sizes):
        kept.add(decision(number, size_bytes=size))
        assert len(kept) <= max_count
        found = list(kept.latest(uid="u"))
        assert kept.size_bytes == sum(entry.size_bytes for entry in found) <= max_bytes
        if size <= max_bytes and max_count:
            assert found[0].at == number


def test_a_rejection_shows_its_nodes_up_to_a_limit():
    rejection = Rejection(nodes=5, failed={"a": "full", "b": "full"}, unresolvable={"c": "broken"})
    shown = rejection.describe(2)
    assert (shown["nodes"], shown["kept"], shown["rejected"]) == (5, 2, 3)
    assert shown["rejections"] == [
        {"node": "a", "why": "full", "resolvable": True},
        {"node": "b", "why": "full", "resolvable": True},
    ]
    assert rejection.describe(9)["rejections"][2]["resolvable"] is False
    assert rejection.size_bytes > 900
