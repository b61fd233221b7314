import pytest

from nearkv.demo.engine_counters import PromptTokens, parse_prompt_tokens
from nearkv.demo.errors import ScenarioError

METRICS = """\
# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 995.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="tiny",source="local_compute"} 5.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_cache_hit"} 128.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv_transfer"} 7.0
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 1135.0
"""


def test_counters_are_summed_over_ranks():
    assert parse_prompt_tokens(METRICS) == PromptTokens(computed=1000, cached=128, transferred=7)


def test_missing_counters_are_an_error_and_not_zero():
    with pytest.raises(ScenarioError, match="prompt_tokens_by_source"):
        parse_prompt_tokens("# TYPE up gauge\nup 1\n")


def test_arithmetic():
    difference = PromptTokens(10, 5, 1) - PromptTokens(4, 5, 0)
    assert difference == PromptTokens(6, 0, 1)
    assert (difference + PromptTokens(1, 1, 1)).total == 10
