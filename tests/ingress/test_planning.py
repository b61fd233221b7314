"""Plans: one engine or two, by roles, room and cost, from what the fleet says."""

import math

import pytest
from msgspec.structs import replace

from nearkv.freshness import FreshnessLimits
from nearkv.ingress.backlog import Backlog
from nearkv.ingress.candidates import CandidateBuilder, PromptView
from nearkv.ingress.fleet import Fleet
from nearkv.ingress.hints import PrefixHints
from nearkv.ingress.keying import Job
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.ledger import Ledger
from nearkv.ingress.parity import ParityCheck
from nearkv.ingress.planning import Planner
from nearkv.ingress.prefix_index import PrefixIndex
from nearkv.ingress.requests import GenerateRequest, PromptKind
from nearkv.ingress.routing import Gate, Policy
from nearkv.ingress.settings import CostSettings, PdSettings
from nearkv.ingress.suspects import Suspects
from nearkv.ingress.tokens.memo import PromptKeys
from nearkv.serving import InFlight
from nearkv.state.model import (
    Cursor,
    EngineGauges,
    EngineInfo,
    EngineState,
    PathReading,
    SnapshotBegin,
    SnapshotEnd,
    TransferInfo,
)

AGENT = "http://agent"
TOKENS = 4096
SLOW = 1e-3
KV = 100
MOVES = TransferInfo(mode="agent", compat="c", kv_bytes_per_token=KV)
BODY = b'{"model":"m","prompt":"x"}'


class World:
    """A fleet of one agent, and a planner over it."""

    def __init__(self, *, policy=Policy.PREFIX_FIRST, cost=None, **settings):
        self.know = Knowledge(
            fleet=Fleet(PrefixIndex(limit_bytes=1 << 20)),
            tokens=None,
            hints=PrefixHints(),
            ledger=Ledger(),
            parity=ParityCheck(),
            suspects=Suspects(),
            in_flight=InFlight(),
            computing=Backlog(lambda: 0.0),
        )
        self.know.fleet.add_agent(AGENT)
        self.planner = Planner(
            PdSettings.model_validate(settings),
            self.know,
            policy=policy,
            gate=Gate(0, 0.1),
            cost=CostSettings.model_validate(cost or {}),
        )
        self.engines = {}
        self.depths = {}
        self.faster = {}
        self.turn = 0

    def engine(self, name, role="both", *, held=0, transfer=MOVES, node="n1", **gauges):
        info = EngineInfo(
            id=name,
            incarnation="i",
            url=f"http://{name}",
            node=node,
            models=("m",),
            role=role,
            state=EngineState.READY,
            block_size=32,
            transfer=transfer,
        )
        reading = {
            "kv_used_ratio": 0.0,
            "kv_total_tokens": 100_000,
            "requests_running": 0,
            "requests_waiting": 0,
            "prefill_seconds_per_token": SLOW,
        } | gauges
        self.engines[name] = info, EngineGauges(id=name, **reading)
        self.depths[name] = held // 32
        return self

    def tell(self, *paths):
        cursor = Cursor("b", 0, 0)
        infos, gauges = zip(*self.engines.values(), strict=True)
        self.know.fleet.apply(
            AGENT,
            SnapshotBegin(
                cursor=cursor, node="n1", version="1", engines=infos, gauges=gauges, paths=paths
            ),
            0.0,
        )
        self.know.fleet.apply(AGENT, SnapshotEnd(cursor=cursor), 0.0)
        return self

    def plan(self, *, tokens=TOKENS, body=BODY, job=None, may_split=True):
        if not self.know.fleet.engines:
            self.tell()
        job = job or self.job(tokens=tokens, body=body)
        builder = CandidateBuilder(
            self.know.ledger, self.know.parity, self.know.suspects, FreshnessLimits()
        )
        view = PromptView(tokens, self.depths, job.hint, job.tried, self.faster)
        candidates = builder.build(job.views, view, 0.0)
        self.turn += 1
        return self.planner.plan(job, candidates, turn=self.turn, may_split=may_split)

    def job(self, *, tokens=TOKENS, body=BODY):
        if not self.know.fleet.engines:
            self.tell()
        return Job(
            web_request=None,
            path="/v1/completions",
            body=body,
            parsed=GenerateRequest(model="m", kind=PromptKind.TEXT),
            request_id="r",
            arrived_at=0.0,
            views=self.know.fleet.serving("m"),
            prompt=None if tokens is None else PromptKeys(tokens, (), "ids"),
        )


def pair_of(plan):
    split = plan.split
    return None if split is None else (split.source.info.id, split.target.info.id)


