"""What the chart hands to the programs is what they take, by their own reading of it."""

import re
from pathlib import PurePosixPath

import pytest

from nearkv.agent.settings import AgentSettings
from nearkv.extender.presets import PRESETS, Transform
from nearkv.extender.settings import ExtenderSettings
from nearkv.ingress.settings import IngressSettings
from nearkv.settings import resolve_settings
from tests.deploy.chart import (
    containers_of,
    pods_of,
    profile,
    profile_names,
    render,
    settings_of,
)

CLASSES = {"agent": AgentSettings, "extender": ExtenderSettings, "ingress": IngressSettings}
GRACE_MARGIN_SECONDS = 5


def workload_of(rendered, component):
    """Return the pod of a component."""
    pods = pods_of(rendered)
    return next(pod for name, pod in pods.items() if name.endswith(f"t/nearkv-{component}"))


def environment_of(pod):
    """Return a container's variables as the kubelet would set them, secrets made up."""
    values = {"NODE_NAME": "node-1", "POD_IP": "10.1.2.3"}
    for each in pod["containers"][0]["env"]:
        if "value" in each:
            text = re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], each["value"])
            values[each["name"]] = text
        elif "secretKeyRef" in each["valueFrom"]:
            values[each["name"]] = "secret"
    return values


def has(name, component):
    """Tell whether a profile's values leave a component on."""
    return profile(name).get(component, {}).get("enabled", True)


@pytest.mark.parametrize(
    ("name", "component"),
    [(name, each) for name in profile_names() for each in CLASSES if has(name, each)],
)
def test_the_program_takes_its_settings(rendered, tmp_path, name, component):
    made = rendered(name)
    pod = workload_of(made, component)
    file = tmp_path / f"{component}.yaml"
    file.write_text(made.one("ConfigMap", f"nearkv-{component}")["data"][file.name])
    environment = environment_of(pod) | {f"NEARKV_{component.upper()}_CONFIG": str(file)}
    resolved = resolve_settings(
        CLASSES[component], [], environment=environment, component=component
    )
    settings = resolved.settings
    assert str(settings.listen).startswith("0.0.0.0:")
    assert pod["terminationGracePeriodSeconds"] >= settings.drain_seconds + GRACE_MARGIN_SECONDS
    ports = {each["containerPort"] for each in pod["containers"][0]["ports"]}
    assert settings.listen.port in ports


def test_agents_are_reachable_at_the_address_of_their_pod(rendered):
    environment = environment_of(workload_of(rendered("default"), "agent"))
    assert environment["NEARKV_AGENT_TRANSFER__PEER_URL"] == "http://10.1.2.3:9471"
    assert environment["NEARKV_AGENT_TRANSFER__DATA_HOST"] == "10.1.2.3"


def test_the_extender_selects_the_agents_pods(rendered):
    made = rendered("default")
    selector = settings_of(made, "extender")["agents"]["selector"]
    wanted = dict(part.split("=") for part in selector.split(","))
    template = made.one("DaemonSet", "nearkv-agent")["spec"]["template"]
    assert wanted.items() <= template["metadata"]["labels"].items()


@pytest.mark.parametrize("name", profile_names())
def test_no_secret_stands_in_a_config_map(rendered, name):
    for each in rendered(name).kinds("ConfigMap"):
        for text in each["data"].values():
            assert not re.search(r"^\s*\w*(token|secret|api_key|password)\w*:", text, re.MULTILINE)


@pytest.mark.parametrize("name", profile_names())
def test_a_change_of_settings_restarts_the_pods(rendered, name):
    for each in rendered(name).kinds("Deployment", "DaemonSet"):
        annotations = each["spec"]["template"]["metadata"]["annotations"]
        assert any(key.startswith("checksum/") for key in annotations)


@pytest.mark.parametrize("name", profile_names())
def test_secrets_are_the_keys_that_the_secret_has(rendered, name):
    known = {
        *("agent-token", "peer-token", "cluster-secret"),
        *("extender-admin-token", "ingress-admin-token", "api-key"),
    }
    for pod in pods_of(rendered(name)).values():
        for container in containers_of(pod):
            for each in container.get("env", []):
                reference = each.get("valueFrom", {}).get("secretKeyRef")
                assert reference is None or reference["key"] in known


