"""How full the engines are: alarms, and the figure to scale by."""

import pytest

from nearkv.ingress.routing import Gate
from nearkv.ingress.saturation import ALARM_LEVELS, Fullness, engines_below, saturation_ratio

GB = 1_000_000_000
GATE = Gate(2 * GB, 0.1)


def full(free_ratio, wait_seconds=0.0, total_bytes=None):
    return Fullness(free_ratio, total_bytes, wait_seconds)


def saturation(*engines, waiting=0):
    return saturation_ratio(engines, waiting, GATE, 2.0)


def test_the_articles_two_levels():
    engines = [full(0.05), full(0.15), full(0.2), full(None)]
    assert [engines_below(ratio, engines) for _, ratio in ALARM_LEVELS] == [2, 1]
    assert [name for name, _ in ALARM_LEVELS] == ["warning", "critical"]


@pytest.mark.parametrize(
    ("engine", "ratio"),
    [
        pytest.param(full(1.0), 0.0, id="idle"),
        pytest.param(full(0.1), 1.0, id="at its gate"),
        pytest.param(full(0.55), 0.5, id="half of what may be used"),
        pytest.param(full(0.02, total_bytes=100 * GB), 1.0, id="the smaller threshold counts"),
        pytest.param(full(1.0, wait_seconds=1.0), 0.5, id="half the target wait"),
        pytest.param(full(0.1, wait_seconds=4.0), 2.0, id="whichever is more"),
        pytest.param(full(None, wait_seconds=1.0), 0.5, id="unknown is not zero"),
    ],
)
def test_an_engine_counts_by_memory_or_by_its_backlog(engine, ratio):
    assert saturation(engine) == pytest.approx(ratio)


def test_engines_share_and_those_who_wait_come_on_top():
    assert saturation(full(0.1), full(1.0)) == pytest.approx(0.5)
    assert saturation(full(0.1), full(0.1), waiting=4) == pytest.approx(3.0)


def test_without_engines_somebody_who_waits_wants_one_and_else_nothing_is_known():
    assert saturation() is None
    assert saturation(waiting=3) == 1.0
