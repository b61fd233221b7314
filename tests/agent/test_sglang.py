"""SGLang through the same adapters as vLLM; tests/data/sglang says where the shapes are from."""

import base64
import json
from pathlib import Path

import msgspec
import pytest

from nearkv.agent.block_table import BlockChanges, BlockTable
from nearkv.agent.engine_kinds import SglangInfo, sglang_event_sources
from nearkv.agent.engine_metrics import RankReading, parse_metrics
from nearkv.agent.engine_tracking import EngineIdentity, EngineTracker
from nearkv.agent.event_sources import EventSource
from nearkv.agent.kv_events import BlockRemoved, decode_batch
from nearkv.agent.state_log import StateLog
from nearkv.block_keys import KeyNamespace, chain_keys, pack_tokens, root_key

DATA = Path(__file__).parents[1] / "data/sglang"
PAGE = 16


def payloads():
    for line in (DATA / "kv_events.jsonl").read_text().splitlines():
        yield base64.b64decode(json.loads(line)["payload_base64"])


def keys(first, count, *, lora="", salt="", after=()):
    """Keys of ``count`` consecutive tokens, behind the blocks ``after``."""
    parent = after[-1] if after else root_key(KeyNamespace("tiny", lora, salt))
    return chain_keys(parent, pack_tokens(range(first, first + count)), PAGE)


PLAIN = keys(100, 48)
DEEPER = keys(200, 32, after=PLAIN)
SALTED = keys(100, 48, salt="tenant-a")
OF_LORA = keys(100, 16, lora="sql")
PAIRS = keys(300, 32)


def table_after(count):
    """The block table after the first ``count`` captured messages."""
    table = BlockTable(key_model="tiny")
    for _, payload in zip(range(count), payloads(), strict=False):
        batch = decode_batch(payload)
        assert batch.skipped == {}
        table.apply(batch.events, BlockChanges())
    return {tier: set(held) for tier, held in table.keys_by_tier().items() if held}


@pytest.mark.parametrize(
    ("count", "device", "host"),
    [
        pytest.param(1, [], [], id="cleared-at-the-start"),
        pytest.param(2, PLAIN, [], id="from-the-root"),
        pytest.param(3, PLAIN + DEEPER, [], id="a-session-is-no-namespace"),
        pytest.param(4, PLAIN + DEEPER + SALTED, [], id="a-salt-is-one"),
        pytest.param(5, PLAIN + DEEPER + SALTED + OF_LORA, [], id="an-adapter-is-one"),
        pytest.param(6, PLAIN + SALTED + OF_LORA, DEEPER, id="written-back-to-the-host"),
        pytest.param(7, PLAIN + DEEPER + SALTED + OF_LORA, [], id="loaded-again"),
        pytest.param(8, PLAIN + DEEPER + SALTED + OF_LORA + PAIRS, [], id="pairs-of-eagle"),
        pytest.param(9, DEEPER + SALTED[:2] + OF_LORA + PAIRS, [], id="removed"),
        pytest.param(10, [], [], id="cleared"),
    ],
)
def test_captured_events_fill_the_table_under_our_own_keys(count, device, host):
    expected = {"GPU": set(device), "CPU": set(host)}
    assert table_after(count) == {tier: held for tier, held in expected.items() if held}


def decode(**event):
    (decoded,) = decode_batch(msgspec.msgpack.encode([0.0, [event], 0])).events
    return decoded


@pytest.mark.parametrize(
    ("medium", "tier"),
    [("CPU_PINNED", "CPU"), ("DISK", "STORAGE"), ("EXTERNAL", "EXTERNAL"), ("GPU", "GPU")],
)
def test_tiers_have_one_name_whatever_the_engine(medium, tier):
    assert decode(type="BlockRemoved", block_hashes=[-7], medium=medium) == BlockRemoved([-7], tier)


def stored(**fields):
    plain = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None}
    return {**plain, "token_ids": [1, 2], "block_size": 2, **fields}


