import math

import numpy as np
import pytest

from nearkv.extender.headroom import REASONS, Candidates, HeadroomConfig, Readings, Verdict
from nearkv.extender.headroom import device_room as judge
from tests.extender.snapshots import NEVER, Node, ask, make_snapshot

NAN = math.nan
CLEAN, USED = 0.99, 0.08


def room_on(*nodes, now=0.0, devices=1, taken=(), rows=None):
    snapshot = make_snapshot(nodes)
    pod = ask(devices=devices)
    expected = np.zeros(len(nodes) + 1)
    expected[: len(taken)] = taken
    asked = np.arange(len(nodes), dtype=np.int32) if rows is None else np.array(rows, np.int32)
    candidates = Candidates(asked, expected, Readings.of(snapshot, pod.memory_ratio))
    return judge(snapshot, pod, candidates, now, HeadroomConfig())


def ratio_of(node, **more):
    return room_on(node, **more).ratio[0]


def verdict_of(node, **more):
    return Verdict(int(room_on(node, **more).verdict[0]))


def test_an_empty_node_has_all_the_room_and_a_full_one_none():
    assert ratio_of(Node(name="a")) == 1.0
    assert ratio_of(Node(name="a", requested=8, free=(USED,) * 8)) == 0.0
    assert ratio_of(Node(name="a", requested=9)) == 0.0


def test_devices_in_use_by_pods_are_counted_once():
    started = Node(name="a", requested=4, free=(USED,) * 4 + (CLEAN,) * 4)
    starting = Node(name="a", requested=4)
    assert ratio_of(started) == ratio_of(starting) == 0.5


def test_expected_pods_take_room():
    assert ratio_of(Node(name="a"), taken=[2.0]) == 0.75
    assert ratio_of(Node(name="a"), taken=[9.0]) == 0.0
    assert room_on(Node(name="a"), taken=[9.0]).free[0] == 0.0


def test_less_than_the_pod_asks_for_is_worth_little():
    assert ratio_of(Node(name="a", requested=6), devices=4) == pytest.approx(0.125)
    assert ratio_of(Node(name="a", requested=6), devices=2) == pytest.approx(0.25)


@pytest.mark.parametrize(("devices", "expected"), [(1, 7 / 8), (4, 1 / 2), (8, 0.0)])
def test_foreign_memory_counts_by_the_chance_to_be_given_that_device(devices, expected):
    node = Node(name="a", free=(USED,) + (CLEAN,) * 7)
    assert ratio_of(node, devices=devices) == pytest.approx(expected)
    assert verdict_of(node) is Verdict.FOREIGN


class TestRejecting:
    def test_foreign_memory_on_every_device(self):
        room = room_on(Node(name="a", free=(USED,) * 8))
        assert (room.rejects[0], room.unresolvable[0]) == (True, False)

    def test_foreign_memory_that_leaves_too_few(self):
        node = Node(name="a", requested=2, free=(USED,) * 6 + (CLEAN,) * 2)
        assert room_on(node, devices=3).rejects[0]
        assert not room_on(node, devices=2).rejects[0]

    def test_devices_in_use_by_pods_are_the_schedulers_business(self):
        assert not room_on(Node(name="a", requested=8, free=(USED,) * 8)).rejects[0]

    def test_failed_hardware_is_unresolvable(self):
        node = Node(name="a", devices=2, free=(CLEAN,) * 2, ok=(0, 1))
        room = room_on(node, devices=2)
        assert (room.rejects[0], room.unresolvable[0]) == (True, True)
        assert not room_on(node, devices=1).rejects[0]

    def test_a_failed_device_that_was_withdrawn_is_not_counted_twice(self):
        node = Node(name="a", devices=7, free=(CLEAN,) * 8, ok=(0,) + (1,) * 7)
        assert not room_on(node, devices=7).rejects[0]
        assert ratio_of(node) == 1.0

    @pytest.mark.parametrize(
        "node",
        [
            Node(name="a", free=(USED,) * 8, reported_at=-30.001),
            Node(name="a", free=(USED,) * 8, reported_at=NEVER),
            Node(name="a", free=(USED,) * 8, from_status=True),
            Node(name="a", ok=(0,) * 8, from_status=True),
            Node(name="a", free=(USED,) * 8, left_at=math.inf),
            Node(name="a", free=(USED,) * 8, left_at=-5.0),
            Node(name="a", devices=0, free=(USED,) * 8),
            Node(name="a", free=(NAN,) * 8),
            Node(name="a", devices=32, free=(USED,) * 8),
        ],
        ids=[
            "aged",
            "never",
            "foreign-by-status",
            "failed-by-status",
            "terminating",
            "just-left",
            "claimed",
            "no-reading",
            "time-sliced",
        ],
    )
    def test_never_on_what_is_not_certain(self, node):
        assert not room_on(node).rejects[0]

    def test_again_once_a_report_is_newer_than_the_pods_end_and_grace(self):
        node = Node(name="a", free=(USED,) * 8, left_at=-10.5)
        assert room_on(node).rejects[0]

    def test_never_for_a_pod_without_devices(self):
        assert not room_on(Node(name="a", free=(USED,) * 8), devices=0).rejects[0]

    def test_what_the_ledger_expects_never_rejects(self):
        assert not room_on(Node(name="a"), taken=[100.0]).rejects[0]


