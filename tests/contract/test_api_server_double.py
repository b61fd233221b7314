"""The API server double is read as a Kubernetes API server is, by the official client.

What a real kube-apiserver 1.36 answered to the same questions is the source of the expectations.
"""

import asyncio
import json

import aiohttp
import pytest

from tests.doubles.api_server import (
    ApiServerConfig,
    ApiServerDouble,
    Faults,
    node_object,
    pod_object,
    worker_status_object,
)

NODES = "/api/v1/nodes"
PODS = "/api/v1/pods"
CRS = "/apis/nearkv.io/v1alpha1/namespaces/default/workerstatuses"


@pytest.fixture
async def api():
    async with ApiServerDouble(ApiServerConfig(bookmark_seconds=0.05)) as double:
        double.put_all(node_object(f"n{number}") for number in range(5))
        yield double


@pytest.fixture
async def ask(api):
    async with aiohttp.ClientSession() as session:

        async def request(method, path, *, body=None, kind="application/json", **query):
            async with session.request(
                method,
                api.url + path,
                params=query,
                data=None if body is None else json.dumps(body),
                headers={"Content-Type": kind},
            ) as response:
                return response.status, json.loads(await response.read())

        yield request


@pytest.fixture
async def watch(api):
    """Return the lines of a watch up to the first ``count``."""
    async with aiohttp.ClientSession() as session:

        async def lines(path, count, **query):
            params = {"watch": "true", "timeoutSeconds": "10", **query}
            found = []
            async with session.get(api.url + path, params=params) as response:
                while len(found) < count and (line := await response.content.readline()):
                    found.append(json.loads(line))
            return found

        yield lines


def official(api):
    """Return the official client for the double; it blocks, and belongs in a thread."""
    from kubernetes import client  # noqa: PLC0415 (slow to import)

    configuration = client.Configuration(host=api.url)
    configuration.proxy = None
    return client.ApiClient(configuration)


async def test_the_official_client_reads_pages_and_objects(api):
    api.put(pod_object("p", node="n1", gpus=2))

    def read():
        from kubernetes import client  # noqa: PLC0415 (slow to import)

        with official(api) as connection:
            core = client.CoreV1Api(connection)
            names, token = [], None
            while token != "":
                page = core.list_node(limit=2, _continue=token)
                names += [node.metadata.name for node in page.items]
                token = page.metadata._continue or ""
            pod = core.read_namespaced_pod("p", "default")
            return names, pod.spec.node_name, pod.spec.containers[0].resources.requests

    names, node, requests = await asyncio.to_thread(read)
    assert names == [f"n{number}" for number in range(5)]
    assert (node, requests["nvidia.com/gpu"]) == ("n1", "2")


async def test_the_official_client_watches(api):
    def follow():
        from kubernetes import client, watch  # noqa: PLC0415 (slow to import)

        with official(api) as connection:
            core = client.CoreV1Api(connection)
            version = core.list_node(limit=1).metadata.resource_version
            stream = watch.Watch().stream(
                core.list_node, resource_version=version, timeout_seconds=5
            )
            return next((e["type"], e["object"].metadata.name) for e in stream)

    following = asyncio.create_task(asyncio.to_thread(follow))
    await api.wait_for_watches()
    api.edit("Node", "n3", {"metadata": {"labels": {"a": "b"}}})
    assert await following == ("MODIFIED", "n3")


async def test_kinds_of_patches_that_the_double_has_not_are_refused(ask):
    for kind in ("application/strategic-merge-patch+json", "application/json-patch+json"):
        status, refusal = await ask("PATCH", f"{NODES}/n1", body={}, kind=kind)
        assert (status, refusal["reason"]) == (415, "UnsupportedMediaType")


async def test_pages_are_of_one_moment(api, ask):
    status, first = await ask("GET", NODES, limit="2")
    assert (status, first["kind"], first["metadata"]["remainingItemCount"]) == (200, "NodeList", 3)
    api.delete("Node", "n3")
    api.put(node_object("n9"))
    _, second = await ask("GET", NODES, limit="9", **{"continue": first["metadata"]["continue"]})
    assert [item["metadata"]["name"] for item in second["items"]] == ["n2", "n3", "n4"]
    assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    assert "continue" not in second["metadata"]


async def test_items_of_built_in_lists_have_no_kind_and_others_have(api, ask):
    api.put(worker_status_object("w", {}))
    _, nodes = await ask("GET", NODES)
    _, statuses = await ask("GET", CRS)
    assert "kind" not in nodes["items"][0]
    assert statuses["items"][0]["kind"] == "WorkerStatus"


