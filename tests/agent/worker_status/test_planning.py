"""When a node writes, and how often all nodes of a large cluster do."""

import heapq
import random
from collections import Counter
from itertools import pairwise

import pytest

from nearkv.agent.worker_status.phasing import Phase, phase_of
from nearkv.agent.worker_status.planning import Act, Errand, WriteLimits, WritePlan

LIMITS = WriteLimits()
ANY_MOMENT = Phase(0.0, 0.0)
PERIOD_SECONDS = 200.0
OWN_MOMENT = Phase(70.0, PERIOD_SECONDS)


class Node:
    """A plan, and what would be written by it; second by second, unless a test says otherwise."""

    def __init__(
        self, *, objects=("a",), draw=lambda: 0.5, limits=LIMITS, told=None, phase=ANY_MOMENT
    ):
        self.plan = WritePlan(limits, phase=phase, now=0.0, draw=draw)
        self.news = dict.fromkeys(objects, b"0")
        self.urgent = dict.fromkeys(objects, b"0")
        self.now = 0.0
        self.works = True
        self.retry_after = None
        self.writes = []
        self.attempts = []
        self._told = told
        self.plan.start(objects, 0.0)

    def add(self, key):
        self.news[key] = self.urgent[key] = b"0"
        self.plan.add(key, self.now)

    def run(self, seconds, step=1.0):
        end = self.now + seconds
        while self.now < end:
            self.look()
            self.now += step
        return self

    def look(self):
        for key, news in self.news.items():
            self.plan.offer(key, news, self.urgent[key], self.now)
        while (errand := self.plan.next_errand(self.now)) is not None:
            self.attempts.append(self.now)
            if not self.works:
                self.plan.failed(self.now, self.retry_after)
                continue
            self.writes.append((self.now, errand))
            if errand.act is Act.INTRODUCE:
                self.plan.introduced(errand.key, self.now, told=self._told)
            else:
                key = errand.key
                self.plan.reported(key, self.news[key], self.urgent[key], self.now)

    def reports(self, since=0.0):
        return [at for at, errand in self.writes if errand.act is Act.REPORT and at >= since]


def started(**options):
    """Return a node whose objects are there, at its second 1000."""
    return Node(**options).run(1000)


def test_an_object_is_made_and_reported_at_once():
    node = Node(draw=lambda: 0.0).run(10)
    assert [errand for _, errand in node.writes] == [
        Errand("a", Act.INTRODUCE),
        Errand("a", Act.REPORT),
    ]


def test_a_pod_that_has_just_come_is_written_within_seconds():
    node = started(objects=())
    node.add("new")
    node.run(10)
    assert [at - 1000 for at, _ in node.writes] == [3.0, 3.0]


def test_without_news_there_are_heartbeats_only():
    node = started(draw=random.Random(1).random)
    since = node.now
    node.run(3600)
    assert 7 <= len(node.reports(since)) <= 11
    gaps = [later - sooner for sooner, later in pairwise(node.reports())]
    assert all(319 <= gap <= 481 for gap in gaps)


def test_heartbeats_keep_to_the_moments_of_the_node():
    node = Node(draw=random.Random(1).random, phase=OWN_MOMENT).run(3600)
    assert node.reports() == [270.0 + 400.0 * each for each in range(9)]


def test_objects_of_a_node_take_turns():
    node = Node(objects="abcdefgh", draw=random.Random(1).random).run(8 * 800)
    since = node.now
    node.run(3 * 3200)
    assert 18 <= len(node.reports(since)) <= 32  # as many as of one object: 9600 / 400 = 24
    assert node.plan.interval_seconds == 3200


def test_news_wait_for_the_nodes_moment_and_urgent_news_a_short_while():
    seldom = {"limits": WriteLimits(heartbeat_seconds=10_000), "phase": OWN_MOMENT}
    node = started(**seldom)
    node.news["a"] = b"1"
    node.run(200)
    assert node.reports(1000)[0] == 1070
    other = started(**seldom)
    other.news["a"] = other.urgent["a"] = b"1"
    other.run(200)
    assert other.reports(1000)[0] == 1003


