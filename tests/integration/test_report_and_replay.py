"""What running components tell, in a report; what an ingress recorded, in a replay."""

import json

from tests.core.running_cli import run_cli
from tests.doubles.engine import EngineDouble, EngineDoubleConfig
from tests.integration.stack import eventually, small_fleet

DOCUMENT = "The ferry leaves when the tide allows, and nobody on the island minds. " * 30


def double():
    config = EngineDoubleConfig(
        num_blocks=600, max_model_len=8192, prefill_tokens_per_second=20_000
    )
    return EngineDouble(config)


async def serve_some(ingress, agent):
    for number in range(6):
        await ingress.complete(f"{DOCUMENT} {number % 2} Question {number}?")
        await ingress.synced(agent)


async def test_a_report_on_running_components_finds_engines_by_their_agent():
    async with double() as a, double() as b, small_fleet(a, b, policy="cost") as (ingress, agent):
        await serve_some(ingress, agent)
        addresses = ("--ingress", ingress.url, "--agent", agent.url)
        status, out, err = await run_cli("report", *addresses, "-o", "json")
    document = json.loads(out)
    answers = {each["id"]: each for each in document["answers"]}
    assert (status, err, document["problems"]) == (0, "", [])
    assert 0 < answers["hit_rate"]["value"] < 1
    assert 0 < answers["predicted_hit_rate"]["value"] < 1
    assert 0 < answers["prefill_share"]["value"] <= 1
    assert answers["first_byte_p99"]["value"] > 0
    assert "of 2" in answers["kv_use"]["text"]


async def test_what_the_ingress_recorded_is_replayed(tmp_path):
    file = tmp_path / "decisions.jsonl"
    recording = {"file": str(file), "keys": True}
    async with (
        double() as a,
        double() as b,
        small_fleet(a, b, policy="cost", decisions=recording) as (ingress, agent),
    ):
        await serve_some(ingress, agent)
        await eventually(
            lambda: file.exists() and len(file.read_bytes().splitlines()) == 6, what="6 records"
        )
    options = ("--engines", "2", "--policy", "cost", "--policy", "round-robin")
    status, out, err = await run_cli("replay", str(file), *options, "-o", "json")
    assert (status, err) == (0, "")
    cost, turns = (row["figures"] for row in json.loads(out))
    assert cost["answered"] == turns["answered"] == 6
    assert cost["hit_ratio"] > 0.4
