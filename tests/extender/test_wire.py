"""Requests of a real kube-scheduler, answers that it can read, and bodies nobody could answer."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkv.extender.errors import BadRequestError
from nearkv.extender.wire import Mode, Wire

CAPTURED = Path(__file__).parents[1] / "data" / "kube-scheduler"
POD = '{"metadata":{"name":"p","namespace":"n","uid":"u"}}'


def captured(name):
    return (CAPTURED / f"{name}.body.json").read_bytes()


def node(name, **more):
    return {"metadata": {"name": name, "labels": {"a": "b"}}, **more}


def nodes_body(*items, pod=POD, metadata="{}"):
    listed = ",".join(json.dumps(item, separators=(", ", ": ")) for item in items)
    return (
        f'{{"Pod":{pod},"Nodes":{{"metadata":{metadata},"items":[{listed}]}},"NodeNames":null}}'
    ).encode()


def written(pieces):
    return b"".join(pieces)


@pytest.mark.parametrize("verb", ["filter", "prioritize"])
@pytest.mark.parametrize(("capable", "mode"), [("true", Mode.NAMES), ("false", Mode.NODES)])
def test_what_a_real_scheduler_sent_is_understood(verb, capable, mode):
    question = Wire().read(captured(f"{verb}_nodeCacheCapable_{capable}"))
    assert question.mode is mode
    assert question.pod.name == "llm-0"
    assert question.pod.uid
    assert question.pod.count("nvidia.com/gpu") == 1
    assert sorted(question.names) == [f"gpu-0000{i}" for i in range(len(question.names))]
    assert question.names


def test_names_are_answered_with_names():
    wire = Wire()
    question = wire.read(captured("filter_nodeCacheCapable_true"))
    answer = json.loads(
        written(
            wire.filtered(
                question,
                kept=question.names[:1],
                failed={"x": "full"},
                unresolvable={"y": "broken"},
            )
        )
    )
    assert answer == {
        "Nodes": None,
        "NodeNames": ["gpu-00002"],
        "FailedNodes": {"x": "full"},
        "FailedAndUnresolvableNodes": {"y": "broken"},
        "Error": "",
    }


def test_a_node_list_of_which_nothing_is_rejected_is_echoed_byte_for_byte():
    wire = Wire()
    body = captured("filter_nodeCacheCapable_false")
    question = wire.read(body)
    answer = written(wire.filtered(question, kept=question.names, failed={}, unresolvable={}))
    sent = body[body.index(b'"Nodes":') + len(b'"Nodes":') : body.index(b',"NodeNames"')]
    assert sent in answer
    assert json.loads(answer)["Nodes"] == json.loads(body)["Nodes"]
    assert json.loads(answer)["NodeNames"] is None


def test_survivors_keep_every_byte_and_the_list_its_metadata():
    wire = Wire()
    items = [node(f"n{i}", odd={"float": 1.50, "text": "\u00e9\n"}) for i in range(5)]
    body = nodes_body(*items, metadata='{"resourceVersion":"7"}')
    question = wire.read(body)
    answer = written(
        wire.filtered(
            question,
            kept=["n0", "n2", "n4"],
            failed={"n1": "full"},
            unresolvable={"n3": "broken"},
        )
    )
    spelled = [json.dumps(item, separators=(", ", ": ")) for item in items]
    assert f"[{spelled[0]},{spelled[2]},{spelled[4]}]".encode() in answer
    assert json.loads(answer)["Nodes"]["metadata"] == {"resourceVersion": "7"}
    assert json.loads(answer)["FailedNodes"] == {"n1": "full"}
    assert json.loads(answer)["FailedAndUnresolvableNodes"] == {"n3": "broken"}


def test_answers_of_many_survivors_come_in_pieces():
    wire = Wire()
    question = wire.read(nodes_body(*(node(f"n{i}", pad="x" * 30_000) for i in range(40))))
    pieces = list(wire.filtered(question, kept=[], failed={"n0": "full"}, unresolvable={}))
    assert len(pieces) > 4
    left = json.loads(written(pieces))["Nodes"]["items"]
    assert [item["metadata"]["name"] for item in left] == [f"n{i}" for i in range(1, 40)]


def test_a_list_of_which_everything_is_rejected_is_an_empty_list():
    wire = Wire()
    question = wire.read(nodes_body(node("a"), node("a")))
    answer = written(wire.filtered(question, kept=[], failed={"a": "full"}, unresolvable={}))
    assert json.loads(answer)["Nodes"] == {"metadata": {}, "items": []}


@given(
    names=st.lists(st.text(st.characters(codec="utf-8"), max_size=8), max_size=30),
    seed=st.integers(0, 2**32 - 1),
)
def test_scores_are_whole_numbers_for_each_host_in_order(names, seed):
    scores = np.random.default_rng(seed).integers(0, 101, len(names)).astype(np.int32)
    wire = Wire(max_hosts=4)
    for _ in range(2):  # the second time from what is remembered, or forgotten as too much
        answer = wire.scores(names, scores)
        assert b"." not in answer.replace(msgspec.json.encode(names), b"") or any(
            "." in name for name in names
        )
        assert json.loads(answer) == [
            {"Host": name, "Score": int(score)} for name, score in zip(names, scores, strict=True)
        ]


def test_remembered_hosts_are_bounded():
    wire = Wire(max_hosts=100)
    for start in range(0, 1000, 50):
        names = [f"n{i}" for i in range(start, start + 50)]
        wire.scores(names, np.zeros(50, np.int32))
    assert len(wire._hosts) <= 100


@pytest.mark.parametrize(
    ("body", "reason", "says"),
    [
        pytest.param(b"", "not_json", "not JSON", id="empty"),
        pytest.param(b"null", "wrong_type", "Expected `object`, got `null`", id="null"),
        pytest.param(b"[]", "wrong_type", "Expected `object`", id="array"),
        pytest.param(b'{"Pod":', "not_json", "truncated", id="truncated"),
        pytest.param(b"{}", "wrong_type", "`Pod`", id="nothing"),
        pytest.param(b'{"Pod":null,"NodeNames":[]}', "wrong_type", "$.Pod", id="null-pod"),
        pytest.param(
            f'{{"Pod":{POD},"Nodes":null,"NodeNames":null}}', "no_nodes", "neither", id="both-null"
        ),
        pytest.param(f'{{"Pod":{POD}}}', "no_nodes", "neither", id="both-missing"),
        pytest.param(
            f'{{"Pod":{POD},"Nodes":{{"items":[]}},"NodeNames":["a"]}}',
            "both_modes",
            "both",
            id="both-given",
        ),
        pytest.param(
            f'{{"Pod":{POD},"NodeNames":[1]}}', "wrong_type", "$.NodeNames[0]", id="number-as-name"
        ),
        pytest.param(
            f'{{"Pod":{POD},"NodeNames":[null]}}', "wrong_type", "$.NodeNames[0]", id="null-name"
        ),
        pytest.param(
            f'{{"Pod":{POD},"NodeNames":"a"}}', "wrong_type", "$.NodeNames", id="text-as-names"
        ),
        pytest.param(
            f'{{"Pod":{POD},"NodeNames":[1.5]}}', "wrong_type", "$.NodeNames[0]", id="float"
        ),
        pytest.param(f'{{"Pod":{POD},"NodeNames":[NaN]}}', "not_json", "not JSON", id="nan"),
        pytest.param(f'{{"Pod":{POD},"x":NaN,"NodeNames":[]}}', "not_json", "", id="nan-beside"),
        pytest.param(f'{{"Pod":{POD},"Nodes":7}}', "wrong_type", "Nodes", id="number-as-list"),
        pytest.param(
            f'{{"Pod":{POD},"Nodes":{{"items":[{{}}]}}}}', "wrong_type", "$.items[0]", id="no-meta"
        ),
        pytest.param(
            f'{{"Pod":{POD},"Nodes":{{"items":[{{"metadata":{{"name":7}}}}]}}}}',
            "wrong_type",
            "$.items[0].metadata.name",
            id="name-type",
        ),
        pytest.param(
            '{"Pod":{"metadata":{"labels":{"a":1}}},"NodeNames":[]}',
            "wrong_type",
            "$.Pod.metadata.labels",
            id="label-type",
        ),
        pytest.param(b'{"Pod":{"metadata":{"name":"\xff"}},"NodeNames":[]}', ..., "", id="utf8"),
        pytest.param(
            f'{{"Pod":{POD},"NodeNames":["\\ud800"]}}', "not_json", "not JSON", id="surrogate"
        ),
        pytest.param(f'{{"Pod":{POD},"x":{"[" * 100_000}', "too_deep", "too deeply", id="deep"),
        pytest.param(f'{{"Pod":{POD},"NodeNames":[]}}x', "not_json", "not JSON", id="trailing"),
    ],
)
def test_bodies_that_nobody_could_answer_say_why(body, reason, says):
    body = body.encode() if isinstance(body, str) else body
    with pytest.raises(BadRequestError) as raised:
        Wire().read(body)
    assert reason in (..., raised.value.reason)
    assert says in str(raised.value)


@pytest.mark.parametrize("name", ["filter_nodeCacheCapable_true", "filter_nodeCacheCapable_false"])
def test_every_truncation_of_a_real_body_is_refused(name):
    body = captured(name)
    wire = Wire()
    for length in range(len(body.rstrip()) - 1):
        with pytest.raises(BadRequestError):
            wire.read(body[:length])


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_be_refused(body):
    with pytest.raises(BadRequestError):
        Wire().read(body)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        pytest.param(f'{{"Pod":{POD},"NodeNames":[]}}', [], id="no-nodes"),
        pytest.param(f'{{"Pod":{POD},"NodeNames":["a","a"]}}', ["a", "a"], id="duplicates"),
        pytest.param(f'{{"NodeNames":["b"],"Pod":{POD},"NodeNames":["a"]}}', ["a"], id="key-twice"),
        pytest.param(f'{{"Pod":{POD},"Nodes":{{"items":null}}}}', [], id="null-items"),
        pytest.param(f'{{"Pod":{POD},"Later":{{"x":1.5}},"NodeNames":["a"]}}', ["a"], id="new-key"),
        pytest.param('{"Pod":{},"NodeNames":["a"]}', ["a"], id="empty-pod"),
    ],
)
def test_odd_bodies_that_can_be_answered_are(body, names):
    assert Wire().read(body.encode()).names == names


def test_a_hundred_thousand_nodes():
    names = [f"node-{i}" for i in range(100_000)]
    wire = Wire()
    question = wire.read(f'{{"Pod":{POD},"NodeNames":{json.dumps(names)}}}'.encode())
    answer = written(wire.filtered(question, kept=question.names, failed={}, unresolvable={}))
    assert json.loads(answer)["NodeNames"] == names
    assert len(json.loads(wire.scores(names, np.full(100_000, 5, np.int32)))) == 100_000