def test_urgent_news_overtake_others():
    node = started(limits=WriteLimits(heartbeat_seconds=10_000), phase=OWN_MOMENT)
    node.news["a"] = b"1"
    node.run(10)
    node.urgent["a"] = b"1"
    node.run(10)
    assert node.reports(1000) == [1013]


def test_a_moment_is_for_one_write_and_who_waits_longest_has_it():
    seldom = WriteLimits(heartbeat_seconds=1e9, seconds_per_write=0.0)
    node = Node(objects="abc", limits=seldom, phase=OWN_MOMENT).run(2000)
    since = node.now
    for key in "cba":
        node.news[key] = b"1"
        node.run(10)
    for number in range(10, 70):
        node.news["c"] = b"%d" % number  # has always something to say
        node.run(10)
    told = [(at, errand.key) for at, errand in node.writes if at >= since]
    assert told == [(2070.0, "c"), (2270.0, "b"), (2470.0, "a")]


def test_what_an_agent_finds_at_its_start_is_not_urgent():
    """What has changed meanwhile has changed with every agent of a rollout."""
    node = Node(told=(b"old", b"old"), phase=OWN_MOMENT).run(300)
    assert node.writes == [(70.0, Errand("a", Act.INTRODUCE)), (270.0, Errand("a", Act.REPORT))]
    node.news["a"] = node.urgent["a"] = b"1"
    node.run(10)
    assert node.reports(300) == [303.0]


def test_after_an_outage_urgent_news_wait_for_the_nodes_moment_too():
    node = started(phase=OWN_MOMENT)
    node.works = False
    node.news["a"] = node.urgent["a"] = b"1"
    node.run(20)
    node.works = True
    node.run(600)
    assert [at for at in node.attempts if at >= 1000][:2] == [1003.0, 1270.0]


def test_the_moments_of_nodes_are_spread_and_stay_over_restarts():
    def moment(name, *, now, time_of_day):
        phase = phase_of(name, period_seconds=200.0, now=now, time_of_day=time_of_day)
        return phase.next_at(now) - now + time_of_day

    seconds = Counter(
        int(moment(f"node-{number}", now=5.0, time_of_day=1e9)) for number in range(5000)
    )
    assert len(seconds) == 200
    assert max(seconds.values()) <= 45
    before = moment("n1", now=5.0, time_of_day=1e9)
    after = moment("n1", now=77.0, time_of_day=1e9 + 1234.5)
    periods = (after - before) / 200
    assert periods == pytest.approx(round(periods), abs=1e-5)


def test_a_phase_without_a_period_is_any_moment():
    phase = phase_of("n1", period_seconds=0.0, now=3.0, time_of_day=1e9)
    assert phase.next_at(17.5) == 17.5
    assert Phase(0.0, 10.0).next_at(float("inf")) == float("inf")


def test_news_that_are_taken_back_are_not_written():
    node = started(limits=WriteLimits(heartbeat_seconds=10_000), phase=OWN_MOMENT)
    node.news["a"] = b"1"
    node.run(50)
    node.news["a"] = b"0"
    node.run(500)
    assert node.reports(1000) == []


def test_a_node_whose_news_swing_is_bounded():
    node = started(draw=random.Random(1).random)
    since = node.now
    for number in range(720):
        node.news["a"] = node.urgent["a"] = b"%d" % number
        node.run(5, step=5.0)
    assert len(node.reports(since)) <= LIMITS.burst + 3600 / LIMITS.seconds_per_write + 1


def test_a_failure_is_followed_by_silence_which_grows_and_ends():
    node = started(draw=lambda: 0.5)
    node.works = False
    node.news["a"] = b"1"
    node.run(2000)
    tried = [at for at in node.attempts if at >= 1000]
    assert [later - sooner for sooner, later in pairwise(tried)][:4] == [120, 240, 300, 300]
    assert node.plan.is_behind
    node.works = True
    node.run(400)
    assert not node.plan.is_behind
    assert node.reports(3000)


