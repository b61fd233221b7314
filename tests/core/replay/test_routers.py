"""Our router's books in a replay, and what other routers' policies look at."""

import pytest

from nearkv.ingress.settings import IngressSettings
from nearkv.replay.engine_model import SimulatedEngine, Work
from nearkv.replay.fleet_feed import EngineSpec, FleetFeed
from nearkv.replay.nearkv_router import NearkvRouter
from nearkv.replay.peers import PEERS
from nearkv.replay.routing import Clock
from nearkv.replay.simulation import Simulation, Surroundings
from tests.core.replay.fleets import arrival, profile, trace_of


def engines_of(count, **fields):
    return {f"e{n}": SimulatedEngine(f"e{n}", profile(**fields)) for n in range(count)}


def feed_of(engines):
    specs = [EngineSpec(name, "both", engine.profile) for name, engine in engines.items()]
    return FleetFeed(specs, None)


def introduced(router, engines):
    feed = feed_of(engines)
    for frame in [*feed.snapshot(), *feed.gauges(engines)]:
        router.hear(frame)
    return feed


def peer(name, engines, clock=None):
    router = PEERS[name](clock or Clock(), list(engines.values()), 1)
    return router, introduced(router, engines)


def test_the_books_are_those_of_the_ingress_and_are_empty_at_the_end():
    engines = engines_of(1)
    router = NearkvRouter(IngressSettings(policy="cost"), Clock(), None)
    introduced(router, engines)
    know = router._know
    router.route(7, arrival(0.0, 1))
    assert know.computing.at("e0", "1") == 163
    assert know.ledger.at("e0", "1").requests == 1
    router.first_token(7)
    assert know.computing.at("e0", "1") == 0
    assert know.ledger.at("e0", "1").requests == 1
    router.ended(7, 0)
    assert know.ledger.total_requests == 0
    assert know.totals.prompt_tokens == 163


def test_the_index_follows_stores_and_evictions_to_the_block():
    clock, engines = Clock(), engines_of(2, blocks=40)
    router = NearkvRouter(IngressSettings(policy="round-robin"), clock, None)
    arrivals = [arrival(n * 0.7, n % 7, blocks=3 + n % 9) for n in range(60)]
    last = arrival(100.0, 99, output_tokens=50)
    feed = feed_of(engines)
    Simulation(engines, feed, Surroundings(), clock=clock, router=router).run(
        trace_of(*arrivals, last)
    )
    fleet = router._know.fleet
    keys = {key for each in [*arrivals, last] for key in each.keys}
    assert fleet.index.size.blocks > 0
    for key in keys:
        held = {name for name, e in engines.items() if e.store.depth_of([key], 1)}
        assert set(fleet.match([key])) == held


def test_least_request_counts_what_it_sent():
    router, _ = peer("least-request", engines_of(2))
    first = router.route(1, arrival(0.0, 1)).engine
    second = router.route(2, arrival(0.0, 1)).engine
    assert {first, second} == {"e0", "e1"}
    router.ended(1, 0)
    assert router.route(3, arrival(0.0, 1)).engine == first


def test_string_trie_remembers_and_else_takes_the_smallest():
    router, _ = peer("string-trie", engines_of(3))
    homes = [router.route(n, arrival(0.0, n)).engine for n in range(3)]
    assert sorted(homes) == ["e0", "e1", "e2"]
    again = [router.route(10 + n, arrival(0.0, n)).engine for n in (2, 0, 1)]
    assert again == [homes[2], homes[0], homes[1]]


def test_string_trie_leaves_a_crowd():
    router, _ = peer("string-trie", engines_of(2))
    sent = [router.route(n, arrival(0.0, 1)).engine for n in range(40)]
    assert set(sent[:33]) == {sent[0]}
    assert set(sent[34:]) != {sent[0]}


def test_weights_give_the_holder_the_request_unless_it_is_full_and_waited_for():
    engines = engines_of(2, blocks=20)
    clock = Clock()
    router, feed = peer("llm-d-style", engines, clock)
    wanted = arrival(0.0, 1)
    router.hear(feed.blocks("e1", wanted.keys, ()))
    assert router.route(1, wanted).engine == "e1"
    for number in range(3):
        engines["e1"].submit(Work(number, (), 160, 5), 0.0)
    clock.seconds = 0.01
    assert router.route(2, wanted).engine == "e1", "readings are 50 ms old"
    clock.seconds = 0.2
    partly = arrival(0.0, 2)
    router.hear(feed.blocks("e1", partly.keys[:2], ()))
    assert router.route(3, partly).engine == "e0"


@pytest.mark.parametrize(("name", "chosen"), [("dynamo-style", "e1"), ("dynamo-style-8", "e0")])
def test_block_costs_weigh_computing_against_what_is_held(name, chosen):
    router, feed = peer(name, engines_of(2))
    held = arrival(0.0, 1)
    router.hear(feed.blocks("e0", held.keys, ()))
    router.held["e0"].update(range(40))
    assert router.route(1, held).engine == chosen


def test_block_costs_count_what_requests_have_in_common_once():
    router, _ = peer("dynamo-style", engines_of(2))
    shared, other = arrival(0.0, 1, blocks=30), arrival(0.0, 2, blocks=20)
    router.held["e0"].update(shared.keys)
    router.held["e1"].update(other.keys)
    assert router.choose(shared)[0] == "e0", "30 blocks there, not 60; on e1 it would be 50"
    for number in (1, 2):
        assert router.route(number, shared).engine == "e0"
        router.first_token(number)
    assert len(router.held["e0"]) == 30
    for number in (1, 2):
        router.ended(number, 0)
    assert set(router.held["e0"]) == set(shared.keys)
    assert router.loads["e0"].requests == 0
