"""What is granted is what the programs ask for: no right is missing, none too many.

The programs run against the double of the API server, which allows what the chart grants and
nothing else.
"""

from contextlib import asynccontextmanager
from tempfile import TemporaryDirectory

import pytest

from nearkv.agent.app import build_app as build_agent
from nearkv.agent.gpu.driver_upgrade import UPGRADE_LABEL
from nearkv.agent.settings import AgentSettings
from nearkv.extender.app import build_app as build_extender
from nearkv.extender.settings import ExtenderSettings
from nearkv.ingress.app import build_app as build_ingress
from nearkv.ingress.settings import IngressSettings
from nearkv.node_summary import DeviceSummary
from nearkv.serving import running
from tests.agent.kubernetes.things import SLICES, slice_of
from tests.deploy.chart import NAMESPACE, ROOT, profile, render, settings_of
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


def roles_of(rendered, component):
    """Return the roles that are bound to a component's ServiceAccount, by namespace."""
    subject = {"kind": "ServiceAccount", "name": f"nearkv-{component}", "namespace": NAMESPACE}
    roles = {}
    for each in rendered.kinds("ClusterRoleBinding", "RoleBinding"):
        if subject in each["subjects"]:
            role = rendered.one(each["roleRef"]["kind"], each["roleRef"]["name"])
            namespace = each["metadata"].get("namespace", "")
            assert role["metadata"].get("namespace", "") == namespace
            assert namespace not in roles, "one role in each place, and none of Kubernetes' own"
            roles[namespace] = role
    return roles


