"""Reading ``/metrics``: a real capture, what is missing, and what makes no sense."""

from pathlib import Path

import pytest

from nearkv.agent.engine_metrics import RankReading, parse_metrics

CAPTURED = Path(__file__).parents[1] / "data/vllm/metrics.txt"
INFO = (
    'vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="100",'
    'kv_cache_memory_bytes="1000"{more}}} 1.0'
)


def rank(*lines):
    """The one rank that the lines speak of."""
    (reading,) = parse_metrics("\n".join(lines)).ranks.values()
    return reading


def test_a_real_capture_is_read_in_full():
    reading = parse_metrics(CAPTURED.read_text())
    assert reading.start_time_seconds == 1795999360.25
    assert reading.ranks == {
        "0": RankReading(
            kv_used_ratio=0.0,
            requests_running=0.0,
            requests_waiting=0.0,
            prefix_hits_tokens=128.0,
            prefix_queries_tokens=1123.0,
            prompt_tokens=1123.0,
            computed_tokens=995.0,
            prefills=9.0,
            prefill_seconds=0.1562778170009551,
            prefill_computed_tokens=995.0,
            awake=True,
            block_size=32,
            kv_total_tokens=768,
            kv_total_bytes=None,  # the block count is overridden, so the bytes do not apply
        )
    }


FIELDS = {
    "vllm:num_requests_running": "requests_running",
    "vllm:num_requests_waiting": "requests_waiting",
    "vllm:kv_cache_usage_perc": "kv_used_ratio",
    "vllm:prefix_cache_hits_total": "prefix_hits_tokens",
    "vllm:prefix_cache_queries_total": "prefix_queries_tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:prompt_tokens_by_source_total": "computed_tokens",
    "vllm:engine_sleep_state": "awake",
    "vllm:request_prefill_time_seconds_sum": "prefill_seconds",
    "vllm:request_prefill_time_seconds_count": "prefills",
    "vllm:request_prefill_kv_computed_tokens_sum": "prefill_computed_tokens",
}


@pytest.mark.parametrize(("name", "field"), FIELDS.items())
def test_a_missing_metric_is_unknown_and_the_others_stay(name, field):
    whole = parse_metrics(CAPTURED.read_text()).ranks["0"]
    lines = CAPTURED.read_text().splitlines()
    part = rank(*(line for line in lines if not line.startswith((name + "{", name + " "))))
    assert getattr(part, field) is None
    setattr(part, field, getattr(whole, field))
    assert part == whole


def test_nothing_at_all_is_unknown():
    assert parse_metrics("").ranks == {}
    assert parse_metrics("").start_time_seconds is None


def test_ranks_are_told_apart_by_their_label():
    lines = [f'vllm:num_requests_running{{model_name="m",engine="{n}"}} {n + 1}' for n in (0, 1)]
    ranks = parse_metrics("\n".join(lines)).ranks
    assert {name: reading.requests_running for name, reading in ranks.items()} == {"0": 1, "1": 2}
    assert ranks["1"].requests_waiting is None


@pytest.mark.parametrize(
    "line",
    [
        'vllm:gpu_cache_usage_perc{engine="0"} 0.5',
        'vllm:gpu_prefix_cache_hits_total{engine="0"} 5',
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7',
        'vllm:prefix_cache_hits_created{engine="0"} 1.7e9',
        'other:num_requests_running{engine="0"} 7',
        '# vllm:num_requests_running{engine="0"} 7',
        'vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 7',
    ],
    ids=lambda line: line.split("{")[0],
)
def test_dead_and_foreign_names_are_never_read(line):
    assert rank("vllm:num_requests_running 1", line) == RankReading(requests_running=1.0)


@pytest.mark.parametrize(
    "line",
    [
        'vllm:num_requests_running{engine="0"}',
        'vllm:num_requests_running{engine="0"} many',
        'vllm:num_requests_running{engine="0"} NaN',
        'vllm:num_requests_running{engine="0"} +Inf',
        'vllm:num_requests_running{engine="0" 7',
        'vllm:num_requests_running{engine="0"} -7',
        'vllm:num_requests_running{engine="0"} 1e15',
        'vllm:num_requests_running{engine="0"} 0.' + "0" * 100,
        "vllm:num_requests_running{" + "a" * 1_000_000 + "} 7",
        "process_start_time_seconds 1e306",
        "vllm:num_requests_running",
        "vllm:",
        "process_start_time_seconds NaN",
        "process_start_time_seconds",
        "\x00\xff}{",
    ],
)
def test_lines_that_make_no_sense_are_passed_over(line):
    reading = parse_metrics(f"{line}\nvllm:num_requests_waiting 2\n{line}")
    assert reading.start_time_seconds is None
    assert reading.ranks == {"0": RankReading(requests_waiting=2.0)}


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("vllm:num_requests_running 3", 3),
        ("vllm:num_requests_running 3 1795999360000", 3),
        ('vllm:num_requests_running{model_name="a}b\\"c"} 3.0', 3),
        ("vllm:num_requests_running 1e2", 100),
    ],
)
def test_every_form_of_a_sample_is_read(line, value):
    assert rank(line).requests_running == value


@pytest.mark.parametrize(
    ("more", "tokens", "total_bytes"),
    [
        pytest.param("", 1600, 1000, id="blocks-times-size"),
        pytest.param(',kv_cache_size_tokens="900"', 900, 1000, id="tokens-come-first"),
        pytest.param(',kv_cache_size_tokens="None"', 1600, 1000, id="tokens-none"),
        pytest.param(',num_gpu_blocks_override="None"', 1600, 1000, id="no-override"),
        pytest.param(',num_gpu_blocks_override="100"', 1600, None, id="override"),
    ],
)
def test_the_size_of_the_cache(more, tokens, total_bytes):
    reading = rank(INFO.format(more=more))
    assert (reading.block_size, reading.kv_total_tokens) == (16, tokens)
    assert reading.kv_total_bytes == total_bytes


def test_a_cache_of_unknown_size_is_unknown():
    reading = rank('vllm:cache_config_info{engine="0",num_gpu_blocks="None",block_size="16"} 1')
    assert (reading.kv_total_tokens, reading.kv_total_bytes) == (None, None)


@pytest.mark.parametrize("name", ["block_size", "num_gpu_blocks", "kv_cache_memory_bytes"])
def test_a_size_of_zero_is_unknown(name):
    reading = rank(f'vllm:cache_config_info{{engine="0",{name}="0"}} 1')
    assert reading == RankReading()


@pytest.mark.parametrize(
    ("said", "read"), [("0.5", 0.5), ("1.02", 1.0), ("37", None), ("1e14", None), ("-1", None)]
)
def test_a_share_is_between_nothing_and_all(said, read):
    lines = (f"vllm:kv_cache_usage_perc {said}", "vllm:num_requests_running 1")
    assert rank(*lines).kv_used_ratio == read


def test_there_is_a_bound_on_series():
    lines = "\n".join(f'vllm:num_requests_running{{engine="{n}"}} 1' for n in range(30_000))
    assert len(parse_metrics(lines).ranks) == 20_000


@pytest.mark.parametrize(("value", "awake"), [("1.0", True), ("0.0", False)])
def test_sleep_is_read_from_the_awake_state(value, awake):
    head = 'vllm:engine_sleep_state{engine="0",sleep_state='
    assert rank(head + f'"awake"}} {value}', head + '"discard_all"} 1').awake is awake
