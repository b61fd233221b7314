"""What is taken for a path's cost where pulls and probes both measured it."""

import pytest

from nearkv.agent.probes.planning import NEVER
from nearkv.agent.probes.readings import ProbeReading
from nearkv.agent.settings import PathPriorSettings
from nearkv.agent.transfer.path_costs import PathCosts, path_priors
from nearkv.transfer.backends.contract import Path

TCP, UCX = Path(name="tcp"), Path(name="ucx", rdma=True)
SIZE = 4_000_000


@pytest.fixture
def costs():
    return PathCosts("here", path_priors(PathPriorSettings()))


def probe(costs, speed, now, path=TCP):
    costs.probed("n", path, ProbeReading(0.001, speed, now))


def pull(costs, speed, now, times=1, path=TCP):
    for _ in range(times):
        costs.succeeded("n", path, size_bytes=SIZE, now=now, agent="http://n")
        costs.measured("n", path, SIZE, SIZE / speed, now=now)


def measured(costs):
    (pair,) = costs.all_measured()
    return pair.by, pair.cost.bytes_per_second


def test_probes_fill_in_where_there_were_no_pulls(costs):
    assert costs.last_measured("n").at == NEVER
    probe(costs, 1e8, 10.0)
    assert measured(costs) == ("probes", 1e8)
    assert costs.last_measured("n").at == 10.0
    (reading,) = costs.take_news(10.0)
    assert (reading.source, reading.path, reading.points) == ("n", "tcp", 1)
    assert reading.bytes_per_second == 1e8
    assert costs.pulled_from() == []


def test_too_few_pulls_leave_it_to_probes(costs):
    pull(costs, 2e8, 10.0, times=4)
    assert costs.last_measured("n").at == NEVER
    probe(costs, 1e8, 11.0)
    pull(costs, 2e8, 12.0)
    assert measured(costs)[0] == "pulls"
    assert [peer.url for peer in costs.pulled_from()] == ["http://n"]


def test_whichever_is_newer_counts(costs):
    pull(costs, 1e8, 10.0, times=6)
    assert measured(costs) == ("pulls", pytest.approx(1e8, rel=0.2))
    probe(costs, 1.2e8, 50.0)
    assert measured(costs) == ("probes", 1.2e8)
    pull(costs, 1e8, 60.0)
    assert measured(costs) == ("pulls", pytest.approx(1e8, rel=0.2))


def test_probes_that_agree_with_each_other_outdate_pulls(costs):
    pull(costs, 1e8, 10.0, times=30)
    probe(costs, 1e7, 50.0)
    probe(costs, 1e7, 60.0)
    pull(costs, 1e7, 70.0)
    assert measured(costs) == ("probes", 1e7)
    pull(costs, 1e7, 71.0, times=4)
    assert measured(costs) == ("pulls", pytest.approx(1e7, rel=0.2))


def test_pulls_outdate_probes(costs):
    probe(costs, 1e7, 0.0)
    probe(costs, 1e7, 5.0)
    pull(costs, 1e8, 20.0, times=5)
    probe(costs, 1.1e8, 60.0)
    assert measured(costs) == ("probes", 1.1e8)
    assert not costs.last_measured("n").is_suspect


def test_a_surprise_asks_for_another_probe(costs):
    probe(costs, 1e8, 0.0)
    probe(costs, 1e7, 10.0)
    assert costs.last_measured("n").is_suspect
    assert measured(costs) == ("probes", 1e8)
    probe(costs, 1e7, 12.0)
    assert not costs.last_measured("n").is_suspect
    assert measured(costs) == ("probes", 1e7)


@pytest.mark.parametrize("speed", [1e7, 1e9])
def test_five_pulls_that_all_say_so_are_another_path(costs, speed):
    pull(costs, 1e8, 10.0, times=100)
    pull(costs, speed, 20.0, times=4)
    assert measured(costs)[1] != pytest.approx(speed, rel=0.2)
    pull(costs, speed, 21.0)
    # Of which up to a half may be set-up, where all were as large.
    assert measured(costs)[1] == pytest.approx(SIZE / max(SIZE / speed - 0.005, SIZE / speed / 2))


def test_pulls_that_surprise_both_ways_are_noise(costs):
    pull(costs, 1e8, 10.0, times=100)
    for _ in range(3):
        pull(costs, 1e7, 20.0)
        pull(costs, 1e9, 20.0)
    (pair,) = costs.all_measured()
    assert pair.count == 106


def test_the_path_of_pulls_is_the_pairs(costs):
    pull(costs, 1e8, 10.0, times=6, path=UCX)
    probe(costs, 1e6, 20.0, path=TCP)
    assert measured(costs) == ("pulls", pytest.approx(1e8, rel=0.2))
    assert costs.last_measured("n").at == 20.0
    (pair,) = costs.describe(30.0)
    assert (pair["path"], pair["measured_by"], pair["measured_age_seconds"]) == (
        *("ucx", "pulls"),
        20.0,
    )
