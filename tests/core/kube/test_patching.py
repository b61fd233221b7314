import json

import pytest

from nearkv.kube.access import ApiAccess
from nearkv.kube.errors import PatchError, Trouble
from nearkv.kube.objects import node_path
from nearkv.kube.patching import Patcher, PatchLimits
from tests.doubles.api_server import ApiServerDouble, Faults, node_object, worker_status_object

QUICK = PatchLimits(
    deadline_seconds=20, attempt_seconds=1.0, first_pause_seconds=0.01, longest_pause_seconds=0.02
)
STATUS_PATH = "/apis/nearkv.io/v1alpha1/namespaces/default/workerstatuses/w/status"


@pytest.fixture
async def api():
    async with ApiServerDouble() as double:
        double.put(node_object("n1", annotations={"kept": "yes"}))
        double.put(worker_status_object("w", {}))
        yield double


@pytest.fixture
async def patcher(api):
    async with ApiAccess.plain(api.url) as access:
        yield Patcher(access, limits=QUICK)


async def refused(call):
    with pytest.raises(PatchError) as caught:
        await call
    return caught.value


async def test_an_annotation_is_set_and_removed(api, patcher):
    await patcher.annotate(node_path("n1"), {"nearkv.io/room-changed-at": "now"})
    annotations = api.get("Node", "n1")["metadata"]["annotations"]
    assert annotations == {"kept": "yes", "nearkv.io/room-changed-at": "now"}
    await patcher.annotate(node_path("n1"), {"nearkv.io/room-changed-at": None})
    assert api.get("Node", "n1")["metadata"]["annotations"] == {"kept": "yes"}
    assert api.record.rules == {("patch", "nodes")}


async def test_a_status_is_applied(api, patcher):
    value = {
        "apiVersion": "nearkv.io/v1alpha1",
        "kind": "WorkerStatus",
        "metadata": {"name": "w"},
        "status": {"seq": 3, "conditions": [{"type": "Ready", "status": "True"}]},
    }
    answer = json.loads(await patcher.apply(STATUS_PATH, value, field_manager="agent"))
    assert answer["status"] == value["status"]
    assert api.get("WorkerStatus", "w")["status"] == value["status"]
    assert api.record.rules == {("patch", "workerstatuses/status")}


async def test_fields_of_others_are_taken_by_force_only(patcher):
    value = {"metadata": {"name": "n1", "labels": {"a": "1"}}}
    await patcher.apply(node_path("n1"), value, field_manager="one")
    value["metadata"]["labels"]["a"] = "2"
    error = await refused(patcher.apply(node_path("n1"), value, field_manager="two", force=False))
    assert (error.trouble, error.status) == (Trouble.CONFLICT, 409)
    await patcher.apply(node_path("n1"), value, field_manager="two")


@pytest.mark.parametrize("fault", [{"status": 429}, {"status": 503}, {"hang": True}])
async def test_what_may_pass_is_sent_again(api, patcher, fault):
    api.inject(Faults(verbs=("patch",), times=2, **fault))
    await patcher.annotate(node_path("n1"), {"a": "b"})
    assert api.get("Node", "n1")["metadata"]["annotations"]["a"] == "b"
    assert len(api.record.all("patch")) == 3


async def test_it_comes_back_no_sooner_than_asked(api, patcher):
    api.inject(Faults(status=429, retry_after_seconds=1, times=1))
    await patcher.annotate(node_path("n1"), {"a": "b"})
    first, second = api.record.all("patch")
    assert second.at - first.at >= 1


@pytest.mark.parametrize(
    ("status", "trouble"),
    [(400, Trouble.REFUSED), (403, Trouble.FORBIDDEN), (404, Trouble.NOT_FOUND)],
)
async def test_a_refusal_is_told_at_once(api, patcher, status, trouble):
    api.inject(Faults(status=status))
    error = await refused(patcher.annotate(node_path("n1"), {"a": "b"}))
    assert (error.trouble, error.status) == (trouble, status)
    assert "/api/v1/nodes/n1" in str(error)
    assert len(api.record) == 1


async def test_a_node_that_is_not_there(patcher):
    error = await refused(patcher.annotate(node_path("gone"), {"a": "b"}))
    assert error.trouble is Trouble.NOT_FOUND
    assert 'nodes "gone" not found' in str(error)


async def test_attempts_are_bounded(api, patcher):
    api.inject(Faults(status=500))
    error = await refused(patcher.annotate(node_path("n1"), {"a": "b"}))
    assert error.trouble is Trouble.SERVER_ERROR
    assert len(api.record) == QUICK.attempts


async def test_the_deadline_holds_whatever_the_server_asks_for(api):
    api.inject(Faults(status=429, retry_after_seconds=1000))
    async with ApiAccess.plain(api.url) as access:
        patcher = Patcher(access, limits=PatchLimits(deadline_seconds=0.3))
        error = await refused(patcher.annotate(node_path("n1"), {"a": "b"}))
    assert (error.trouble, len(api.record)) == (Trouble.THROTTLED, 1)


async def test_a_server_that_never_answers(api):
    api.inject(Faults(hang=True))
    async with ApiAccess.plain(api.url) as access:
        patcher = Patcher(access, limits=PatchLimits(deadline_seconds=0.3))
        error = await refused(patcher.annotate(node_path("n1"), {"a": "b"}))
    assert error.trouble is Trouble.SILENT
