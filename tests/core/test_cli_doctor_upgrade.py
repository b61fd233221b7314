"""``nearkv doctor upgrade`` on two running engine doubles that differ."""

import json
import socket
import sys
from contextlib import asynccontextmanager

import pytest
import yaml
from aiohttp import web

from nearkv.agent.errors import EngineProbeError
from nearkv.cli.doctor_upgrade import UpgradeQuestion, UpgradeQuestionError, examine
from nearkv.cli.doctor_upgrade_model import Severity
from nearkv.serving import running
from nearkv.settings import Address
from tests.core.running_cli import run_cli
from tests.doubles.engine.config import EngineDoubleConfig
from tests.doubles.engine.faults import Faults
from tests.doubles.engine.server import EngineDouble

BREAKS, DEGRADES, UNKNOWN, DIFFERS, SAME = Severity
COMPLETIONS = "/v1/completions"
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
KV_RATIO = "metric vllm:kv_cache_usage_perc (kv_used_ratio)"


@asynccontextmanager
async def engines(old=None, new=None):
    async with (
        EngineDouble(EngineDoubleConfig(**(old or {}))) as before,
        EngineDouble(EngineDoubleConfig(**(new or {}))) as after,
    ):
        yield before, after


async def compared(old=None, new=None, **question):
    async with engines(old, new) as (before, after):
        return await ask(before, after, **question)


async def ask(before, after, **question):
    asked = {"model": None, "send_prompt": True, "event_seconds": 20} | question
    return await examine(UpgradeQuestion(old_url=before.url, new_url=after.url, **asked))


def rows(comparison):
    return {finding.check: finding for finding in comparison.findings}


async def test_equal_engines_are_the_same_in_everything():
    # Longer than a test may take: it ends when the events are there.
    comparison = await compared(event_seconds=100)
    assert {finding.severity for finding in comparison.findings} == {SAME}
    assert comparison.verdict is SAME
    found = rows(comparison)
    assert found["KV events"].old == "heard"
    assert found["hash rule"].new == "equal hashes"
    assert found["blocks of the prompt"].new.startswith("96 of 1")
    assert found["cached tokens of the same prompt again"].new == "96 tokens"


@pytest.mark.parametrize(
    ("new", "check", "severity", "told"),
    [
        pytest.param({"version": "0.33.0"}, "version", DIFFERS, "0.33.0", id="version"),
        pytest.param({"model": "small"}, "model", BREAKS, "small", id="model"),
        pytest.param({"max_model_len": 4096}, "max_model_len", BREAKS, "4096", id="shorter"),
        pytest.param({"block_size": 16}, "block size", BREAKS, "16 tokens", id="block-size"),
        pytest.param({"event_encoding": "array"}, "event encoding", DIFFERS, "array", id="array"),
        pytest.param({"block_hash_form": "bytes"}, "block hashes", DIFFERS, "32 bytes", id="bytes"),
        pytest.param({"topic": "kv@2"}, "event topic", DIFFERS, "kv@2", id="topic"),
        pytest.param(
            {"replay_framing": "plain"},
            "replay of events",
            DIFFERS,
            "without the topic",
            id="plain",
        ),
        pytest.param(
            {"missing_metrics": frozenset({"vllm:kv_cache_usage_perc"})},
            *(KV_RATIO, BREAKS, "missing"),
            id="metric",
        ),
        pytest.param(
            {"publish_events": False}, "KV events", BREAKS, "switched off", id="no-events"
        ),
        pytest.param(
            {"offer_kv_event_sources": False},
            *("endpoint /kv_event_sources", BREAKS, "not there"),
            id="no-event-sources",
        ),
        pytest.param(
            {"scale_out": False},
            *("endpoint /v1/chat/completions/render", DEGRADES, "declined (403)"),
            id="no-render",
        ),
        pytest.param(
            {"render_other_apis": False},
            *("endpoint /v1/responses/render", DEGRADES, "not there"),
            id="no-responses-render",
        ),
        pytest.param(
            {"prompt_tokens_details": False},
            *("cached tokens of the same prompt again", DEGRADES, "not reported"),
            id="no-details",
        ),
        pytest.param(
            {"transfer_keys": '{"dcp_size":1}'},
            *("transfer parameters", DIFFERS, "without none; with dcp_size"),
            id="transfer-keys",
        ),
        pytest.param(
            {"transfer_keys": '{"remote_lease_id":"x"}'},
            *("transfer of KV", BREAKS, "nearkv's connector"),
            id="connector",
        ),
        pytest.param({"loras": ("sql",)}, "adapters", DIFFERS, "sql", id="adapter-added"),
    ],
)
async def test_what_differs_is_found_with_what_it_means(new, check, severity, told):
    found = rows(await compared(new=new))[check]
    assert (found.severity, found.new) == (severity, told)


