import pytest

from nearkv.extender.ledger import MOST_SHARES, Ledger
from tests.extender.snapshots import Node, make_snapshot

SNAPSHOT = make_snapshot([Node(name="a"), Node(name="b")])


@pytest.fixture
def ledger():
    return Ledger(ttl_seconds=30.0, max_pods=3)


def taken(ledger, now=0.0):
    return ledger.taken(SNAPSHOT, now).tolist()


def test_a_pod_is_expected_on_its_node(ledger):
    ledger.expect("pod", ["a"], 4, 0.0)
    assert taken(ledger) == [4.0, 0.0, 0.0]


def test_nodes_that_tie_share_the_pod(ledger):
    ledger.expect("pod", ["a", "b", "a"], 4, 0.0)
    assert taken(ledger) == [2.0, 2.0, 0.0]
    assert ledger.expected(SNAPSHOT, 0.0).pods.tolist() == [0.5, 0.5, 0.0]


def test_the_last_word_on_a_pod_counts(ledger):
    for _ in range(3):
        ledger.expect("pod", ["a"], 4, 0.0)
    ledger.expect("pod", ["b"], 1, 0.0)
    assert taken(ledger) == [0.0, 1.0, 0.0]
    assert len(ledger) == 1


def test_several_pods_add_up(ledger):
    ledger.expect("one", ["a"], 4, 0.0)
    ledger.expect("two", ["a", "b"], 1, 0.0)
    assert taken(ledger) == [4.5, 0.5, 0.0]


@pytest.mark.parametrize("how", ["bound", "covered", "forget"])
def test_an_expectation_is_gone_once_the_pod_is_accounted_for(ledger, how):
    ledger.expect("pod", ["a"], 4, 0.0)
    arguments = ("b", 0.0) if how == "bound" else ()
    getattr(ledger, how)("pod", *arguments)
    getattr(ledger, how)("pod", *arguments)
    assert taken(ledger) == [0.0, 0.0, 0.0]


def test_bound_tells_whether_the_node_was_expected(ledger):
    ledger.expect("one", ["a", "b"], 4, 0.0)
    ledger.expect("two", ["a"], 4, 0.0)
    assert ledger.bound("one", "b", 0.1)
    assert not ledger.bound("two", "b", 0.1)
    assert not ledger.bound("never-seen", "b", 0.1)


def test_an_expectation_ends_by_itself(ledger):
    ledger.expect("pod", ["a"], 4, 0.0)
    ledger.expect("later", ["b"], 1, 10.0)
    assert taken(ledger, 29.9) == [4.0, 1.0, 0.0]
    assert taken(ledger, 30.0) == [0.0, 1.0, 0.0]
    assert taken(ledger, 40.0) == [0.0, 0.0, 0.0]


def test_the_oldest_go_when_there_are_too_many(ledger):
    for number in range(5):
        ledger.expect(f"pod-{number}", ["a"], 1, float(number))
    assert len(ledger) == 3
    assert taken(ledger, 5.0) == [3.0, 0.0, 0.0]


def test_over_many_nodes_a_share_is_not_written_down(ledger):
    nodes = [f"n{number}" for number in range(MOST_SHARES + 1)]
    ledger.expect("pod", ["a", *nodes], 4, 0.0)
    assert taken(ledger) == [0.0, 0.0, 0.0]
    assert len(ledger) == 1


def test_nodes_that_are_not_known_are_passed_over(ledger):
    ledger.expect("pod", ["elsewhere"], 4, 0.0)
    assert taken(ledger) == [0.0, 0.0, 0.0]


def test_nothing_is_left_of_pods_that_are_gone(ledger):
    for number in range(100):
        ledger.expect(f"pod-{number}", ["a", "b", f"n{number}"], 0.1, float(number))
    ledger.expire(1e6)
    assert not ledger._pods
    assert not ledger._on_node


def test_rows_may_change_between_questions(ledger):
    ledger.expect("pod", ["b"], 4, 0.0)
    assert taken(ledger) == [0.0, 4.0, 0.0]
    turned = make_snapshot([Node(name="b"), Node(name="c"), Node(name="a")])
    assert ledger.taken(turned, 0.0).tolist() == [4.0, 0.0, 0.0, 0.0]
    ledger.expect("other", ["a"], 1, 0.0)
    assert ledger.taken(turned, 0.0).tolist() == [4.0, 0.0, 1.0, 0.0]
    assert taken(ledger) == [1.0, 4.0, 0.0]


def test_what_was_handed_out_stays_as_it_was(ledger):
    before = ledger.taken(SNAPSHOT, 0.0)
    ledger.expect("pod", ["b"], 4, 0.0)
    ledger.taken(SNAPSHOT, 0.0)
    assert not before.any()


@pytest.mark.parametrize("change", [{"ttl_seconds": 0.0}, {"max_pods": 0}])
def test_a_bound_that_cannot_be_is_refused(change):
    with pytest.raises(ValueError, match="must be above 0"):
        Ledger(**change)
