"""Evidence in, answers out: on made-up figures and on captured metrics of real engines."""

from pathlib import Path

import pytest

from nearkv.break_even import Link
from nearkv.report.answering import Setting, answer_all
from nearkv.report.evidence import Evidence, gather
from nearkv.report.rendering import as_markdown
from nearkv.report.samples import between, histogram_of, parse_scrape, since_start
from nearkv.report.separating import Measured, advised_ratio, separate

DATA = Path(__file__).parents[2] / "data"
WHERE = "http://engine/metrics"
FAST = Link("fast", 1e12, 0.0001)
INF = float("inf")


def answers_of(*texts, at=1000.0, setting=None):
    changes = [since_start(parse_scrape(WHERE, text, at)) for text in texts]
    found = answer_all(gather(changes, where=WHERE), setting or Setting(FAST))
    return {answer.id: answer for answer in found}


def engine_text(*, prefill=10.0, decode=40.0, requests=20, slow="decode", extra=""):
    """Return the metrics of an engine with so many seconds of both phases, started at 900."""
    lines = ["process_start_time_seconds 900"]
    for phase, total in (("prefill", prefill), ("decode", decode), ("queue", 0.1)):
        name = f"vllm:request_{phase}_time_seconds"
        fast = requests - 1 if phase == slow else requests
        lines += [
            f"# TYPE {name} histogram",
            f'{name}_bucket{{engine="0",le="1.0"}} {fast}',
            f'{name}_bucket{{engine="0",le="8.0"}} {requests}',
            f'{name}_bucket{{engine="0",le="+Inf"}} {requests}',
            f'{name}_count{{engine="0"}} {requests}',
            f'{name}_sum{{engine="0"}} {total}',
        ]
    lines += [
        f'vllm:prompt_tokens_total{{engine="0"}} {requests * 1000}',
        'vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 10000',
        'vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 10000',
        extra,
    ]
    return "\n".join(lines) + "\n"


def test_captured_metrics_of_real_vllm_are_answered():
    text = (DATA / "vllm" / "metrics.txt").read_text()
    found = answers_of(text, at=1.795999384e9 + 100, setting=Setting(FAST, 1000.0))
    assert found["prefill_share"].value == pytest.approx(0.15628 / (0.15628 + 0.29538), rel=1e-3)
    assert found["hit_rate"].value == pytest.approx(128 / 1123)
    assert found["kv_use"].value == 0.0
    assert found["prefill_rate"].value == pytest.approx(995 / 0.15628, rel=1e-3)
    assert found["p99_source"].unknown == (
        "P99 of prefill and decode and queue is in one histogram bucket, up to 0.3 s "
        "(means: prefill 17.4 ms, decode 32.8 ms, queue 0.0 ms)"
    )
    assert "P : D" in found["pd_ratio"].text
    assert found["pd_gain"].value is not None


def test_what_real_vllm_does_not_tell_is_unknown_with_the_metric_and_the_place():
    found = answers_of((DATA / "vllm" / "metrics.txt").read_text(), at=1.9e9)
    assert found["predicted_hit_rate"].unknown == (
        f"metric nearkv_ingress_prompt_tokens_total not found at {WHERE}"
    )
    assert "nearkv_agent_kv_cache_total_capacity_bytes" in found["pd_gain"].unknown
    assert "--kv-bytes-per-token" in found["pd_gain"].unknown


def test_captured_shapes_of_sglang_are_answered():
    found = answers_of((DATA / "sglang" / "metrics.txt").read_text())
    assert found["prefill_share"].value == pytest.approx(0.8 / 2.3)
    assert found["hit_rate"].value == pytest.approx(1012 / 4000)
    assert found["kv_use"].value == pytest.approx(0.28)


def test_each_rank_of_sglang_counts_once():
    found = answers_of((DATA / "sglang" / "metrics_dp.txt").read_text())
    assert "of 2" in found["kv_use"].text


def test_nothing_at_all_is_unknown_everywhere_and_zero_nowhere():
    found = answers_of("")
    assert all(answer.unknown and answer.value is None for answer in found.values())


def test_an_engine_without_requests_is_not_zero_percent():
    found = answers_of(engine_text(prefill=0.0, decode=0.0, requests=0))
    assert found["prefill_share"].unknown == "no request ended in the window"
    assert found["p99_source"].unknown == "no request ended in the window"


@pytest.mark.parametrize("slow", ["prefill", "decode", "queue"])
def test_p99_comes_from_the_phase_with_the_slow_requests(slow):
    found = answers_of(engine_text(slow=slow))
    assert found["p99_source"].text.startswith(slow)
    assert found["p99_source"].value > 1.0


