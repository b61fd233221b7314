"""What must hold for every cluster, sound or not."""

import math
from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nearkv.extender.deciding import Scorer
from nearkv.extender.distance import DistanceConfig
from nearkv.extender.explaining import explain
from nearkv.extender.fetching import Basis, FetchTimes
from nearkv.extender.headroom import DeviceRoom, HeadroomConfig
from nearkv.extender.ledger import Ledger
from nearkv.extender.model import MeasuredLink, Role
from nearkv.extender.presets import Level, LinkCost
from nearkv.extender.scoring import Deal, ScoreConfig, score
from tests.extender.snapshots import Group, Node, ask, make_snapshot

NOW = 1000.0
bounded = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A whole cluster takes a while to draw."""
NAMES = [f"n{number}" for number in range(6)]
LEVELS = (
    Level("rack", ("rack",), LinkCost(0.001, 45e9)),
    Level("zone", ("zone",), LinkCost(0.003, 11e9)),
    Level("region", ("region",), LinkCost(0.005, 2.5e9)),
)
FLAT = LinkCost(0.002, 10e9)
SAME_COSTS = DistanceConfig(
    levels=tuple(replace(level, cost=FLAT) for level in LEVELS),
    same_node=FLAT,
    beyond=FLAT,
    unknown=FLAT,
    without_rdma=FLAT,
)

anything = st.floats(width=32)
times = st.one_of(st.floats(0.0, NOW + 50), st.sampled_from([-math.inf, math.inf, math.nan]))
label = st.sampled_from(["", "a", "b", "c"])


@st.composite
def nodes(draw, name):
    devices = draw(st.integers(-1, 4))
    count = draw(st.integers(0, 4))
    return Node(
        name=name,
        labels=(draw(label), draw(label), draw(label)),
        rdma=draw(st.sampled_from([-1, 0, 1])),
        devices=devices,
        requested=draw(st.integers(0, 5)),
        free=tuple(draw(st.lists(anything, min_size=count, max_size=count))),
        ok=tuple(draw(st.lists(st.sampled_from([-1, 0, 1]), min_size=count, max_size=count))),
        reported_at=draw(times),
        report_seconds=draw(st.one_of(st.just(15.0), anything)),
        left_at=draw(times),
    )


links = st.builds(
    MeasuredLink,
    setup_seconds=anything,
    bytes_per_second=anything,
    count=st.integers(0, 20),
    received_at=times,
)
some_names = st.lists(st.sampled_from(NAMES), unique=True, max_size=4)


@st.composite
def snapshots(draw):
    pods = st.integers(0, 3)
    return make_snapshot(
        [draw(nodes(name)) for name in NAMES],
        groups={
            "g": Group(
                held={name: draw(anything) for name in draw(some_names)},
                held_at=draw(times),
                prefill={name: draw(pods) for name in draw(some_names)},
                decode={name: draw(pods) for name in draw(some_names)},
                kv_free={name: draw(anything) for name in draw(some_names)},
                kv_bytes_per_token=draw(st.one_of(st.none(), anything)),
                prefill_tokens_per_second=draw(st.one_of(st.none(), anything)),
            )
        },
        links=draw(st.dictionaries(st.integers(-1, 7), links, max_size=4)),
        pairs=draw(
            st.dictionaries(
                st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)), links, max_size=6
            )
        ),
    )


asks = st.builds(
    ask,
    group=st.sampled_from(["g", "g", "g", "other", ""]),
    role=st.sampled_from(list(Role)),
    devices=st.integers(-1, 5),
    name=st.sampled_from(["pod", "another"]),
    memory_ratio=st.one_of(st.just(0.9), anything),
    prefix_tokens=st.one_of(st.none(), st.integers(-5, 10**400)),
)
candidates = st.lists(st.sampled_from([*NAMES, "unknown", "strange"]), max_size=10)


def scorer(*, highest=10, distance=None, expected=()):
    ledger = Ledger()
    for number, (node, devices) in enumerate(expected):
        ledger.expect(f"expected-{number}", [node], devices, NOW)
    config = DistanceConfig(levels=LEVELS) if distance is None else distance
    return Scorer(config, HeadroomConfig(), ScoreConfig(highest=highest), ledger)


def scores_by_name(decider, pod, names, snapshot, now=NOW):
    decision = decider.prioritize(pod, names, snapshot, now)
    return list(zip(names, decision.scores.tolist(), strict=True))


expectations = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 3)), max_size=3)


@bounded
@given(snapshots(), asks, candidates, st.sampled_from([2, 10, 100]), expectations)
def test_scores_are_integers_in_range_and_explained(snapshot, pod, names, highest, expected):
    decider = scorer(highest=highest, expected=expected)
    decision = decider.prioritize(pod, names, snapshot, NOW)
    assert decision.scores.dtype == np.int32
    assert len(decision.scores) == len(names)
    assert all(0 <= value <= highest for value in decision.scores.tolist())
    if decision.record is not None:
        shown = explain(decision.record, 100)["scores"]
        assert sorted(entry["node"] for entry in shown) == sorted(names)


@bounded
@given(snapshots(), asks, candidates)
def test_filter_sorts_every_node_into_one_of_three(snapshot, pod, names):
    decision = scorer().filter(pod, names, snapshot, NOW)
    assert not decision.failed.keys() & decision.unresolvable.keys()
    rejected = decision.failed.keys() | decision.unresolvable.keys()
    assert decision.kept == [name for name in names if name not in rejected]
    assert rejected <= set(names)


@bounded
@given(snapshots(), asks, st.randoms(use_true_random=False), candidates, expectations)
def test_neither_order_nor_repetition_changes_a_score(snapshot, pod, random, names, expected):
    before = dict(scores_by_name(scorer(expected=expected), pod, names, snapshot))
    shuffled = [*names, *random.choices(names, k=3)] if names else []
    random.shuffle(shuffled)
    after = scores_by_name(scorer(expected=expected), pod, shuffled, snapshot)
    assert all(before[name] == value for name, value in after)


@bounded
@given(snapshots(), asks, candidates, st.permutations(range(len(NAMES))))
def test_rows_may_be_in_any_order(snapshot, pod, names, order):
    before = scores_by_name(scorer(), pod, names, snapshot)
    assert scores_by_name(scorer(), pod, names, relaid(snapshot, list(order))) == before


def relaid(snapshot, order):
    """The same cluster with its nodes in other rows."""
    new_row = {old: new for new, old in enumerate(order)}
    columns = [
        "labels",
        "rdma",
        "devices",
        "requested",
        "free_ratio",
        "device_ok",
        "reported_at",
        "report_seconds",
        "from_status",
        "left_at",
    ]
    facts = snapshot.groups["g"]

    def moved(rows):
        return np.array([new_row[row] for row in rows.tolist()], np.int32)

    return replace(
        snapshot,
        **{name: getattr(snapshot, name)[order] for name in columns},
        names=tuple(snapshot.names[row] for row in order),
        rows={snapshot.names[old]: new for new, old in enumerate(order)},
        groups={
            "g": replace(
                facts,
                holders=moved(facts.holders),
                prefill=moved(facts.prefill),
                decode=moved(facts.decode),
                kv_free_bytes=facts.kv_free_bytes[order],
            )
        },
        pairs={(new_row[a], new_row[b]): link for (a, b), link in snapshot.pairs.items()},
    )


@bounded
@given(snapshots(), asks, candidates, st.floats(30.001, 1e6))
def test_stale_data_never_bans_a_node(snapshot, pod, names, age):
    stale = replace(
        snapshot,
        reported_at=np.full(len(NAMES), NOW - age),
        report_seconds=np.full(len(NAMES), 15.0),
    )
    decision = scorer().filter(pod, names, stale, NOW)
    assert decision.kept == names


@bounded
@given(snapshots(), st.lists(st.tuples(asks, candidates), min_size=1, max_size=5), expectations)
def test_replicas_with_the_same_snapshot_agree(snapshot, questions, expected):
    """One has answered many other questions; expectations are the same."""
    experienced = scorer(expected=expected)
    for pod, names in questions:
        experienced.filter(pod, names, snapshot, NOW)
        experienced.prioritize(pod, names, snapshot, NOW)
        experienced._ledger.forget(pod.uid)
    pod, names = questions[0]
    fresh = scores_by_name(scorer(expected=expected), pod, names, snapshot)
    assert scores_by_name(experienced, pod, names, snapshot) == fresh


@bounded
@given(
    st.lists(snapshots(), min_size=1, max_size=2),
    asks,
    candidates,
    st.lists(st.floats(0.0, 5000.0), max_size=6),
)
def test_what_is_kept_between_calls_never_shows(clusters, pod, names, moments):
    keeper = scorer()
    for turn, now in enumerate(moments):
        snapshot = clusters[turn % len(clusters)]
        kept = scores_by_name(keeper, pod, names, snapshot, now)
        keeper._ledger.forget(pod.uid)
        assert kept == scores_by_name(scorer(), pod, names, snapshot, now)


@bounded
@given(snapshots(), asks, candidates, expectations, st.lists(label, min_size=18, max_size=18))
def test_topology_has_no_effect_where_links_cost_the_same(snapshot, pod, names, expected, values):
    snapshot = replace(snapshot, links={}, pairs={})
    number = {"": 0, "a": 1, "b": 2, "c": 3}
    labels = np.array([number[value] for value in values], np.int32).reshape(6, 3)
    elsewhere = replace(
        snapshot, labels=labels, rdma=np.zeros(6, np.int8), groups={"g": snapshot.groups["g"]}
    )
    here = scores_by_name(scorer(distance=SAME_COSTS, expected=expected), pod, names, snapshot)
    there = scores_by_name(scorer(distance=SAME_COSTS, expected=expected), pod, names, elsewhere)
    assert here == there


positive = st.floats(1e-3, 1e7)
ratio = st.sampled_from([0.0, 0.125, 0.5, 1.0])
weights = st.sampled_from([(0.7, 0.3), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.5, 2.0)])


@given(
    st.lists(st.tuples(positive, ratio), min_size=1, max_size=12),
    weights,
    st.sampled_from([2, 10, 100]),
    st.one_of(st.none(), st.integers(0, 2**64 - 1)),
)
@settings(max_examples=200, deadline=None)
def test_nearer_and_roomier_never_score_lower(candidate_terms, weight, highest, seed):
    milliseconds = np.array([ms for ms, _ in candidate_terms])
    room = np.array([value for _, value in candidate_terms])
    config = ScoreConfig(network_weight=weight[0], headroom_weight=weight[1], highest=highest)
    deal = None if seed is None else Deal(seed=seed, crowd=np.zeros(len(room) + 1))
    rows = np.arange(len(room), dtype=np.int32)
    values = score(times_of(milliseconds), room_of(room), rows, config, deal=deal).values
    for one in rows:
        for other in rows:
            clearly_nearer = milliseconds[one] < milliseconds[other] * (1 - 1e-6) - 1e-6
            if clearly_nearer and room[one] == room[other] and weight[0]:
                assert values[one] >= values[other]
            if milliseconds[one] == milliseconds[other] and room[one] > room[other] and weight[1]:
                assert values[one] >= values[other]


def times_of(milliseconds):
    """Fetch times as given, with one entry more for unknown nodes."""
    count = len(milliseconds) + 1
    nothing = np.zeros(0, np.int32)
    return FetchTimes(
        milliseconds=np.append(milliseconds, 100.0),
        link_class=np.zeros(count, np.int8),
        source=np.zeros(count, np.int32),
        measured=np.zeros(count, np.bool_),
        basis=Basis.COUNTERPARTS,
        cap_ms=math.inf,
        kv_bytes=1.0,
        prefix_tokens=1,
        counterparts=nothing,
        holders=nothing,
        held_bytes=np.zeros(0),
        computed_at=0.0,
        valid_until=math.inf,
    )


def room_of(values):
    nothing = np.zeros(len(values), np.bool_)
    return DeviceRoom(
        ratio=values,
        verdict=np.zeros(len(values), np.int8),
        free=np.zeros(len(values)),
        age_seconds=np.zeros(len(values)),
        rejects=nothing,
        unresolvable=nothing,
    )
