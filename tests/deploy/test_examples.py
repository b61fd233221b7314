"""The example workloads: valid, read by the agent and the extender as they are meant."""

import json
import re

import kubernetes_validate
import msgspec
import pytest
import yaml

from nearkv.agent.kubernetes.pod_engines import PodRules, is_engine, read_engine
from nearkv.extender.presets import PRESETS
from nearkv.kube.objects import Pod
from nearkv.transfer.connector.settings import read_settings
from tests.deploy.chart import DEPLOY, profile, render
from tests.deploy.series import exported_names, names_in

EXAMPLES = sorted([*(DEPLOY / "examples").glob("*.yaml"), DEPLOY / "kind" / "engines.yaml"])
POOLS = [DEPLOY / "examples" / "prefill-decode.yaml", DEPLOY / "kind" / "engines.yaml"]
CUSTOM = {"ScaledObject", "PodMonitor"}
"""Kinds of KEDA and the Prometheus operator: no package here has their schemas."""


def objects(path):
    """Return the objects of a file."""
    return [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each]


def pools(path):
    """Return the pod templates of a file by role."""
    return {
        each["spec"]["template"]["metadata"]["labels"]["role"]: each["spec"]["template"]
        for each in objects(path)
        if each["kind"] == "Deployment"
    }


def arguments(template):
    """Return the options of an engine's command line."""
    options = {}
    for each in template["spec"]["containers"][0]["args"]:
        name, _, value = each.removeprefix("--").partition("=")
        options[name] = value
    return options


VLLM = pools(POOLS[0])
EACH_POOL = pytest.mark.parametrize("role", ["prefill", "decode"])


