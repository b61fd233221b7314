"""Which peers there are, how near they are, and which few of them are probed."""

from collections import Counter

import pytest

from nearkv.agent.probes.peers import Peer, PeerBook
from nearkv.path_class import BEYOND, UNKNOWN, class_between, place_of

LEVELS = ("rack", "zone")
HERE = {"rack": "r1", "zone": "a"}


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"rack": "r1", "zone": "a"}, "rack"),
        ({"rack": "r2", "zone": "a"}, "zone"),
        ({"rack": "r2", "zone": "b"}, BEYOND),
        ({"rack": "r2"}, UNKNOWN),
        ({"rack": "", "zone": "a"}, "zone"),
        ({"rack": "", "zone": "b"}, UNKNOWN),
        ({}, UNKNOWN),
    ],
)
def test_the_first_equal_level_is_the_class(other, name):
    assert class_between(HERE, other, LEVELS) == name


def test_without_levels_no_class_is_known():
    assert class_between(HERE, HERE, ()) == UNKNOWN


def book_of(*providers, node="here", peers_per_class=2):
    book = PeerBook(node, providers, levels=LEVELS, labels=HERE, peers_per_class=peers_per_class)
    book.refresh()
    return book


def test_peers_come_from_all_providers_and_a_node_is_no_peer_of_its_own():
    configured = [Peer("a", "http://a", {"rack": "r1"}), Peer("here", "http://me")]
    seen = [Peer("b", "http://b"), Peer("a", "http://elsewhere")]
    book = book_of(lambda: configured, lambda: seen)
    assert len(book) == 2
    urls = {peer.node: peer.url for peers in book.chosen().values() for peer in peers}
    assert urls == {"a": "http://a", "b": "http://b"}


def test_a_provider_that_knows_labels_is_preferred():
    book = book_of(lambda: [Peer("a", "http://a")], lambda: [Peer("a", "http://b", HERE)])
    assert book.class_of("a") == "rack"


def test_a_peer_tells_its_labels_and_changes_class():
    book = book_of(lambda: [Peer("a", "http://a")])
    assert book.class_of("a") == UNKNOWN
    assert book.told("a", {"zone": "a", "rack": "r9", "other": "x"})
    assert not book.told("a", {"zone": "a", "rack": "r9"})
    assert book.class_of("a") == "zone"
    book.refresh()
    assert book.class_of("a") == "zone"
    assert not book.told("nobody", HERE)


def test_peers_that_are_gone_are_forgotten():
    peers = [Peer("a", "http://a", HERE)]
    book = book_of(lambda: peers)
    peers.clear()
    book.refresh()
    assert (len(book), book.chosen(), book.class_of("a")) == (0, {}, UNKNOWN)


def test_a_few_of_each_class_are_chosen_always_the_same():
    peers = [Peer(f"n{i}", f"http://n{i}", {"rack": f"r{i % 3}", "zone": "a"}) for i in range(60)]
    book = book_of(lambda: peers)
    chosen = book.chosen()
    assert {name: len(of_class) for name, of_class in chosen.items()} == {"rack": 2, "zone": 2}
    assert book_of(lambda: peers[::-1]).chosen() == chosen


def test_nodes_choose_different_peers():
    peers = [Peer(f"n{i}", f"http://n{i}", HERE) for i in range(200)]
    counts = Counter()
    for peer in peers:
        chosen = book_of(lambda: peers, node=peer.node, peers_per_class=8).chosen()
        counts.update(other.node for other in chosen["rack"])
    assert set(counts.values()) == {8}
    assert len(counts) == 200


def test_a_level_may_be_one_of_several_labels():
    levels = ("rack|old/rack", "zone")
    assert place_of({"old/rack": "r1", "zone": ""}, levels) == {"rack|old/rack": "r1"}
    assert place_of({"old/rack": "r1", "rack": "r2"}, levels) == {"rack|old/rack": "r2"}
    # What a peer tells is by level already.
    assert place_of({"rack|old/rack": "r3"}, levels) == {"rack|old/rack": "r3"}


def test_a_nil_uuid_is_no_place():
    assert place_of({"rack": "00000000-0000-0000-0000-000000000000.0"}, LEVELS) == {}


def test_configured_labels_win_over_those_of_the_node():
    node = {"rack": "r9", "zone": "z9", "other": "x"}
    book = PeerBook(
        "here", (), levels=LEVELS, labels={"zone": "a"}, peers_per_class=2, node_labels=lambda: node
    )
    assert book.labels == {"rack": "r9", "zone": "a"}
    node["rack"] = "r1"
    assert book.labels["rack"] == "r1"


def test_what_a_peer_tells_adds_to_what_a_provider_says():
    book = book_of(lambda: [Peer("a", "http://a", {"zone": "b"})])
    assert book.class_of("a") == UNKNOWN
    assert book.told("a", {"rack": "r1", "zone": "a"})
    assert book.class_of("a") == "rack"
    other = book_of(lambda: [Peer("a", "http://a", {"zone": "b"})])
    other.told("a", {"rack": "r2", "zone": "a"})
    assert other.class_of("a") == BEYOND
