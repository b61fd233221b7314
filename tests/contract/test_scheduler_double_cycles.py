"""Who is called when, about which nodes: sequence, sampling, gangs, preemption."""

from contextlib import AsyncExitStack

import pytest

from nearkv.scheduler_config.sampling import sampled_nodes
from tests.contract.scheduler_stage import GPU, make_node, make_pod, staged
from tests.doubles.scheduler import ExtenderConfig, Outcome, SchedulerConfig, SchedulerDouble
from tests.doubles.scheduler.clocks import HandClock
from tests.doubles.scheduler.cluster import Cluster
from tests.doubles.scheduler.objects import UNIT, PodInfo
from tests.doubles.scheduler.sampling import nodes_to_find
from tests.doubles.scheduler.scripted_extender import HANG, Answer, ScriptedExtender

MANAGED = frozenset({GPU})


@pytest.mark.parametrize(
    ("nodes", "percentage", "wanted"),
    [
        *((5, 0, 5), (99, 0, 99), (100, 0, 100), (300, 0, 144), (500, 0, 230), (1000, 0, 420)),
        *((5000, 0, 500), (15000, 0, 750), (500, 100, 500), (5000, 1, 100), (5000, 100, 5000)),
    ],
)
def test_sample_sizes(nodes, percentage, wanted):
    assert nodes_to_find(nodes, percentage) == wanted
    assert sampled_nodes(nodes, percentage) == wanted


async def test_filter_then_prioritize_with_the_sample_from_a_moving_start():
    async with staged(300) as stage:
        await stage.place(make_pod("p"))
        await stage.place(make_pod("q"))
        first, again, second, _ = (one.args["NodeNames"] for one in stage.extender.requests)
        assert stage.extender.verbs == ["filter", "prioritize"] * 2
        assert len(first) == 144
        assert first == again
        assert set(first) == {f"n{index}" for index in range(144)}
        assert set(second) == {f"n{index}" for index in range(144, 288)}
        assert first != [f"n{index}" for index in range(144)]  # nor in any other order


async def test_prioritize_is_not_asked_about_a_single_node():
    async with staged() as stage:
        stage.extender.answers["filter"] = Answer({"NodeNames": ["n4"]})
        assert (await stage.place(make_pod("p"))).node == "n4"
        assert stage.extender.verbs == ["filter"]


async def test_the_filter_is_not_asked_when_no_node_is_left():
    async with staged() as stage:
        placement = await stage.place(make_pod("p", devices=64))
        assert placement.describe() == f"0/5 nodes are available: 5 Insufficient {GPU}."
        assert stage.extender.requests == []


async def test_a_hundred_pods_are_a_hundred_pairs_of_calls():
    async with staged(20) as stage:
        for index in range(100):
            stage.cluster.set_pod(make_pod(f"p{index}"))
        assert len(await stage.scheduler.drain()) == 100
        assert stage.extender.verbs == ["filter", "prioritize"] * 100
        assert len({request.peer for request in stage.extender.requests}) == 1


@pytest.mark.parametrize("mode", [True, False], ids=["names", "whole nodes"])
async def test_both_modes_lead_to_the_same_node(mode):
    async with staged(node_cache_capable=mode) as stage:
        stage.extender.answers["prioritize"] = Answer([{"Host": "n2", "Score": 9}])
        assert (await stage.place(make_pod("p"))).node == "n2"
        args = stage.extender.requests[0].args
        assert (args["Nodes"] is None) is mode
        assert (args["NodeNames"] is None) is not mode


async def test_pods_that_name_no_managed_resource_are_not_sent():
    async with staged(managed_resources=MANAGED) as stage:
        assert (await stage.place(make_pod("cpu-only", devices=0))).outcome is Outcome.PLACED
        assert stage.extender.requests == []
        limits_only = make_pod("limits", devices=0)
        limits_only["spec"]["initContainers"] = [{"resources": {"limits": {GPU: "1"}}}]
        await stage.place(limits_only)
        assert stage.extender.verbs == ["filter", "prioritize"]


async def test_without_managed_resources_every_pod_is_sent():
    async with staged() as stage:
        await stage.place(make_pod("cpu-only", devices=0))
        assert stage.extender.verbs == ["filter", "prioritize"]


async def test_an_ignored_resource_is_counted_by_nobody_but_the_extender():
    async with staged(managed_resources=MANAGED, ignored_resources=MANAGED) as stage:
        assert (await stage.place(make_pod("p", devices=64))).outcome is Outcome.PLACED


