"""Decision records over real sockets: what both entries keep, and what is read of it."""

import asyncio
import json

import pytest

from nearkv.ingress.app import build_app
from nearkv.ingress.recording.opening import RecordFileError
from nearkv.ingress.settings import IngressSettings
from nearkv.replay.traces import read_trace
from tests.doubles.engine import EngineDouble, EngineDoubleConfig, Faults
from tests.integration.pd_stack import Part, pd_double, pd_stack
from tests.integration.picker_site import gateway, running_picker
from tests.integration.stack import DEADLINE_SECONDS, running_agent, running_ingress, small_fleet

DOCUMENT = "A heron stands in the shallows below the weir until the light goes. " * 40
TOKEN = "not-a-real-one"  # noqa: S105 (it guards nothing)


def double(**config):
    settings = {"num_blocks": 600, "max_model_len": 8192, "prefill_tokens_per_second": 4000}
    return EngineDouble(EngineDoubleConfig(**settings | config))


async def read(entry, path, status=200, **options):
    async with entry.session.get(entry.url + path, **options) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def explained(entry, request_id):
    """Return why a request went where it did, once it is over."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            async with entry.session.get(f"{entry.url}/v1/explain?request={request_id}") as answer:
                if answer.status == 200:
                    return await answer.json()
            await asyncio.sleep(0.005)


async def stream(ingress, prompt, **headers):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "stream": True}
    body["stream_options"] = {"include_usage": True}
    async with ingress.session.post(
        ingress.url + "/v1/completions", json=body, headers=headers
    ) as response:
        await response.read()
        return response


async def test_a_follow_up_is_explained_from_all_engines_terms_to_what_came_of_it():
    async with double() as a, double() as b, small_fleet(a, b, policy="cost") as (ingress, agent):
        first, _ = await ingress.complete(DOCUMENT)
        await ingress.synced(agent)
        second = await stream(ingress, DOCUMENT + "Why?", **{"X-Request-Id": "two"})
        home = first.headers["x-nearkv-engine"]
        found = await explained(ingress, "two")
        request = found["request"]
        assert request["engine"] == home == second.headers["x-nearkv-engine"]
        assert request["reason"] == "prefix_hit"
        assert request["predicted_cached_tokens"] == request["reported_cached_tokens"] > 0
        assert request["output_tokens"] == 4
        assert request["predicted_first_token_ms"] > 0 < request["first_token_ms"]
        assert request["total_ms"] >= request["first_byte_ms"] > request["routed_ms"]
        chosen, other = found["engines"]
        assert (chosen["engine"], chosen["chosen"], other["chosen"]) == (home, True, False)
        assert other["cost_ms"] > chosen["cost_ms"]
        assert other["why"].startswith(f"{other['cost_ms'] - chosen['cost_ms']:.1f} ms dearer")
        assert 0 <= chosen["age_ms"] < DEADLINE_SECONDS * 1000


async def test_the_list_has_the_latest_first_and_is_narrowed_by_its_fields():
    async with double() as a, double() as b, small_fleet(a, b) as (ingress, agent):
        for number in range(3):
            await ingress.complete(DOCUMENT, headers={"X-Request-Id": f"r{number}"})
            await ingress.synced(agent)
        await ingress.complete("x", model="nobody", headers={"X-Request-Id": "lost"})
        found = await read(ingress, "/v1/decisions")
        assert [line["id"] for line in found["decisions"]] == ["lost", "r2", "r1", "r0"]
        assert (found["kept"], found["matching"]) == (4, 4)
        found = await read(ingress, "/v1/decisions?reason=prefix_hit&limit=1&model=tiny")
        assert ([line["id"] for line in found["decisions"]], found["matching"]) == (["r2"], 2)
        assert "candidates" not in found["decisions"][0]
        bad = await read(ingress, "/v1/decisions?limit=none", 400)
        assert bad["error"].startswith("limit: expected 1 to 1000")


async def test_what_is_not_known_says_how_long_records_live():
    async with double() as a, small_fleet(a) as (ingress, _):
        gone = await read(ingress, "/v1/explain?request=nobody", 404)
        assert "no request has ended yet" in gone["error"]
        await ingress.complete("Short.")
        gone = await read(ingress, "/v1/explain?request=nobody", 404)
        assert "keeps its last 1 requests" in gone["error"]
        assert "decisions.max_bytes" in gone["error"]


async def test_a_small_ring_forgets():
    async with double() as a, small_fleet(a, decisions={"max_bytes": 3000}) as (ingress, _):
        for number in range(6):
            await ingress.complete("Short.", headers={"X-Request-Id": f"r{number}"})
        kept = (await read(ingress, "/v1/decisions"))["kept"]
        assert 1 <= kept < 6
        await read(ingress, "/v1/explain?request=r0", 404)
        await read(ingress, "/v1/explain?request=r5")


async def test_records_can_be_off():
    async with double() as a, small_fleet(a, decisions={"max_bytes": 0}) as (ingress, _):
        await ingress.complete("Short.", headers={"X-Request-Id": "r"})
        assert (await read(ingress, "/v1/decisions"))["kept"] == 0
        gone = await read(ingress, "/v1/explain?request=r", 404)
        assert "decisions.max_bytes is 0" in gone["error"]


async def test_the_admin_token_guards_them():
    async with double() as a, small_fleet(a, admin_token=TOKEN) as (ingress, _):
        for path in ("/v1/decisions", "/v1/explain?request=r"):
            await read(ingress, path, 401)
        await read(ingress, "/v1/decisions", headers={"Authorization": f"Bearer {TOKEN}"})


async def test_a_retry_shows_the_failure_and_the_engine_that_answered():
    async with double() as a, double() as b, small_fleet(a, b) as (ingress, _):
        engines = {"a": a, "b": b}
        first, _ = await ingress.complete("Short.")
        failing = next(name for name in engines if name != first.headers["x-nearkv-engine"])
        await engines[failing].inject(Faults(answer_status=503))
        for number in range(4):
            await ingress.complete(f"{number} and so on", headers={"X-Request-Id": f"r{number}"})
        told = [await explained(ingress, f"r{number}") for number in range(4)]
        retried = next(found for found in told if found["request"]["failures"])
        (failure,) = retried["request"]["failures"]
        assert (failure["engine"], failure["why"]) == (failing, "status 503")
        assert retried["request"]["engine"] != failing
        assert retried["request"]["attempts"] == 2
        assert f"{failing} failed before its first byte" in retried["story"][0]


async def test_two_engines_are_recorded_with_leg_and_transfer():
    parts = {"p": Part("prefill"), "d": Part("decode")}
    doubles = {"p": pd_double(), "d": pd_double()}
    async with pd_stack(parts, doubles=doubles) as stack:
        await stack.ingress.complete(DOCUMENT, headers={"X-Request-Id": "r"})
        found = await explained(stack.ingress, "r")
        request, transfer = found["request"], found["request"]["transfer"]
        assert (request["engine"], request["prefill_engine"]) == ("d", "p")
        assert (transfer["source"], transfer["target"], transfer["prefill"]) == ("p", "d", "ok")
        assert transfer["bytes"] > 100 * 1000
        assert transfer["pair_ms"] > 0
        assert 0 < request["prefill_ms"] < request["total_ms"]


async def test_the_file_has_what_a_replay_needs_and_nothing_that_tells_prompts(tmp_path):
    path = tmp_path / "d.jsonl"
    decisions = {"file": str(path), "keys": True}
    async with (
        double() as a,
        small_fleet(a, policy="cost", decisions=decisions) as (ingress, agent),
    ):
        await ingress.complete(DOCUMENT, headers={"X-Session-ID": "anna", "X-Request-Id": "one"})
        await ingress.synced(agent)
        await stream(ingress, DOCUMENT + "Why is that so, and for how long, would you say?")
    text = path.read_text()
    assert "heron" not in text
    assert "anna" not in text
    first, second = map(json.loads, text.splitlines())
    assert (first["id"], first["prompt_tokens"]) == ("one", 961)
    assert first["block_tokens"] * len(first["hash_ids"]) <= first["prompt_tokens"]
    assert len(first["hash_ids"]) == first["key_count"] > 20
    assert second["hash_ids"][: len(first["hash_ids"])] == first["hash_ids"]
    assert all(0 <= one < 1 << 32 for one in second["hash_ids"])
    assert second["at_seconds"] > first["at_seconds"] > 1e9
    assert second["output_tokens"] == 4
    assert second["first_token_ms"] > 0
    assert [c["engine"] for c in second["candidates"]] == ["a"]
    trace = read_trace(path)
    assert (trace.block_tokens, len(trace.arrivals)) == (first["block_tokens"], 2)
    assert second["quotes"][0]["cost_ms"] > 0
    assert len(second["ages_ms"]) == 1


async def test_the_file_has_no_keys_unless_they_are_asked_for(tmp_path):
    path = tmp_path / "d.jsonl"
    async with double() as a, small_fleet(a, decisions={"file": str(path)}) as (ingress, _):
        await ingress.complete(DOCUMENT)
    (line,) = map(json.loads, path.read_text().splitlines())
    assert "hash_ids" not in line
    assert line["key_count"] > 20


async def test_a_file_that_cannot_be_written_stops_the_start(tmp_path):
    settings = IngressSettings(decisions={"file": str(tmp_path / "no" / "d.jsonl")})
    with pytest.raises(RecordFileError, match=r"decisions.file: .*No such file"):
        await build_app(settings)


async def test_a_client_that_leaves_is_recorded_as_gone():
    async with double(decode_seconds_per_token=0.05) as a, small_fleet(a) as (ingress, _):
        body = {"model": "tiny", "prompt": "word", "max_tokens": 400, "stream": True}
        response = await ingress.session.post(
            ingress.url + "/v1/completions", json=body, headers={"X-Request-Id": "r"}
        )
        await response.content.readany()
        response.close()
        found = await explained(ingress, "r")
        assert (found["request"]["outcome"], found["request"]["error"]) == (
            "broken",
            "client_gone",
        )
        assert found["request"]["engine"] == "a"


async def test_without_engines_the_refusal_is_the_record():
    async with running_ingress() as ingress:
        await ingress.complete("x", headers={"X-Request-Id": "r"})
        found = await explained(ingress, "r")
        assert found["summary"].startswith("refused with 503, no_engine")
        assert found["engines"] == []


async def test_the_picker_keeps_records_of_what_envoy_sends(tmp_path):
    async with (
        double() as a,
        double() as b,
        running_agent(a, b) as agent,
        running_picker(agent.url, policy="cost") as picker,
        gateway(picker, tmp_path) as entry,
    ):
        first, _ = await entry.complete(DOCUMENT, headers={"X-Request-Id": "one"})
        await picker.synced(agent)
        await entry.complete(
            DOCUMENT + "Why?",
            headers={"X-Request-Id": "two"},
            stream=True,
            stream_options={"include_usage": True},
        )
        found = await explained(picker, "two")
        request = found["request"]
        assert request["engine"] == first.headers["x-nearkv-engine"]
        assert (request["reason"], request["outcome"]) == ("prefix_hit", "ok")
        assert request["predicted_cached_tokens"] == request["reported_cached_tokens"] > 0
        assert (request["output_tokens"], request["status"]) == (4, 200)
        assert request["total_ms"] >= request["first_byte_ms"] > 0
        assert len(found["engines"]) == 2
        refused, _ = await entry.complete("x", model="nobody", headers={"X-Request-Id": "lost"})
        assert refused.status == 404
        assert (await explained(picker, "lost"))["request"]["reason"] == "unknown_model"
