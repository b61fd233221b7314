"""A watch on a healthy API server: what it asks for, what it tells."""

import asyncio
from dataclasses import replace

import msgspec
import pytest

from nearkv.health import Readiness
from nearkv.kube.access import ApiAccess
from nearkv.kube.listing import ListLimits
from nearkv.kube.objects import NODES_PATH, PODS_PATH, Node, Pod
from nearkv.kube.watching import Watch
from nearkv.supervising import Job, RestartLimits, supervised
from tests.core.kube.following import QUICK, following
from tests.doubles.api_server import ApiServerConfig, ApiServerDouble, node_object, pod_object
from tests.integration.stack import eventually


@pytest.fixture
async def api():
    async with ApiServerDouble(ApiServerConfig(bookmark_seconds=0.05)) as double:
        double.put_all(node_object(f"n{number}") for number in range(8))
        yield double


async def test_all_objects_come_at_once_from_several_pages(api):
    async with following(api) as followed:
        assert followed.replaced == [[f"n{number}" for number in range(8)]]
        assert followed.events == []
        lists = api.record.all("list")
        assert [seen.query["limit"] for seen in lists] == ["3", "3", "3"]
        assert ["continue" in seen.query for seen in lists] == [False, True, True]


async def test_changes_follow(api):
    async with following(api) as followed:
        api.put(node_object("new"))
        api.edit("Node", "n0", {"metadata": {"labels": {"a": "b"}}})
        api.delete("Node", "n1")
        await followed.until_in_step()
        assert followed.events == [("ADDED", "new"), ("MODIFIED", "n0"), ("DELETED", "n1")]
        assert followed.objects["n0"].labels["a"] == "b"
        assert len(followed.replaced) == 1


async def test_requests_are_those_that_an_api_server_bears(api):
    async with following(api) as followed:
        version = api.version
        await followed.until(lambda: followed.watch.last_heard_at > 0)
        assert len(api.record) == 4
        for seen in api.record.all("list"):
            assert "resourceVersion" not in seen.query
            assert int(seen.query["limit"]) > 0
        (watch,) = api.record.all("watch")
        assert watch.query["resourceVersion"] == version != "0"
        assert watch.query["allowWatchBookmarks"] == "true"
        assert 60 <= int(watch.query["timeoutSeconds"]) <= 120
        assert watch.user_agent.startswith("nearkv/")
        assert api.record.rules == {("list", "nodes"), ("watch", "nodes")}


async def test_no_watch_ever_starts_without_a_version(api):
    async with following(api, limits=replace(QUICK, watch_seconds=1)) as followed:
        await followed.until(lambda: len(api.record.all("watch")) > 2)
        assert all(int(seen.query["resourceVersion"]) > 0 for seen in api.record.all("watch"))


async def test_watches_that_the_server_ends_go_on_where_they_were(api):
    limits = replace(QUICK, watch_seconds=1, silence_seconds=5)
    async with following(api, limits=limits, draw=lambda: 0.0) as followed:
        api.put(node_object("new"))
        await followed.until(lambda: len(api.record.all("watch")) > 1)
        api.put(node_object("newer"))
        await followed.until_in_step()
        assert followed.events == [("ADDED", "new"), ("ADDED", "newer")]
        assert (followed.watch.lists, dict(followed.watch.failures)) == (1, {})


async def test_bookmarks_move_the_version_on(api):
    async with following(api, limits=replace(QUICK, watch_seconds=1)) as followed:
        for _ in range(5):
            api.put(pod_object("other"))  # no Node, but a newer version
            api.delete("Pod", "other")
        version = int(api.version)
        await followed.until(
            lambda: int(api.record.all("watch")[-1].query["resourceVersion"]) >= version
        )
        assert followed.events == []


async def test_one_watch_for_the_pods_of_a_node(api):
    for number in range(6):
        api.put(pod_object(f"p{number}", node=f"n{number % 2}", gpus=2))
    selection = {"field_selector": "spec.nodeName=n1", "cached": True}
    async with following(api, PODS_PATH, Pod, **selection) as followed:
        assert followed.names == {"p1", "p3", "p5"}
        api.put(pod_object("late"))
        api.bind("late", "n1")
        api.delete("Pod", "p1")
        api.delete("Pod", "p0")
        await followed.until(lambda: followed.names == {"p3", "p5", "late"})
        assert followed.events == [("ADDED", "late"), ("DELETED", "p1")]
        # Ten scans of everything known cost the API server nothing.
        assert [len(followed.objects) for _ in range(10)] == [3] * 10
        first, watch = api.record.all(resource="pods")
        assert (first.verb, first.query["resourceVersion"]) == ("list", "0")
        assert "limit" not in first.query
        assert watch.query["fieldSelector"] == first.query["fieldSelector"] == "spec.nodeName=n1"


