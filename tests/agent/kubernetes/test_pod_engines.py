"""From labels and annotations of a pod to the engine in it."""

import pytest
from pydantic import SecretStr

from nearkv.agent.event_sources import EventSource
from nearkv.agent.kubernetes.pod_engines import (
    PodRules,
    PodUnreadableError,
    is_engine,
    is_running,
    read_engine,
)
from tests.agent.kubernetes.things import pod

RULES = PodRules()


def annotated(**annotations):
    named = {f"nearkv.io/{name.replace('_', '-')}": value for name, value in annotations.items()}
    return pod(annotations=named)


def test_a_pod_without_annotations_is_asked_at_the_usual_port():
    engine = read_engine(pod(), RULES)
    assert (engine.uid, engine.pod) == ("u-e", "default/e")
    assert engine.spec.url == "http://10.0.0.7:8000"
    assert (engine.spec.id, engine.spec.group, engine.spec.role) == ("u-e", "g", "decode")
    assert engine.spec.events is None
    assert (engine.transfer, engine.is_ready, engine.is_leaving) == ("agent", True, False)


def test_annotations_say_how_it_is_reached():
    engine = read_engine(
        annotated(
            port="8200",
            engine_kind="sglang",
            dp_size="2",
            kv_events_port="5557",
            kv_replay_port="5567",
            kv_events_topic="kv",
            key_model="llama",
            kv_bytes_per_token="1000",  # noqa: S106 (no secret)
            transfer="nixl",
        ),
        RULES,
    )
    spec = engine.spec
    assert spec.url == "http://10.0.0.7:8200"
    assert spec.event_sources() == {
        0: EventSource("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5567", "kv"),
        1: EventSource("tcp://10.0.0.7:5558", "tcp://10.0.0.7:5568", "kv"),
    }
    assert (spec.kind, spec.key_model, spec.kv_bytes_per_token) == ("sglang", "llama", 1000)
    assert engine.transfer == "nixl"


def test_an_address_of_ipv6_and_a_key_for_all():
    rules = PodRules(port=80, api_key=SecretStr("k"))
    spec = read_engine(
        pod(ip="fd00::7", annotations={"nearkv.io/kv-events-port": "5557"}), rules
    ).spec
    assert spec.url == "http://[fd00::7]:80"
    assert spec.events.endpoint == "tcp://[fd00::7]:5557"
    assert spec.api_key == "k"


@pytest.mark.parametrize(
    ("labels", "role"),
    [
        ({"nearkv.io/role": "prefill"}, "prefill"),
        ({"llm-d.ai/role": "decode"}, "decode"),
        ({"nearkv.io/role": "prefill", "llm-d.ai/role": "decode"}, "prefill"),
        ({"llm-d.ai/role": "prefill-decode"}, "both"),
        ({"nearkv.io/group": "g"}, "both"),
    ],
)
def test_roles(labels, role):
    found = pod(labels=labels)
    assert is_engine(found, RULES)
    assert read_engine(found, RULES).spec.role == role


def test_which_pods_are_engines():
    other = pod(labels={"app": "web"})
    assert not is_engine(other, RULES)
    assert is_engine(other, PodRules(every=True))
    assert is_engine(other, PodRules(group_labels=("app",)))
    assert not is_engine(pod(labels={"nearkv.io/group": ""}), RULES)


@pytest.mark.parametrize(
    ("fields", "running"),
    [({}, True), ({"phase": "Pending"}, False), ({"ip": ""}, False), ({"phase": "Unknown"}, False)],
)
def test_which_pods_run(fields, running):
    assert is_running(pod(**fields)) is running


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("port", "http", "annotation nearkv.io/port: 'http' is no port"),
        ("port", "70000", "annotation nearkv.io/port: '70000' is no port"),
        ("port", "80/evil", "annotation nearkv.io/port: '80/evil' is no port"),
        ("kv_events_port", "tcp://elsewhere:1", "annotation nearkv.io/kv-events-port"),
        ("kv_replay_port", "5567", "annotation nearkv.io/kv-replay-port: .*needs kv_events"),
        ("dp_size", "0", "annotation nearkv.io/dp-size"),
        ("dp_size", "100000", "annotation nearkv.io/dp-size: at most 256"),
        ("engine_kind", "tgi", "annotation nearkv.io/engine-kind"),
        ("transfer", "maybe", "annotation nearkv.io/transfer"),
        ("key_model", "m" * 600, "annotation nearkv.io/key-model: 600 characters"),
    ],
)
def test_what_makes_no_sense_names_the_annotation(name, value, said):
    with pytest.raises(PodUnreadableError, match=said):
        read_engine(annotated(**{name: value}), RULES)
