"""The double's metrics page has the captured names, labels, help and values."""

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.doubles.engine import EngineDouble, EngineDoubleConfig
from tests.doubles.engine.captured import CAPTURED_CONFIG, captured_exchanges, captured_metrics

# Times and start-up moments differ from run to run.
_VARYING = ("seconds", "created", "process_start")


def families(page):
    return {family.name: family for family in text_string_to_metric_families(page)}


def samples(family):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for sample in family.samples
    }


async def metrics(session, engine):
    async with session.get(engine.url + "/metrics") as response:
        return await response.text()


async def replay(session, engine):
    for exchange in captured_exchanges():
        body = {} if exchange.request is None else {"json": exchange.request}
        async with session.request(exchange.method, engine.url + exchange.path, **body) as response:
            await response.read()


async def test_page_equals_the_capture():
    async with EngineDouble(CAPTURED_CONFIG) as engine, aiohttp.ClientSession() as session:
        await replay(session, engine)
        page = await metrics(session, engine)
    wanted, found = families(captured_metrics()), families(page)
    assert set(found) <= set(wanted)
    for name, family in found.items():
        assert family.documentation == wanted[name].documentation
        assert family.type == wanted[name].type
        ours, theirs = samples(family), samples(wanted[name])
        assert set(ours) == set(theirs), name
        if not any(word in name for word in _VARYING):
            assert ours == theirs, name


@pytest.mark.parametrize(
    "name",
    [
        "process_start_time_seconds",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries",
        "vllm:prefix_cache_hits",
        "vllm:prompt_tokens",
        "vllm:prompt_tokens_by_source",
        "vllm:prompt_tokens_cached",
        "vllm:generation_tokens",
        "vllm:request_prefill_kv_computed_tokens",
        "vllm:time_to_first_token_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
        "vllm:request_inference_time_seconds",
        "vllm:cache_config_info",
        "vllm:engine_sleep_state",
        "vllm:request_success",
    ],
)
async def test_families_that_are_read_exist_and_can_be_left_out(name):
    config = EngineDoubleConfig(missing_metrics=frozenset({name}), publish_events=False)
    async with (
        EngineDouble(EngineDoubleConfig(publish_events=False)) as whole,
        EngineDouble(config) as without,
        aiohttp.ClientSession() as session,
    ):
        assert name in families(await metrics(session, whole))
        assert name not in families(await metrics(session, without))


async def test_start_time_changes_with_a_restart():
    async with EngineDouble() as engine, aiohttp.ClientSession() as session:
        first = families(await metrics(session, engine))["process_start_time_seconds"]
        await engine.restart()
        second = families(await metrics(session, engine))["process_start_time_seconds"]
    assert first.samples[0].value < second.samples[0].value


@pytest.mark.parametrize(
    ("level", "state"),
    [
        pytest.param("1", "weights_offloaded", id="level-1"),
        pytest.param("2", "discard_all", id="level-2"),
    ],
)
async def test_sleep_state(level, state):
    async with EngineDouble() as engine, aiohttp.ClientSession() as session:
        async with session.post(engine.url + "/sleep", params={"level": level}):
            asleep = families(await metrics(session, engine))["vllm:engine_sleep_state"]
        async with session.post(engine.url + "/wake_up"):
            awake = families(await metrics(session, engine))["vllm:engine_sleep_state"]
    assert [s.labels["sleep_state"] for s in asleep.samples if s.value] == [state]
    assert [s.labels["sleep_state"] for s in awake.samples if s.value] == ["awake"]


async def test_host_hits_count_as_external():
    config = EngineDoubleConfig(block_size=4, num_blocks=5, cpu_blocks=8, publish_events=False)
    async with EngineDouble(config) as engine, aiohttp.ClientSession() as session:
        for start in (0, 100, 0):
            body = {"prompt": list(range(start, start + 15)), "max_tokens": 1}
            async with session.post(engine.url + "/v1/completions", json=body) as response:
                assert response.status == 200
        found = families(await metrics(session, engine))
    by_tier = {
        s.labels["source"]: s.value for s in _totals(found, "prompt_tokens_cached_by_source")
    }
    assert by_tier["host"] == 12
    assert _totals(found, "external_prefix_cache_hits")[0].value == 12
    assert _totals(found, "prefix_cache_hits")[0].value == 0


def _totals(found, name):
    return [s for s in found[f"vllm:{name}"].samples if s.name.endswith("_total")]
