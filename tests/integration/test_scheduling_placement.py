"""A small simulated cluster: pods go nearer to their KV, and only if that makes a difference."""

import pytest

from tests.benchmarks.placement_cluster import Placer, Shape, place

SMALL = Shape(nodes=200, level_nodes=(5, 25, 100, 200), decode_per_group=10)
OURS = Placer(name="ours", extender=True)


async def test_pods_fetch_their_kv_sooner_than_with_a_stock_scheduler_or_zone_affinity():
    default = await place(SMALL, Placer(name="default"))
    zone = await place(SMALL, Placer(name="zone", zone_affinity=True))
    ours = await place(SMALL, OURS)
    assert ours.mean_ms < zone.mean_ms < default.mean_ms
    assert len(ours.nodes) == len(default.nodes) == 30


@pytest.mark.parametrize("seed", [1, 2])
async def test_with_equal_link_costs_pods_go_where_the_stock_scheduler_puts_them(seed):
    shape = Shape(nodes=100, level_nodes=(5, 25, 50, 100), decode_per_group=10, seed=seed)
    default = await place(shape, Placer(name="default"))
    ours = await place(shape, Placer(name="ours", extender=True, equal_costs=True))
    assert ours.nodes == default.nodes


async def test_the_same_cluster_twice_is_the_same_placement():
    shape = Shape(nodes=100, level_nodes=(5, 25, 50, 100), decode_per_group=5)
    first, second = [await place(shape, OURS) for _ in range(2)]
    assert first.nodes == second.nodes
