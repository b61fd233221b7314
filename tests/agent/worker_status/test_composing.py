"""The status: what it says, what of it is news, its size, and what the extender makes of it."""

import msgspec
import pytest

from nearkv.agent.worker_status.composing import compose, fit, news_of, urgent_of
from nearkv.agent.worker_status.observing import EngineFacts
from nearkv.extender.view.statuses import read_status
from nearkv.kube.objects import WorkerStatus
from nearkv.state.model import EngineState
from tests.agent.worker_status.things import (
    GIB,
    complaints,
    devices,
    facts,
    node_facts,
    paths,
    report,
    schema_of_status,
)

LONGEST = "n" * 253


def test_what_it_says():
    status = compose(report(prefixes=("a", "b"), prefix_count=3))
    conditions = {each["type"]: each["status"] for each in status.pop("conditions")}
    assert conditions == {
        "Ready": "True",
        "Fresh": "True",
        "CacheParity": "True",
        "TransferReady": "True",
        "KVPressure": "False",
    }
    assert status == {
        "observedAt": "2026-11-30T12:00:00Z",
        "intervalSeconds": 300,
        "node": "gpu-1",
        "role": "decode",
        "group": "llama",
        "model": "meta-llama/Llama-3-8B",
        "engineVersion": "0.33.0",
        "transferMode": "agent",
        "kvCacheUsedPercent": 40,
        "kvCacheUsedBytes": 8 * GIB,
        "kvCacheFreeBytes": 12 * GIB,
        "kvCacheTotalBytes": 20 * GIB,
        "queueDepth": 1,
        "runningRequests": 7,
        "blocks": {"GPU": 5000},
        "cachedPrefixes": ("a", "b"),
        "cachedPrefixCount": 3,
        "groups": [
            {
                "group": "llama",
                "engines": 1,
                "roles": ["decode"],
                "heldBytes": 10 * GIB,
                "freeBytes": 12 * GIB,
                "kvBytesPerToken": 131072,
                "prefillTokensPerSecond": 4300.0,
            }
        ],
    }


def test_what_is_not_known_is_not_there():
    unknown = EngineFacts(role="both", group="", problem="http://x: connection refused")
    status = compose(report(unknown, used_ratio=None, held_ratio=None))
    assert set(status) == {
        *("observedAt", "intervalSeconds", "node", "role", "transferMode", "conditions")
    }
    assert list(complaints(status, schema_of_status())) == []
    assert status["conditions"][0]["message"] == "http://x: connection refused"


@pytest.mark.parametrize("own", [None, node_facts(), node_facts(devices=[], paths=())])
def test_the_schema_knows_all_of_it(own):
    status = compose(report(facts(ranks=4), prefixes=("a",), prefix_count=1, node_facts=own))
    read_back = msgspec.json.decode(msgspec.json.encode(status))
    assert list(complaints(read_back, schema_of_status())) == []


# -- The extender ----------------------------------------------------------------------------


def test_the_extender_reads_node_and_group_from_it():
    status = compose(report(node_facts=node_facts()))
    found = WorkerStatus(status=msgspec.Raw(msgspec.json.encode(status)))
    summary = read_status(found).summary
    assert (summary.node, summary.interval_seconds, summary.rdma) == ("gpu-1", 300.0, True)
    assert list(summary.devices) == devices()
    (group,) = summary.groups
    assert (group.group, group.engines, group.roles) == ("llama", 1, ("decode",))
    assert (group.held_bytes, group.free_bytes) == (10 * GIB, 12 * GIB)
    assert [path.source for path in summary.paths] == [path.source for path in paths()]
    assert summary.paths[0].bytes_per_second == 1.2e9


def test_the_extender_counts_no_engine_that_is_away():
    for away in (facts(state=EngineState.UNREACHABLE), facts(state=None)):
        assert compose(report(away))["groups"][0]["engines"] == 0


# -- News ------------------------------------------------------------------------------------


def told(**fields):
    status = compose(report(**fields))
    return news_of(status), urgent_of(status)


def test_what_swings_is_no_news():
    engine = facts(
        requests_running=99,
        requests_waiting=50,
        blocks={"GPU": 1},
        kv_held_bytes=1,
        prefill_tokens_per_second=1.0,
        metrics_age_seconds=2.9,
    )
    other = told(engine=engine, held_ratio=0.9, observed_at="2027", interval_seconds=600.0)
    assert other == told()
    assert told(node_facts=node_facts(paths=paths(2))) == told(node_facts=node_facts())


@pytest.mark.parametrize(
    "fields",
    [
        {"used_ratio": 0.45},
        {"used_ratio": None},
        {"prefixes": ("a",)},
        {"node_facts": node_facts()},
        {"node_facts": node_facts(rdma=False)},
        {"engine": facts(version="0.34.0")},
        {"engine": facts(can_transfer=False)},
    ],
)
def test_what_is_news_but_not_urgent(fields):
    news, urgent = told(**fields)
    assert news != told()[0]
    assert urgent == told()[1]


def test_a_device_that_fails_is_news():
    failed = told(node_facts=node_facts(devices=devices(health="failed", why="Xid 79")))
    assert failed[0] != told(node_facts=node_facts())[0]


def test_readiness_is_urgent():
    assert told(engine=facts(state=EngineState.UNREACHABLE))[1] != told()[1]


def test_a_status_read_back_is_the_same_news():
    status = compose(report(node_facts=node_facts(), prefixes=("a",)))
    read_back = msgspec.json.decode(msgspec.json.encode(status, order="sorted"))
    assert (news_of(read_back), urgent_of(read_back)) == (news_of(status), urgent_of(status))
    assert news_of({"conditions": 7}) != news_of(status)


# -- Size ------------------------------------------------------------------------------------


def fitted(name="decode-7f9c4b5d8-x2x4q", **fields):
    status = fit(compose(report(**fields)), name=name)
    assert (
        list(complaints(msgspec.json.decode(msgspec.json.encode(status)), schema_of_status())) == []
    )
    return status


def test_a_node_of_eight_gpus_fits_as_it_is():
    status = fitted(node_facts=node_facts(paths=paths(2)), prefixes=("a", "b"))
    assert "omitted" not in status


def test_paths_go_one_by_one():
    status = fitted(node_facts=node_facts(paths=paths(8)))
    assert status["omitted"] == ["paths"]
    assert 2 <= len(status["paths"]) < 8
    assert [path["source"] for path in status["paths"]][:2] == ["gpu-0", "gpu-1"]


def test_what_does_not_fit_goes_as_a_whole_and_is_named():
    some = fitted(node_facts=node_facts(devices=devices(9)))
    assert (some["omitted"], len(some["devices"])) == (["paths"], 9)
    status = fitted(node_facts=node_facts(devices=devices(56)), prefixes=("a",))
    assert status["omitted"] == ["cachedPrefixes", "devices", "paths"]
    assert "devices" not in status


def test_the_longest_names_fit():
    engine = facts(group=LONGEST, model=LONGEST * 3, version="v" * 200, problem="p" * 1000)
    status = fitted(
        name=LONGEST,
        engine=engine,
        node=LONGEST,
        prefixes=("x" * 64,) * 16,
        node_facts=node_facts(),
    )
    assert len(msgspec.json.encode(status)) + 2 * len(LONGEST) + 1300 <= 4096