async def test_a_pod_is_assumed_before_it_is_bound():
    async with staged(2) as stage:
        nodes = [(await stage.place(make_pod(f"p{index}", devices=5))).node for index in range(2)]
        assert sorted(nodes) == ["n0", "n1"]
        assert (await stage.place(make_pod("p2", devices=5))).outcome is Outcome.UNSCHEDULABLE


async def test_a_taint_and_a_selector_keep_nodes_from_the_extender():
    async with staged(3) as stage:
        tainted = make_node("n0")
        tainted["spec"]["taints"] = [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]
        stage.cluster.set_node(tainted)
        stage.cluster.set_node(make_node("n1", labels={"pool": "llm"}))
        await stage.place(make_pod("p"))
        assert sorted(stage.extender.requests[-1].args["NodeNames"]) == ["n1", "n2"]
        await stage.place(make_pod("q", nodeSelector={"pool": "llm"}))
        assert stage.extender.requests[-1].args["NodeNames"] == ["n1"]
        tolerations = [{"key": "gpu", "operator": "Exists"}]
        await stage.place(make_pod("r", tolerations=tolerations))
        assert sorted(stage.extender.requests[-1].args["NodeNames"]) == ["n0", "n1", "n2"]


async def two_extenders(stack, first, second):
    """Return a scheduler with two extenders and what they saw."""
    log = []
    configs = []
    for name, fields in (("first", first), ("second", second)):
        extender = await stack.enter_async_context(ScriptedExtender().serving())
        extender.answers = fields.pop("answers", {})
        configs.append(
            ExtenderConfig(
                url_prefix=extender.url,
                filter_verb="filter",
                prioritize_verb="prioritize",
                node_cache_capable=True,
                **fields,
            )
        )
        log.append((name, extender))
    cluster = Cluster()
    for index in range(5):
        cluster.set_node(make_node(f"n{index}"))
    config = SchedulerConfig(extenders=configs)
    scheduler = SchedulerDouble(cluster, config, now=HandClock())
    stack.callback(scheduler.close)
    return scheduler, dict(log)


async def test_each_filter_gets_what_the_one_before_left_and_scores_add_up():
    async with AsyncExitStack() as stack:
        left = Answer({"NodeNames": ["n1", "n2", "n3"]})
        scores = (Answer([{"Host": "n1", "Score": 5}]), Answer([{"Host": "n3", "Score": 2}]))
        scheduler, by_name = await two_extenders(
            stack,
            {"weight": 3, "answers": {"filter": left, "prioritize": scores[0]}},
            {"weight": 10, "answers": {"prioritize": scores[1]}},
        )
        scheduler.cluster.set_pod(make_pod("p"))
        placement = await scheduler.step()
        assert len(by_name["first"].requests[0].args["NodeNames"]) == 5
        assert by_name["second"].requests[0].args["NodeNames"] == ["n1", "n2", "n3"]
        base = placement.points["n2"]
        assert {k: v - base for k, v in placement.points.items()} == {"n1": 150, "n2": 0, "n3": 200}


async def test_ignorable_extenders_are_asked_after_the_others():
    async with AsyncExitStack() as stack:
        scheduler, by_name = await two_extenders(
            stack,
            {"weight": 1, "ignorable": True},
            {"weight": 1, "answers": {"filter": Answer({"NodeNames": ["n1", "n2"]})}},
        )
        scheduler.cluster.set_pod(make_pod("p"))
        await scheduler.step()
        assert by_name["first"].requests[0].args["NodeNames"] == ["n1", "n2"]


async def test_no_extender_is_asked_about_nothing():
    async with AsyncExitStack() as stack:
        scheduler, by_name = await two_extenders(
            stack,
            {"weight": 1, "answers": {"filter": Answer({"NodeNames": []})}},
            {"weight": 1},
        )
        scheduler.cluster.set_pod(make_pod("p"))
        await scheduler.step()
        assert by_name["second"].requests == []


async def test_prioritize_goes_to_all_extenders_at_once():
    async with AsyncExitStack() as stack:
        scheduler, by_name = await two_extenders(stack, {"weight": 1}, {"weight": 1})
        first, second = by_name["first"], by_name["second"]
        # One after the other, nobody would ever release the first.
        first.answers["prioritize"] = Answer([{"Host": "n1", "Score": 10}], instead=HANG)
        second.answers["prioritize"] = Answer([], then=first.released.set)
        scheduler.cluster.set_pod(make_pod("p"))
        assert (await scheduler.step()).node == "n1"


