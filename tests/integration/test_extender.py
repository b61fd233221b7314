"""The extender over HTTP: answers in both modes, explanations, metrics, failure behaviour."""

import asyncio
import json

import pytest

from nearkv.extender.app import SCORER
from tests.extender.snapshots import make_cluster
from tests.integration.extender_site import (
    captured,
    question,
    running_extender,
    small_cluster,
    until,
)

TOKEN = "not-a-real-one"  # noqa: S105 (it guards nothing)
NAMES = [f"gpu-0000{i}" for i in range(4)]


@pytest.fixture
async def extender():
    async with running_extender(small_cluster(), preempt=True) as running:
        yield running


def whole(name, **more):
    return {"metadata": {"name": name, "labels": {"x": "y"}}, "status": {"n": 1.50}, **more}


async def test_nodes_near_the_kv_score_higher_in_both_modes(extender):
    by_names = await extender.scores(question(NAMES))
    by_nodes = await extender.scores(question(nodes=[whole(name) for name in NAMES]))
    assert by_names == by_nodes
    assert by_names["gpu-00000"] > by_names["gpu-00002"]
    assert by_names["gpu-00001"] > by_names["gpu-00002"]
    assert by_names["gpu-00002"] == by_names["gpu-00003"]


@pytest.mark.parametrize("capable", ["true", "false"])
async def test_what_a_real_scheduler_sent_is_answered_in_its_mode(extender, capable):
    body = captured(f"filter_nodeCacheCapable_{capable}")
    status, answer = await extender.post("filter", body)
    assert status == 200
    sent = json.loads(body)
    assert answer["Nodes"] == sent["Nodes"]
    assert answer["NodeNames"] == sent["NodeNames"]
    assert (answer["FailedNodes"], answer["FailedAndUnresolvableNodes"]) == ({}, {})
    assert answer["Error"] == ""
    scores = await extender.scores(captured(f"prioritize_nodeCacheCapable_{capable}"))
    assert set(scores.values()) == {5}
    mode = {"true": "names", "false": "nodes"}[capable]
    counts = await extender.series("request_seconds_count")
    assert counts[f'mode="{mode}",verb="filter"'] == 1
    assert await extender.series("neutral_answers_total") == {'reason="not_ours"': 1}


@pytest.mark.parametrize("mode", ["names", "nodes"])
async def test_only_nodes_that_cannot_work_are_rejected(mode):
    snapshot = small_cluster(
        **{"gpu-00001": {"free": (0.1,) * 8}, "gpu-00003": {"ok": (0,) * 8, "free": (1.0,) * 8}}
    )
    async with running_extender(snapshot) as extender:
        items = [whole(name, number=i) for i, name in enumerate(NAMES)]
        body = question(NAMES) if mode == "names" else question(nodes=items)
        status, answer = await extender.post("filter", body)
        assert status == 200
        if mode == "names":
            assert answer["NodeNames"] == ["gpu-00000", "gpu-00002"]
        else:
            assert answer["Nodes"]["items"] == [items[0], items[2]]
        assert list(answer["FailedNodes"]) == ["gpu-00001"]
        assert list(answer["FailedAndUnresolvableNodes"]) == ["gpu-00003"]
        assert await extender.series("rejected_nodes_total") == {
            'reason="foreign_memory"': 1,
            'reason="failed_devices"': 1,
        }
        assert await extender.series("all_rejected_total") == {"": 0}
        await extender.post("filter", question(["gpu-00001"]))
        assert await extender.series("all_rejected_total") == {"": 1}


async def test_the_last_decisions_are_explained(extender):
    await extender.scores(question([*NAMES, "unheard-of"]))
    status, answer = await extender.get("/v1/explain?pod=default/decode-1&limit=3")
    assert status == 200
    (decision,) = answer["decisions"]
    assert (decision["verb"], decision["group"], decision["nodes"]) == ("prioritize", "g", 5)
    best = decision["scores"][0]
    assert (best["node"], best["class"]) == ("gpu-00000", "same-node")
    assert best["why"]
    assert len(decision["scores"]) == 3
    assert (await extender.get("/v1/explain?uid=u1"))[1]["pod"] == "default/decode-1"
    assert await extender.series("decisions") == {"": 1}
    assert await extender.series("ledger_pods") == {"": 1}


async def test_rejections_are_explained():
    async with running_extender(small_cluster(**{"gpu-00001": {"free": (0.1,) * 8}})) as extender:
        await extender.post("filter", question(NAMES))
        await extender.scores(question(["gpu-00000", "gpu-00002"]))
        _, answer = await extender.get("/v1/explain?pod=default/decode-1")
        assert [decision["verb"] for decision in answer["decisions"]] == ["prioritize", "filter"]
        rejected = answer["decisions"][1]
        assert (rejected["kept"], rejected["rejected"]) == (3, 1)
        assert rejected["rejections"][0]["node"] == "gpu-00001"


@pytest.mark.parametrize(
    ("query", "status", "says"),
    [
        pytest.param("", 400, "pod=namespace/name", id="nothing"),
        pytest.param("?pod=a/b&uid=c", 400, "one of", id="both"),
        pytest.param("?pod=decode-1", 400, "namespace/name", id="no-namespace"),
        pytest.param("?pod=a/b/c", 400, "namespace/name", id="too-many-parts"),
        pytest.param("?pod=default/decode-1&limit=0", 400, "limit", id="no-nodes"),
        pytest.param("?pod=default/decode-1&limit=x", 400, "limit", id="no-number"),
        pytest.param("?pod=default/decode-1&limit=99999999", 400, "limit", id="too-many-nodes"),
        pytest.param("?pod=default/other", 404, "no decision", id="not-known"),
    ],
)
async def test_questions_that_cannot_be_answered_say_why(extender, query, status, says):
    await extender.scores(question(NAMES))
    got, answer = await extender.get(f"/v1/explain{query}")
    assert got == status
    assert says in answer["error"]


