"""What is told of paths: news, and how old they are."""

import msgspec

from nearkv.agent.published_paths import PublishedPaths
from nearkv.state.model import PathClass, PathClasses, PathReading

PAIR = ("s", "n")


def reading(*, points=5, age_seconds=0.0, setup_seconds=1.0):
    return PathReading(
        source="s",
        target="n",
        path="tcp",
        setup_seconds=setup_seconds,
        bytes_per_second=1e9,
        points=points,
        age_seconds=age_seconds,
    )


def classes(*, age_seconds=0.0, zone="a"):
    cost = PathClass(
        name="zone",
        path="tcp",
        setup_seconds=1.0,
        bytes_per_second=1e9,
        pairs=2,
        count=9,
        age_seconds=age_seconds,
    )
    return PathClasses(levels=("zone",), labels={"zone": zone}, costs=(cost,))


def test_a_snapshot_tells_ages_of_its_own_moment():
    told = PublishedPaths()
    told.put(reading(age_seconds=2.0), 10.0)
    told.put_classes(classes(age_seconds=5.0), 10.0)
    assert told.pending[PAIR].age_seconds == 2.0
    assert [each.age_seconds for each in told.aged(100.0)] == [92.0]
    (cost,) = told.aged_classes(100.0).costs
    assert cost.age_seconds == 95.0
    assert told.measured_at(PAIR) == 8.0


def test_a_cost_that_nobody_measured_has_no_age():
    told = PublishedPaths()
    told.put(reading(points=0), 10.0)
    assert told.aged(100.0) == (reading(points=0),)


def test_growing_older_is_no_news():
    told = PublishedPaths()
    told.put(reading(), 0.0)
    told.put_classes(classes(), 0.0)
    told.sealed()
    told.put(reading(age_seconds=500.0), 500.0)
    told.put_classes(classes(age_seconds=50.0), 50.0)
    assert not told.pending
    assert told.pending_classes is None


def test_the_same_figures_measured_again_are_news_once_a_minute():
    told = PublishedPaths()
    told.put(reading(), 0.0)
    told.sealed()
    told.put(reading(), 59.0)
    assert not told.pending
    told.put(reading(), 60.0)
    assert told.pending
    assert told.measured_at(PAIR) == 60.0


def test_other_figures_are_news_at_once():
    told = PublishedPaths()
    told.put(reading(), 0.0)
    told.put_classes(classes(), 0.0)
    told.sealed()
    told.put(reading(setup_seconds=2.0), 0.5)
    told.put_classes(classes(zone="b"), 0.5)
    assert told.pending[PAIR].setup_seconds == 2.0
    assert told.pending_classes == classes(zone="b")


def test_a_pair_that_is_dropped_is_told_to_nobody():
    told = PublishedPaths()
    told.put(reading(), 0.0)
    told.drop(PAIR)
    told.drop(PAIR)
    assert (told.pending, told.aged(1.0), told.measured_at(PAIR)) == ({}, (), None)


def test_before_anything_is_known_there_is_nothing():
    assert PublishedPaths().aged_classes(0.0) is None
    assert msgspec.msgpack.encode(PublishedPaths().aged(0.0)) == b"\x90"
