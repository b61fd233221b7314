"""Every image is built, and runs as the chart has it: its user, its rights, a read-only root.

Run by ``make test-images``; skipped otherwise.
"""

import os

import pytest
import yaml

from nearkv.demo.launching import free_port
from tests.deploy.chart import containers_of, pods_of, profile, render, settings_of
from tests.images.building import FOLDER, WANTED, Builder, why_not
from tests.images.running import Container, Mount, running

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get(WANTED) or bool(why_not()), reason="run by make test-images"
    ),
    pytest.mark.timeout(1800),
]
TOKEN = "secret"  # noqa: S105 (it guards nothing)
HERE = {"NODE_NAME": "n1", "POD_IP": "127.0.0.1"}
NO_CAPABILITIES = "0" * 16
VALUES = profile("base") | {
    "extender": {"tls": {"mode": "off"}},
    "ingress": {"agents": ["http://127.0.0.1:9"], "decisionsFile": {"enabled": True}},
    "agent": {"gpu": {"enabled": False}, "waking": {"enabled": False}},
}
LIBRARIES = {
    "agent": "import grpc, nixl_cu12, numpy, pynvml, redis, ucxx, zmq",
    "extender": "import numpy",
    "ingress": "import grpc, numpy, opentelemetry.sdk, tokenizers",
}


@pytest.fixture(scope="module")
def builder():
    made = Builder(FOLDER)
    made.make_bases()
    return made


@pytest.fixture(scope="module")
def chart():
    return render(VALUES)


def settings_here(chart, name, port):
    """Return the chart's settings, but for what needs a cluster."""
    settings = settings_of(chart, name) | {"listen": f"127.0.0.1:{port}"}
    if name == "agent":
        settings["transfer"] |= {"peer_listen": "127.0.0.1:0"}
        settings["transfer"].pop("probes")
        settings["worker_status"] = {"enabled": "off"}
    return settings


def environment_of(container):
    """Return a container's variables; secrets are made up."""
    found = {}
    for each in container["env"]:
        if "value" in each:
            found[each["name"]] = each["value"].replace("$(POD_IP)", HERE["POD_IP"])
        elif "secretKeyRef" in each["valueFrom"]:
            found[each["name"]] = TOKEN
        else:
            found[each["name"]] = HERE[each["name"]]
    return found


def mounts_of(pod, container, scratch, settings):
    """Return the volumes of a pod as folders here; emptyDirs are open to all, as the kubelet's."""
    volumes = {each["name"]: each for each in pod["volumes"]}
    mounts = []
    for each in container["volumeMounts"]:
        source = scratch / each["name"]
        source.mkdir()
        if "configMap" in volumes[each["name"]]:
            (source / settings[0]).write_text(yaml.safe_dump(settings[1]))
        elif "emptyDir" in volumes[each["name"]]:
            source.chmod(0o777)
        mounts.append(Mount(source, each["mountPath"], each.get("readOnly", False)))
    return mounts


@pytest.mark.parametrize("name", ["agent", "extender", "ingress"])
def test_it_runs_as_the_chart_has_it(builder, chart, tmp_path, name):
    image = builder.build(name)
    assert image.config["User"] == "65532:65532"
    (pod,) = (each for owner, each in pods_of(chart).items() if owner.endswith(f"t/nearkv-{name}"))
    (spec,) = containers_of(pod)
    assert spec["securityContext"]["readOnlyRootFilesystem"] is True
    port = free_port()
    settings = f"{name}.yaml", settings_here(chart, name, port)
    own = dict(each.split("=", 1) for each in image.config["Env"])
    with builder.unpacked(image) as root:
        container = Container(
            root=root,
            command=image.config["Entrypoint"],
            environment=own | environment_of(spec),
            user=pod["securityContext"]["runAsUser"],
            group=pod["securityContext"]["runAsGroup"],
            mounts=mounts_of(pod, spec, tmp_path, settings),
        )
        with running(container, tmp_path) as one:
            url = f"http://127.0.0.1:{port}"
            assert one.ask(f"{url}/livez") == 200
            assert one.ask(f"{url}/metrics", TOKEN) == 200
            status = one.status()
            assert status["Uid"].split() == [str(container.user)] * 4
            assert (status["CapEff"], status["CapBnd"]) == (NO_CAPABILITIES,) * 2
            assert status["NoNewPrivs"] == "1"
            assert "Read-only file system" in one.python("open('/nearkv', 'w')")
            assert one.python(LIBRARIES[name]) == ""
            if name == "agent":
                told = one.python(
                    "from nearkv.transfer.copying import native_copy; print(native_copy())"
                )
                assert "copy_runs" in told
            assert one.stop() == 0, one.log
    if name == "ingress":
        assert (tmp_path / "decisions" / "decisions.jsonl").exists()


def test_the_double_of_an_engine_runs(builder, tmp_path):
    image = builder.build("engine-double")
    port = free_port()
    with builder.unpacked(image) as root:
        container = Container(
            root=root,
            command=[*image.config["Entrypoint"], "--port", str(port)],
            environment=dict(each.split("=", 1) for each in image.config["Env"]),
            user=65532,
            group=65532,
            folder=image.config["WorkingDir"],
        )
        with running(container, tmp_path) as one:
            assert one.ask(f"http://127.0.0.1:{port}/health") == 200


def test_the_overlay_has_the_connector(builder):
    image = builder.build("engine")
    with builder.unpacked(image) as root:
        (module,) = root.glob(
            "opt/venv/lib/python3*/site-packages/nearkv/transfer/vllm_connector.py"
        )
        assert "NodeAgentConnector" in module.read_text(encoding="utf-8")