async def test_the_topology(extender):
    status, answer = await extender.get("/v1/topology")
    assert status == 200
    assert answer["nodes"] == 4
    assert answer["levels"][0] | {"name": "rack", "domains": 2} == answer["levels"][0]
    assert answer["groups"]["g"]["held_by"][0]["node"] == "gpu-00000"


async def test_people_need_the_token_and_the_scheduler_does_not():
    async with running_extender(small_cluster(), admin_token=TOKEN) as extender:
        await extender.scores(question(NAMES))
        for path in ("/v1/explain?uid=u1", "/v1/topology"):
            assert (await extender.get(path))[0] == 401
            assert (await extender.get(path, Authorization=f"Bearer {TOKEN}"))[0] == 200


async def test_preemption_keeps_every_candidate(extender):
    body = captured("preempt_nodeCacheCapable_true")
    status, answer = await extender.post("preempt", body)
    assert status == 200
    assert answer == {"NodeNameToMetaVictims": json.loads(body)["NodeNameToMetaVictims"]}


async def test_preemption_is_off_and_binding_is_not_done():
    async with running_extender(small_cluster()) as extender:
        status, answer = await extender.post("preempt", captured("preempt_nodeCacheCapable_true"))
        assert (status, answer["reason"]) == (404, "no_preempt")
        status, answer = await extender.post("bind", captured("bind"))
        assert (status, answer["reason"]) == (404, "no_bind")
        assert (await extender.get("/v1/filter"))[0] == 405
        assert (await extender.get("/v1/other"))[0] == 404


@pytest.mark.parametrize("labels", [None, {}], ids=["ours", "not-ours"])
async def test_without_a_snapshot_every_answer_is_neutral(labels):
    async with running_extender(None) as extender:
        body = question(NAMES, labels=labels)
        assert await extender.scores(body) == dict.fromkeys(NAMES, 5)
        assert (await extender.post("filter", body))[1]["NodeNames"] == NAMES
        reason = "no_snapshot" if labels is None else "not_ours"
        assert await extender.series("neutral_answers_total") == {f'reason="{reason}"': 1}
        status, answer = await extender.get("/v1/topology")
        assert (status, answer["reason"]) == (503, "no_snapshot")


async def test_neutral_means_the_middle_of_whatever_range():
    async with running_extender(None, score={"highest": 100}) as extender:
        assert await extender.scores(question(NAMES)) == dict.fromkeys(NAMES, 50)


async def test_a_defect_in_scoring_gives_equal_scores_and_is_counted(extender, monkeypatch):
    def break_down(*_args):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(extender.app[SCORER], "prioritize", break_down)
    monkeypatch.setattr(extender.app[SCORER], "filter", break_down)
    assert await extender.scores(question(NAMES)) == dict.fromkeys(NAMES, 5)
    status, answer = await extender.post("filter", question(NAMES))
    assert (status, answer["NodeNames"], answer["Error"]) == (200, NAMES, "")
    failures = await extender.series("internal_failures_total")
    assert failures == {'verb="prioritize"': 1, 'verb="filter"': 1}
    assert await extender.series("neutral_answers_total") == {'reason="internal_failure"': 1}


async def test_annotations_that_cannot_be_read_are_counted(extender):
    pod = json.loads(question(NAMES))
    pod["Pod"]["metadata"]["annotations"] = {"nearkv.io/prefix-tokens": "many"}
    await extender.scores(json.dumps(pod).encode())
    assert await extender.series("ignored_annotations_total") == {
        'annotation="nearkv.io/prefix-tokens"': 1
    }


async def test_readiness_waits_for_the_caches():
    async with running_extender(small_cluster()) as extender:
        assert (await extender.get("/readyz"))[0] == 200
        assert (await extender.get("/livez"))[0] == 200
    synced = asyncio.Event()

    class LateView(type(extender.view)):
        async def wait_until_synced(self):
            await synced.wait()

    async with running_extender(None, view_class=LateView) as extender:
        status, text = await extender.get("/readyz")
        assert status == 503
        assert "caches_synced" in text
        synced.set()

        async def is_ready():
            return (await extender.get("/readyz"))[0] == 200

        await until(is_ready, what="it is ready")


async def test_a_large_node_list_is_answered_whole():
    snapshot = make_cluster(600)
    names = list(snapshot.names)
    async with running_extender(snapshot) as extender:
        items = [whole(name, pad="x" * 18_000) for name in names]
        body = question(nodes=items)
        assert len(body) > 10_000_000
        status, answer = await extender.post("filter", body)
        assert (status, answer["Nodes"]["items"]) == (200, items)
        assert set(await extender.scores(body)) == set(names)


async def test_a_burst_spreads():
    nodes = {f"gpu-0000{i}": {"devices": 8} for i in range(4)}
    async with running_extender(small_cluster(**nodes)) as extender:
        chosen = []
        for number in range(4):
            scores = await extender.scores(question(NAMES[2:], uid=f"u{number}", gpus=8))
            chosen.append(max(scores, key=scores.__getitem__))
        assert len(set(chosen)) == 2
