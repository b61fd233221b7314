"""What each kind of answer leads to: the tables observed on kube-scheduler 1.36."""

import json

import pytest

from tests.contract.scheduler_stage import make_pod, staged
from tests.doubles.scheduler import Outcome
from tests.doubles.scheduler.scripted_extender import CLOSE, HANG, Answer

ALL = [f"n{index}" for index in range(5)]
FAILED = dict.fromkeys(ALL, "no headroom")
FAILURES = {
    "500": (Answer(status=500), "status"),
    "503": (Answer(status=503), "status"),
    "201": (Answer({"NodeNames": ALL}, status=201), "status"),
    "204": (Answer(body=b"", status=204), "status"),
    "malformed": (Answer(body=b'{"NodeNames": ['), "decode"),
    "html": (Answer(body=b"<html></html>"), "decode"),
    "empty body": (Answer(body=b""), "decode"),
    "wrong type": (Answer({"NodeNames": "n0"}), "decode"),
    "closed": (Answer(instead=CLOSE), "closed"),
    "Error set": (Answer({"NodeNames": ALL, "Error": "out of order"}), "answer"),
    "unknown node": (Answer({"NodeNames": ["n0", "n9"]}), "answer"),
    "timeout": (Answer(instead=HANG), "timeout"),
}


def deadline(failure):
    """Return a short deadline only for who needs it: the others must not miss theirs."""
    return 0.5 if failure == "timeout" else 10.0


each_failure = pytest.mark.parametrize("failure", FAILURES)


@each_failure
async def test_a_failed_filter_leaves_the_pod_pending_and_is_tried_again_by_time(failure):
    answer, reason = FAILURES[failure]
    async with staged(timeout_seconds=deadline(failure)) as stage:
        stage.extender.answers["filter"] = answer
        placement = await stage.place(make_pod("p"))
        assert placement.outcome is Outcome.ERROR
        assert placement.describe()
        assert stage.scheduler.extenders[0].calls[-1].failure == reason
        assert not stage.scheduler.queue.rejected
        stage.extender.heal()
        assert [one.outcome for one in await stage.later(1.0)] == [Outcome.PLACED]


@each_failure
async def test_a_failed_filter_of_an_ignorable_extender_is_skipped_and_it_still_scores(failure):
    answer, _ = FAILURES[failure]
    async with staged(timeout_seconds=deadline(failure), ignorable=True) as stage:
        stage.extender.answers["filter"] = answer
        assert (await stage.place(make_pod("p"))).outcome is Outcome.PLACED
        assert stage.extender.verbs == ["filter", "prioritize"]


@pytest.mark.parametrize("ignorable", [True, False], ids=["ignorable", "needed"])
async def test_a_refused_connection_is_a_failure_like_others(ignorable):
    async with staged(ignorable=ignorable) as stage:
        pass
    placement = await stage.place(make_pod("p"))
    assert placement.outcome is (Outcome.PLACED if ignorable else Outcome.ERROR)
    assert stage.scheduler.extenders[0].calls[0].failure == "refused"


@pytest.mark.parametrize("ignorable", [True, False], ids=["ignorable", "needed"])
@pytest.mark.parametrize(
    ("answer", "reasons"),
    [
        ({"NodeNames": [], "FailedNodes": FAILED}, "5 no headroom"),
        ({"NodeNames": [], "FailedAndUnresolvableNodes": FAILED}, "5 no headroom"),
        ({"NodeNames": None, "FailedNodes": {}}, ""),
        ({}, ""),
        (None, ""),
    ],
    ids=["FailedNodes", "FailedAndUnresolvableNodes", "no NodeNames", "{}", "null"],
)
async def test_a_rejection_is_no_error_and_waits_for_an_event(answer, reasons, ignorable):
    async with staged(ignorable=ignorable) as stage:
        stage.extender.answers["filter"] = Answer(answer)
        placement = await stage.place(make_pod("p"))
        assert placement.outcome is Outcome.UNSCHEDULABLE
        assert placement.by_extender
        assert reasons in placement.describe()
        assert placement.describe().startswith("0/5 nodes are available")
        stage.extender.heal()
        assert await stage.later(15.0) == []


async def test_unresolvable_wins_over_failed():
    async with staged() as stage:
        stage.extender.answers["filter"] = Answer(
            {"NodeNames": [], "FailedNodes": FAILED, "FailedAndUnresolvableNodes": {"n1": "broken"}}
        )
        placement = await stage.place(make_pod("p"))
        assert (placement.refusals["n1"].helps, placement.refusals["n0"].helps) == (False, True)


@pytest.mark.parametrize(
    "answer",
    [{"nodenames": ["n1", "n2"]}, {"NODENAMES": ["n1", "n2"]}, {"NodeNames": ["n1", "n1", "n2"]}],
    ids=["lower case", "upper case", "duplicates"],
)
async def test_accepted_filter_answers(answer):
    async with staged() as stage:
        stage.extender.answers["filter"] = Answer(answer)
        assert (await stage.place(make_pod("p"))).node in {"n1", "n2"}