async def test_the_cache_makes_no_pages_and_versions_may_be_too_large(api, ask):
    _, cached = await ask("GET", NODES, limit="2", resourceVersion="0")
    assert len(cached["items"]) == 5
    query = {"resourceVersion": "99999", "resourceVersionMatch": "NotOlderThan"}
    status, refusal = await ask("GET", NODES, **query)
    assert (status, refusal["reason"]) == (504, "Timeout")
    assert refusal["details"]["retryAfterSeconds"] == 1


async def test_old_tokens_and_versions_are_gone(api, ask, watch):
    _, first = await ask("GET", NODES, limit="2")
    api.put(node_object("n9"))
    api.compact()
    status, refusal = await ask("GET", NODES, **{"continue": first["metadata"]["continue"]})
    assert (status, refusal["reason"], refusal["kind"]) == (410, "Expired", "Status")
    version = first["metadata"]["resourceVersion"]
    (event,) = await watch(NODES, 9, resourceVersion=version)
    assert (event["type"], event["object"]["code"]) == ("ERROR", 410)


async def test_history_is_bounded():
    async with ApiServerDouble(ApiServerConfig(history_kept=3)) as api:
        api.put(node_object("n"))
        version = int(api.version)
        for number in range(10):
            api.edit("Node", "n", {"metadata": {"labels": {"a": str(number)}}})
        assert api._store.is_gone(version)
        assert not api._store.is_gone(int(api.version))


async def test_a_watch_begins_after_its_version(api, watch):
    version = api.version
    api.put(node_object("new"))
    api.delete("Node", "n0")
    added, deleted = await watch(NODES, 2, resourceVersion=version)
    assert (added["type"], added["object"]["kind"]) == ("ADDED", "Node")
    assert deleted["type"] == "DELETED"
    versions = [int(e["object"]["metadata"]["resourceVersion"]) for e in (added, deleted)]
    assert versions == [int(version) + 1, int(version) + 2]


async def test_a_watch_without_a_version_sends_everything(api, watch):
    events = await watch(NODES, 5)
    assert [event["type"] for event in events] == ["ADDED"] * 5


async def test_bookmarks_come_to_those_who_ask(api, watch):
    (bookmark,) = await watch(NODES, 1, resourceVersion=api.version, allowWatchBookmarks="true")
    assert bookmark["type"] == "BOOKMARK"
    assert bookmark["object"]["metadata"]["resourceVersion"] == api.version
    assert await watch(NODES, 1, resourceVersion=api.version, timeoutSeconds="1") == []


async def test_a_version_from_the_future_is_waited_for_without_a_word(api, watch):
    query = {"resourceVersion": "999", "allowWatchBookmarks": "true", "timeoutSeconds": "1"}
    waiting = asyncio.create_task(watch(NODES, 1, **query))
    await api.wait_for_watches()
    api.put(node_object("new"))
    assert await waiting == []


async def test_objects_enter_and_leave_a_selection(api, watch):
    version = api.version
    api.put(pod_object("p"))
    api.bind("p", "n1")
    api.edit("Pod", "p", {"status": {"phase": "Succeeded"}})
    query = {"fieldSelector": "spec.nodeName=n1,status.phase!=Succeeded"}
    events = await watch(PODS, 2, resourceVersion=version, **query)
    assert [event["type"] for event in events] == ["ADDED", "DELETED"]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ("role=prefill", "a"),
        ("role!=prefill", "bc"),
        ("role", "ab"),
        ("!role", "c"),
        ("role in (prefill, decode),zone==x", "a"),
        ("role notin (prefill)", "bc"),
    ],
)
async def test_label_selectors(ask, api, labels, names):
    for name, given in {
        "a": {"role": "prefill", "zone": "x"},
        "b": {"role": "decode"},
        "c": {},
    }.items():
        api.put(pod_object(name, labels=given))
    _, found = await ask("GET", PODS, labelSelector=labels)
    assert "".join(item["metadata"]["name"] for item in found["items"]) == names


async def test_field_selectors_that_are_not_served(ask):
    status, refusal = await ask("GET", PODS, fieldSelector="spec.foo=1")
    assert (status, refusal["reason"]) == (400, "BadRequest")


async def test_a_patch_without_effect_makes_no_version(api, ask):
    patch = {"metadata": {"annotations": {"a": "b"}}}
    for _ in range(2):
        status, node = await ask(
            "PATCH", f"{NODES}/n1", body=patch, kind="application/merge-patch+json"
        )
        assert (status, node["metadata"]["annotations"]) == (200, {"a": "b"})
        assert node["metadata"]["resourceVersion"] == api.version
    version = api.version
    await ask(
        "PATCH", f"{NODES}/n1", body={"status": {"x": 1}}, kind="application/merge-patch+json"
    )
    assert api.version == version  # a status is changed at /status only


