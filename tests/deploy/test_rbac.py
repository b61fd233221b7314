"""What is granted is what the programs ask for: no right is missing, none too many.

The programs run against the double of the API server, which allows what the chart grants and
nothing else.
"""

import asyncio
from contextlib import asynccontextmanager

import pytest

from nearkv.agent.app import build_app as build_agent
from nearkv.agent.gpu.driver_upgrade import UPGRADE_LABEL
from nearkv.agent.settings import AgentSettings
from nearkv.extender.app import build_app as build_extender
from nearkv.extender.settings import ExtenderSettings
from nearkv.ingress.extproc.pool_watching import PoolWatch
from nearkv.kube.access import ApiAccess
from nearkv.node_summary import DeviceSummary
from nearkv.serving import running
from tests.deploy.chart import profile, render, settings_of
from tests.doubles.api_server import (
    ApiServerConfig,
    ApiServerDouble,
    node_object,
    pod_object,
    worker_status_object,
)
from tests.doubles.api_server.resources import Resource
from tests.integration.stack import ANY_PORT, eventually

NODE = "n1"
POOLS = Resource("InferencePool", "inferencepools", "inference.networking.k8s.io")
NOT_RECORDED = {("create", "workerstatuses")}
"""An API server wants this right, too, of whoever applies an object that is not there yet."""


