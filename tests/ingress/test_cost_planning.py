"""Policy cost over a fleet: waits, speeds, tiers, sessions, and pairs by the same terms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nearkv.block_keys import pack_keys
from nearkv.ingress.hints import PrefixHint
from nearkv.ingress.routing import Policy
from nearkv.ingress.settings import PdSettings
from nearkv.state.model import Blocks, Cursor, PathReading, SnapshotBegin, SnapshotEnd
from tests.ingress.test_planning import AGENT, KV, SLOW, TOKENS, World, pair_of


class CostWorld(World):
    """The same fleet, planned for by cost."""

    def __init__(self, cost=None, **settings):
        cost = {"crowding_weight": 1.0, "crowding_most_ms": 1e12} | (cost or {})  # round figures
        super().__init__(policy=Policy.COST, cost=cost, **settings)

    def ask(self, *, request_id="r", priority=0, session="", tokens=TOKENS):
        job = replace_job(self.job(tokens=tokens), request_id=request_id, priority=priority)
        if session:
            job.hint = PrefixHint((), session, "i")
        return self.plan(job=job, tokens=tokens or 0)


def replace_job(job, **changes):
    for name, value in changes.items():
        setattr(job, name, value)
    return job


def quotes(plan):
    return {quote.engine: quote for quote in plan.quotes}


def chosen(plan):
    return plan.decision.engine, plan.decision.reason


def test_terms_are_in_milliseconds_of_each_engines_own_speed():
    world = CostWorld().engine(
        "a", transfer=None, held=1024, requests_waiting=2, requests_running=3
    )
    world.engine("b", transfer=None, prefill_seconds_per_token=SLOW / 4)
    plan = world.ask()
    a, b = quotes(plan)["a"], quotes(plan)["b"]
    assert a.recompute_ms == pytest.approx(3072)
    assert a.wait_ms == pytest.approx(2 * TOKENS)
    assert a.disturb_ms == pytest.approx(3072 * (1 + 3 * 0.02))
    assert (b.wait_ms, b.recompute_ms, b.disturb_ms) == pytest.approx((0, 1024, 1024))
    assert chosen(plan) == ("b", "prefix_miss")
    assert plan.expected.first_token_ms == pytest.approx(1024)
    assert plan.expected.undisturbed
    assert plan.computing_tokens == TOKENS


def test_what_was_sent_counts_before_any_reading_shows_it():
    world = CostWorld().engine("a", transfer=None, held=2048).engine("b", transfer=None)
    assert chosen(world.ask()) == ("a", "prefix_hit")
    with world.know.computing.counting("a", "i", 5000):
        plan = world.ask()
        assert quotes(plan)["a"].wait_ms == pytest.approx(5000)
        assert chosen(plan) == ("b", "prefix_miss")
        with world.know.computing.counting("b", "i", 9000):
            plan = world.ask()
            assert plan.decision.engine == "a"
            assert not plan.expected.undisturbed
    assert chosen(world.ask())[0] == "a"


def test_our_own_requests_in_an_engines_queue_count_once():
    world = CostWorld().engine("a", transfer=None, requests_waiting=2)
    world.know.ledger.open("a", "i", 1000)
    with world.know.computing.counting("a", "i", 1000):
        # one of the two is ours; the other is taken to be like it
        assert quotes(world.ask())["a"].wait_ms == pytest.approx(2000)


def test_a_queue_shorter_than_what_we_sent_is_all_ours():
    world = CostWorld().engine("a", transfer=None, requests_waiting=1)
    with (
        world.know.computing.counting("a", "i", 1000),
        world.know.computing.counting("a", "i", 1000),
    ):
        assert quotes(world.ask())["a"].wait_ms == pytest.approx(2000)


def test_an_engine_that_says_nothing_keeps_what_was_known_of_it():
    world = CostWorld().engine("a", transfer=None).engine("b", transfer=None)
    world.ask()
    world.engine("a", transfer=None, prefill_seconds_per_token=None)
    world.engine("b", transfer=None, prefill_seconds_per_token=SLOW * 2).tell()
    assert quotes(world.ask())["a"].recompute_ms == pytest.approx(TOKENS)


def test_first_bytes_seen_here_refine_what_the_engine_says():
    world = CostWorld().engine("a", transfer=None)
    for tokens in range(200, 4200, 100):
        world.know.fits.observe("a", tokens, 0.25 + tokens * SLOW)
    assert quotes(world.ask())["a"].recompute_ms == pytest.approx(250 + TOKENS, rel=1e-3)


def test_blocks_on_slower_tiers_cost_their_way_back():
    world = CostWorld({"host_bytes_per_second": 1e6, "disk_bytes_per_second": 2e5})
    for name in ("d", "h", "s"):
        world.engine(name)
    keys = tuple(range(1, 101))
    tiers = {"d": {"GPU": keys}, "h": {"GPU": keys[:50], "CPU": keys[50:]}, "s": {"STORAGE": keys}}
    cursor = Cursor("b", 0, 0)
    infos, gauges = zip(*world.engines.values(), strict=True)
    infos = [replace(info, transfer=replace(info.transfer, compat=info.id)) for info in infos]
    begin = SnapshotBegin(
        cursor=cursor, node="n1", version="1", engines=tuple(infos), gauges=gauges
    )
    frames = [
        Blocks(engine=name, tier=tier, keys=pack_keys(held))
        for name, by_tier in tiers.items()
        for tier, held in by_tier.items()
    ]
    for frame in (begin, *frames, SnapshotEnd(cursor=cursor)):
        world.know.fleet.apply(AGENT, frame, 0.0)
    world.depths, world.faster = world.know.fleet.match_tiers(keys)
    assert world.depths == {"d": 100, "h": 100, "s": 100}
    plan = world.ask()
    loads = {name: quote.load_ms for name, quote in quotes(plan).items()}
    # 100 bytes of KV per token: 0.1 ms from the host, 0.5 ms from disk, 1 ms to compute
    assert loads == pytest.approx({"d": 0.0, "h": 1600 * 0.1, "s": 3200 * 0.5})
    assert chosen(plan) == ("d", "prefix_hit")


def test_a_session_stays_near_ties_and_leaves_a_queue():
    world = CostWorld().engine("a", transfer=None).engine("b", transfer=None)
    assert {chosen(world.ask(session="b")) for _ in range(4)} == {("b", "hint")}
    world.engine("b", transfer=None, requests_waiting=1).tell()
    assert chosen(world.ask(session="b"))[0] == "a"


def test_without_tokens_engines_are_told_apart_by_wait_and_session():
    world = CostWorld().engine("a", transfer=None).engine("b", transfer=None, requests_waiting=1)
    plan = world.ask(tokens=None)
    assert chosen(plan) == ("a", "prefix_miss")
    assert plan.computing_tokens == 512
    assert chosen(world.ask(tokens=None, session="a")) == ("a", "hint")


def test_every_replica_gives_the_same_answer_to_the_same_request():
    def answers():
        world = CostWorld()
        for name in "abcdef":
            world.engine(name, transfer=None, held=2048)
        return [world.ask(request_id=f"r{i}").decision.engine for i in range(50)]

    first = answers()
    assert first == answers()
    assert len(set(first)) > 3


def test_a_new_engine_starts_as_an_average_one():
    world = CostWorld().engine("a", transfer=None).engine("b", transfer=None)
    for name in "ab":
        world.know.placements.note(name, "i", 9000)
    world.engine("c", transfer=None).tell()
    served = []
    for number in range(6):
        plan = world.ask(request_id=f"r{number}")
        served.append(plan.decision.engine)
        world.know.placements.note(plan.decision.engine, "i", plan.computing_tokens)
    assert sorted(served) == ["a", "a", "b", "b", "c", "c"]


# -- Pairs -----------------------------------------------------------------------------


def split_world(**settings):
    return CostWorld(**settings).engine("p", "prefill").engine("d", "decode", requests_running=8)


def test_pairs_and_one_engine_are_compared_by_the_same_terms():
    plan = split_world().ask()
    record = plan.record
    # both compute the whole prompt; on d it disturbs eight others and the pair moves its KV
    assert record.local_seconds == pytest.approx(TOKENS * SLOW * (2 + 8 * 0.02))
    assert record.pair_seconds == pytest.approx(TOKENS * SLOW * 2 + 0.003, rel=1e-3)
    assert {q.engine for q in plan.quotes} == {"p", "d"}


def test_a_busy_decode_engine_has_the_prompt_computed_elsewhere_by_cost():
    plan = split_world().engine("d", "decode", requests_running=30).ask()
    assert pair_of(plan) == ("p", "d")
    assert (plan.record.outcome, plan.record.why) == ("pd", "cheaper")
    assert plan.expected is None


def test_a_holder_is_pulled_from_by_cost_and_urgent_requests_count_their_own_time_only():
    world = CostWorld().engine("h", "prefill", held=4064).engine("d", "decode")
    plan = world.ask()
    assert (pair_of(plan), plan.decision.reason) == (("h", "d"), "pull")
    plan = split_world().engine("d", "decode", requests_running=30).ask(priority=1)
    assert plan.record.why == "not_cheaper"


def path(target, seconds, *, source="n1", bytes_per_second=1e9):
    return PathReading(
        source=source,
        target=target,
        path="tcp",
        setup_seconds=seconds,
        bytes_per_second=bytes_per_second,
        points=9,
    )


def pulled_by(*paths):
    """Count which of two decode engines pull from a holder, over many requests."""
    world = CostWorld().engine("h", "prefill", held=4064)
    world.engine("near", "decode", node="n2").engine("far", "decode", node="n3").tell(*paths)
    return {pair_of(world.ask(request_id=f"r{i}"))[1] for i in range(20)}


def test_equal_links_give_topology_no_effect():
    assert pulled_by(path("n2", 0.01), path("n3", 0.01)) == {"near", "far"}


@st.composite
def fleets_with_nodes(draw):
    """Return engines by name with their fields, and their nodes in two orders."""
    count = draw(st.integers(2, 5))
    engines = [
        {
            "role": draw(st.sampled_from(["both", "prefill", "decode"])),
            "held": draw(st.sampled_from([0, 1024, 4064])),
            "requests_running": draw(st.integers(0, 40)),
            "requests_waiting": draw(st.integers(0, 2)),
        }
        for _ in range(count)
    ]
    nodes = [f"n{i}" for i in range(count)]
    return engines, nodes, draw(st.permutations(nodes))


@given(fleets_with_nodes(), st.floats(0, 0.5), st.integers(0, 9))
def test_with_equal_links_it_never_matters_which_node_an_engine_is_on(drawn, setup_seconds, number):
    engines, *orders = drawn

    def plan(nodes):
        world = CostWorld()
        for i, (fields, node) in enumerate(zip(engines, nodes, strict=True)):
            world.engine(f"e{i}", node=node, **fields)
        between = [(a, b) for a in nodes for b in nodes if a != b]
        world.tell(*(path(b, setup_seconds, source=a) for a, b in between))
        plan = world.ask(request_id=f"r{number}")
        return plan.decision, pair_of(plan), plan.record

    first, second = map(plan, orders)
    assert first == second


@pytest.mark.parametrize("bytes_per_second", [6e4, 1e5, 1e6])
def test_a_pull_begins_at_the_length_where_it_takes_less_than_computing(bytes_per_second):
    """No fixed count of tokens: what it is follows from the path, the speed and the load."""
    pulled = {}
    for tokens in range(64, 4096, 64):
        world = CostWorld(hysteresis_ratio=0.0, min_tokens=1)
        world.engine("h", "prefill", held=tokens - 32).engine("d", "decode", node="n2")
        world.tell(path("n2", 0.2, bytes_per_second=bytes_per_second))
        pulled[tokens] = pair_of(world.ask(tokens=tokens)) == ("h", "d")
    # per token: 2 ms to compute (crowding 1) or 100 bytes to move; the holder computes 32
    hop_seconds = PdSettings().terms.hop_seconds
    saved_per_token = 2 * SLOW - KV / bytes_per_second
    switch = (0.2 + hop_seconds + 32 * 2 * SLOW) / saved_per_token
    assert pulled == {tokens: tokens > switch for tokens in pulled}
    assert set(pulled.values()) == {False, True}


def test_a_link_ten_times_slower_is_left_for_the_other():
    assert pulled_by(path("n2", 0.05), path("n3", 0.5)) == {"near"}
    assert pulled_by(path("n2", 0.5), path("n3", 0.05)) == {"far"}


def test_no_room_for_staging_no_pair():
    world = split_world(room_margin_tokens=0)
    world.engine("d", "decode", kv_total_tokens=TOKENS - 1, requests_running=30)
    assert world.ask().record.why == "no_room"


def test_with_mode_off_there_are_neither_pairs_nor_roles():
    world = CostWorld(mode="off").engine("p", "prefill", held=4064).engine("d", "decode")
    plan = world.ask()
    assert (plan.split, plan.record, plan.decision.engine) == (None, None, "p")
