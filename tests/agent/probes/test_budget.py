"""What probes cost a node: by arithmetic, and in a simulated cluster of a thousand."""

import heapq
import random
from collections import Counter, defaultdict

import pytest

from nearkv.agent.probes.budget import (
    BURST_SECONDS,
    PROBE_BYTES,
    REFUSAL,
    SIDES,
    Budget,
    ProbeCost,
    cost_of,
    half_of,
)
from nearkv.agent.probes.peers import Peer, PeerBook
from nearkv.agent.probes.planning import Measured, ProbePlan
from nearkv.agent.probes.settings import ProbeSettings

DEFAULTS = ProbeSettings()
MAX_BYTES_PER_SECOND = 1_000_000
MAX_CPU_RATIO = 0.001


def default_half():
    return half_of(bytes_per_second=DEFAULTS.max_bytes_per_second, cpu_ratio=DEFAULTS.max_cpu_ratio)


def test_after_a_probe_its_cost_is_made_up_for():
    budget = Budget(bytes_per_second=1000.0, cpu_ratio=0.01)
    assert budget.take(ProbeCost(25_000, 0.01), 10.0)
    assert budget.wait_seconds(11.0) == pytest.approx(4.0)
    assert not budget.take(ProbeCost(1, 0.0), 14.9)
    assert budget.take(ProbeCost(0, 0.2), 15.0)
    assert budget.wait_seconds(15.0) == pytest.approx(20.0)


def test_two_questions_that_come_together_are_both_answered():
    budget = default_half()
    answered = 0
    while budget.take(cost_of("tcp"), 0.0):
        answered += 1
    assert answered == 3


def test_a_refusal_costs_less_than_the_probe_that_it_was_to_be():
    budget = Budget(bytes_per_second=1e6, cpu_ratio=0.001)
    for _ in range(30):
        assert budget.take(cost_of("nixl"), 0.0)
        budget.was_refused(cost_of("nixl"), 0.0)
        if budget.wait_seconds(0.0):
            break
    assert budget.wait_seconds(0.0) == pytest.approx(1.0)


def test_saying_no_is_paid_for_too():
    budget = Budget(bytes_per_second=1e6, cpu_ratio=0.001)
    for _ in range(22):
        budget.refuses(5.0)
    assert budget.wait_seconds(5.0) == pytest.approx(2.0)


def test_nothing_is_saved_up():
    budget = Budget(bytes_per_second=1000.0, cpu_ratio=1.0)
    assert budget.take(ProbeCost(21_000, 0.0), 1e6)
    assert not budget.take(ProbeCost(1000, 0.0), 1e6 + 0.9)


@pytest.mark.parametrize("backend", ["tcp", "ucx", "nixl"])
def test_a_node_that_asks_and_answers_all_it_may_stays_within_the_bounds(backend):
    """By arithmetic: however many ask, a side cannot take more than its half."""
    cost, sides = cost_of(backend), [default_half(), default_half()]
    assert cost.size_bytes >= PROBE_BYTES
    seconds, done = 86_400, 0
    for side in sides:
        now = 0.0
        while now < seconds:
            done += side.take(cost, now)
            now += max(side.wait_seconds(now), 0.001)
    # What is to be made up for at its end is made up for after the day.
    left = 2 + SIDES * BURST_SECONDS * MAX_CPU_RATIO / cost.cpu_seconds
    assert (done - left) * cost.size_bytes / seconds <= MAX_BYTES_PER_SECOND
    assert (done - left) * cost.cpu_seconds / seconds <= MAX_CPU_RATIO
    assert done > 100


def zone_of(number):
    return {"zone": f"z{number % 20}", "region": f"r{number % 20 // 10}"}