async def test_other_forms_of_events_change_nothing_for_nearkv():
    old = {"event_encoding": "array", "replay_framing": "plain"}
    found = rows(await compared(old, {"block_hash_form": "bytes"}))
    assert found["hash rule"].severity is SAME, "bytes end in the 64 bits that integers are"
    assert found["fields of stored blocks"].severity is SAME
    assert found["blocks of the prompt"].severity is SAME
    assert found["replay of events"].severity is DIFFERS


async def test_an_adapter_that_is_gone_breaks():
    found = rows(await compared(old={"loras": ("sql",)}))["adapters"]
    assert found.severity is BREAKS
    assert "sql" in found.effect


async def test_another_chat_template_breaks_chats_and_no_texts(tmp_path):
    template = tmp_path / "other.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    found = rows(await compared(new={"chat_template_path": template}))
    assert found["tokens, chat: one message"].severity is BREAKS
    assert "differ from token 0 on" in found["tokens, chat: one message"].effect
    assert found["tokens, text: words"].severity is SAME


async def test_versions_of_vllms_own_connector_are_never_paired():
    found = rows(await compared(new={"version": "0.33.0"}))
    assert found["pairs of prefill and decode"].severity is DEGRADES
    assert "pairs of prefill and decode" not in rows(await compared())


async def test_engines_that_do_not_tell_their_event_sockets():
    older = {"offer_kv_event_sources": False}
    async with engines(older, older) as (before, after):
        silent = rows(await ask(before, after))["KV events"]
        told = {
            "old_events": f"{before.kv_events_endpoint},{before.kv_replay_endpoint}",
            "new_events": after.kv_events_endpoint,
        }
        found = rows(await ask(before, after, **told))
    assert (silent.severity, silent.old) == (UNKNOWN, "the engine does not tell where they are")
    assert found["KV events"].severity is SAME
    assert found["replay of events"].severity is DEGRADES, "the new one has no replay"


async def test_an_event_socket_that_nobody_listens_on_ends_by_the_deadline():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dead = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        found = rows(await compared(new_events=dead, event_seconds=2))["KV events"]
    assert (found.severity, found.old) == (BREAKS, "heard")
    assert found.new == f"{dead}: nothing accepts connections there"


async def test_an_event_socket_that_is_no_address():
    found = rows(await compared(new_events="gopher://x"))["KV events"]
    assert found.severity is BREAKS
    assert "gopher://x" in found.new


async def test_ranks_one_is_listened_to_and_gets_the_prompt():
    async with engines(new={"dp_size": 2}) as (before, after):
        found = rows(await ask(before, after))
        ranks = [
            request.headers.get("X-data-parallel-rank")
            for request in after.record
            if request.path == COMPLETIONS
        ]
    assert found["KV events"].severity is SAME
    assert set(ranks) == {"0"}


async def test_events_that_were_missed_are_asked_for_by_another_prompt():
    async with engines() as (before, after):
        await after.inject(Faults(drop_event_batches=1))
        found = rows(await ask(before, after, event_seconds=3))
        bodies = [json.loads(each.body) for each in after.record if each.path == COMPLETIONS]
    assert found["KV events"].severity is SAME
    assert found["hash rule"].severity is SAME
    assert len({body["prompt"] for body in bodies}) == 2


async def test_events_that_are_missed_again_end_by_the_deadline():
    async with engines() as (before, after):
        await after.inject(Faults(drop_event_batches=9))
        found = rows(await ask(before, after, event_seconds=0.2))
    assert (found["KV events"].severity, found["KV events"].new) == (BREAKS, "none heard")