def test_without_roles_and_moving_kv_there_is_nothing_to_weigh():
    plan = World(mode="always").engine("a", transfer=None).engine("b", transfer=None).plan()
    assert (plan.split, plan.record, plan.computing_tokens) == (None, None, 0)
    assert plan.decision.reason == "prefix_miss"


def test_always_means_whenever_there_is_a_pair():
    plan = World(mode="always").engine("p", "prefill").engine("d", "decode").plan()
    assert pair_of(plan) == ("p", "d")
    assert (plan.decision.engine, plan.decision.reason) == ("d", "pd")
    assert (plan.record.outcome, plan.record.why) == ("pd", "always")


def test_both_costs_are_on_record():
    plan = World().engine("p", "prefill").engine("d", "decode").plan()
    record = plan.record
    assert (record.outcome, record.why) == ("local", "not_cheaper")
    assert (record.local_engine, record.prefill_engine, record.decode_engine) == ("d", "p", "d")
    assert record.local_seconds == pytest.approx(TOKENS * SLOW)
    moved = 0.001 + TOKENS * KV / 8e9
    assert record.pair_seconds == pytest.approx(TOKENS * SLOW + 0.002 + moved)


def test_a_holder_is_pulled_from_where_that_is_cheaper():
    world = World().engine("h", held=4064, requests_waiting=0, kv_used_ratio=0.95).engine("d")
    plan = world.plan()
    assert plan.record.why == "no_room"  # the holder is the source, and needs room as well
    world = World().engine("h", "prefill", held=4064).engine("d", "decode")
    plan = world.plan()
    assert pair_of(plan) == ("h", "d")
    assert (plan.decision.reason, plan.record.why) == ("pull", "cheaper")
    assert plan.split.source_cached_tokens == 4064
    assert plan.split.source_missing_tokens == 32
    assert plan.split.reused_tokens == 4064


def test_a_decode_engine_may_be_pulled_from_but_never_prefills():
    world = World().engine("h", "decode", held=4064, requests_waiting=500).engine("d", "decode")
    assert world.plan().record.outcome == "local"
    world = World(mode="always").engine("h", "decode", held=2048).engine("d", "decode")
    assert world.plan().record.why == "no_pair"


@pytest.mark.parametrize(("mode", "target_tokens"), [("agent", 4064), ("nixl", 4095)])
def test_the_target_will_have_all_that_its_connector_moves(mode, target_tokens):
    moves = TransferInfo(mode=mode, compat="c")
    world = World(mode="always").engine("p", "prefill", transfer=moves)
    assert world.engine("d", "decode", transfer=moves).plan().split.target_tokens == target_tokens


@pytest.mark.parametrize(
    ("busy", "why"),
    [
        pytest.param({}, "not_cheaper", id="idle"),
        pytest.param({"requests_waiting": 1}, "cheaper", id="a queue drains meanwhile"),
        pytest.param({"requests_running": 20}, "cheaper", id="running requests are spared"),
        pytest.param({"requests_running": 2}, "not_cheaper", id="a few are worth little"),
    ],
)
def test_a_busy_decode_engine_has_the_prompt_computed_elsewhere(busy, why):
    world = World().engine("p", "prefill").engine("d", "decode", **busy)
    assert world.plan().record.why == why


def test_what_we_sent_and_nobody_answered_yet_counts_as_a_queue():
    world = World().engine("p", "prefill").engine("b").engine("c").tell()
    with (
        world.know.computing.counting("b", "i", 50_000),
        world.know.computing.counting("c", "i", 50_000),
    ):
        plan = world.plan()
        assert plan.record.local_seconds == pytest.approx(50 + TOKENS * SLOW)
    assert world.plan().record.local_seconds == pytest.approx(TOKENS * SLOW)


def test_an_engine_that_does_not_tell_its_speed_is_an_average_one():
    world = World().engine("p", "prefill", prefill_seconds_per_token=None)
    world.engine("d", "decode")
    assert world.plan().record.pair_seconds == pytest.approx(TOKENS * SLOW, rel=0.01)


@pytest.mark.parametrize("told", [None, 0.0, -1.0, math.nan, math.inf])
def test_where_nobody_tells_the_prior_stands_in(told):
    world = World(prior={"seconds_per_token": 0.5})
    for name, role in (("p", "prefill"), ("d", "decode")):
        world.engine(name, role, prefill_seconds_per_token=told)
    assert world.plan().record.local_seconds == pytest.approx(TOKENS * 0.5)


