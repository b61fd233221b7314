"""Preemption: every candidate comes back, victims by UID."""

import json
from pathlib import Path

import pytest

from nearkv.extender.errors import BadRequestError
from nearkv.extender.preempting import answer_preemption
from nearkv.extender.wire import Mode

CAPTURED = Path(__file__).parents[1] / "data" / "kube-scheduler"


def answered(body):
    mode, candidates, answer = answer_preemption(body)
    victims = json.loads(answer)["NodeNameToMetaVictims"]
    assert len(victims) == candidates
    return mode, victims


def test_a_real_question_by_uid_comes_back_as_it_was():
    body = (CAPTURED / "preempt_nodeCacheCapable_true.body.json").read_bytes()
    mode, victims = answered(body)
    assert mode is Mode.NAMES
    assert len(victims) == 3
    assert victims == json.loads(body)["NodeNameToMetaVictims"]


def test_a_real_question_with_whole_pods_is_answered_by_uid():
    body = (CAPTURED / "preempt_nodeCacheCapable_false.body.json").read_bytes()
    mode, victims = answered(body)
    assert mode is Mode.NODES
    for node, asked in json.loads(body)["NodeNameToVictims"].items():
        uids = [{"UID": pod["metadata"]["uid"]} for pod in asked["Pods"]]
        assert uids
        assert victims[node] == {"Pods": uids, "NumPDBViolations": asked["NumPDBViolations"]}


@pytest.mark.parametrize("form", ["NodeNameToVictims", "NodeNameToMetaVictims"])
@pytest.mark.parametrize("pods", ['"Pods":[]', '"Pods":null'], ids=["empty", "null"])
def test_candidates_without_victims_stay(form, pods):
    body = f'{{"Pod":{{}},"{form}":{{"a":{{{pods},"NumPDBViolations":2}},"b":{{{pods}}}}}}}'
    _, victims = answered(body.encode())
    assert victims == {
        "a": {"Pods": [], "NumPDBViolations": 2},
        "b": {"Pods": [], "NumPDBViolations": 0},
    }


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param(b"{", "not_json", id="truncated"),
        pytest.param(b"{}", "no_nodes", id="neither"),
        pytest.param(b'{"NodeNameToMetaVictims":[]}', "wrong_type", id="list"),
        pytest.param(b'{"NodeNameToMetaVictims":{"a":{"Pods":[{}]}}}', "wrong_type", id="no-uid"),
        pytest.param(
            b'{"NodeNameToMetaVictims":{"a":{"Pods":[],"NumPDBViolations":1.5}}}',
            "wrong_type",
            id="float",
        ),
    ],
)
def test_questions_that_cannot_be_read(body, reason):
    with pytest.raises(BadRequestError) as raised:
        answer_preemption(body)
    assert raised.value.reason == reason
