"""The chart renders for every kind of cluster, and strict API servers take what it renders."""

import kubernetes_validate
import pytest

from tests.deploy.chart import NAMESPACE, ChartError, lint, pods_of, profile, profile_names, render
from tests.deploy.render import GOLDEN, golden_path, golden_text

PROFILES = profile_names()
NEWEST = kubernetes_validate.latest_version()
NOT_KUBERNETES = {"ServiceMonitor", "PodMonitor", "PrometheusRule", "Certificate"}
"""Kinds of the Prometheus operator and of cert-manager, whose schemas no package here has."""


def slow_but(*names):
    """Return the profiles, all but some for the full lane."""
    return [
        name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in PROFILES
    ]


@pytest.mark.parametrize("name", PROFILES)
def test_lint_has_nothing_to_say(name):
    assert lint(profile(name)) == []


@pytest.mark.parametrize("version", ["1.31", NEWEST])
@pytest.mark.parametrize("name", slow_but("default", "rdma"))
def test_a_strict_api_server_would_take_it(rendered, name, version):
    unknown = set()
    for each in rendered(name).objects:
        if each["kind"] in NOT_KUBERNETES:
            unknown.add(each["kind"])
            continue
        if each["kind"] == "CustomResourceDefinition":
            continue  # its schema of schemas is not in the package; tests/cluster has a real server
        kubernetes_validate.validate(each, version, strict=True)
    assert unknown <= NOT_KUBERNETES


def test_the_validation_finds_a_misspelt_field(rendered):
    daemon_set = rendered("default").one("DaemonSet", "nearkv-agent")
    broken = {**daemon_set, "spec": {**daemon_set["spec"], "minReadySecond": 1}}
    with pytest.raises(kubernetes_validate.ValidationError, match="minReadySecond"):
        kubernetes_validate.validate(broken, NEWEST, strict=True)


@pytest.mark.parametrize("name", PROFILES)
def test_every_object_says_what_it_belongs_to(rendered, name):
    for each in rendered(name).objects:
        labels = each["metadata"]["labels"]
        wanted = {"name", "instance", "component", "version", "part-of", "managed-by"}
        assert {f"app.kubernetes.io/{part}" for part in wanted} <= labels.keys(), each["metadata"]
        selected = each.get("spec", {}).get("selector", {})
        if isinstance(selected, dict) and "matchLabels" in selected and "template" in each["spec"]:
            template = each["spec"]["template"]["metadata"]["labels"]
            assert selected["matchLabels"].items() <= template.items()


@pytest.mark.parametrize("name", PROFILES)
def test_names_are_unique_and_namespaced_ones_say_where(rendered, name):
    seen = set()
    cluster = ("Cluster", "Validating", "CustomResource")
    for each in rendered(name).objects:
        metadata = each["metadata"]
        key = (each["kind"], metadata.get("namespace"), metadata["name"])
        assert key not in seen
        seen.add(key)
        if not each["kind"].startswith(cluster):
            assert metadata["namespace"] in {NAMESPACE, "kube-system", "nearkv-agents"}, key


@pytest.mark.parametrize("name", GOLDEN)
def test_the_golden_rendering_is_what_the_chart_makes(name):
    assert golden_path(name).read_text(encoding="utf-8") == golden_text(name), "run `make render`"


def test_two_renderings_differ_in_secrets_only():
    first, second = (render(profile("default")) for _ in range(2))
    random = [
        one["metadata"]["name"]
        for one, other in zip(first.objects, second.objects, strict=True)
        if one != other
    ]
    assert random == ["nearkv-auth", "nearkv-extender-tls"]


@pytest.mark.parametrize("name", ["base", "kind", "tls"])
def test_with_secrets_made_beforehand_renderings_are_equal(name):
    assert render(profile(name)).objects == render(profile(name)).objects


@pytest.mark.parametrize("name", PROFILES)
def test_the_notes_name_what_was_installed(rendered, name):
    notes = rendered(name).notes
    assert "nearkv" in notes
    assert ("llm-scheduler" in notes) == ("Deployment/nearkv-scheduler" in pods_of(rendered(name)))


def test_without_a_registry_nothing_is_rendered():
    with pytest.raises(ChartError, match=r"image\.registry: say where you pushed"):
        render({})


def test_the_crd_is_the_reviewed_one_and_outlives_the_release(rendered):
    (definition,) = rendered("default").kinds("CustomResourceDefinition")
    assert definition["metadata"]["name"] == "workerstatuses.nearkv.io"
    assert definition["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    without = render(profile("default") | {"crds": {"install": False}})
    assert without.kinds("CustomResourceDefinition") == []