class Cluster:
    """Nodes that probe each other; what each probe costs is written down on both sides."""

    def __init__(self, nodes, *, seed=7):
        self._random = random.Random(seed)
        peers = [Peer(f"n{i}", f"http://n{i}", zone_of(i)) for i in range(nodes)]
        self.books, self.plans, self.asks, self.answers = {}, {}, {}, {}
        for i, peer in enumerate(peers):
            book = PeerBook(
                peer.node,
                [lambda: peers],
                levels=("zone", "region"),
                labels=zone_of(i),
                peers_per_class=DEFAULTS.peers_per_class,
            )
            book.refresh()
            self.books[peer.node] = book.chosen()
            self.plans[peer.node] = ProbePlan(
                interval_seconds=DEFAULTS.interval_seconds,
                fresh_seconds=DEFAULTS.fresh_seconds,
                spread=lambda: self._random.uniform(0.5, 1.5),
            )
            self.asks[peer.node], self.answers[peer.node] = default_half(), default_half()
        self.measured = {peer.node: defaultdict(Measured) for peer in peers}
        self.spent = defaultdict(list)
        self.outcomes = Counter()

    def run(self, seconds):
        looks = [(plan.first_pause_seconds(), node) for node, plan in self.plans.items()]
        heapq.heapify(looks)
        while looks[0][0] < seconds:
            now, node = heapq.heappop(looks)
            heapq.heappush(looks, (now + self._look(node, now), node))

    def _look(self, node, now):
        plan, budget = self.plans[node], self.asks[node]
        wait = budget.wait_seconds(now)
        peer = plan.choose(self.books[node], self.measured[node].__getitem__, now)
        if peer is None or wait:
            return plan.idle_pause_seconds(wait, now)
        cost = cost_of("tcp")
        assert budget.take(cost, now)
        self.spent[node].append((now, cost))
        if self.answers[peer.node].take(cost, now):
            self.spent[peer.node].append((now, cost))
            self.measured[node][peer.node] = Measured(at=now)
            plan.succeeded(peer.node)
            self.outcomes["done"] += 1
        else:
            budget.was_refused(cost, now)
            self.answers[peer.node].refuses(now)
            self.spent[node][-1] = (now, REFUSAL)
            self.spent[peer.node].append((now, REFUSAL))
            plan.refused(peer.node, now)
            self.outcomes["refused"] += 1
            return plan.refused_pause_seconds(budget.wait_seconds(now))
        return plan.pause_seconds(budget.wait_seconds(now), suspects=False)


def test_a_thousand_nodes_stay_within_the_bounds_and_measure_every_class():
    cluster = Cluster(1000)
    seconds = 900.0
    cluster.run(seconds)
    for spent in cluster.spent.values():
        assert sum(cost.size_bytes for _, cost in spent) / seconds <= MAX_BYTES_PER_SECOND
        assert sum(cost.cpu_seconds for _, cost in spent) / seconds <= MAX_CPU_RATIO
        # Nor in any five minutes, but for what is made up for afterwards. Nobody can choose
        # when to be asked, and so when to say no.
        times = sorted((at, cost) for at, cost in spent if cost != REFUSAL)
        for first, (began, _) in enumerate(times):
            window = [cost for at, cost in times[first:] if at < began + 300.0]
            used = sum(cost.cpu_seconds for cost in window)
            put_off = BURST_SECONDS * MAX_CPU_RATIO + SIDES * cost_of("tcp").cpu_seconds
            allowed = 300.0 * MAX_CPU_RATIO + put_off
            assert used <= allowed + 1e-9
    # No node is kept busy with saying no, and of all pairs only a few are measured.
    assert cluster.outcomes["done"] > cluster.outcomes.total() / 3
    pairs = sum(map(len, cluster.measured.values()))
    assert pairs <= 1000 * 3 * DEFAULTS.peers_per_class
    for node, measured in cluster.measured.items():
        for peers in cluster.books[node].values():
            newest = max(measured[peer.node].at for peer in peers)
            assert seconds - newest < 600.0


def test_the_bounds_break_where_answers_cost_nothing():
    """The simulation can fail: without budgets for answers, popular nodes go beyond."""
    cluster = Cluster(60)
    free = {node: Budget(bytes_per_second=1e12, cpu_ratio=1.0) for node in cluster.answers}
    cluster.answers = free
    for node in cluster.books:
        cluster.books[node] = {"all": [Peer("n0", "http://n0", {})]} if node != "n0" else {}
    cluster.run(600.0)
    spent = sum(cost.cpu_seconds for _, cost in cluster.spent["n0"])
    assert spent / 600.0 > MAX_CPU_RATIO