def test_agents_have_the_first_word_on_hits_and_on_use():
    agent = (
        'nearkv_agent_kv_cache_prefix_hits_tokens_total{engine="a"} 30\n'
        'nearkv_agent_kv_cache_prefix_miss_tokens_total{engine="a"} 70\n'
        'nearkv_agent_kv_cache_used_ratio{engine="a"} 0.5\n'
        'nearkv_agent_kv_cache_used_ratio{engine="b"} 0.1\n'
    )
    found = answers_of(agent, "vllm:prefix_cache_hits_total 1\nvllm:kv_cache_usage_perc 0.9\n")
    assert found["hit_rate"].value == 0.3
    assert found["kv_use"].value == pytest.approx(0.3)
    assert "fullest engine 50.0%" in found["kv_use"].text


def test_the_share_of_engine_time_needs_to_know_that_time():
    text = engine_text().replace("process_start_time_seconds 900", "")
    assert "scrape twice with --interval" in answers_of(text)["prefill_busy"].unknown
    first, second = (parse_scrape(WHERE, text, at) for at in (0.0, 50.0))
    found = answer_all(gather([between(first, second)], where=WHERE), Setting(FAST))
    assert next(a for a in found if a.id == "prefill_busy").value == 0.0


def test_separation_pays_where_decoding_waits_for_prompts_and_links_are_fast():
    busy = engine_text(prefill=60.0, decode=400.0)
    found = answers_of(busy, setting=Setting(FAST, 1000.0))["pd_gain"]
    assert found.text.startswith("pays")
    # 20 s of decoding each, 60 % of the time beside prefills, less the transfer.
    assert found.value == pytest.approx(20 * 0.6, rel=0.01)
    slow = answers_of(busy, setting=Setting(Link("slow", 1e3), 1e6))["pd_gain"]
    assert slow.text.startswith("does not pay")
    assert "never" in slow.text


def test_the_kv_size_is_the_agents():
    agent = (
        'nearkv_agent_kv_cache_total_capacity_bytes{engine="a"} 1000000\n'
        'nearkv_agent_kv_cache_total_capacity_tokens{engine="a"} 1000\n'
    )
    by_agent = answers_of(engine_text(), agent)["pd_gain"]
    by_hand = answers_of(engine_text(), setting=Setting(FAST, 1000.0))["pd_gain"]
    assert by_agent.value == by_hand.value


def test_the_ratio_is_of_the_engines_there_are():
    found = answers_of(*(engine_text(prefill=35.0, decode=100.0) for _ in range(6)))
    assert found["pd_ratio"].text == "P : D = 1 : 2 (of 6 engines: 2 for prefill, 4 for decode)"
    alone = answers_of(engine_text())["pd_ratio"]
    assert "one engine cannot be split" in alone.text


@pytest.mark.parametrize(
    ("busy", "decoding", "ratio"),
    [(0.7, 1.0, (1, 1)), (0.35, 1.0, (1, 2)), (0.01, 1.0, (1, 8)), (0.9, 0.05, (8, 1))],
)
def test_ratios_are_small_whole_numbers(busy, decoding, ratio):
    assert advised_ratio(busy, decoding) == ratio


def test_moving_pays_from_the_length_where_it_is_clearly_quicker():
    measured = Measured(
        prompt_tokens=1000,
        seconds_per_token=1e-4,
        decode_seconds=1.0,
        busy_ratio=0.1,
        decoding_ratio=1.0,
    )
    found = separate(measured, Link("l", 1e9, 0.01), 10_000)
    assert found.price_seconds == pytest.approx(0.01 + 0.01)
    assert found.break_even_tokens == int(1.1 * 0.01 / (1e-4 - 1.1e-5)) + 1


def test_markdown_escapes_what_would_break_the_table():
    evidence = Evidence(where="a|b")
    text = as_markdown(answer_all(evidence, Setting(FAST)), "Once")
    assert "a\\|b" in text
    assert all(line.count(" | ") == 1 for line in text.splitlines()[2:-2] if line)


def test_an_empty_histogram_of_first_bytes_is_unknown():
    evidence = Evidence(where=WHERE, histograms={})
    found = {a.id: a for a in answer_all(evidence, Setting(FAST))}
    assert "nearkv_ingress_first_byte_seconds" in found["first_byte_p99"].unknown
    assert histogram_of([], 0.0).count == 0.0
