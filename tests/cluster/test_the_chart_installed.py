"""The chart on a real kube-apiserver with RBAC: what it makes is taken, and its rights suffice.

Skipped where ``KUBE_BIN_DIR`` has no binaries.
"""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from tempfile import TemporaryDirectory

import pytest
import pytest_asyncio

from nearkv.agent.app import build_app as build_agent
from nearkv.extender.app import READINESS
from nearkv.extender.app import build_app as build_extender
from nearkv.extender.settings import ExtenderSettings
from nearkv.ingress.agent_watching import AgentWatch
from nearkv.ingress.settings import AgentServiceSettings
from nearkv.kube.access import ApiAccess
from nearkv.serving import running
from tests.cluster.binaries import VARIABLE, find_binaries
from tests.cluster.installed import MERGE, installed, scheduling_by_the_chart, until
from tests.deploy.chart import NAMESPACE, pods_of, profile, render, settings_of
from tests.deploy.test_rbac import agent_settings
from tests.integration.scheduling_scenarios import one_of_fifty
from tests.integration.scheduling_site import site_over
from tests.integration.stack import ANY_PORT, eventually

pytestmark = [
    pytest.mark.skipif(not find_binaries().usable, reason=f"{VARIABLE} has no binaries"),
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]
NODE, OTHER = "n1", "n2"
STRICT = "strict"
POD_SECURITY = "pod-security.kubernetes.io"
AGENT = "nearkv-agent"
WAKE = "nearkv.io/room-changed-at"
NOT_SERVED = {"ServiceMonitor", "PodMonitor", "PrometheusRule", "Certificate"}
"""Kinds of the Prometheus operator and of cert-manager, which are not installed here."""