async def test_a_packed_answer_is_read():
    async with staged() as stage:
        stage.extender.answers["filter"] = Answer({"NodeNames": ["n3"]}, packed=True)
        assert (await stage.place(make_pod("p"))).node == "n3"


async def test_whole_nodes_are_answered_by_whole_nodes_and_names_alone_reject_all():
    async with staged(node_cache_capable=False) as stage:
        assert (await stage.place(make_pod("p"))).outcome is Outcome.PLACED
        assert stage.extender.requests[0].args["NodeNames"] is None
        stage.extender.answers["filter"] = Answer({"NodeNames": ALL})
        assert (await stage.place(make_pod("q"))).outcome is Outcome.UNSCHEDULABLE


SCORE_FAILURES = {
    "500": Answer(status=500),
    "malformed": Answer(body=b"["),
    "html": Answer(body=b"<html>"),
    "empty": Answer(body=b""),
    "closed": Answer(instead=CLOSE),
    "null": Answer(None),
    "float": Answer(body=b'[{"Host":"n3","Score":10.0}]'),
    "string": Answer([{"Host": "n3", "Score": "10"}]),
    "more than int64": Answer([{"Host": "n3", "Score": 2**63}]),
    "one bad among good": Answer([{"Host": "n3", "Score": 10}, {"Host": "n1", "Score": 1.5}]),
    "object": Answer({"n3": 10}),
    "timeout": Answer(instead=HANG),
}


@pytest.mark.parametrize("ignorable", [True, False], ids=["ignorable", "needed"])
@pytest.mark.parametrize("failure", SCORE_FAILURES)
async def test_failed_scores_are_dropped_without_a_word(failure, ignorable):
    async with staged(timeout_seconds=deadline(failure), ignorable=ignorable) as stage:
        stage.extender.answers["prioritize"] = SCORE_FAILURES[failure]
        placement = await stage.place(make_pod("p"))
        assert placement.outcome is Outcome.PLACED
        assert len(set(placement.points.values())) == 1


@pytest.mark.parametrize(
    ("scores", "added"),
    [
        ([("n3", 7)], {"n3": 70}),
        ([("n3", 7), ("stranger", 10)], {"n3": 70}),
        ([("n3", 5), ("n1", 6), ("n3", 5)], {"n3": 100, "n1": 60}),
        ([("n3", 11)], {"n3": 110}),
        ([("n3", 100)], {"n3": 1000}),
        ([("n3", -10)], {"n3": -100}),
        ([("n3", 2**63 - 1)], {"n3": -10}),
        ([("n3", None)], {}),
    ],
    ids=["missing is 0", "stranger", "duplicates add up", "11", "100", "-10", "overflow", "null"],
)
async def test_points_that_scores_add(scores, added):
    async with staged() as stage:
        stage.extender.answers["prioritize"] = Answer(
            [{"Host": host, "Score": score} for host, score in scores]
        )
        placement = await stage.place(make_pod("p"))
        base = placement.points["n0"]
        assert {k: v - base for k, v in placement.points.items() if v != base} == added
        if added:
            assert (placement.node == "n3") is (added["n3"] > 0)


async def test_scores_read_without_case_and_without_a_host():
    async with staged() as stage:
        body = json.dumps([{"host": "n2", "SCORE": 9}, {"Score": 10}, {}, None]).encode()
        stage.extender.answers["prioritize"] = Answer(body=body)
        assert (await stage.place(make_pod("p"))).node == "n2"


AFFINITY = {
    "nodeAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {
                "weight": 1,
                "preference": {
                    "matchExpressions": [
                        {"key": "kubernetes.io/hostname", "operator": "In", "values": ["n1"]}
                    ]
                },
            }
        ]
    }
}


@pytest.mark.parametrize(("weight", "wins"), [(1, 0), (3, 5), (5, 5), (10, 5)])
async def test_weight_against_a_preferred_node_affinity(weight, wins):
    async with staged(weight=weight) as stage:
        stage.extender.answers["prioritize"] = Answer([{"Host": "n3", "Score": 10}])
        nodes = []
        for index in range(5):
            nodes.append((await stage.place(make_pod(f"p{index}", affinity=AFFINITY))).node)
            stage.cluster.delete_pod(f"uid-p{index}")
        assert nodes.count("n3") == wins
        assert nodes.count("n1") == 5 - wins


async def test_weight_two_ties_with_a_preferred_node_affinity():
    async with staged(weight=2) as stage:
        stage.extender.answers["prioritize"] = Answer([{"Host": "n3", "Score": 10}])
        points = (await stage.place(make_pod("p", affinity=AFFINITY))).points
        assert points["n1"] == points["n3"] == points["n0"] + 200
