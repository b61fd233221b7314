"""Counters as growth: what stood before, what fell, what was replaced."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkv.agent.links.counting import FAULTS, NET_COUNTERS, RDMA_COUNTERS, ErrorHistory

SYMBOL, DOWNED = "counters/symbol_error", "counters/link_downed"
ACK, RNR = "hw_counters/local_ack_timeout_err", "hw_counters/rnr_nak_retry_err"


class Counted:
    """One link's history."""

    def __init__(self, window_seconds=100.0):
        self.history = ErrorHistory(window_seconds=window_seconds)

    def see(self, now=0.0, identity="guid", **counters):
        counts = {name.replace("__", "/"): count for name, count in counters.items()}
        self.history.observe(
            "mlx5_0/1", identity=identity, counters=counts, kinds=RDMA_COUNTERS, now=now
        )
        return dict(self.history.totals("mlx5_0/1"))

    @property
    def recent(self):
        return dict(self.history.recent("mlx5_0/1"))


@pytest.mark.parametrize(
    ("counts", "total"),
    [
        ([7], 0),
        ([7, 7], 0),
        ([7, 9, 12], 5),
        ([7, 9, 3], 5),
        ([7, 0, 2], 2),
        ([7, None, 9], 2),
        ([None, 7, 8], 1),
    ],
    ids=["first", "unchanged", "grown", "set-back", "set-to-zero", "missing-once", "late"],
)
def test_only_growth_counts(counts, total):
    counted = Counted()
    for count in counts:
        seen = counted.see(**({} if count is None else {"counters__symbol_error": count}))
    assert seen == {"symbol_error": total}


def test_a_kind_that_is_not_counted_is_unknown_not_zero():
    assert Counted().see(counters__link_downed=3) == {"link_downed": 0}


def test_files_of_one_kind_add_up_each_on_its_own():
    counted = Counted()
    counted.see(**{ACK.replace("/", "__"): 10, RNR.replace("/", "__"): 5})
    # One is set back while the other grows: the sum of both would hide it.
    assert counted.see(**{ACK.replace("/", "__"): 0, RNR.replace("/", "__"): 8}) == {"retry": 3}


def test_another_device_of_that_name_starts_anew():
    counted = Counted()
    counted.see(counters__symbol_error=5)
    counted.see(counters__symbol_error=9)
    assert counted.see(identity="other", counters__symbol_error=50) == {"symbol_error": 0}
    assert counted.recent == {}


def test_what_grew_is_recent_for_a_while():
    counted = Counted(window_seconds=100)
    counted.see(now=0, counters__symbol_error=0)
    counted.see(now=10, counters__symbol_error=2)
    counted.see(now=60, counters__symbol_error=3)
    assert counted.recent == {"symbol_error": 3}
    counted.see(now=111, counters__symbol_error=3)
    assert counted.recent == {"symbol_error": 1}
    counted.see(now=161, counters__symbol_error=3)
    assert counted.recent == {}


def test_links_that_are_gone_are_forgotten():
    counted = Counted()
    counted.see(counters__symbol_error=1)
    counted.history.keep_only(["eth0"])
    assert (counted.history.totals("mlx5_0/1"), counted.recent) == ({}, {})


def test_memory_is_bound_however_often_it_is_read():
    counted = Counted(window_seconds=1e9)
    for count in range(5000):
        counted.see(now=count, counters__symbol_error=count)
    assert counted.see(now=5000, counters__symbol_error=4999) == {"symbol_error": 4999}
    assert counted.recent["symbol_error"] <= 1024


@given(st.lists(st.integers(0, 2**64), min_size=1, max_size=20))
def test_totals_never_fall(counts):
    counted = Counted()
    totals = [counted.see(counters__symbol_error=count)["symbol_error"] for count in counts]
    assert totals == sorted(totals)


def test_faults_are_kinds_that_are_counted():
    counted = {*RDMA_COUNTERS.values(), *NET_COUNTERS.values()}
    assert counted.issuperset(FAULTS)