@pytest.mark.parametrize(
    "salt", ["tenant", "sql", "GPU"], ids=["other", "like-the-adapter", "like-a-tier"]
)
def test_a_salt_and_an_adapter_make_one_namespace(salt):
    table = BlockTable(key_model="tiny")
    table.apply([decode(**stored(cache_salt=salt, lora_name="sql"))], BlockChanges())
    root = root_key(KeyNamespace("tiny", "sql", salt))
    assert table.keys_by_tier() == {"GPU": chain_keys(root, pack_tokens([1, 2]), 2)}


def test_a_salt_that_is_no_text_is_never_taken_for_none():
    batch = decode_batch(msgspec.msgpack.encode([0.0, [stored(cache_salt=[7])], 0]))
    assert (batch.events, batch.skipped) == ([], {"malformed": 1})


@pytest.mark.parametrize("tokens", [[[1, 2], []], [[], [1, 2]], [[1, 2], "x"], [["a", 1], [2, 3]]])
def test_pairs_that_are_none_are_counted_as_bad_tokens(tokens):
    table = BlockTable(key_model="tiny")
    table.apply([decode(**stored(token_ids=tokens))], BlockChanges())
    assert (table.block_count, table.counts.bad_tokens) == (0, 1)


# -- Metrics ---------------------------------------------------------------------------------


def read(name="metrics.txt"):
    return parse_metrics((DATA / name).read_text())


ONE_RANK = RankReading(
    kv_used_ratio=0.28,
    requests_running=3,
    requests_waiting=2,
    prefix_hits_tokens=1012,
    prefix_queries_tokens=4000,
    prompt_tokens=4000,
    computed_tokens=3000,
    prefills=3,
    prefill_seconds=0.8,
    block_size=16,
    kv_total_tokens=51200,
    kv_total_bytes=6_710_886_400,
)


@pytest.mark.parametrize("name", ["metrics.txt", "metrics_priorities.txt"])
def test_the_page_of_one_rank_is_read_in_full(name):
    assert read(name).ranks == {"0": ONE_RANK}


def test_ranks_are_told_apart_and_one_process_speaks_for_each():
    ranks = read("metrics_dp.txt").ranks
    assert {rank: reading.requests_running for rank, reading in ranks.items()} == {"0": 3, "1": 7}
    assert [ranks["1"].computed_tokens, ranks["1"].prefix_hits_tokens] == [3004, 1004]
    assert [ranks[rank].prefix_hits_tokens for rank in "01"] == [1000, 1004]
    assert [ranks[rank].prefix_queries_tokens for rank in "01"] == [4000, 4008]


def test_the_first_process_speaks_in_whatever_order_they_come():
    lines = (DATA / "metrics_dp.txt").read_text().splitlines()
    assert parse_metrics("\n".join(reversed(lines))).ranks == read("metrics_dp.txt").ranks


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("num_running_reqs", ["requests_running"]),
        ("num_queue_reqs", ["requests_waiting"]),
        ("token_usage", ["kv_used_ratio"]),
        ("max_total_num_tokens", ["kv_total_tokens"]),
        ("page_size", ["block_size"]),
        ("kv_cache_memory_usage_gb", ["kv_total_bytes"]),
        ("per_stage_req_latency_seconds_sum", ["prefill_seconds"]),
        ("per_stage_req_latency_seconds_count", ["prefills"]),
        ("realtime_tokens_total", ["computed_tokens"]),
    ],
)
def test_a_missing_metric_is_unknown_and_the_others_stay(name, fields):
    text = (DATA / "metrics.txt").read_text().splitlines()
    part = parse_metrics("\n".join(line for line in text if f"sglang:{name}{{" not in line))
    changed = {
        field
        for field in RankReading.__slots__
        if getattr(part.ranks["0"], field) != getattr(ONE_RANK, field)
    }
    assert changed == set(fields)
    assert all(getattr(part.ranks["0"], field) is None for field in fields)


@pytest.mark.parametrize("value", ["-5", "0", "1e300", "NaN", "+Inf", "many"])
def test_sizes_that_are_none_are_unknown(value):
    text = "\n".join(
        f"sglang:{name} {value}"
        for name in ("page_size", "max_total_num_tokens", "kv_cache_memory_usage_gb")
    )
    reading = parse_metrics(text + "\nsglang:num_running_reqs 1").ranks["0"]
    assert reading == RankReading(requests_running=1)