async def test_a_selector_of_labels(api):
    api.put(node_object("gpu", labels={"nvidia.com/gpu.present": "true"}))
    async with following(api, label_selector="nvidia.com/gpu.present=true") as followed:
        assert followed.names == {"gpu"}
        api.edit("Node", "gpu", {"metadata": {"labels": {"nvidia.com/gpu.present": "false"}}})
        await followed.until(lambda: followed.names == set())
        assert followed.events == [("DELETED", "gpu")]


async def test_nothing_is_told_before_the_last_page(api):
    seen_at_replace = []
    async with following(api, synced=False) as followed:
        tell = followed.on_replace
        followed.watch._on_replace = lambda objects: (
            seen_at_replace.append(len(api.record.all("list"))),
            tell(objects),
        )
        await followed.watch.wait_until_synced()
        assert seen_at_replace == [3]


async def test_an_empty_collection_is_known_as_such(api):
    async with following(api, PODS_PATH, Pod) as followed:
        assert (followed.replaced, followed.watch.synced) == ([[]], True)


async def test_what_the_owner_raises_ends_the_watch(api):
    async with following(api) as followed:

        def refuse(kind, item):
            raise LookupError(kind)

        followed.watch._on_change = refuse
        api.put(node_object("new"))
        with pytest.raises(LookupError):
            await asyncio.wait_for(followed.task, 30)


async def test_objects_that_do_not_decode_are_left_out_and_counted(api):
    api.put(node_object("odd") | {"spec": {"unschedulable": "perhaps"}})
    async with following(api) as followed:
        assert followed.names == {f"n{number}" for number in range(8)}
        api.edit("Node", "n0", {"spec": {"unschedulable": 7}})
        api.put(node_object("new"))
        await followed.until(lambda: "new" in followed.names)
        assert followed.watch.failures == {"unreadable_object": 2}
        assert followed.counted == ["unreadable_object"] * 2
        assert not followed.objects["n0"].unschedulable  # its last state that could be read


async def test_pages_that_are_too_large_get_smaller(api):
    listing = ListLimits(page_objects=8, page_bytes=3000)
    async with following(api, limits=replace(QUICK, listing=listing)) as followed:
        assert len(followed.names) == 8
        assert set(followed.watch.failures) == {"too_large"}
        limits = [int(seen.query["limit"]) for seen in api.record.all("list")]
        assert limits[0] == 8
        assert limits == sorted(limits, reverse=True)


async def test_path_of_the_collection_is_asked_as_given(api):
    async with following(api):
        assert {seen.path for seen in api.record} == {NODES_PATH}


async def test_a_watch_that_is_begun_anew_after_a_defect_lists_again():
    """The event that the defect came with is lost else."""
    readiness, seen = Readiness(), []

    def take(kind, node):
        if len(seen) == 0:
            seen.append("a defect")
            raise ValueError("a defect")
        seen.append((kind, node.name))

    async with ApiServerDouble() as api, ApiAccess.plain(api.url) as access:
        watch = Watch(
            access,
            NODES_PATH,
            decode=msgspec.json.Decoder(Node).decode,
            on_replace=lambda nodes: seen.append([node.name for node in nodes]) if seen else None,
            on_change=take,
            limits=QUICK,
        )
        limits = RestartLimits(first_pause_seconds=0.0)
        job = Job("nodes", watch.run)
        async with supervised([job], readiness, check="working", limits=limits):
            await asyncio.wait_for(watch.wait_until_synced(), 30)
            await api.wait_for_watches()
            api.put(node_object("new"))
            await eventually(lambda: ["new"] in seen, what="it is listed")
            assert [request.verb for request in api.record][:3] == ["list", "watch", "list"]
            assert readiness.task_failures == {"nodes": 1}
            assert readiness.is_ready