class TestAge:
    def test_an_ageing_report_fades_into_an_even_chance(self):
        node = Node(name="a")
        seen = [ratio_of(node, now=now) for now in (0.0, 30.0, 60.0, 90.0, 1e6)]
        assert seen == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.5])

    def test_bad_news_fades_as_well(self):
        node = Node(name="a", free=(USED,) * 8)
        seen = [ratio_of(node, now=now) for now in (0.0, 60.0, 90.0)]
        assert seen == pytest.approx([0.0, 0.25, 0.5])

    @pytest.mark.parametrize("interval", [0.0, NAN, -1.0, math.inf], ids=str)
    def test_without_a_sound_interval_a_usual_one_counts(self, interval):
        node = Node(name="a", report_seconds=interval)
        assert ratio_of(node, now=60.0) == pytest.approx(0.75)

    def test_without_a_report_requests_and_ledger_still_count(self):
        silent = Node(name="a", reported_at=NEVER, requested=4)
        assert ratio_of(silent) == pytest.approx(0.25)
        assert ratio_of(silent, taken=[2.0]) == pytest.approx(0.125)

    def test_ages_are_told(self):
        room = room_on(Node(name="a", reported_at=-7.0), Node(name="b", reported_at=NEVER))
        assert room.age_seconds.tolist() == [7.0, math.inf]


@pytest.mark.parametrize(
    ("node", "verdict"),
    [
        (Node(name="a"), Verdict.FRESH),
        (Node(name="a", reported_at=-60.0), Verdict.AGED),
        (Node(name="a", reported_at=-600.0), Verdict.NO_REPORT),
        (Node(name="a", free=(NAN,) * 8, ok=(-1,) * 8), Verdict.NO_READING),
        (Node(name="a", devices=0), Verdict.NO_DEVICES),
        (Node(name="a", left_at=-1.0), Verdict.SETTLING),
        (Node(name="a", free=(USED,) * 8), Verdict.FOREIGN),
        (Node(name="a", ok=(0,) * 8), Verdict.FAILED),
    ],
    ids=lambda value: value.name if isinstance(value, Verdict) else "",
)
def test_a_verdict_says_what_the_room_rests_on(node, verdict):
    assert verdict_of(node) is verdict
    assert verdict in REASONS


def test_unknown_nodes_and_claims_are_neutral():
    room = room_on(Node(name="a", devices=0), rows=[-1, 0])
    assert room.ratio.tolist() == [0.5, 0.5]
    assert np.isnan(room.free).all()
    assert room.verdict.tolist() == [Verdict.UNKNOWN_NODE, Verdict.NO_DEVICES]


def test_a_pod_without_devices_finds_all_nodes_alike():
    room = room_on(Node(name="a"), Node(name="b", requested=8), devices=0)
    assert room.ratio.tolist() == [0.5, 0.5]


def test_no_nodes_at_all_is_fine():
    assert room_on(rows=[-1]).ratio.tolist() == [0.5]


@pytest.mark.parametrize("change", [{"fresh_intervals": 7.0}, {"default_report_seconds": 0.0}])
def test_a_configuration_that_cannot_be_is_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        HeadroomConfig(**change)