@pytest.fixture(scope="module")
def chart():
    return render(profile("default"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(chart):
    async with installed(find_binaries(), chart) as cluster:
        for name in (NODE, OTHER):
            await cluster.add_node(name)
        # GPU operators make it; without it, the API server refuses the agents' pods.
        runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": "nvidia"}
        await cluster.apply(runtime | {"metadata": {"name": "nvidia"}})
        await cluster.add_namespace("nearkv-agents")
        await cluster.add_namespace(STRICT, **{f"{POD_SECURITY}/enforce": "restricted"})
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agent_token(cluster):
    """A token as it is mounted into the agent's pod on the first node."""
    pod = await cluster.add_pod("agent-n1", namespace=NAMESPACE, node=NODE, account=AGENT, gpus=0)
    return await cluster.token(AGENT, pod)


# -- What the chart makes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["default", "tls", "picker", "rdma", "large", "agents", "restricted"]
)
async def test_all_that_is_rendered_passes_a_strict_dry_run(cluster, name):
    for each in render(profile(name)).objects:
        if each["kind"] in NOT_SERVED:
            continue
        answer = await cluster.apply(each, dry_run=True)
        assert answer.status < 300, f"{each['kind']}/{each['metadata']['name']}: {answer.message}"


@pytest.mark.parametrize("name", ["restricted", "agents", "large"])
async def test_a_restricted_namespace_takes_all_pods_but_agents(cluster, name):
    for owner, spec in pods_of(render(profile(name))).items():
        strict, other = [await try_pod(cluster, spec, where) for where in (STRICT, NAMESPACE)]
        assert other == "", owner
        if owner == f"DaemonSet/{AGENT}":
            assert 'violates PodSecurity "restricted' in strict
        else:
            assert strict == "", owner


async def try_pod(cluster, spec, namespace):
    """Return why a namespace refuses a pod, empty where it takes it."""
    head = {"apiVersion": "v1", "kind": "Pod", "spec": spec}
    metadata = {"name": "tried", "namespace": namespace}
    return (await cluster.apply(head | {"metadata": metadata}, dry_run=True)).message


async def test_a_dry_run_finds_a_misspelt_field(cluster, chart):
    broken = dict(chart.one("DaemonSet", AGENT))
    broken["spec"] = broken["spec"] | {"minReadySecond": 1}
    assert "minReadySecond" in (await cluster.apply(broken, dry_run=True)).message


# -- The agent -------------------------------------------------------------------------------------


@pytest.fixture
def short_folder():
    """A folder for a Unix socket, whose path may not be long."""
    with TemporaryDirectory(prefix="nkv-", dir="/tmp") as folder:
        yield folder


async def test_the_agent_reports_with_the_charts_rights_alone(
    cluster, chart, agent_token, short_folder
):
    await cluster.add_pod(
        "engine",
        node=NODE,
        labels={"nearkv.io/group": "g"},
        annotations={"nearkv.io/port": "1"},
        pod_ip="127.0.0.1",
    )
    kubeconfig = cluster.kubeconfig("agent", agent_token)
    settings = agent_settings(chart, kubeconfig, short_folder)
    path = "/apis/nearkv.io/v1alpha1/namespaces/default/workerstatuses/engine"

    async def reported():
        answer = await cluster.ask("GET", path)
        assert answer.status == 200, "it was not made yet"
        assert answer.body.get("status", {}).get("node") == NODE

    async with running(build_agent(settings), settings.listen):
        await until(reported, what="the agent reports on its engine")
    assert (await cluster.ask("GET", "/api/v1/secrets", token=agent_token)).status == 403
    assert (await cluster.ask("GET", path, token=agent_token)).status == 403


def status_of(node):
    conditions = [
        {
            "type": kind,
            "status": "Unknown",
            "reason": "Test",
            "message": "",
            "lastTransitionTime": "2026-11-30T00:00:00Z",
        }
        for kind in ("Ready", "Fresh", "CacheParity", "TransferReady", "KVPressure")
    ]
    return {
        "observedAt": "2026-11-30T00:00:00Z",
        "intervalSeconds": 60,
        "node": node,
        "role": "both",
        "conditions": conditions,
    }


async def report_on(cluster, node, token):
    """Write a WorkerStatus that speaks of a node; return why that was refused, if it was."""
    head = {"apiVersion": "nearkv.io/v1alpha1", "kind": "WorkerStatus"}
    path = "/apis/nearkv.io/v1alpha1/namespaces/default/workerstatuses/policy"
    query = "fieldManager=nearkv-agent&force=true"
    for where, more in (("", {}), ("/status", {"status": status_of(node)})):
        body = {**head, "metadata": {"name": "policy", "namespace": "default"}, **more}
        kind = "application/apply-patch+yaml"
        answer = await cluster.ask("PATCH", f"{path}{where}?{query}", body, token=token, kind=kind)
        if answer.message:
            return answer.message
    return ""


async def test_an_agent_reports_on_its_own_node_only(cluster, agent_token):
    async def is_refused():
        message = await report_on(cluster, OTHER, agent_token)
        assert "an agent may report on its own node only" in message

    await until(is_refused, what="the policy is in force")
    assert await report_on(cluster, NODE, agent_token) == ""


async def test_a_token_that_no_pod_has_reports_on_nothing(cluster):
    unbound = await cluster.token(AGENT)

    async def is_refused():
        assert "its own node only" in await report_on(cluster, NODE, unbound)

    await until(is_refused, what="the policy is in force")


async def change(cluster, node, patch, token):
    path = f"/api/v1/nodes/{node}"
    return (await cluster.ask("PATCH", path, patch, token=token, kind=MERGE)).message


def annotated(**annotations):
    names = {"wake": WAKE, "other": "example.com/other"}
    return {"metadata": {"annotations": {names[key]: each for key, each in annotations.items()}}}


@pytest.mark.parametrize(
    ("node", "patch", "message"),
    [
        (OTHER, annotated(wake="1"), "an agent may change its own Node only"),
        (NODE, annotated(other="1"), "no annotation of its Node but nearkv.io/room-changed-at"),
        (NODE, {"metadata": {"labels": {"zone": "b"}}}, "may not change labels"),
        (NODE, {"metadata": {"finalizers": ["a.b/c"]}}, "may not change finalizers"),
        (NODE, {"spec": {"unschedulable": True}}, "neither spec nor status"),
        (NODE, {"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}}, "neither spec"),
    ],
    ids=["other-node", "annotation", "label", "finalizer", "cordon", "taint"],
)
async def test_an_agent_changes_nothing_but_one_annotation_of_its_node(
    cluster, agent_token, node, patch, message
):
    async def is_refused():
        assert message in await change(cluster, node, patch, agent_token)

    await until(is_refused, what="the policy is in force")
    assert await change(cluster, NODE, annotated(wake="2"), agent_token) == ""
    path = f"/api/v1/nodes/{NODE}/status"
    status = {"status": {"phase": "Terminated"}}
    assert (await cluster.ask("PATCH", path, status, token=agent_token, kind=MERGE)).status == 403


async def test_the_policies_are_no_concern_of_others(cluster, agent_token):
    assert agent_token
    admin = {"metadata": {"annotations": {"example.com/other": "1"}}}
    await cluster.must("PATCH", f"/api/v1/nodes/{OTHER}", admin, kind=MERGE)
    await cluster.must("PATCH", f"/api/v1/nodes/{NODE}", {"spec": {}}, kind=MERGE)


# -- Ingress and extender --------------------------------------------------------------------------


def slice_object(name, address):
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "labels": {"kubernetes.io/service-name": "nearkv-agent"},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
        "ports": [{"name": "state", "port": 9470, "protocol": "TCP"}],
    }


@asynccontextmanager
async def following(kubeconfig, service):
    """Follow a Service's agents; yields what is known, newest last, and what failed."""
    seen, failures = [], Counter()
    watch = AgentWatch(
        ApiAccess.automatic(str(kubeconfig)),
        service,
        on_agents=lambda urls: seen.append(sorted(urls)),
        count_failure=lambda reason: failures.update([reason]),
    )
    task = asyncio.create_task(watch.run())
    try:
        yield seen, failures
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_ingress_follows_agents_with_the_charts_rights_alone(cluster, chart):
    kubeconfig = cluster.kubeconfig("ingress", await cluster.token("nearkv-ingress"))
    given = settings_of(chart, "ingress")["agent_service"]
    slices = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
    async with following(kubeconfig, AgentServiceSettings.model_validate(given)) as (seen, failed):
        await eventually(lambda: seen == [[]], what="there is none at first", seconds=30)
        await cluster.must("POST", slices, slice_object("a", "10.0.0.1"))
        await eventually(lambda: seen[-1] == ["http://10.0.0.1:9470"], what="one comes")
        moved = slice_object("a", "10.0.0.2")
        await cluster.apply(moved)
        await eventually(lambda: seen[-1] == ["http://10.0.0.2:9470"], what="it moves")
        await cluster.must("DELETE", f"{slices}/a")
        await eventually(lambda: seen[-1] == [], what="it goes")
        assert failed == {}
    elsewhere = AgentServiceSettings.model_validate({**given, "namespace": "default"})
    async with following(kubeconfig, elsewhere) as (seen, failed):
        await eventually(lambda: failed["forbidden"], what="it may look nowhere else", seconds=30)
        assert seen == []


async def test_the_extender_watches_with_the_charts_rights_alone(cluster):
    kubeconfig = cluster.kubeconfig("extender", await cluster.token("nearkv-extender"))
    app = build_extender(ExtenderSettings(kubernetes={"kubeconfig": kubeconfig}))
    async with running(app, ANY_PORT):
        await eventually(lambda: app[READINESS].is_ready, what="it knows all nodes", seconds=30)


# -- The scheduler ---------------------------------------------------------------------------------


async def test_the_charts_scheduler_and_extender_place_a_pod_by_their_own_accounts(chart, tmp_path):
    """A cluster of its own, since the nodes of the others would count."""
    async with installed(find_binaries(), chart) as cluster:
        names = {"scheduler": "nearkv-scheduler", "extender": "nearkv-extender"}
        files = {
            name: cluster.kubeconfig(name, await cluster.token(account))
            for name, account in names.items()
        }
        plane = scheduling_by_the_chart(
            cluster, find_binaries(), chart, tmp_path, files["scheduler"]
        )
        async with site_over(plane) as site:
            site.extender_arguments = ("--kubernetes.kubeconfig", str(files["extender"]))
            await one_of_fifty(site)
        # It led by a lease of its own, not by that of the cluster's scheduler.
        leases = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
        await cluster.must("GET", f"{leases}/llm-scheduler")