async def test_without_pyzmq_the_rest_is_compared(monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq.asyncio", None)
    found = rows(await compared())
    assert found["KV events"].severity is UNKNOWN
    assert "pip install 'nearkv[agent]'" in found["KV events"].new
    assert found["transfer of KV"].severity is SAME


async def test_an_engine_that_talks_nonsense_is_named(agent):
    async with EngineDouble() as alive:
        (nonsense,) = agent("nonsense")
        question = UpgradeQuestion(
            old_url=alive.url, new_url=nonsense, model=None, send_prompt=False
        )
        with pytest.raises(EngineProbeError, match=f"{nonsense}: unexpected answer"):
            await examine(question)


async def test_without_a_prompt_none_is_sent_and_nothing_is_put_to_sleep():
    async with engines() as (before, after):
        found = rows(await ask(before, after, send_prompt=False))
        asked = {(each.method, each.path) for each in (*before.record, *after.record)}
    assert found["KV events"].severity is UNKNOWN
    assert "transfer of KV" not in found
    assert found["tokens, chat: with tools"].severity is SAME
    assert not {path for _, path in asked} & {COMPLETIONS, "/v1/chat/completions"}
    assert ("POST", "/sleep") not in asked


async def test_a_prompt_is_sent_three_times_for_a_token_each():
    async with engines() as (before, after):
        await ask(before, after)
        bodies = [json.loads(each.body) for each in before.record if each.path == COMPLETIONS]
    assert [body["max_tokens"] for body in bodies] == [1, 1, 1]
    assert len({body["prompt"] for body in bodies}) == 1
    assert [bool(body.get("kv_transfer_params")) for body in bodies] == [False, False, True]


async def test_a_model_that_the_old_engine_lacks_is_a_wrong_question():
    with pytest.raises(UpgradeQuestionError, match="does not serve gpt-9, but: tiny"):
        await compared(model="gpt-9")


@pytest.fixture
async def agent():
    def entry(name, url, version):
        return {"id": name, "url": url, "engine_version": version}

    def status(packet, engines, compats):
        registered = [{"id": name, "compat": compat} for name, compat in compats.items()]
        transfer = {"protocol": 1, "packet": packet, "engines": registered}
        return {"component": "agent", "node": "n", "engines": engines, "transfer": transfer}

    documents = {
        "nonsense": {"data": 3},
        "old": status("1.0", [entry("a", "http://pod", "0.32.0")], {"a": "c1"}),
        "new": status("1.0", [entry("b", "http://pod", "0.33.0")], {"b": "c2"}),
        "other": status("2.0", [entry("b", "http://pod", "0.33.0")], {"b": "c1"}),
    }

    async def answer(request):
        return web.json_response(documents[request.match_info["name"]])

    app = web.Application()
    app.router.add_get("/{name}/v1/status", answer)
    app.router.add_get("/{name}/v1/models", answer)
    async with running(app, Address("127.0.0.1", 0)) as address:
        yield lambda *names: [f"{address.url}/{name}" for name in names]


async def test_agents_tell_versions_and_what_kv_fits(agent):
    new = {"version": "0.33.0"}
    found = rows(await compared(new=new, agents=agent("old", "new")))
    assert found["version of state packets"].severity is SAME
    fits = found["KV of one for the other"]
    assert (fits.severity, fits.old, fits.new) == (DEGRADES, "c1", "c2")
    found = rows(await compared(new=new, agents=agent("old", "other")))
    assert found["version of state packets"].severity is BREAKS
    assert found["KV of one for the other"].severity is SAME


async def test_an_agent_that_does_not_answer_is_named(agent):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        found = rows(await compared(agents=[dead, *agent("old")]))
    assert found[f"agent {dead}"].severity is UNKNOWN
    assert found["KV of one for the other"].severity is SAME


async def test_the_table_has_the_worst_first_and_the_exit_status_says_so():
    new = {"missing_metrics": frozenset({"vllm:kv_cache_usage_perc"}), "version": "0.33.0"}
    async with engines(new=new) as (before, after):
        code, out, err = await run_cli("doctor", "upgrade", before.url, after.url)
    head, first, *_ = out.splitlines()
    assert (code, err) == (1, "")
    assert head.split()[:4] == ["CHECK", "VERDICT", "OLD", "NEW"]
    assert first.startswith("metric vllm:kv_cache_usage_perc")
    assert "free KV is unknown" in first
    assert out.splitlines()[-1].startswith("1 breaks, ")


@pytest.mark.parametrize(("form", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
async def test_documents(form, read):
    async with engines(new={"version": "0.33.0"}) as (before, after):
        code, out, _ = await run_cli(
            *("doctor", "upgrade", before.url, after.url, "--no-prompt", "-o", form)
        )
        document = read(out)
        assert (code, document["verdict"]) == (0, "unknown")
        assert document["new"] == {"url": after.url, "version": "0.33.0", "model": "tiny"}
    assert document["findings"][0]["severity"] == "differs"


async def test_the_options_arrive():
    async with engines(new={"model": "small"}) as (before, after):
        code, out, _ = await run_cli(
            *("doctor", "upgrade", before.url, after.url, "--model", "tiny", "-o", "json"),
            *("--old-events", before.kv_events_endpoint, "--event-seconds", "20"),
            NEARKV_ENGINE_API_KEY="k1",
        )
        keys = {each.headers.get("Authorization") for each in (*before.record, *after.record)}
    document = json.loads(out)
    found = {row["check"]: row for row in document["findings"]}
    assert (code, document["new"]["model"]) == (1, "small")
    assert found["model"]["severity"] == "breaks"
    assert found["replay of events"]["old"] == "not answered", "no replay was given"
    assert found["hash rule"]["severity"] == "same", "it is asked under a name of its own"
    assert keys == {"Bearer k1"}


async def test_engines_that_do_not_answer_are_named():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        line = f"nearkv: {dead}/v1/models: cannot connect: Connection refused\n"
        async with EngineDouble() as alive:
            assert await run_cli("doctor", "upgrade", alive.url, dead) == (1, "", line)
        assert await run_cli("doctor", "upgrade", dead, dead) == (1, "", line * 2)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("localhost:8000", "http://h:1"), id="no-url"),
        pytest.param(("http://h:1",), id="one-url"),
        pytest.param(("http://h:1", "http://h:2", "-o", "xml"), id="no-such-form"),
    ],
)
async def test_usage_errors(arguments):
    code, out, err = await run_cli("doctor", "upgrade", *arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
