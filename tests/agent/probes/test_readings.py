"""What probes say of a path: the median, and what happens when the path changes."""

import pytest

from nearkv.agent.probes.readings import ProbeReading, ProbeReadings, reading_of


def readings_of(*speeds, step=10.0):
    readings = ProbeReadings()
    for number, speed in enumerate(speeds):
        readings.add(ProbeReading(0.001 * (number + 1), speed, number * step))
    return readings


def speed_of(readings):
    return readings.cost.bytes_per_second


def test_before_the_first_nothing_is_known():
    readings = ProbeReadings()
    assert (readings.cost, readings.at, len(readings)) == (None, None, 0)


def test_the_median_counts():
    readings = readings_of(100.0, 120.0, 90.0)
    assert speed_of(readings) == 100.0
    assert readings.cost.setup_seconds == pytest.approx(0.002)
    assert (len(readings), readings.at) == (3, 20.0)


def test_one_that_was_unlucky_does_not_count():
    readings = readings_of(100.0, 100.0, 100.0, 10.0)
    assert (speed_of(readings), readings.is_suspect) == (100.0, True)
    readings.add(ProbeReading(0.001, 100.0, 50.0))
    assert (speed_of(readings), readings.is_suspect) == (100.0, False)


@pytest.mark.parametrize("now", [10.0, 1000.0])
def test_two_that_agree_are_another_path(now):
    readings = readings_of(100.0, 100.0, 100.0, 100.0, now, now * 1.1)
    assert speed_of(readings) == pytest.approx(now * 1.05)
    assert (len(readings), readings.is_suspect) == (2, False)


def test_a_second_one_that_differs_has_to_be_confirmed():
    readings = readings_of(100.0, 1000.0)
    assert (speed_of(readings), readings.is_suspect) == (100.0, True)
    readings.add(ProbeReading(0.001, 1000.0, 30.0))
    assert (speed_of(readings), readings.is_suspect) == (1000.0, False)


def test_what_others_refute_is_forgotten():
    readings = readings_of(100.0, 1000.0)
    readings.clear()
    assert (readings.cost, readings.is_suspect) == (None, False)


def test_two_that_do_not_agree_are_noise():
    readings = readings_of(100.0, 100.0, 100.0, 10.0, 1000.0)
    assert (speed_of(readings), readings.is_suspect) == (100.0, True)


def test_old_ones_are_forgotten_and_few_are_kept():
    assert len(readings_of(*[100.0] * 20)) == 9
    readings = readings_of(100.0, 130.0, step=2000.0)
    assert (len(readings), speed_of(readings)) == (1, 130.0)


def test_a_reading_is_the_bytes_beyond_the_set_up():
    reading = reading_of(
        asking_seconds=0.01, small_seconds=0.1, large_seconds=1.1, large_bytes=1000, at=5.0
    )
    assert reading.setup_seconds == pytest.approx(0.11)
    assert reading.bytes_per_second == pytest.approx(1000.0)


def test_noise_makes_no_path_infinitely_fast():
    reading = reading_of(
        asking_seconds=0.0, small_seconds=0.2, large_seconds=0.1, large_bytes=1000, at=5.0
    )
    assert reading.bytes_per_second == pytest.approx(100_000.0)
    assert reading.setup_seconds == pytest.approx(0.2)
