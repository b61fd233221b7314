"""What pods may do: nothing by default, and each right beyond that for a reason that is written."""

import pytest

from tests.deploy.chart import (
    CHART,
    containers_of,
    pods_of,
    profile,
    profile_names,
    render,
    settings_of,
)

PROFILES = profile_names()
EVERY = pytest.mark.parametrize("name", PROFILES)
AGENT = "DaemonSet/nearkv-agent"
SOUND = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


@EVERY
def test_all_pods_but_the_agent_are_restricted(rendered, name):
    for owner, pod in pods_of(rendered(name)).items():
        if owner == AGENT:
            continue
        assert pod["securityContext"]["runAsNonRoot"] is True, owner
        assert pod["securityContext"]["runAsUser"] > 0, owner
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, owner
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys(), owner
        assert all("hostPath" not in each for each in pod.get("volumes", [])), owner
        for container in containers_of(pod):
            assert container["securityContext"] == SOUND, (owner, container["name"])


def agent_rights(rendered):
    """Return what the agent has beyond a restricted pod, as short words."""
    pod = pods_of(rendered)[AGENT]
    context = pod["securityContext"]
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostPID", "hostIPC"} & pod.keys()
    rights = {f"mount {each['hostPath']['path']}" for each in pod["volumes"] if "hostPath" in each}
    rights |= {"root"} if context["runAsUser"] == 0 else set()
    rights |= {"host network"} if pod.get("hostNetwork") else set()
    for container in containers_of(pod):
        own = container["securityContext"]
        assert own["readOnlyRootFilesystem"] is True
        whose = "" if container["name"] == "agent" else f"{container['name']}: "
        if own.get("privileged"):
            rights.add(f"{whose}privileged")
            continue
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"]["drop"] == ["ALL"]
        rights |= {f"{whose}{each}" for each in own["capabilities"].get("add", ())}
        rights |= {f"{whose}root"} if own.get("runAsUser") == 0 else set()
    return rights


WITHOUT_AGENTS = {"picker", "restricted"}
USUAL = {"root", "mount /run/nearkv", "mount /sys", "mount /var/lib/kubelet/pod-resources"}
GPU_LESS = {"root", "mount /run/nearkv", "mount /sys"}


@pytest.mark.parametrize(
    ("name", "rights"),
    [
        ("default", USUAL),
        ("base", USUAL),
        ("tls", USUAL),
        ("large", USUAL),
        ("agents", USUAL),
        ("canary", USUAL - {"mount /run/nearkv"} | {"mount /run/nearkv-canary"}),
        ("kind", GPU_LESS),
        ("rdma", USUAL | {"IPC_LOCK", "host network"}),
        ("privileged", USUAL | {"privileged", "host network", "mount /dev/infiniband"}),
        (
            "minimal",
            {
                *("mount /run/nearkv", "mount /sys"),
                *("own-socket-folder: root", "own-socket-folder: CHOWN"),
            },
        ),
    ],
)
def test_the_agent_has_these_rights_and_no_more(rendered, name, rights):
    assert agent_rights(rendered(name)) == rights


def test_every_profile_with_an_agent_is_among_those():
    names = {
        name
        for mark in test_the_agent_has_these_rights_and_no_more.pytestmark
        for name, _ in mark.args[1]
    }
    assert names == set(PROFILES) - WITHOUT_AGENTS


RIGHTS_IN_THE_TEMPLATE = (
    *("runAsUser: 0", "privileged: true", "add: [IPC_LOCK]", "hostNetwork: true"),
    *("runAsUser: 0\n            allow", "path: /sys,", "path: /dev/infiniband,"),
    *("path: /var/lib/kubelet/pod-resources,", "socketDir }}, type: DirectoryOrCreate"),
    *("runtimeClassName: {{", "runAsGroup:", "automountServiceAccountToken: true"),
)


@pytest.mark.parametrize("right", RIGHTS_IN_THE_TEMPLATE)
def test_a_comment_before_each_right_says_why(right):
    text = (CHART / "templates" / "agent" / "daemonset.yaml").read_text(encoding="utf-8")
    assert right in text
    lines = text[: text.index(right)].splitlines()[-5:]
    assert any(line.lstrip().startswith("# ") for line in lines), right


@EVERY
def test_tokens_are_mounted_where_the_api_server_is_asked_only(rendered, name):
    asking = {AGENT, "Deployment/nearkv-extender", "Deployment/nearkv-scheduler"}
    ingress = profile(name).get("ingress", {})
    if ingress.get("extProc", {}).get("enabled") or not ingress.get("agents"):
        asking.add("Deployment/nearkv-ingress")
    for owner, pod in pods_of(rendered(name)).items():
        assert pod["automountServiceAccountToken"] is (owner in asking), owner
        assert pod["enableServiceLinks"] is False, owner
    for each in rendered(name).kinds("ServiceAccount"):
        assert each["automountServiceAccountToken"] is False