# -- Restarts --------------------------------------------------------------------------------


def test_the_time_its_start_took_is_the_same_in_whatever_order_it_is_told():
    lines = [f'sglang:startup_time_seconds{{phase="{n}"}} 0.{n}' for n in range(1, 8)]
    orders = [lines[n:] + lines[:n] for n in range(len(lines))]
    assert len({parse_metrics("\n".join(order)).start_time_seconds for order in orders}) == 1


def test_the_time_its_start_took_tells_starts_apart():
    text = (DATA / "metrics.txt").read_text()
    other = parse_metrics(text.replace("17.33498239517212", "17.33498339517212"))
    assert abs(read().start_time_seconds - other.start_time_seconds) > 0.0005, "in the name, too"


class Tracked:
    """A tracker that holds one block."""

    def __init__(self):
        identity = EngineIdentity("e", "http://e", "n", "tiny", ("tiny",), key_model="tiny")
        log = StateLog(boot="b", node="n", version="1")
        self.tracker = EngineTracker(identity, log, secret=b"", table_limit_bytes=1 << 20)
        self.tracker.on_message(0, msgspec.msgpack.encode([0.0, [stored()], 0]), 0.0)

    def read(self, start=None, **reading):
        reading = RankReading(**reading)
        return self.tracker.on_reading(reading, start_time_seconds=start, boot="b", now=0.0)


@pytest.mark.parametrize(
    ("then", "restarted"),
    [({"prompt_tokens": 5}, True), ({}, True), ({"prompt_tokens": 10}, False)],
)
def test_without_a_start_time_a_sum_that_fell_shows_a_new_process(then, restarted):
    engine = Tracked()
    engine.read(prompt_tokens=10)
    before = engine.tracker.incarnation
    assert engine.read(**then) is restarted
    assert (engine.tracker.table.block_count, engine.tracker.incarnation != before) == (
        (0, True) if restarted else (1, False)
    )


def test_a_fallen_sum_says_nothing_where_the_start_time_is_told():
    engine = Tracked()
    engine.read(start=1.0, prompt_tokens=10)
    assert engine.read(start=1.0, prompt_tokens=5) is False
    assert engine.tracker.table.block_count == 1


def test_a_restart_seen_by_its_events_is_not_seen_again_by_its_sums():
    engine = Tracked()
    engine.read(prompt_tokens=10)
    engine.tracker.restart(noticed_by_events=True)
    assert engine.read(prompt_tokens=1) is False
    assert engine.read(prompt_tokens=0) is True


# -- What /server_info says ------------------------------------------------------------------


def info(**events):
    told = json.loads((DATA / "server_info.json").read_text())
    told["kv_events"] = {**told["kv_events"], **events}
    return msgspec.json.decode(json.dumps(told), type=SglangInfo)


def test_each_rank_has_a_port_of_its_own():
    assert sglang_event_sources(info(), "10.0.0.7") == {
        0: EventSource("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5567"),
        1: EventSource("tcp://10.0.0.7:5558", "tcp://10.0.0.7:5568"),
    }


@pytest.mark.parametrize(
    ("events", "ranks"),
    [
        ({"endpoint_port_base": None}, []),
        ({"publisher": "null"}, []),
        ({"endpoint_port_base": 65535}, [0]),
        ({"replay_endpoint_port_base": 65535, "dp_size": 2}, [0, 1]),
    ],
    ids=["no-port", "no-publisher", "no-port-left", "no-replay-port-left"],
)
def test_ranks_without_a_port_have_no_source(events, ranks):
    assert list(sglang_event_sources(info(**events), "h")) == ranks


def test_topic_and_concrete_hosts_are_kept():
    source = sglang_event_sources(info(endpoint_host="[fd00::7]", topic="kv"), "h")[0]
    assert source == EventSource("tcp://[fd00::7]:5557", "tcp://[fd00::7]:5567", "kv")