async def test_a_gang_is_simulated_and_taken_back():
    async with staged(2) as stage:
        pods = [PodInfo(make_pod(f"g{index}", devices=8)) for index in range(3)]
        for _ in range(2):
            placements = await stage.scheduler.simulate(pods)
            assert [one.outcome for one in placements] == [
                *(Outcome.PLACED, Outcome.PLACED),
                Outcome.UNSCHEDULABLE,
            ]
        assert stage.bound == {}
        assert all(node.free(GPU) == 8 * UNIT for node in stage.cluster.nodes.values())
        assert stage.extender.verbs == ["filter", "prioritize", "filter"] * 2


LOW = {"priority": 0}
HIGH = {"priority": 1000, "preemptionPolicy": "PreemptLowerPriority"}


async def fill(stage):
    for index, name in enumerate(stage.cluster.nodes):
        stage.cluster.set_pod(make_pod(f"low-{index}", devices=8, node=name, **LOW))


@pytest.mark.parametrize("mode", [True, False], ids=["uids", "pods"])
async def test_preemption_asks_then_filters_one_node_and_does_not_prioritize(mode):
    async with staged(3, preempt_verb="preempt", node_cache_capable=mode) as stage:
        await fill(stage)
        placement = await stage.place(make_pod("vip", devices=8, **HIGH))
        assert placement.nominated
        args = stage.extender.requests[0].args
        key = "NodeNameToMetaVictims" if mode else "NodeNameToVictims"
        assert sorted(args[key]) == ["n0", "n1", "n2"]
        await stage.later(1.0)
        assert stage.extender.verbs == ["preempt", "filter"]
        assert stage.bound["vip"] == placement.nominated


@pytest.mark.parametrize(
    ("answer", "ignorable", "nominates"),
    [
        (Answer({"NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": "uid-low-1"}]}}}), False, True),
        (Answer({"NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": "else"}]}}}), False, False),
        (Answer({"NodeNameToMetaVictims": {"n9": {"Pods": [{"UID": "uid-low-1"}]}}}), False, False),
        (Answer({"NodeNameToMetaVictims": {"n1": {"Pods": []}}}), False, False),
        (Answer({"NodeNameToMetaVictims": {}}), False, False),
        (Answer(status=404), False, False),
        (Answer(status=404), True, True),
    ],
    ids=["one", "wrong uid", "wrong node", "no victims", "none", "404", "404 but ignorable"],
)
async def test_answers_to_preempt(answer, ignorable, nominates):
    async with staged(3, preempt_verb="preempt", ignorable=ignorable) as stage:
        await fill(stage)
        stage.extender.answers["preempt"] = answer
        placement = await stage.place(make_pod("vip", devices=8, **HIGH))
        assert bool(placement.nominated) is nominates


async def test_nobody_is_evicted_for_nodes_that_only_the_extender_rejects():
    async with staged(2, preempt_verb="preempt") as stage:
        stage.cluster.set_pod(make_pod("low", node="n0", **LOW))
        stage.extender.answers["filter"] = Answer({"FailedNodes": {"n0": "x", "n1": "x"}})
        placement = await stage.place(make_pod("vip", **HIGH))
        # The pod fits beside the others, so that their going would not help.
        assert (placement.outcome, placement.nominated) == (Outcome.UNSCHEDULABLE, "")
        assert stage.extender.verbs == ["filter"]


@pytest.mark.parametrize("ignorable", [True, False], ids=["ignorable", "needed"])
async def test_an_extender_that_should_bind_and_fails(ignorable):
    async with staged(bind_verb="bind", ignorable=ignorable) as stage:
        stage.extender.answers["bind"] = Answer({"Error": "cannot"})
        await stage.place(make_pod("p"))
        assert ("p" in stage.bound) is ignorable
        assert stage.extender.requests[-1].args == {
            "PodName": "p",
            "PodNamespace": "default",
            "PodUID": "uid-p",
            "Node": stage.scheduler.placements[-1].node,
        }


async def test_an_extender_that_says_it_bound_and_did_not_leaves_the_pod_unbound():
    async with staged(bind_verb="bind") as stage:
        await stage.place(make_pod("p"))
        assert stage.bound == {}
        assert await stage.later(400.0) == []


async def test_pods_of_other_schedulers_are_left_alone():
    async with staged() as stage:
        assert await stage.place(make_pod("p", schedulerName="other")) is None