@EVERY
def test_all_containers_have_requests_and_a_memory_limit(rendered, name):
    for owner, pod in pods_of(rendered(name)).items():
        for container in containers_of(pod):
            resources = container["resources"]
            assert {"cpu", "memory"} <= resources["requests"].keys(), owner
            assert "memory" in resources["limits"], owner


@EVERY
def test_servers_are_probed_for_life_and_readiness(rendered, name):
    for owner, pod in pods_of(rendered(name)).items():
        if owner.startswith("Pod/"):
            continue
        for container in pod["containers"]:
            names = {each["name"] for each in container["ports"]}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert container[probe]["httpGet"]["port"] in names, owner
            if "scheduler" not in owner:
                # Liveness must not depend on peers, or a partition restarts everything.
                assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
                assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


@EVERY
def test_images_are_named_exactly(rendered, name):
    for owner, pod in pods_of(rendered(name)).items():
        for container in containers_of(pod):
            image = container["image"]
            assert "@sha256:" in image or (":" in image and not image.endswith(":latest")), owner


def test_replicas_stay_apart_and_are_not_drained_together(rendered):
    made = rendered("large")
    for component in ("extender", "scheduler", "ingress"):
        pod = pods_of(made)[f"Deployment/nearkv-{component}"]
        (term,) = pod["affinity"]["podAntiAffinity"][
            "preferredDuringSchedulingIgnoredDuringExecution"
        ]
        selected = term["podAffinityTerm"]["labelSelector"]["matchLabels"]
        assert selected["app.kubernetes.io/component"] == component
        budget = made.one("PodDisruptionBudget", f"nearkv-{component}")["spec"]
        assert budget["selector"]["matchLabels"] == selected


def test_one_replica_has_no_budget_that_would_block_a_drain(rendered):
    assert rendered("kind").kinds("PodDisruptionBudget") == []


def test_agents_are_replaced_one_by_one_and_never_two_on_a_node(rendered):
    for name, unavailable in (("default", 1), ("large", "10%")):
        strategy = rendered(name).one("DaemonSet", "nearkv-agent")["spec"]["updateStrategy"]
        assert strategy["rollingUpdate"] == {"maxUnavailable": unavailable, "maxSurge": 0}


def test_the_agent_keeps_its_place_on_a_full_node(rendered):
    pod = pods_of(rendered("default"))[AGENT]
    assert pod["priorityClassName"] == "system-node-critical"
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod[
        "tolerations"
    ]


def test_agents_take_no_gpu_from_anybody(rendered):
    resources = pods_of(rendered("default"))[AGENT]["containers"][0]["resources"]
    assert not any("nvidia.com" in key for part in resources.values() for key in part)


GUARDED = [name for name in PROFILES if profile(name).get("networkPolicy", {}).get("enabled", True)]


@pytest.mark.parametrize("name", GUARDED)
def test_every_pod_has_a_network_policy_that_selects_it(rendered, name):
    policies = rendered(name).kinds("NetworkPolicy")
    for each in rendered(name).kinds("Deployment", "DaemonSet", "Pod"):
        template = each if each["kind"] == "Pod" else each["spec"]["template"]
        labels = template["metadata"]["labels"].items()
        selecting = [
            policy
            for policy in policies
            if policy["spec"]["podSelector"]["matchLabels"].items() <= labels
        ]
        # NetworkPolicies do not reach pods on the node's network.
        assert len(selecting) == (0 if template["spec"].get("hostNetwork") else 1)
        for policy in selecting:
            assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
            if each["kind"] == "Pod":  # there before the pod that needs it
                hooks = [one["metadata"]["annotations"] for one in (policy, each)]
                weights = [int(hook.get("helm.sh/hook-weight", "0")) for hook in hooks]
                assert {hook["helm.sh/hook"] for hook in hooks} == {"test"}
                assert weights[0] < weights[1]


def policy(rendered, component):
    """Return a policy, as who may come in by which port, and where it may go."""
    spec = rendered.one("NetworkPolicy", f"nearkv-{component}")["spec"]

    def words(peer):
        labels = peer.get("podSelector", {}).get("matchLabels", {})
        component = labels.get("app.kubernetes.io/component")
        namespaces = peer.get("namespaceSelector", {}).get("matchLabels", {})
        expressions = peer.get("podSelector", {}).get("matchExpressions", [])
        engines = "engines" if expressions else ""
        return (
            component
            or engines
            or next(iter(namespaces.values()), "")
            or peer.get("ipBlock", {}).get("cidr", "any")
        )

    def read(rules, side):
        return {
            (words(peer), port.get("port"))
            for rule in rules
            for peer in rule.get(side, [{}])
            for port in rule.get("ports", [{}])
        }

    return read(spec["ingress"], "from"), read(spec["egress"], "to")


