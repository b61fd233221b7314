"""What the lint says about each setting."""

import copy

import pytest
import yaml

from nearkv.scheduler_config.linting import lint

SOUND = {
    "apiVersion": "kubescheduler.config.k8s.io/v1",
    "kind": "KubeSchedulerConfiguration",
    "leaderElection": {"leaderElect": True, "resourceName": "llm-scheduler"},
    "profiles": [{"schedulerName": "llm-scheduler", "percentageOfNodesToScore": 100}],
    "extenders": [
        {
            "urlPrefix": "https://nearkv-extender.nearkv.svc:9473/v1",
            "filterVerb": "filter",
            "prioritizeVerb": "prioritize",
            "weight": 8,
            "httpTimeout": "200ms",
            "nodeCacheCapable": True,
            "ignorable": True,
            "tlsConfig": {"caFile": "/etc/nearkv/ca.crt"},
            "managedResources": [{"name": "nvidia.com/gpu"}],
        }
    ],
}
DELETE = object()


def changed(**changes):
    """Return the sound configuration with fields set by their path, dots written as ``__``."""
    document = copy.deepcopy(SOUND)
    for path, value in changes.items():
        *above, last = path.split("__")
        place = document
        for part in above:
            place = place[int(part) if part.isdigit() else part]
        if value is DELETE:
            del place[last]
        else:
            place[last] = value
    return document


def findings(document):
    return [
        (one.severity.value, one.where, one.what) for one in lint(yaml.safe_dump(document)).findings
    ]


def entry(**fields):
    return changed(**{f"extenders__0__{name}": value for name, value in fields.items()})


def test_the_sound_one_has_no_findings_and_is_described():
    report = lint(yaml.safe_dump(SOUND))
    assert list(report.findings) == []
    text = " ".join(report.behaviour)
    assert "For each pod of llm-scheduler that names nvidia.com/gpu" in text
    assert "/v1/filter and then POST" in text
    assert "at most 0.4 s" in text
    assert "800 points" in text
    assert "DRA" in text