def test_memory_is_enough_for_the_bounds_that_the_settings_allow(rendered):
    for name in ("default", "large"):
        made = rendered(name)
        ours = AgentSettings.model_validate(
            {"state": settings_of(made, "agent").get("state", {})}
        ).state
        bound = (
            ours.tables_limit_bytes
            + ours.ring_limit_bytes
            + ours.max_consumers * ours.consumer_queue_bytes
        )
        assert bound * 1.2 < memory_bytes(workload_of(made, "agent"))
        limits = IngressSettings.model_validate(
            {"limits": settings_of(made, "ingress").get("limits", {})}
        ).limits
        bound = 2 * limits.index_bytes + limits.token_memo_bytes + limits.hint_bytes
        assert bound < memory_bytes(workload_of(made, "ingress"))


def memory_bytes(pod):
    """Return the memory limit of a pod's first container."""
    text = pod["containers"][0]["resources"]["limits"]["memory"]
    return int(text[:-2]) * {"Mi": 1 << 20, "Gi": 1 << 30}[text[-2:]]


def decisions_volume(values, **config):
    """Return the folder of the file of decisions, the mount there, its volume, and the pod."""
    made = render(
        profile("base") | {"ingress": {"decisionsFile": values, "config": {"decisions": config}}}
    )
    pod = workload_of(made, "ingress")
    file = PurePosixPath(settings_of(made, "ingress")["decisions"]["file"])
    (mount,) = (
        each
        for each in pod["containers"][0]["volumeMounts"]
        if each["mountPath"] == str(file.parent)
    )
    (volume,) = (each for each in pod["volumes"] if each["name"] == mount["name"])
    assert not mount.get("readOnly")
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    return mount, volume, pod


@pytest.mark.parametrize(
    "config", [{}, {"files_kept": 9, "file_bytes": 1 << 30}, {"file_bytes": 100_000}]
)
def test_the_file_of_decisions_has_room_for_all_that_are_kept(config):
    mount, volume, pod = decisions_volume({"enabled": True}, **config)
    ours = IngressSettings.model_validate({"decisions": config}).decisions
    room = int(volume["emptyDir"]["sizeLimit"].removesuffix("Mi")) << 20
    # Those kept, the one being written, and what a last batch has more than it should.
    assert (ours.files_kept + 1) * ours.file_bytes < room
    assert room <= (ours.files_kept + 2) * ours.file_bytes + (1 << 20)
    assert "subPathExpr" not in mount
    assert "fsGroup" not in pod["securityContext"]
    told = {"enabled": True, "sizeLimit": "2Gi"}
    assert decisions_volume(told)[1]["emptyDir"] == {"sizeLimit": "2Gi"}


def test_pods_that_share_a_claim_have_a_folder_each_and_may_write_there():
    mount, volume, pod = decisions_volume({"enabled": True, "existingClaim": "records"})
    assert volume["persistentVolumeClaim"] == {"claimName": "records"}
    assert mount["subPathExpr"] == "$(POD_NAME)"
    (variable,) = (each for each in pod["containers"][0]["env"] if each["name"] == "POD_NAME")
    assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]


def test_without_the_value_nothing_of_requests_is_written(rendered):
    made = rendered("default")
    assert "decisions" not in settings_of(made, "ingress")
    volumes = {each["name"] for each in workload_of(made, "ingress")["volumes"]}
    assert volumes == {"settings", "tmp"}


def test_the_key_of_engines_is_shown_by_agents_and_ingress(rendered):
    made = rendered("large")
    for component, name in (
        ("agent", "NEARKV_AGENT_KUBERNETES__API_KEY"),
        ("ingress", "NEARKV_INGRESS_ENGINE_API_KEY"),
    ):
        variables = {
            each["name"]: each for each in workload_of(made, component)["containers"][0]["env"]
        }
        reference = variables[name]["valueFrom"]["secretKeyRef"]
        assert reference == {"name": "engine-key", "key": "api-key"}


@pytest.mark.parametrize("preset", PRESETS)
def test_agents_tell_the_same_classes_of_distance_as_the_extender(preset):
    """But for levels that are a part of a label."""
    made = render(profile("base") | {"extender": {"distancePreset": preset}})
    probes = settings_of(made, "agent")["transfer"]["probes"]
    levels = [level for level in PRESETS[preset] if level.transform is Transform.WHOLE]
    assert probes["levels"] == ["|".join(level.labels) for level in levels]


def test_agents_find_each_other_by_their_service(rendered):
    made = rendered("default")
    probes = settings_of(made, "agent")["transfer"]["probes"]
    service = made.one("Service", probes["service"])
    assert service["metadata"]["namespace"] == probes["namespace"]
    listen = settings_of(made, "agent")["transfer"]["peer_listen"]
    peers = next(port for port in service["spec"]["ports"] if port["name"] == "peers")
    assert listen.endswith(f":{peers['port']}")
    assert AgentSettings().transfer.probes.port_name == "peers"
