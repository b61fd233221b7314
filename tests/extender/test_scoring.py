import numpy as np
import pytest

from nearkv.extender.scoring import NOBODY, Deal, ScoreConfig, best_of, score
from tests.extender.test_properties import room_of, times_of

CONFIG = ScoreConfig()


def scored(milliseconds, ratios=None, *, config=CONFIG, crowd=None, seed=7, single=False):
    count = len(milliseconds)
    room = room_of(np.full(count, 0.5) if ratios is None else np.array(ratios, float))
    rows = np.arange(count, dtype=np.int32)
    deal = None if crowd is None else Deal(seed=seed, crowd=np.array([*crowd, 0.0]))
    times = times_of(np.array(milliseconds, float))
    return score(times, room, rows, config, single=single, deal=deal)


def values(*arguments, **more):
    return scored(*arguments, **more).values.tolist()


def test_equal_nodes_all_get_half():
    assert values([20, 20, 20]) == [5, 5, 5]
    assert scored([20, 20, 20]).flat


def test_one_node_gets_the_highest():
    assert values([20], single=True) == [10]
    assert values([20, 20], single=True) == [10, 10]


def test_the_network_counts_in_log_time():
    assert values([10, 100, 1000], config=ScoreConfig(headroom_weight=0.0)) == [10, 5, 0]


def test_a_small_difference_earns_a_small_share():
    assert scored([100, 110]).network_share == pytest.approx(0.7 * 0.068, rel=0.02)
    assert scored([100, 1000]).network_share == pytest.approx(0.7)
    one, other = values([100, 110])
    assert one - other <= 1


def test_times_that_nobody_notices_are_the_same():
    one, other = values([0.01, 0.1])
    assert one - other <= 1


def test_headroom_decides_in_full_where_the_network_does_not():
    assert values([20, 20, 20], [1.0, 0.5, 0.0]) == [10, 5, 0]


def test_the_network_outweighs_headroom_where_it_differs():
    near_and_nearly_full, far_and_empty = values([20, 200], [0.125, 1.0])
    assert near_and_nearly_full > far_and_empty


def test_headroom_has_no_effect_at_weight_zero():
    config = ScoreConfig(headroom_weight=0.0)
    assert values([20, 20], [1.0, 0.0], config=config) == [5, 5]
    assert values([20, 200], [0.0, 1.0], config=config) == [10, 0]


def test_the_network_has_no_effect_at_weight_zero():
    assert values([20, 2000], config=ScoreConfig(network_weight=0.0)) == [5, 5]


def test_a_finer_range_is_ten_times_finer():
    assert values([10, 30, 1000], config=ScoreConfig(highest=100)) == [85, 69, 15]


def test_no_candidates_is_fine():
    assert values([]) == []
    assert values([], crowd=[]) == []


class TestDealing:
    def test_one_of_equal_nodes_is_put_ahead(self):
        found = scored([20] * 5, crowd=[0.1] * 5)
        assert sorted(found.values.tolist()) == [5, 5, 5, 5, 6]
        assert found.values[found.dealt_to] == 6

    def test_whom_a_pod_is_dealt_to_depends_on_the_pod_alone(self):
        chosen = {seed: scored([20] * 5, crowd=[0.0] * 5, seed=seed).dealt_to for seed in range(50)}
        again = {seed: scored([20] * 5, crowd=[0.0] * 5, seed=seed).dealt_to for seed in range(50)}
        assert chosen == again
        assert set(chosen.values()) == set(range(5))

    def test_nodes_where_fewer_pods_are_expected_come_first(self):
        assert scored([20] * 3, crowd=[1.0, 0.5, 1.0]).dealt_to == 1

    def test_what_rounding_hides_decides(self):
        for seed in range(20):
            found = scored([20] * 3, [0.52, 0.5, 0.51], crowd=[0.0] * 3, seed=seed)
            assert found.dealt_to == 0
            assert found.values.tolist() == [6, 5, 5]

    def test_at_the_top_the_others_make_way(self):
        found = scored([20] * 3, [1.0, 1.0, 0.96], crowd=[0.0] * 3)
        assert found.values[found.dealt_to] == 10
        assert sorted(found.values.tolist()) == [9, 9, 10]

    def test_who_is_ahead_already_stays_there(self):
        assert scored([20, 200], crowd=[0.0] * 2).values.tolist() == values([20, 200])

    def test_the_lead_is_a_tenth_of_the_range(self):
        config = ScoreConfig(highest=100)
        found = sorted(scored([20] * 3, config=config, crowd=[0.0] * 3).values.tolist())
        assert found == [50, 50, 60]

    def test_one_node_has_nobody_to_be_ahead_of(self):
        assert scored([20], single=True, crowd=[0.0]).dealt_to == NOBODY


def test_the_best_are_those_the_scheduler_picks_from():
    assert best_of(np.array([1, 7, 7], np.int32)).tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"network_weight": -1.0}, "network_weight"),
        ({"highest": 1}, "highest"),
        ({"highest": 1000}, "highest"),
        ({"span_ratio": 1.0}, "span_ratio"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(change, named):
    with pytest.raises(ValueError, match=named):
        ScoreConfig(**change)
