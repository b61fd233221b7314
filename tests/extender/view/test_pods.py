"""Which pods count, and what they add up to on each node."""

import random

import pytest

from nearkv.extender.model import Role
from nearkv.extender.view.pods import PodChanges, PodRules, PodStore, read_pod
from tests.doubles.api_server import pod_object
from tests.extender.view.things import as_pod, pod

RULES = PodRules(resources=("nvidia.com/gpu", "amd.com/gpu"))
INFINITY = float("inf")


def read(**fields):
    return read_pod(as_pod(pod_object("p", **{"node": "n1", **fields})), RULES)


@pytest.mark.parametrize(
    "fields",
    [{"node": ""}, {"phase": "Succeeded"}, {"phase": "Failed"}, {"gpus": 0}],
    ids=["not bound", "succeeded", "failed", "asks for nothing"],
)
def test_pods_that_take_nothing_of_a_node_are_not_kept(fields):
    assert read(**fields) is None


def test_a_pod_of_a_group_counts_without_devices():
    found = read(gpus=0, labels={"nearkv.io/group": "g"})
    assert (found.group, found.devices, found.role) == ("g", 0, Role.BOTH)


def test_init_containers_and_sidecars_count_as_the_scheduler_counts_them():
    value = pod_object("p", node="n1", gpus=2)

    def init(gpus, **fields):
        return {"name": "i", "resources": {"requests": {"nvidia.com/gpu": str(gpus)}}, **fields}

    value["spec"]["initContainers"] = [init(1, restartPolicy="Always"), init(4)]
    assert read_pod(as_pod(value), RULES).devices == 5
    value["spec"]["initContainers"].pop()
    assert read_pod(as_pod(value), RULES).devices == 3


def test_resources_add_up():
    value = pod_object("p", node="n1", gpus=2)
    value["spec"]["containers"][0]["resources"]["requests"]["amd.com/gpu"] = "1"
    assert read_pod(as_pod(value), RULES).devices == 3


@pytest.mark.parametrize(
    ("labels", "role"),
    [
        ({"nearkv.io/role": "prefill"}, Role.PREFILL),
        ({"llm-d.ai/role": "decode"}, Role.DECODE),
        ({"nearkv.io/role": "prefill", "llm-d.ai/role": "decode"}, Role.PREFILL),
        ({"nearkv.io/role": "", "llm-d.ai/role": "decode"}, Role.DECODE),
        ({"nearkv.io/role": "boss"}, Role.BOTH),
        ({}, Role.BOTH),
    ],
)
def test_the_role_comes_from_the_first_label_that_is_set(labels, role):
    assert read(labels=labels).role is role


@pytest.mark.parametrize(
    ("phase", "deleted", "running"),
    [("Running", False, True), ("Pending", False, False), ("Running", True, False)],
)
def test_an_engine_counts_while_it_runs_and_is_to_stay(phase, deleted, running):
    value = pod_object("p", node="n1", phase=phase)
    if deleted:
        value["metadata"]["deletionTimestamp"] = "2026-11-30T00:00:00Z"
    found = read_pod(as_pod(value), RULES)
    assert (found.running, found.terminating) == (running, deleted)


# -- Sums ------------------------------------------------------------------------------------


@pytest.fixture
def store():
    return PodStore()


def put(store, *pods, now=1.0):
    changes = PodChanges()
    for each in pods:
        store.put(each, now, changes)
    return changes


def drop(store, uid, now=1.0):
    changes = PodChanges()
    store.drop(uid, now, changes)
    return changes


def test_a_bound_pod_adds_its_devices_and_is_told_once(store):
    changes = put(store, pod("a", devices=2), pod("b", devices=3))
    assert store.on_node("n1").requested == 5
    assert changes.bound == {"a": "n1", "b": "n1"}
    assert put(store, pod("a", devices=2)).bound == {}
    assert store.on_node("n1").requested == 5


def test_a_terminating_pod_keeps_its_devices_until_it_is_gone(store):
    put(store, pod("a", devices=2))
    assert store.on_node("n1").left_at == -INFINITY
    put(store, pod("a", devices=2, terminating=True, running=False), now=5.0)
    assert (store.on_node("n1").requested, store.on_node("n1").left_at) == (2, INFINITY)
    assert drop(store, "a", now=9.0).gone == ["a"]
    assert (store.on_node("n1").requested, store.on_node("n1").left_at) == (0, 9.0)


def test_a_pod_without_devices_leaves_no_memory_behind(store):
    put(store, pod("a", devices=0, group="g", terminating=True))
    assert store.on_node("n1").left_at == -INFINITY
    drop(store, "a", now=9.0)
    assert store.on_node("n1").left_at == -INFINITY


def test_running_pods_are_counted_by_group_and_role(store):
    put(store, pod("a", group="g", role=Role.PREFILL), pod("b", group="g", role=Role.PREFILL))
    put(store, pod("c", group="h", running=False))
    running = store.on_node("n1").running
    assert (running["g", Role.PREFILL], running["h", Role.BOTH]) == (2, 0)
    changes = put(store, pod("a", group="g", role=Role.DECODE))
    running = store.on_node("n1").running
    assert (running["g", Role.PREFILL], running["g", Role.DECODE]) == (1, 1)
    assert changes.groups == {("g", "n1")}


def test_a_pod_that_appears_on_another_node_is_off_the_first(store):
    put(store, pod("a", "n1"))
    changes = put(store, pod("a", "n2"), now=4.0)
    assert (store.on_node("n1").requested, store.on_node("n2").requested) == (0, 1)
    assert store.on_node("n1").left_at == 4.0
    assert changes.nodes == {"n1", "n2"}
    assert changes.bound == {"a": "n2"}


def test_what_is_missing_from_a_list_is_told(store):
    put(store, pod("a"), pod("b", "n2"))
    assert store.missing_from({"b", "c"}) == ["a"]
    assert store.missing_from({"a", "b"}) == []


def test_a_node_that_is_gone_is_forgotten_once_no_pod_is_said_to_be_there(store):
    put(store, pod("a"))
    store.forget_node("n1")
    assert store.on_node("n1").requested == 1
    drop(store, "a", now=3.0)
    store.forget_node("n1")
    assert store.on_node("n1").left_at == -INFINITY


def test_sums_never_drift_from_what_the_pods_say(store):
    random_ = random.Random(3)
    known = {}
    for step in range(4000):
        uid = f"p{random_.randrange(60)}"
        if random_.random() < 0.3:
            known.pop(uid, None)
            drop(store, uid, now=step)
        else:
            known[uid] = pod(
                uid,
                f"n{random_.randrange(5)}",
                devices=random_.randrange(4),
                group=random_.choice(["", "g", "h"]),
                role=random_.choice(list(Role)),
                running=random_.random() < 0.5,
                terminating=random_.random() < 0.2,
            )
            put(store, known[uid], now=step)
    for node in {f"n{number}" for number in range(5)}:
        here = [each for each in known.values() if each.node == node]
        sums = store.on_node(node)
        assert sums.requested == sum(each.devices for each in here)
        assert sums.terminating == sum(each.terminating and each.devices > 0 for each in here)
        for name in ("g", "h"):
            for role in Role:
                there = [e for e in here if (e.group, e.role, e.running) == (name, role, True)]
                assert sums.running[name, role] == len(there)