async def test_apply_owns_fields_and_removes_those_left_out(ask):
    async def apply(manager, labels, **query):
        return await ask(
            "PATCH",
            f"{NODES}/n1",
            body={"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "labels": labels}},
            kind="application/apply-patch+yaml",
            fieldManager=manager,
            **query,
        )

    await apply("one", {"a": "1", "b": "1"})
    status, refusal = await apply("two", {"a": "2"})
    assert (status, refusal["reason"]) == (409, "Conflict")
    assert refusal["details"]["causes"][0]["field"] == ".metadata.labels.a"
    status, node = await apply("two", {"a": "2"}, force="true")
    assert (status, node["metadata"]["labels"]["a"]) == (200, "2")
    _, node = await apply("one", {})
    assert "b" not in node["metadata"]["labels"]
    assert node["metadata"]["labels"]["a"] == "2"
    assert "kubernetes.io/hostname" in node["metadata"]["labels"]
    assert [entry["manager"] for entry in node["metadata"]["managedFields"]] == ["two"]


async def test_conditions_are_applied_by_type(api, ask):
    async def apply(manager, *conditions):
        body = {"metadata": {"name": "n1"}, "status": {"conditions": list(conditions)}}
        query = {"fieldManager": manager, "force": "true"}
        return await ask(
            "PATCH", f"{NODES}/n1/status", body=body, kind="application/apply-patch+yaml", **query
        )

    await apply("agent", {"type": "X", "status": "True"}, {"type": "Y", "status": "True"})
    _, node = await apply("agent", {"type": "X", "status": "False"})
    conditions = {item["type"]: item["status"] for item in node["status"]["conditions"]}
    assert conditions == {"Ready": "True", "X": "False"}


async def test_apply_creates_what_is_not_there_but_no_status_of_it(api, ask):
    body = {"apiVersion": "nearkv.io/v1alpha1", "kind": "WorkerStatus", "metadata": {"name": "w"}}
    query = {"fieldManager": "agent", "kind": "application/apply-patch+yaml"}
    status, _ = await ask("PATCH", f"{CRS}/w/status", body=body | {"status": {"a": 1}}, **query)
    assert status == 404
    status, made = await ask("PATCH", f"{CRS}/w", body=body, **query)
    assert (status, made["metadata"]["namespace"]) == (200, "default")
    _, made = await ask("PATCH", f"{CRS}/w/status", body=body | {"status": {"a": 1}}, **query)
    assert made["status"] == {"a": 1}


async def test_pods_are_created_bound_once_and_deleted(ask, api):
    path = "/api/v1/namespaces/default/pods"
    assert (await ask("POST", path, body=pod_object("p")))[0] == 201
    assert (await ask("POST", path, body=pod_object("p")))[0] == 409
    binding = {"target": {"kind": "Node", "name": "n1"}}
    assert (await ask("POST", f"{path}/p/binding", body=binding))[0] == 201
    status, refusal = await ask("POST", f"{path}/p/binding", body=binding)
    assert (status, refusal["reason"]) == (409, "Conflict")
    assert api.get("Pod", "p")["spec"]["nodeName"] == "n1"
    assert (await ask("DELETE", f"{path}/p"))[0] == 200
    assert (await ask("GET", f"{path}/p"))[0] == 404


async def test_tokens_and_verbs(api, ask):
    api.accept_tokens("secret")
    assert (await ask("GET", NODES))[0] == 401
    api.accept_tokens()
    api.allow({"nodes": ["list"]})
    assert (await ask("GET", NODES))[0] == 200
    status, refusal = await ask("GET", NODES, watch="true")
    assert (status, refusal["reason"]) == (403, "Forbidden")
    assert api.record.rules == {("list", "nodes"), ("watch", "nodes")}


async def test_faults_hit_what_they_name_and_end(api, ask):
    api.inject(Faults(verbs=("list",), resources=("nodes",), skip=1, times=1, status=429))
    assert [(await ask("GET", NODES))[0] for _ in range(3)] == [200, 429, 200]
    api.inject(Faults(status=500))
    assert (await ask("GET", PODS))[0] == 500
    api.inject(Faults())
    assert (await ask("GET", PODS))[0] == 200


async def test_what_is_not_served_is_not_found(ask):
    for path in ("/", "/api/v1/secrets", "/apis/nearkv.io/v1/workerstatuses", "/api/v1/pods/p"):
        assert (await ask("GET", path))[0] == 404


async def test_objects_and_port_outlive_a_restart(api, ask):
    url, version = api.url, api.version
    await api.restart()
    assert (api.url, api.version) == (url, version)
    assert len((await ask("GET", NODES))[1]["items"]) == 5