def granted(rendered, component, kind="ClusterRole"):
    """Return the rights of a component's ServiceAccount, as (verb, resource)."""
    name = f"nearkv-{component}"
    bound = [
        each["roleRef"]["name"]
        for each in rendered.kinds("ClusterRoleBinding", "RoleBinding")
        if any(subject["name"] == name for subject in each["subjects"])
    ]
    assert bound == [name], "one role, and nothing of Kubernetes' own"
    return {
        (verb, resource)
        for rule in rendered.one(kind, name)["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def by_resource(rights):
    """Return rights in the form that the double takes."""
    resources = {resource for _, resource in rights}
    return {one: [verb for verb, each in rights if each == one] for one in resources}


@asynccontextmanager
async def api_server(rights):
    """Run the double with a node and an engine, allowing these rights."""
    async with ApiServerDouble() as api:
        api.put(node_object(NODE, labels={UPGRADE_LABEL: "upgrade-done"}))
        pod = pod_object(
            "engine",
            node=NODE,
            labels={"nearkv.io/group": "g"},
            annotations={"nearkv.io/port": "1"},
            pod_ip="127.0.0.1",
        )
        api.put(pod)
        api.put(worker_status_object("other", {"node": "n2"}))
        api.allow(by_resource(rights))
        yield api


def agent_settings(rendered, kubeconfig):
    """Return the chart's settings of an agent, with what a test needs to run it here, and fast."""
    given = settings_of(rendered, "agent")
    given |= {"node": NODE, "listen": ANY_PORT}
    given["transfer"] = {}
    given["links"] = {"enabled": False}
    given["kubernetes"] = {"kubeconfig": str(kubeconfig)}
    given["worker_status"] = {"spread_seconds": 0}
    given["waking"] |= {"kubeconfig": str(kubeconfig), "settle_seconds": 0}
    given["summary"] = {"interval_seconds": 0.1}
    return AgentSettings.model_validate(given)


async def test_the_agents_rights_are_those_that_it_uses(rendered, tmp_path):
    made = rendered("default")
    rights = granted(made, "agent")
    broken = [DeviceSummary(id="0", health="failed")]
    healed = [DeviceSummary(id="0", health="ok", total_bytes=100, used_bytes=0)]
    # Long enough for all who look to have seen it broken.
    readings = iter([broken] * 12)
    async with api_server(rights) as api:
        kubeconfig = api.write_kubeconfig(tmp_path / "kubeconfig")
        settings = agent_settings(made, kubeconfig)
        app = build_agent(settings, devices=lambda: next(readings, healed))
        async with running(app, settings.listen):
            used = rights - NOT_RECORDED
            await eventually(
                lambda: api.record.rules == used, what="every right is used", seconds=30
            )
            assert {seen.status for seen in api.record} <= {200, 201}


async def test_the_extenders_rights_are_those_that_it_uses(rendered, tmp_path):
    rights = granted(rendered("default"), "extender")
    async with api_server(rights) as api:
        kubeconfig = api.write_kubeconfig(tmp_path / "kubeconfig")
        settings = ExtenderSettings(kubernetes={"kubeconfig": kubeconfig})
        async with running(build_extender(settings), ANY_PORT):
            await eventually(lambda: api.record.rules == rights, what="every right is used")
            assert {seen.status for seen in api.record} == {200}


async def test_the_pickers_rights_are_those_that_it_uses(rendered):
    rights = granted(rendered("picker"), "ingress", "Role")
    where = settings_of(rendered("picker"), "ingress")["ext_proc"]["pool"]
    role = rendered("picker").one("Role", "nearkv-ingress")
    assert role["metadata"]["namespace"] == where["namespace"]
    kinds = (*ApiServerConfig().resources, POOLS)
    async with ApiServerDouble(ApiServerConfig(resources=kinds)) as api:
        api.put(pool_object(where))
        api.allow(by_resource(rights))
        async with ApiAccess.plain(api.url) as access:
            watch = PoolWatch(access, **where, count_failure=lambda _: None)
            following = asyncio.create_task(watch.run())
            await eventually(lambda: api.record.rules == rights, what="every right is used")
            assert {seen.status for seen in api.record} == {200}
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


def pool_object(where):
    """Return an InferencePool."""
    spec = {"selector": {"matchLabels": {"app": "e"}}, "targetPorts": [{"number": 8000}]}
    kind = {"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool"}
    return {**kind, "metadata": dict(where), "spec": spec}


@pytest.mark.parametrize(
    ("values", "component", "gone"),
    [
        ({"waking": {"enabled": False}}, "agent", {("patch", "nodes")}),
        ({"followDriverUpgrades": False}, "agent", {("list", "nodes"), ("watch", "nodes")}),
        (
            {"workerStatus": {"enabled": False}},
            "agent",
            {
                *(("create", "workerstatuses"), ("patch", "workerstatuses")),
                ("patch", "workerstatuses/status"),
            },
        ),
        (
            {"workerStatus": {"enabled": False}},
            "extender",
            {("list", "workerstatuses"), ("watch", "workerstatuses")},
        ),
    ],
)
def test_what_is_switched_off_needs_no_right(rendered, values, component, gone):
    fewer = granted(render(profile("base") | {"agent": values}), component)
    assert granted(rendered("base"), component) - fewer == gone


def test_the_ingress_has_no_rights(rendered):
    subjects = {
        subject["name"]
        for each in rendered("default").kinds("ClusterRoleBinding", "RoleBinding")
        for subject in each["subjects"]
    }
    assert subjects == {"nearkv-agent", "nearkv-extender", "nearkv-scheduler"}


def test_nothing_is_granted_by_wildcard_and_no_secret_may_be_read(rendered):
    for each in rendered("default").kinds("ClusterRole", "Role"):
        for rule in each["rules"]:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert "secrets" not in rule["resources"]


def test_the_scheduler_has_kubernetes_roles_and_its_own_lease(rendered):
    made = rendered("default")
    bindings = made.kinds("ClusterRoleBinding", "RoleBinding")
    roles = {
        each["roleRef"]["name"]
        for each in bindings
        if each["subjects"][0]["name"] == "nearkv-scheduler"
    }
    assert roles == {
        *("system:kube-scheduler", "system:volume-scheduler", "system:auth-delegator"),
        *("extension-apiserver-authentication-reader", "nearkv-scheduler-lease"),
    }
    create, use = made.one("Role", "nearkv-scheduler-lease")["rules"]
    assert (create["verbs"], use["verbs"]) == (["create"], ["get", "update"])
    assert use["resourceNames"] == ["llm-scheduler"]


POLICIES = {
    "agent-own-node": {("UPDATE", "nodes"), ("UPDATE", "nodes/status")},
    "agent-own-status": {
        *(("CREATE", "workerstatuses"), ("UPDATE", "workerstatuses")),
        *(("CREATE", "workerstatuses/status"), ("UPDATE", "workerstatuses/status")),
    },
}


def test_all_that_agents_may_write_is_under_a_policy(rendered):
    made = rendered("default")
    covered = set()
    for name, rules in POLICIES.items():
        policy = made.one("ValidatingAdmissionPolicy", f"nearkv-{name}")["spec"]
        assert policy["failurePolicy"] == "Fail"
        found = {
            (verb, resource)
            for rule in policy["matchConstraints"]["resourceRules"]
            for resource in rule["resources"]
            for verb in rule["operations"]
        }
        assert found == rules
        covered |= found
        binding = made.one("ValidatingAdmissionPolicyBinding", f"nearkv-{name}")["spec"]
        assert binding == {"policyName": f"nearkv-{name}", "validationActions": ["Deny"]}
    operations = {"patch": "UPDATE", "create": "CREATE"}
    written = {
        (operations[verb], resource)
        for verb, resource in granted(made, "agent")
        if verb in operations
    }
    assert written <= covered