def test_measured_paths_stand_before_priors():
    world = World(mode="always").engine("p", "prefill", node="n1").engine("d", "decode", node="n2")
    without = world.tell().plan().record.pair_seconds
    there = PathReading(
        source="n1", target="n2", path="tcp", setup_seconds=5.0, bytes_per_second=1e9
    )
    back = PathReading(
        source="n2", target="n1", path="tcp", setup_seconds=9.0, bytes_per_second=1e9
    )
    measured = world.tell(there, back).plan().record.pair_seconds
    assert measured - without == pytest.approx(5.0 - 0.003)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        pytest.param({"tokens": 255}, "short", id="short"),
        pytest.param({"tokens": None}, "no_tokens", id="no tokens"),
        pytest.param({"body": b'{"prompt":"x","n":2}'}, "several_answers", id="several answers"),
        pytest.param({"body": b'{"prompt":"\\ud800"}'}, "unreadable", id="unreadable"),
    ],
)
def test_requests_that_are_served_whole(changes, why):
    world = World(mode="always").engine("p", "prefill").engine("d", "decode").tell()
    job = world.job(**changes)
    plan = world.plan(job=job)
    assert (plan.split, plan.record.outcome, plan.record.why) == (None, "local", why)


def test_after_pairs_failed_there_are_no_more():
    world = World(mode="always").engine("p", "prefill").engine("q", "prefill").engine("d", "decode")
    job = world.job()
    job.failed_sources.add("p")
    assert pair_of(world.plan(job=job)) == ("q", "d")
    job.pairs_left = 0
    assert world.plan(job=job).record.why == "pairs_failed"
    assert world.plan(may_split=False).record is None


def test_an_engine_that_fails_is_in_no_pair():
    world = World(mode="always").engine("p", "prefill").engine("d", "decode").tell()
    world.know.suspects.failed("p", "i", 0.0)
    assert world.plan().record.why == "no_pair"


def test_room_is_what_nobody_holds_or_was_promised():
    world = World(mode="always", room_margin_tokens=0).engine("p", "prefill")
    world.engine("d", "decode", kv_total_tokens=10_000, kv_used_ratio=0.5).tell()
    assert world.plan().split is not None
    with world.know.staged.counting("d", "i", 904):
        world.know.ledger.open("d", "i", 904)  # the pair's own entry, which staged speaks of
        assert world.plan().split is not None
    with world.know.staged.counting("d", "i", 905):
        assert world.plan().record.why == "no_room"
    world.know.ledger.open("d", "i", 5_000 + 905)  # not in the reading yet
    assert world.plan().record.why == "no_room"


def test_an_engine_below_the_gate_has_no_room():
    world = World(mode="always").engine("p", "prefill")
    world.engine("d", "decode", kv_total_tokens=10**7, kv_used_ratio=0.95).engine("b", "both")
    assert pair_of(world.plan()) == ("p", "b")


def test_two_layouts_never_meet():
    other = replace(MOVES, compat="other")
    world = World(mode="always").engine("p", "prefill").engine("d", "decode", transfer=other)
    assert world.plan().record is None  # not even looked at
    world.engine("p2", "prefill", transfer=other)
    assert pair_of(world.tell().plan()) == ("p2", "d")


# -- Roles, for requests that are not split --------------------------------------------


def alone(world):
    return world.plan(may_split=False).decision.engine


def test_whole_requests_go_to_engines_of_both_roles_then_decode_then_prefill():
    world = World().engine("p", "prefill", transfer=None).engine("d", "decode", transfer=None)
    assert alone(world) == "d"
    assert alone(world.engine("b", transfer=None, kv_used_ratio=0.5).tell()) == "b"
    world.engine("b", transfer=None, kv_used_ratio=0.95)
    assert alone(world.tell()) == "d"
    world.engine("d", "decode", transfer=None, kv_used_ratio=0.95)
    assert alone(world.tell()) == "p"


def test_a_decode_engine_gets_a_whole_request_where_it_computes_it_sooner():
    world = World().engine("b", transfer=None).engine("d", "decode", held=2048, transfer=None)
    assert alone(world) == "d"
    world.engine("d", "decode", held=320, transfer=None)
    assert alone(world.tell()) == "b"


def test_a_prefill_engine_never_decodes_what_it_holds_while_others_can():
    world = World().engine("b", transfer=None).engine("p", "prefill", held=4064, transfer=None)
    assert alone(world) == "b"


def test_with_mode_off_roles_mean_what_the_policy_makes_of_them():
    world = World(mode="off").engine("b").engine("p", "prefill", held=4064)
    plan = world.plan()
    assert (plan.decision.engine, plan.split, plan.record) == ("p", None, None)


@pytest.mark.parametrize("given", ["off", False])
def test_yaml_may_say_off_without_quotes(given):
    assert PdSettings.model_validate({"mode": given}).mode == "off"