def rights_of(role):
    """Return the rights of a role, as (verb, resource)."""
    return {
        (verb, resource)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def granted(rendered, component):
    """Return all rights of a component's ServiceAccount."""
    return {right for role in roles_of(rendered, component).values() for right in rights_of(role)}


def by_resource(rights):
    """Return rights in the form that the double takes."""
    resources = {resource for _, resource in rights}
    return {one: [verb for verb, each in rights if each == one] for one in resources}


@asynccontextmanager
async def api_server(rights):
    """Run the double with a node and an engine, allowing these rights."""
    kinds = (*ApiServerConfig().resources, SLICES)
    async with ApiServerDouble(ApiServerConfig(resources=kinds)) as api:
        api.put(node_object(NODE, labels={UPGRADE_LABEL: "upgrade-done"}))
        api.put(slice_of(NODE, 9471, namespace=NAMESPACE))
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


def agent_settings(rendered, kubeconfig, folder):
    """Return the chart's settings of an agent, with what a test needs to run it here, and fast."""
    given = settings_of(rendered, "agent")
    given |= {"node": NODE, "listen": ANY_PORT}
    given["transfer"] = {
        "socket_dir": folder,
        "peer_listen": "127.0.0.1:0",
        "peer_token": "shown",
        "paths": ["tcp"],
        "probes": {**given["transfer"]["probes"], "refresh_seconds": 0.2},
    }
    given["links"] = {"enabled": False}
    given["kubernetes"] = {"kubeconfig": str(kubeconfig)}
    given["worker_status"] = {"spread_seconds": 0}
    given["waking"] |= {"kubeconfig": str(kubeconfig), "settle_seconds": 0}
    given["summary"] = {"interval_seconds": 0.1}
    return AgentSettings.model_validate(given)


@pytest.fixture
def short_folder():
    """A folder for a Unix socket, whose path may not be long."""
    with TemporaryDirectory(prefix="nkv-", dir="/tmp") as folder:
        yield folder


async def test_the_agents_rights_are_those_that_it_uses(rendered, tmp_path, short_folder):
    made = rendered("default")
    rights = granted(made, "agent")
    broken = [DeviceSummary(id="0", health="failed")]
    healed = [DeviceSummary(id="0", health="ok", total_bytes=100, used_bytes=0)]
    # Long enough for all who look to have seen it broken.
    readings = iter([broken] * 12)
    async with api_server(rights) as api:
        kubeconfig = api.write_kubeconfig(tmp_path / "kubeconfig")
        settings = agent_settings(made, kubeconfig, short_folder)
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


@pytest.mark.parametrize("name", ["default", "picker", "tls"])
async def test_the_ingresses_rights_are_those_that_it_uses(rendered, name):
    made = rendered(name)
    rights = granted(made, "ingress")
    given = settings_of(made, "ingress")
    kinds = (*ApiServerConfig().resources, POOLS, SLICES)
    async with ApiServerDouble(ApiServerConfig(resources=kinds)) as api:
        if "ext_proc" in given:
            where = given["ext_proc"]["pool"]
            api.put(pool_object(where))
            where["api_server"] = api.url
            given["ext_proc"] = {"listen": ANY_PORT, "pool": where}
        given["agent_service"]["api_server"] = api.url
        given |= {"listen": ANY_PORT, "agent_tls": {}, "decisions": {}}
        api.allow(by_resource(rights))
        app = await build_ingress(IngressSettings.model_validate(given))
        async with running(app, ANY_PORT):
            await eventually(lambda: api.record.rules == rights, what="every right is used")
            assert {seen.status for seen in api.record} == {200}


def test_the_ingress_may_look_for_agents_where_they_are_and_for_its_pool_at_home(rendered):
    slices = {("list", "endpointslices"), ("watch", "endpointslices")}
    assert rights_of(roles_of(rendered("default"), "ingress")[NAMESPACE]) == slices
    elsewhere = render(
        profile("picker") | {"ingress": profile("picker")["ingress"] | {"agentService": "a.others"}}
    )
    roles = roles_of(elsewhere, "ingress")
    assert rights_of(roles["others"]) == slices
    assert roles["others"]["metadata"]["name"] == "nearkv-ingress-of-nearkv"
    assert {resource for _, resource in rights_of(roles[NAMESPACE])} == {"inferencepools", "pods"}


def pool_object(where):
    """Return an InferencePool."""
    spec = {"selector": {"matchLabels": {"app": "e"}}, "targetPorts": [{"number": 8000}]}
    kind = {"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool"}
    return {**kind, "metadata": dict(where), "spec": spec}


@pytest.mark.parametrize(
    ("values", "component", "gone"),
    [
        ({"waking": {"enabled": False}}, "agent", {("patch", "nodes")}),
        # The own Node is watched for its labels, too.
        ({"followDriverUpgrades": False}, "agent", set()),
        ({"transfer": {"enabled": False}}, "agent", {("list", "endpointslices")}),
        (
            {"followDriverUpgrades": False, "transfer": {"enabled": False}},
            "agent",
            {("list", "endpointslices"), ("list", "nodes"), ("watch", "nodes")},
        ),
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


def test_with_agents_configured_the_ingress_has_no_rights(rendered):
    assert roles_of(rendered("minimal"), "ingress") == {}


ADMINISTRATORS = (
    *("crds.yaml", "agent/admission-policy.yaml"),
    *(f"{component}/rbac.yaml" for component in ("agent", "extender", "scheduler", "ingress")),
)
"""Templates of what an administrator makes for somebody who is none (docs/install.md)."""
NOT_AN_ADMINISTRATORS = {
    "rbac": {"create": False},
    "crds": {"install": False},
    "agent": {"admissionPolicy": {"enabled": False}},
}


def test_who_is_no_administrator_installs_all_but_what_takes_one(rendered):
    whole = rendered("base")
    rest = render(profile("base") | NOT_AN_ADMINISTRATORS)
    assert all(each["metadata"]["namespace"] == NAMESPACE for each in rest.objects)
    assert not {each["kind"] for each in rest.objects} & {"Role", "RoleBinding"}
    theirs = [f"nearkv/templates/{path}" for path in ADMINISTRATORS]
    assert rest.texts.keys() == whole.texts.keys() - set(theirs)
    assert all(rest.texts[path] == whole.texts[path] for path in rest.texts)
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    for path in ADMINISTRATORS:
        assert f"--show-only templates/{path}" in page
    assert "Roles and bindings are not made by this release" in rest.notes
    assert "Roles and bindings" not in whole.notes


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