RULES = [
    (
        "error",
        "apiVersion",
        "went with 1.29",
        changed(apiVersion="kubescheduler.config.k8s.io/v1beta3"),
    ),
    ("error", "apiVersion", "refuses to start", changed(apiVersion="v1")),
    ("error", "kind", "kind is missing", changed(kind=DELETE)),
    ("error", "healthzBindAddress", "does not know", changed(healthzBindAddress="x")),
    ("error", "extenders[0].enableHttps", "case", entry(enableHttps=True)),
    ("error", "extenders[0].nodeCacheCapabel", "does not know", entry(nodeCacheCapabel=True)),
    ("error", "extenders[0].httpTimeout", "200", entry(httpTimeout=200)),
    ("error", "extenders[0].httpTimeout", "not a duration", entry(httpTimeout="200")),
    ("error", "extenders[0].ignorable", "not true or false", entry(ignorable="yes please")),
    ("error", "extenders[0].weight", "not an integer", entry(weight=1.5)),
    ("error", "extenders[0].weight", "above 0", entry(weight=0)),
    ("error", "extenders[0].weight", "above 0", entry(weight=DELETE)),
    ("error", "extenders[0].weight", "64 bits", entry(weight=2**60)),
    ("warning", "extenders[0].weight", "200 points", entry(weight=2)),
    ("info", "extenders[0].weight", "outranks", entry(weight=13)),
    ("warning", "extenders[0].weight", "no effect", entry(prioritizeVerb=DELETE)),
    ("warning", "extenders[0].prioritizeVerb", "not scored", entry(prioritizeVerb=DELETE)),
    ("error", "extenders[0]", "never asks", entry(prioritizeVerb=DELETE, filterVerb=DELETE)),
    ("error", "extenders[0].urlPrefix", "every call fails", entry(urlPrefix="nearkv:9473/v1")),
    ("error", "extenders[0].urlPrefix", "every call fails", entry(urlPrefix=DELETE)),
    ("error", "extenders[0].urlPrefix", "every call fails", entry(urlPrefix="https://[::1/v1")),
    ("error", "extenders[0].urlPrefix", "every call fails", entry(urlPrefix="https://x:94730/v1")),
    ("error", "extenders[0].filterVerb", "404", entry(urlPrefix="https://x:1/")),
    ("error", "extenders[0].prioritizeVerb", "404", entry(prioritizeVerb="score")),
    ("warning", "extenders[0].urlPrefix", "without TLS", entry(urlPrefix="http://x:1/v1")),
    ("warning", "extenders[0].enableHTTPS", "not verify", entry(enableHTTPS=True, tlsConfig={})),
    ("warning", "extenders[0].tlsConfig", "not verify", entry(tlsConfig={"insecure": True})),
    (
        "error",
        "extenders[0].tlsConfig",
        "exclude",
        entry(tlsConfig={"insecure": True, "caData": "x"}),
    ),
    ("error", "extenders[0].tlsConfig", "pair", entry(tlsConfig={"caFile": "x", "certFile": "y"})),
    ("error", "extenders[0].bindVerb", "stay Pending", entry(bindVerb="bind")),
    ("warning", "extenders[0].preemptVerb", "is skipped", entry(preemptVerb="preempt")),
    ("warning", "extenders[0].httpTimeout", "5 s", entry(httpTimeout=DELETE)),
    ("warning", "extenders[0].httpTimeout", "5 s", entry(httpTimeout="0s")),
    ("warning", "extenders[0].httpTimeout", "30 s", entry(httpTimeout="30s")),
    ("warning", "extenders[0].httpTimeout", "10 ms", entry(httpTimeout="10ms")),
    ("error", "extenders[0].httpTimeout", "at once", entry(httpTimeout="-1s")),
    ("warning", "extenders[0].nodeCacheCapable", "whole Node", entry(nodeCacheCapable=DELETE)),
    ("warning", "extenders[0].ignorable", "no pod", entry(ignorable=False)),
    ("warning", "extenders[0].managedResources", "every pod", entry(managedResources=DELETE)),
    (
        "error",
        "extenders[0].managedResources[0]",
        "extended",
        entry(managedResources=[{"name": "cpu"}]),
    ),
    (
        *("error", "extenders[0].managedResources[0]", "extended"),
        entry(managedResources=[{"name": "node.kubernetes.io/x"}]),
    ),
    (
        *("error", "extenders[0].managedResources[0]", "extended"),
        entry(managedResources=[{"name": "kubernetes.io/x"}]),
    ),
    ("error", "extenders[0].managedResources[0]", "no name", entry(managedResources=[{}])),
    (
        *("error", "extenders[0].managedResources[0]", "stops counting"),
        entry(managedResources=[{"name": "nvidia.com/gpu", "ignoredByScheduler": True}]),
    ),
    ("error", "extenders", "asks no extender", changed(extenders=[])),
    (
        "warning",
        "profiles",
        "shared by all",
        changed(profiles=[{"schedulerName": "llm-scheduler"}, {"schedulerName": "b"}]),
    ),
    (
        "error",
        "profiles[1].schedulerName",
        "two profiles",
        changed(profiles=[{"schedulerName": "a"}] * 2),
    ),
    ("warning", "profiles[0].schedulerName", "default scheduler", changed(profiles=[{}])),
    ("warning", "profiles[0].schedulerName", "default scheduler", changed(profiles=DELETE)),
    (
        *("warning", "profiles[0].percentageOfNodesToScore", "500 of 5,000"),
        changed(profiles=[{"schedulerName": "llm-scheduler"}]),
    ),
    (
        *("error", "profiles[0].percentageOfNodesToScore", "between 0 and 100"),
        changed(profiles__0__percentageOfNodesToScore=101),
    ),
    (
        "error",
        "percentageOfNodesToScore",
        "between 0 and 100",
        changed(percentageOfNodesToScore=-1),
    ),
    ("error", "leaderElection.resourceName", "schedules nothing", changed(leaderElection=DELETE)),
    (
        "error",
        "leaderElection.resourceLock",
        "not leases",
        changed(leaderElection__resourceLock="endpoints"),
    ),
    ("error", "podInitialBackoffSeconds", "backoff", changed(podInitialBackoffSeconds=0)),
    ("error", "podMaxBackoffSeconds", "backoff", changed(podMaxBackoffSeconds=0)),
    ("error", "parallelism", "above 0", changed(parallelism=0)),
]


