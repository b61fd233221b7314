"""Settings: defaults in step with the parts' own, and what is refused."""

import pytest
from pydantic import ValidationError

from nearkv.certificates import ClientCertificates
from nearkv.extender.configuring import (
    distance_config,
    headroom_config,
    pod_rules,
    score_config,
    transport,
    view_config,
)
from nearkv.extender.distance import DistanceConfig
from nearkv.extender.headroom import HeadroomConfig
from nearkv.extender.presets import PRESETS, LinkCost, Transform
from nearkv.extender.scoring import ScoreConfig
from nearkv.extender.settings import ExtenderSettings
from nearkv.extender.view.pods import PodRules

TOKEN = "not-a-real-one"  # noqa: S105 (it guards nothing)


def settings(**values):
    return ExtenderSettings.model_validate(values)


def test_the_defaults_are_those_of_the_parts():
    defaults = ExtenderSettings()
    assert distance_config(defaults.distance) == DistanceConfig()
    assert headroom_config(defaults.headroom) == HeadroomConfig()
    assert score_config(defaults.score) == ScoreConfig()
    assert pod_rules(defaults) == PodRules()


def test_connections_outlast_those_of_the_scheduler():
    assert transport(ExtenderSettings()).keepalive_seconds > 90
    with pytest.raises(ValidationError, match="must be above 90"):
        settings(limits={"keepalive_seconds": 90})


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_can_be_chosen(preset):
    assert distance_config(settings(distance={"preset": preset}).distance).levels == PRESETS[preset]


def test_own_levels_take_the_place_of_the_preset():
    level = {
        "name": "rack",
        "labels": ["a", "b"],
        "setup_seconds": 0.1,
        "bytes_per_second": 5e9,
        "transform": "before_last_dot",
        "needs_rdma": False,
    }
    found = settings(distance={"levels": [level], "beyond_setup_seconds": 0.5})
    config = distance_config(found.distance)
    (own,) = config.levels
    assert (own.name, own.labels, own.cost) == ("rack", ("a", "b"), LinkCost(0.1, 5e9))
    assert (own.transform, own.needs_rdma) == (Transform.BEFORE_LAST_DOT, False)
    assert config.beyond.setup_seconds == 0.5


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"distance": {"preset": "azure"}}, "distance.preset"),
        ({"distance": {"link_aged_seconds": 900}}, "link_fresh_seconds"),
        ({"distance": {"levels": [{"name": "r", "labels": []}]}}, "labels"),
        ({"headroom": {"fresh_intervals": 6}}, "fresh_intervals"),
        ({"score": {"highest": 101}}, "highest"),
        ({"kubernetes": {"silence_seconds": 60}}, "silence_seconds"),
        ({"kubernetes": {"watch_seconds": 50}}, "silence_seconds"),
        ({"agents": {"tls": {"cert": "/x"}}}, "tls.key"),
        ({"agents": {"template": "http://agents"}}, "host_ip"),
        ({"tls": {"cert": "/x"}}, "key"),
        ({"kubernetes": {"managed_resources": []}}, "managed_resources"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_by_name(values, says):
    with pytest.raises(ValidationError, match=says):
        settings(**values)


def test_two_levels_of_one_name_are_refused():
    level = {"name": "r", "labels": ["a"], "setup_seconds": 0, "bytes_per_second": 1}
    with pytest.raises(ValidationError, match="same name"):
        settings(distance={"levels": [level, level]})


def test_what_is_watched():
    found = settings(
        kubernetes={
            "managed_resources": ["amd.com/gpu"],
            "node_selector": "pool=gpu",
            "page_objects": 7,
            "publish_seconds": 0.5,
        },
        agents={"selector": "app=agent", "port": 1234, "token": TOKEN, "wait_seconds": 9}
        | {"tls": {"name": "agents"}},
    )
    certificates = ClientCertificates(found.agents.tls.files)
    config = view_config(found, distance_config(found.distance), certificates)
    assert config.nodes.resources == config.pods.resources == ("amd.com/gpu",)
    assert config.node_selector == "pool=gpu"
    assert config.watch.listing.page_objects == 7
    assert config.publish_seconds == 0.5
    assert (config.agents.selector, config.agents.port) == ("app=agent", 1234)
    assert config.agents_trust.token == TOKEN
    assert config.agents_trust.certificates is certificates
    assert certificates.options["server_hostname"] == "agents"
    assert config.collect.wait_seconds == 9
    assert config.nodes.levels_of({"topology.kubernetes.io/zone": "z"})[1] == "z"


@pytest.mark.parametrize(
    ("group", "build", "name"),
    [
        pytest.param(group, build, name, id=f"{group}.{name}")
        for group, build in (
            ("distance", distance_config),
            ("headroom", headroom_config),
            ("score", score_config),
        )
        for name in type(getattr(ExtenderSettings(), group)).model_fields
        if name not in ("preset", "levels", "memory_ratio")
    ],
)
def test_every_setting_arrives(group, build, name):
    default = getattr(getattr(ExtenderSettings(), group), name)
    other = not default if isinstance(default, bool) else default + (0.25 if default < 1 else 1)
    changed = getattr(settings(**{group: {name: other}}), group)
    assert build(changed) != build(getattr(ExtenderSettings(), group))