def test_after_a_failure_what_was_saved_up_is_lost():
    node = Node(objects="abc", draw=lambda: 0.5).run(5000)
    node.works = False
    for key in node.news:
        node.news[key] = node.urgent[key] = b"1"
    node.run(300)
    node.works = True
    since = node.now
    node.run(700)
    first, second, third = node.reports(since)[:3]
    assert second - first >= LIMITS.seconds_per_write - 1
    assert third - second >= LIMITS.seconds_per_write - 1


def test_the_server_may_ask_for_a_longer_silence():
    node = started()
    node.works, node.retry_after = False, 500
    node.news["a"] = b"1"
    node.run(700)
    attempts = [at for at in node.attempts if at >= 1000]
    assert attempts[1] - attempts[0] == 550


def test_an_object_that_is_there_already_is_looked_at_and_left():
    node = Node(told=(b"0", b"0")).run(200)
    assert [errand.act for _, errand in node.writes] == [Act.INTRODUCE]


def test_an_object_that_is_there_but_says_other_things_is_news():
    node = Node(told=(b"old", b"0")).run(400)
    assert [errand.act for _, errand in node.writes] == [Act.INTRODUCE, Act.REPORT]


def test_what_vanished_is_made_anew_but_not_in_a_loop():
    node = started()
    for _ in range(3600):
        before = len(node.reports())
        node.look()
        if len(node.reports()) > before:
            node.plan.vanished("a", node.now)
        node.news["a"] = b"%f" % node.now
        node.now += 1.0
    introduced = [at for at, errand in node.writes if errand.act is Act.INTRODUCE and at >= 1000]
    assert 2 <= len(introduced) <= LIMITS.burst + 3600 / LIMITS.seconds_per_write + 1


def test_what_is_refused_is_left_alone_and_holds_up_nobody_else():
    plan = WritePlan(LIMITS, phase=ANY_MOMENT, now=0.0, draw=lambda: 0.5)
    plan.add("a", 0.0)
    plan.add("b", 0.0)
    refusals = []
    for now in range(2000):
        while (errand := plan.next_errand(float(now))) is not None:
            if errand.key == "a":
                refusals.append(now)
                plan.refused("a", float(now))
            elif errand.act is Act.INTRODUCE:
                plan.introduced("b", float(now), told=None)
            else:
                plan.reported("b", b"", b"", float(now))
    gaps = [later - sooner for sooner, later in pairwise(refusals)]
    assert gaps[:5] == [15, 30, 60, 120, 240]
    assert max(gaps) == 300


def test_what_is_gone_is_forgotten():
    node = started()
    node.plan.drop("a")
    node.plan.drop("a")
    assert node.plan.next_errand(1e9) is None
    assert node.plan.next_at(1e9) == float("inf")
    node.plan.reported("a", b"", b"", 0.0)
    node.plan.refused("a", 0.0)
    node.plan.vanished("a", 0.0)
    node.plan.introduced("a", 0.0, told=None)
    assert len(node.plan) == 0


# -- A large cluster -------------------------------------------------------------------------