def test_who_talks_to_whom(rendered):
    made = rendered("default")
    outside = {("any", 53), ("any", 443), ("any", 6443)}
    came, goes = policy(made, "scheduler")
    assert came == {("monitoring", "https")}
    assert goes == outside | {("extender", "extender")}
    came, goes = policy(made, "extender")
    assert came == {("scheduler", "extender"), ("test", "extender"), ("monitoring", "extender")}
    assert goes == outside | {("agent", 9470)}
    came, goes = policy(made, "agent")
    assert came == {
        *(("ingress", "state"), ("extender", "state"), ("test", "state"), ("monitoring", "state")),
        ("agent", None),
    }
    assert goes == outside | {("engines", None), ("agent", None)}
    came, goes = policy(made, "ingress")
    assert came == {("any", "http")}
    assert goes == outside | {("agent", 9470), ("engines", None)}
    came, goes = policy(made, "test")
    assert came == set()
    assert goes == {("any", 53), ("agent", 9470), ("extender", "extender"), ("ingress", "http")}
    # One that has its agents by settings asks the API server nothing.
    told = render(profile("base") | {"ingress": {"agents": ["http://10.0.0.7:9470"]}})
    assert not {("any", 443), ("any", 6443)} & policy(told, "ingress")[1]


def test_policies_can_be_narrowed(rendered):
    made = rendered("large")
    came, goes = policy(made, "ingress")
    assert came == {("gateway", "http"), ("test", "http"), ("monitoring", "http")}
    assert {("engines", 8000), ("engines", 5557)} <= goes
    assert ("10.0.0.1/32", 443) in policy(made, "extender")[1]


def test_names_are_looked_up_where_the_cluster_says():
    to = [{"ipBlock": {"cidr": "169.254.20.10/32"}}]
    values = profile("base") | {"networkPolicy": {"dns": {"to": to, "ports": [5353]}}}
    made = render(values)
    for component in ("agent", "extender", "scheduler", "ingress", "test"):
        (_, egress) = policy(made, component)
        assert ("169.254.20.10/32", 5353) in egress
        assert ("any", 53) not in egress


RESTRICTED_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
    *("persistentVolumeClaim", "projected", "secret"),
}


def test_a_restricted_namespace_takes_all_but_the_agents(rendered):
    """With what is checked of all profiles above: every rule of the standard."""
    pods = pods_of(rendered("restricted"))
    assert AGENT not in pods
    assert {name.rpartition("-")[2] for name in pods} == {"extender", "scheduler", "ingress"}
    for owner, pod in pods.items():
        for each in pod["volumes"]:
            assert set(each) - {"name"} <= RESTRICTED_VOLUMES, owner
        for container in containers_of(pod):
            assert all("hostPort" not in port for port in container.get("ports", ())), owner


def test_agents_of_a_namespace_of_their_own_are_found_and_let_the_others_in(rendered):
    agents, others = rendered("agents"), rendered("restricted")
    assert set(pods_of(agents)) == {AGENT, "Pod/nearkv-test-agent"}
    assert agents.kinds("CustomResourceDefinition")
    assert not others.kinds("CustomResourceDefinition")
    service = settings_of(others, "ingress")["agent_service"]
    assert service["namespace"] == "nearkv-agents"
    assert agents.one("Service", service["name"])
    found = settings_of(others, "extender")["agents"]
    assert found["namespace"] == service["namespace"]
    key, _, value = found["selector"].partition("=")
    template = agents.one("DaemonSet", "nearkv-agent")["spec"]["template"]
    assert template["metadata"]["labels"][key] == value
    (rule, *_) = agents.one("NetworkPolicy", "nearkv-agent")["spec"]["ingress"]
    (expression,) = rule["from"][-1]["podSelector"]["matchExpressions"]
    assert expression["values"] == ["ingress", "extender"]
    for component in expression["values"]:
        assert ("any", 9470) in policy(others, component)[1]


def test_a_picker_is_asked_by_gateways_and_reads_agents_of_another_release(rendered):
    came, goes = policy(rendered("picker"), "ingress")
    assert ("gateway", "ext-proc") in came
    assert {("any", 9470), ("any", 443)} <= goes
    assert ("ingress", "state") in policy(rendered("large"), "agent")[0]


def test_agents_on_the_nodes_network_can_still_be_reached(rendered):
    assert ("any", 9470) in policy(rendered("rdma"), "ingress")[1]
    assert "guard ports 9470 and 9471" in rendered("rdma").notes


def test_another_release_can_stand_beside(rendered):
    values = profile("base") | {"fullnameOverride": "canary"}
    theirs = {
        (each["kind"], each["metadata"]["name"])
        for each in render(values | {"crds": {"install": False}}).objects
    }
    ours = {(each["kind"], each["metadata"]["name"]) for each in rendered("base").objects}
    assert theirs & ours == set()


@EVERY
def test_no_volume_is_mounted_within_another(rendered, name):
    """A mount point cannot be made within a mount that is read-only."""
    for owner, pod in pods_of(rendered(name)).items():
        for container in containers_of(pod):
            mounts = [each["mountPath"] for each in container["volumeMounts"]]
            assert len(mounts) == len(set(mounts)), owner
            names = {each["name"] for each in pod["volumes"]}
            assert {each["name"] for each in container["volumeMounts"]} <= names, owner
            for inner in mounts:
                assert not any(inner.startswith(f"{outer}/") for outer in mounts), (owner, inner)
