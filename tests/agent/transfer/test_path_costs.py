"""What pulls from each node cost, and what of it is published when."""

import pytest

from nearkv.agent.settings import PathPriorSettings
from nearkv.agent.transfer.path_costs import PathCosts, path_priors
from nearkv.transfer.backends.contract import Path

SHM, TCP, RDMA = Path(name="shm"), Path(name="tcp"), Path(name="nixl", rdma=True)
PRIORS = PathPriorSettings()


@pytest.fixture
def costs():
    return PathCosts("here", path_priors(PRIORS), max_pairs=2)


def pull(costs, source="n", path=TCP, size_bytes=1_000_000, seconds=0.1, now=0.0):
    costs.began(source, path)
    costs.ended(source)
    costs.succeeded(source, path, size_bytes=size_bytes, now=now)
    costs.measured(source, path, size_bytes, seconds, now=now)


def news(costs, now):
    return {reading.source: reading for reading in costs.take_news(now)}


@pytest.mark.parametrize(
    ("path", "setup_seconds", "bytes_per_second"),
    [
        (SHM, PRIORS.same_node_setup_seconds, PRIORS.same_node_bytes_per_second),
        (RDMA, PRIORS.rdma_setup_seconds, PRIORS.rdma_bytes_per_second),
        (Path(name="nixl"), PRIORS.tcp_setup_seconds, PRIORS.tcp_bytes_per_second),
    ],
)
def test_before_it_is_measured_a_path_costs_what_its_class_does(
    costs, path, setup_seconds, bytes_per_second
):
    costs.expect("n", path)
    reading = news(costs, 0.0)["n"]
    assert (reading.setup_seconds, reading.bytes_per_second) == (setup_seconds, bytes_per_second)
    assert (reading.source, reading.target, reading.path) == ("n", "here", path.name)
    assert reading.points == 0


def test_enough_pulls_replace_the_prior(costs):
    for number in range(1, 7):
        size_bytes = number * 1_000_000
        pull(costs, size_bytes=size_bytes, seconds=0.02 + size_bytes / 2e8)
    reading = news(costs, 0.0)["n"]
    assert reading.setup_seconds == pytest.approx(0.02)
    assert reading.bytes_per_second == pytest.approx(2e8)
    assert reading.points == 6


def test_too_few_pulls_are_told_as_the_prior(costs):
    for _ in range(3):
        pull(costs)
    assert news(costs, 0.0)["n"].points == 0


def test_a_pair_is_published_once_a_second_at_most_and_only_when_it_changed(costs):
    pull(costs)
    assert set(news(costs, 10.0)) == {"n"}
    pull(costs)
    assert news(costs, 10.9) == {}
    assert set(news(costs, 11.0)) == {"n"}
    assert news(costs, 20.0) == {}


def test_the_path_last_used_is_the_one_that_counts(costs):
    for _ in range(6):
        pull(costs, path=RDMA, seconds=0.001)
    pull(costs, path=TCP)
    reading = news(costs, 0.0)["n"]
    assert (reading.path, reading.points) == ("tcp", 0)
    pull(costs, path=RDMA, seconds=0.001)
    assert news(costs, 5.0)["n"].points == 7


def test_expecting_does_not_overwrite_what_is_known(costs):
    pull(costs, path=RDMA)
    costs.expect("n", TCP)
    assert news(costs, 0.0)["n"].path == "nixl"


def test_pairs_are_bounded_and_the_forgotten_are_named(costs):
    for source in ("a", "b", "c"):
        costs.expect(source, TCP)
    assert costs.take_dropped() == ["a"]
    assert costs.take_dropped() == []
    costs.ended("a", "peer_lost")
    assert set(news(costs, 0.0)) == {"b", "c"}


def test_the_description_counts_what_happened(costs):
    pull(costs, size_bytes=5, now=1.0)
    costs.began("n", TCP)
    costs.began("n", TCP)
    costs.ended("n", "deadline")
    (pair,) = costs.describe(3.0)
    assert (pair["pulls"], pair["bytes"], pair["in_flight"]) == (1, 5, 1)
    assert (pair["failures"], pair["age_seconds"]) == ({"deadline": 1}, 2.0)


def test_nodes_reached_without_rdma_are_named_once_used(costs):
    costs.expect("a", TCP)
    assert costs.without_rdma() == []
    pull(costs, "a")
    pull(costs, "b", path=RDMA)
    assert costs.without_rdma() == [("a", "tcp")]