class Cluster:
    """Nodes with one API server, simulated from one due moment to the next."""

    def __init__(self, nodes, *, seed=1, engines=1, told=None):
        self.random = random.Random(seed)
        self.nodes = [
            Node(
                objects="abcdefgh"[:engines],
                draw=self.random.random,
                told=told,
                phase=phase_of(
                    f"node-{number}", period_seconds=PERIOD_SECONDS, now=0.0, time_of_day=1e9
                ),
            )
            for number in range(nodes)
        ]
        self.writes = Counter()
        self.attempts = Counter()
        self.now = 0.0
        self._queue = []
        for number in range(nodes):
            self._plan(number)

    def _plan(self, number):
        node = self.nodes[number]
        node.now = self.now
        before = len(node.writes), len(node.attempts)
        node.look()
        self.writes[int(self.now)] += len(node.writes) - before[0]
        self.attempts[int(self.now)] += len(node.attempts) - before[1]
        at = max(node.plan.next_at(self.now), self.now + 0.001)
        heapq.heappush(self._queue, (at, number))

    def run(self, seconds, *, changes_per_second=0.0, urgent_ratio=0.2, works=True):
        """Run on; so many nodes have news each second, a share of them urgent."""
        end = self.now + seconds
        for node in self.nodes:
            node.works = works
        next_change = self.now
        while self.now < end:
            at = self._queue[0][0] if self._queue else end
            if changes_per_second and next_change <= at:
                self.now = next_change
                next_change += self.random.expovariate(changes_per_second)
                urgent = self.random.random() < urgent_ratio
                self._change(self.random.randrange(len(self.nodes)), urgent=urgent)
                continue
            if at >= end:
                break
            self.now, number = heapq.heappop(self._queue)
            self._plan(number)
        self.now = end
        return self

    def _change(self, number, *, urgent):
        node = self.nodes[number]
        key = self.random.choice(list(node.news))
        node.news[key] = b"%f" % self.now
        if urgent:
            node.urgent[key] = b"%f" % self.now
        self._plan(number)

    def change_all(self):
        """Let all engines of all nodes have news at once, which are not their pods' own."""
        for number, node in enumerate(self.nodes):
            for key in node.news:
                node.news[key] = b"%f" % self.now
            self._plan(number)

    def busiest(self, since, *, counted=None):
        """Return the most writes in any one second."""
        counts = self.writes if counted is None else counted
        return max(counts[at] for at in range(int(since), int(self.now)))

    def mean(self, since):
        return sum(count for at, count in self.writes.items() if at >= since) / (self.now - since)


@pytest.fixture(scope="module")
def settled():
    """5,000 nodes with one engine each, half an hour after all agents were installed at once."""
    return Cluster(5000).run(1800)


def test_5000_nodes_never_write_50_times_in_a_second(settled):
    # Installing them all at once.
    assert settled.busiest(0) < 50
    # At rest.
    since = settled.now
    settled.run(900)
    assert settled.mean(since) <= 15
    assert settled.busiest(since) < 50
    # In use: each engine has news every five minutes.
    since = settled.now
    settled.run(900, changes_per_second=5000 / 300)
    assert settled.mean(since) <= 25
    assert settled.busiest(since) < 50
    # Under load: every minute, as often as may be.
    since = settled.now
    settled.run(400, changes_per_second=5000 / 60, urgent_ratio=0.02)
    assert settled.busiest(since) < 50
    # All have news at once: a switch fails, say.
    since = settled.now
    settled.change_all()
    settled.run(600)
    assert settled.busiest(since) < 50
    # The API server is away for five minutes, while things change.
    since = settled.now
    settled.run(300, changes_per_second=5000 / 300, works=False)
    assert settled.busiest(since, counted=settled.attempts) < 50
    since = settled.now
    settled.run(1200)
    assert settled.busiest(since) < 50
    assert sum(node.plan.is_behind for node in settled.nodes) == 0
    assert all(
        node.news[key] == each.told
        for node in settled.nodes
        for key, each in node.plan._objects.items()
    )


@pytest.mark.slow
def test_eight_engines_on_each_node_write_no_more():
    cluster = Cluster(5000, engines=8)
    cluster.run(900)
    assert cluster.busiest(0) < 50
    since = cluster.now
    cluster.run(600, changes_per_second=5000 * 8 / 300, urgent_ratio=0.005)
    assert cluster.busiest(since) < 50


def test_a_rollout_of_agents_changes_nothing_in_the_store():
    cluster = Cluster(5000, told=(b"0", b"0")).run(300)
    assert sum(cluster.writes.values()) <= 5000 * 1.5
    assert cluster.busiest(0) < 50
