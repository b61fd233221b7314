"""Scrapes, what changed between two, and quantiles."""

import pytest

from nearkv.report.samples import between, histogram_of, parse_scrape, since_start

INF = float("inf")


def scrape(text, at=100.0):
    return parse_scrape("http://e/metrics", text, at)


def test_counters_grow_and_gauges_are_averaged():
    change = between(
        scrape("hits_total 10\nused 0.2\n"), scrape("hits_total 25\nused 0.4\n", 110.0)
    )
    assert change.grown["hits_total", ()] == 15
    assert change.mean["used", ()] == pytest.approx(0.3)
    assert change.seconds == 10.0


def test_a_counter_that_fell_began_anew():
    change = between(scrape("hits_total 10\n"), scrape("hits_total 4\n"))
    assert change.grown["hits_total", ()] == 4


def test_a_series_that_is_new_grew_from_nothing():
    assert between(scrape(""), scrape("hits_total 4\n")).grown["hits_total", ()] == 4


def test_once_is_since_the_start_where_that_is_told():
    assert since_start(scrape("process_start_time_seconds 40\n")).seconds == 60.0
    assert since_start(scrape("hits_total 1\n")).seconds is None


@pytest.mark.parametrize("text", ["<html>", "hits_total x\n", "a{b=\n"])
def test_what_is_no_metrics_is_refused(text):
    with pytest.raises(ValueError, match=r".+"):
        scrape(text)


@pytest.mark.parametrize(
    ("share", "value"),
    [(0.5, 1.0), (0.25, 0.5), (0.75, 2.0), (0.99, 2.0)],
)
def test_quantiles_are_within_their_bucket_by_proportion(share, value):
    histogram = histogram_of([(1.0, 50), (2.0, 75), (INF, 100)], 90.0)
    assert histogram.quantile(share) == pytest.approx(value)


def test_a_histogram_of_nothing_has_no_quantile():
    assert histogram_of([(1.0, 0), (INF, 0)], 0.0).quantile(0.99) is None


def test_buckets_of_several_engines_are_added_up():
    histogram = histogram_of([(1.0, 1), (INF, 2), (1.0, 3), (INF, 4)], 5.0)
    assert (histogram.bounds, histogram.counts, histogram.count) == ((1.0, INF), (4, 6), 6)
