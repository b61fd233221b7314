"""Where other agents are, which of them are kept, and how seldom is asked."""

from collections import Counter

import msgspec
import pytest

from nearkv.agent.kubernetes.peer_listing import ListPace
from nearkv.agent.kubernetes.peer_slices import peers_of
from nearkv.agent.probes.neighbours import ZONE_LABEL, near_on_the_ring
from nearkv.agent.probes.peers import Peer
from nearkv.kube.endpoint_slices import EndpointSlice
from tests.agent.kubernetes.things import slice_of


def found(*slices, scheme="http"):
    decoded = [
        msgspec.json.decode(msgspec.json.encode(each), type=EndpointSlice) for each in slices
    ]
    peers = peers_of(decoded, port_name="peers", scheme=scheme)
    return {peer.node: (peer.url, dict(peer.labels)) for peer in peers}


def test_agents_are_found_with_their_node_and_zone():
    assert found(slice_of("n1", 9471, zone="a"), slice_of("n2", 9471)) == {
        "n1": ("http://127.0.0.1:9471", {ZONE_LABEL: "a"}),
        "n2": ("http://127.0.0.1:9471", {}),
    }


def test_one_address_of_each_node_counts_and_version_4_first():
    six = {**slice_of("n1", 9471, address="fd00::1"), "addressType": "IPv6"}
    six_only = {**slice_of("n2", 9471, address="fd00::2"), "addressType": "IPv6"}
    urls = {node: url for node, (url, _) in found(six, slice_of("n1", 9471), six_only).items()}
    assert urls == {"n1": "http://127.0.0.1:9471", "n2": "http://[fd00::2]:9471"}


def test_with_tls_they_are_asked_so():
    assert found(slice_of("n1", 9471), scheme="https")["n1"][0] == "https://127.0.0.1:9471"


@pytest.mark.parametrize(
    "fields",
    [
        {"ports": [{"name": "state", "port": 9470}]},
        {"ports": [{"name": "peers", "port": None}]},
        {"ports": None},
        {"endpoints": None},
        {"endpoints": [{"addresses": ["10.0.0.1"]}]},
        {"endpoints": [{"addresses": [], "nodeName": "n1"}]},
        {"endpoints": [{"addresses": None, "nodeName": "n1"}]},
        {"addressType": "FQDN"},
    ],
)
def test_what_does_not_lead_to_an_agent_is_passed_over(fields):
    assert found({**slice_of("n1", 9471), **fields}) == {}


def peers(count, zone_of):
    return [
        Peer(f"n{number}", f"http://n{number}", {ZONE_LABEL: zone_of(number)})
        for number in range(count)
    ]


def test_of_many_a_few_are_kept_near_and_far():
    every = peers(1000, lambda number: "ab"[number % 2])
    kept = near_on_the_ring(every, node="n0", zone="a", most=32)
    zones = [peer.labels[ZONE_LABEL] for peer in kept]
    assert zones == ["a"] * 32 + ["b"] * 32
    assert "n0" not in {peer.node for peer in kept}
    # Within a zone, each node is kept by as many as it keeps.
    zone_a = every[::2]
    keepers = Counter(
        peer.node
        for one in zone_a
        for peer in near_on_the_ring(zone_a, node=one.node, zone="a", most=4)
    )
    assert set(keepers.values()) == {4}


def test_without_a_zone_the_next_ones_are_kept():
    every = peers(100, lambda _: "a")
    assert len(near_on_the_ring(every, node="n0", zone="", most=8)) == 8


PACE = ListPace()


@pytest.mark.parametrize(("agents", "seconds"), [(1, 60.0), (100, 60.0), (1000, 360.0)])
def test_the_more_agents_the_rarer_each_asks(agents, seconds):
    assert PACE.pause_seconds(agents, 0.5) == seconds
    assert PACE.pause_seconds(agents, 0.0) == 0.75 * seconds
    assert PACE.pause_seconds(agents, 1.0) == 1.25 * seconds


def test_5000_agents_ask_three_times_a_second_at_most():
    assert 5000 / PACE.pause_seconds(5000, 0.5) <= 3


def test_after_failures_it_asks_ever_more_seldom():
    pauses = [PACE.retry_seconds(failures, 10, 0.5) for failures in range(1, 8)]
    assert pauses == [60.0, 120.0, 240.0, 480.0, 960.0, 1800.0, 1800.0]
    # Never sooner than without them.
    assert PACE.retry_seconds(1, 10_000, 0.5) == PACE.pause_seconds(10_000, 0.5) == 3600.0