@pytest.mark.parametrize("version", ["1.31", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_strict_api_server_would_take_it(path, version):
    for each in objects(path):
        if each["kind"] not in CUSTOM:
            kubernetes_validate.validate(each, version, strict=True)


@EACH_POOL
@pytest.mark.parametrize("path", POOLS, ids=lambda path: path.stem)
def test_the_agent_reads_the_pod_as_an_engine(path, role):
    template = pools(path)[role]
    metadata = {**template["metadata"], "name": "e", "namespace": "n", "uid": "u"}
    status = {"phase": "Running", "podIP": "10.1.2.3"}
    text = json.dumps({"metadata": metadata, "spec": template["spec"], "status": status})
    pod = msgspec.json.decode(text, type=Pod)
    assert is_engine(pod, PodRules())
    engine = read_engine(pod, PodRules())
    assert (engine.uid, engine.transfer, engine.spec.url) == ("u", "agent", "http://10.1.2.3:8000")
    assert engine.spec.role == role


@pytest.mark.parametrize("path", POOLS, ids=lambda path: path.stem)
def test_both_pools_are_one_group_and_go_to_the_second_scheduler(path):
    prefill, decode = pools(path)["prefill"], pools(path)["decode"]
    groups = {each["metadata"]["labels"]["nearkv.io/group"] for each in (prefill, decode)}
    assert len(groups) == 1
    for each in (prefill, decode):
        assert each["spec"]["schedulerName"] == "llm-scheduler"
        # Without a managed resource the extender is not asked.
        assert "nvidia.com/gpu" in each["spec"]["containers"][0]["resources"]["limits"]


@EACH_POOL
def test_ports_of_events_are_those_that_the_pod_says(role):
    template = VLLM[role]
    annotations = template["metadata"]["annotations"]
    events = json.loads(arguments(template)["kv-events-config"])
    assert events["enable_kv_cache_events"] is True
    assert events["endpoint"] == f"tcp://*:{annotations['nearkv.io/kv-events-port']}"
    assert events["replay_endpoint"] == f"tcp://*:{annotations['nearkv.io/kv-replay-port']}"
    ports = {each["containerPort"] for each in template["spec"]["containers"][0]["ports"]}
    assert ports == {8000, 5557, 5558}
    (policy,) = [each for each in objects(POOLS[0]) if each["kind"] == "NetworkPolicy"]
    open_ports = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert open_ports == ports
    assert (
        policy["spec"]["podSelector"]["matchLabels"].items()
        <= template["metadata"]["labels"].items()
    )


@EACH_POOL
def test_the_connector_takes_its_settings_and_fails_open(role):
    template = VLLM[role]
    transfer = json.loads(arguments(template)["kv-transfer-config"])
    assert transfer["kv_connector"] == "NodeAgentConnector"
    assert transfer["kv_connector_module_path"] == "nearkv.transfer.vllm_connector"
    assert transfer["kv_load_failure_policy"] == "recompute"
    # A producer never loads, see docs/gpu.md.
    assert transfer["kv_role"] == "kv_both"
    container = template["spec"]["containers"][0]
    variables = {each["name"]: each for each in container["env"]}
    fields = variables["NEARKV_ENGINE"]["valueFrom"]["fieldRef"]
    assert fields == {"fieldPath": "metadata.uid"}
    environment = {name: each.get("value", "the-uid") for name, each in variables.items()}
    settings = read_settings(transfer.get("kv_connector_extra_config", {}), environment)
    assert settings.engine == "the-uid"
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert str(settings.socket_path) == f"{mounts['nearkv']}/agent.sock"


def test_the_socket_is_where_the_chart_puts_it_for_whom_the_engines_are(rendered):
    pod = VLLM["decode"]["spec"]
    (volume,) = [each for each in pod["volumes"] if each["name"] == "nearkv"]
    agent = rendered("rdma").one("DaemonSet", "nearkv-agent")["spec"]["template"]["spec"]
    (ours,) = [each for each in agent["volumes"] if each["name"] == "socket"]
    assert volume["hostPath"]["path"] == ours["hostPath"]["path"]
    context = pod["securityContext"]
    assert agent["securityContext"]["runAsGroup"] == context["runAsGroup"]
    values = profile("rdma")["agent"]["transfer"]
    assert context["runAsUser"] in values["allowedUids"]
    text = POOLS[0].read_text(encoding="utf-8")
    assert f"agent.transfer.allowedUids: [{context['runAsUser']}]" in text


def test_decode_engines_seek_the_node_and_the_rack_before_the_zone():
    terms = VLLM["decode"]["spec"]["affinity"]["podAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    by_weight = sorted(terms, key=lambda term: -term["weight"])
    keys = [term["podAffinityTerm"]["topologyKey"] for term in by_weight]
    topology = ("topology.kubernetes.io/rack", "topology.kubernetes.io/zone")
    assert keys == ["kubernetes.io/hostname", *topology]
    (together,) = VLLM["prefill"]["spec"]["affinity"]["podAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    assert together["podAffinityTerm"]["topologyKey"] == "topology.kubernetes.io/rack"
    known = {label for level in PRESETS["generic"] for label in level.labels}
    assert set(keys[1:]) <= known
    labels = VLLM["prefill"]["metadata"]["labels"]
    for term in terms:
        for each in term["podAffinityTerm"]["labelSelector"]["matchExpressions"]:
            assert labels[each["key"]] in each["values"]


@EACH_POOL
def test_pools_are_spread_over_nodes(role):
    (constraint,) = VLLM[role]["spec"]["topologySpreadConstraints"]
    assert constraint["topologyKey"] == "kubernetes.io/hostname"
    selected = constraint["labelSelector"]["matchLabels"]
    assert selected.items() <= VLLM[role]["metadata"]["labels"].items()


def test_scalers_ask_for_series_that_exist():
    names = set()
    for each in objects(DEPLOY / "examples" / "keda.yaml"):
        assert each["spec"]["scaleTargetRef"]["name"] in {"prefill-pool", "decode-pool"}
        for trigger in each["spec"]["triggers"]:
            names |= names_in(trigger["metadata"]["query"])
    assert names
    assert names <= exported_names()


def test_the_script_for_kind_and_the_overlay_agree(rendered):
    script = (DEPLOY / "kind" / "up.sh").read_text(encoding="utf-8")
    made = rendered("kind")
    ours = {"agent", "extender", "ingress", "engine-double"}
    assert set(re.search(r"IMAGES=\(([^)]*)\)", script)[1].split()) == ours
    for component in ("agent", "extender", "ingress"):
        kind = "DaemonSet" if component == "agent" else "Deployment"
        pod = made.one(kind, f"nearkv-{component}")["spec"]["template"]["spec"]
        assert pod["containers"][0]["image"] == f"nearkv.local/{component}:0.1.0"
        assert pod["containers"][0]["imagePullPolicy"] == "Never"
    keys = re.search(r"for key in ([a-z -]+); do", script)[1].split()
    secret = render(profile("default")).one("Secret", "nearkv-auth")
    assert set(keys) == set(secret["data"])
    assert "never run it" in script.replace("\n# ", " ")