@pytest.mark.parametrize(
    ("severity", "where", "what", "document"),
    RULES,
    ids=[f"{index}-{rule[1]}-{rule[2]}" for index, rule in enumerate(RULES)],
)
def test_a_rule_speaks_up_and_names_its_place(severity, where, what, document):
    found = [one for one in findings(document) if one[0] == severity and one[1] == where]
    assert any(what in one[2] for one in found), findings(document)
    report = lint(yaml.safe_dump(document))
    assert report.has_errors is any(one[0] == "error" for one in findings(document))
    assert all(one.fix and one.line for one in report.findings)


@pytest.mark.parametrize(
    "document",
    [
        changed(leaderElection={"leaderElect": False}),
        changed(leaderElection__resourceNamespace="nearkv"),
        changed(percentageOfNodesToScore=100, profiles=[{"schedulerName": "llm-scheduler"}]),
        entry(httpTimeout="1s"),
        entry(weight=12),
        entry(tlsConfig={"caData": "eA==", "certData": "x", "keyData": "y"}),
        entry(filterVerb=DELETE),
        entry(urlPrefix="https://[::1]:9473/v1/"),
        changed(clientConnection={"qps": 50.5, "burst": 100}, parallelism=8),
        changed(profiles__0__plugins={"multiPoint": {"disabled": [{"name": "*"}]}}),
        changed(profiles__0__pluginConfig=[{"name": "x", "args": {"any": ["thing"]}}]),
        changed(delayCacheUntilActive=None),
    ],
)
def test_what_is_fine(document):
    assert findings(document) == []


def test_two_extenders():
    twice = changed(extenders=[*SOUND["extenders"], {**SOUND["extenders"][0], "bindVerb": "b"}])
    where = [one[1] for one in findings(twice) if one[0] == "error"]
    assert "extenders[1].managedResources[0]" in where
    other = {**SOUND["extenders"][0], "urlPrefix": "https://else:1/api"}
    other["managedResources"] = [{"name": "else.com/x"}]
    severities = {
        one[0] for one in findings(changed(extenders=[*SOUND["extenders"], other]))
        if "404" in one[2]
    }  # fmt: skip
    assert severities == {"warning"}  # it may be somebody else's extender


def test_two_binders():
    bound = {**SOUND["extenders"][0], "bindVerb": "b", "managedResources": [{"name": "a.b/c"}]}
    document = changed(extenders=[{**SOUND["extenders"][0], "bindVerb": "b"}, bound])
    assert any("more than one extender binds" in one[2] for one in findings(document))


def test_nothing_is_described_when_kube_scheduler_would_not_start():
    assert list(lint(yaml.safe_dump(entry(weight=0))).behaviour) == []


@pytest.mark.parametrize("value", [None, 1, "x", [None], {}, [{"a": {}}]])
@pytest.mark.parametrize("key", [*SOUND, "clientConnection", "podMaxBackoffSeconds"])
def test_no_value_breaks_the_lint(key, value):
    assert lint(yaml.safe_dump({**SOUND, key: value}))


@pytest.mark.parametrize("value", [None, 1, "x", [None], {}, [{"a": {}}]])
@pytest.mark.parametrize("key", [*SOUND["extenders"][0], "bindVerb", "enableHTTPS"])
def test_no_value_of_an_extender_breaks_the_lint(key, value):
    assert lint(yaml.safe_dump(entry(**{key: value})))
