"""Path cost learnt from transfers."""

import random

import pytest

from nearkv.path_cost import PathCost, PathCostModel

PRIOR = PathCost(0.002, 1e9)


def taught(points, prior=PRIOR):
    model = PathCostModel(prior)
    for size_bytes, seconds in points:
        model.observe(size_bytes, seconds, now=0.0)
    return model


def test_the_prior_stands_until_there_are_enough_points():
    model = taught([(1 << 20, 5.0)] * 4)
    assert not model.is_measured
    assert model.cost == PRIOR


def test_set_up_and_bandwidth_are_found_through_noise():
    source = random.Random(1)
    truth = PathCost(0.005, 4e9)
    sizes = [source.randrange(1 << 16, 1 << 28) for _ in range(300)]
    points = [(n, truth.seconds(n) * source.uniform(0.95, 1.05)) for n in sizes]
    cost = taught(points).cost
    assert cost.bytes_per_second == pytest.approx(4e9, rel=0.1)
    assert cost.setup_seconds == pytest.approx(0.005, rel=0.5)


def test_equal_sizes_give_a_bandwidth_at_least():
    cost = taught([(100_000_000, 0.102)] * 10).cost
    assert cost.seconds(100_000_000) == pytest.approx(0.102)
    assert cost.setup_seconds == PRIOR.setup_seconds


def test_a_changed_path_is_noticed():
    fast = [(n << 20, PathCost(0.001, 10e9).seconds(n << 20)) for n in range(1, 100)]
    slow = [(n << 20, PathCost(0.001, 1e9).seconds(n << 20)) for n in range(1, 100)]
    assert taught(fast + slow).cost.bytes_per_second == pytest.approx(1e9, rel=0.15)


@pytest.mark.parametrize(
    "points",
    [
        [(1000, 1.0), (2000, 0.5), (3000, 0.2), (4000, 0.1), (5000, 0.05), (6000, 0.01)],
        [(1, 1e-9)] * 8,
        [(1 << 40, 1e4)] * 8,
    ],
    ids=["falling", "tiny", "huge"],
)
def test_whatever_comes_in_the_cost_is_positive_and_finite(points):
    cost = taught(points).cost
    assert 0 <= cost.setup_seconds < float("inf")
    assert 0 < cost.bytes_per_second < float("inf")


@pytest.mark.parametrize(
    "point", [(0, 1.0), (-5, 1.0), (10, 0.0), (10, float("inf")), (10, float("nan"))]
)
def test_impossible_points_are_passed_over(point):
    assert taught([point] * 9).points == 0
