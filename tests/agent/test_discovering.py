"""Which engines there are, and where each of their ranks publishes."""

import pytest
from pydantic import SecretStr, ValidationError

from nearkv.agent.discovering import EngineSpec, configured_engines
from nearkv.agent.engine_metrics import RankReading
from nearkv.agent.event_sources import EventSource, endpoint_of_rank, reachable_endpoint
from nearkv.agent.probing import ModelCard
from nearkv.agent.settings import AgentSettings, ConfiguredEngine
from nearkv.agent.watching import describe_engine, rank_reading


def configured(name, **fields):
    return ConfiguredEngine(id=name, url="http://e:8000/", **fields)


def test_a_configured_engine_becomes_a_spec():
    (spec,) = configured_engines(
        [configured("e", role="decode", kv_events="tcp://e:5557", api_key=SecretStr("k"))]
    )
    assert spec == EngineSpec(
        "e", "http://e:8000", "decode", events=EventSource("tcp://e:5557"), api_key="k"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"dp_size": 0},
        {"role": "both-ways"},
        {"kv_bytes_per_token": 0},
        {"kv_replay": "tcp://e:5558"},
        {"topic": "kv"},
        {"url": "e:8000"},
        {"typo": 1},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_engines_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        AgentSettings(engines=(configured("e").model_dump(exclude_unset=True) | wrong,))


def test_a_secret_longer_than_the_hash_takes_is_refused():
    with pytest.raises(ValidationError, match="cluster_secret"):
        AgentSettings(cluster_secret="x" * 65)


def test_each_rank_has_an_id_and_ports_of_its_own():
    spec = EngineSpec(
        "e", "http://e", events=EventSource("tcp://e:5557", "tcp://e:5600", "kv"), dp_size=2
    )
    assert [spec.rank_id(rank, 2) for rank in (0, 1)] == ["e/dp0", "e/dp1"]
    assert spec.rank_id(0, 1) == "e"
    assert spec.event_sources() == {
        0: EventSource("tcp://e:5557", "tcp://e:5600", "kv"),
        1: EventSource("tcp://e:5558", "tcp://e:5601", "kv"),
    }


def test_an_engine_may_have_no_replay_or_no_events():
    assert EngineSpec("e", "http://e").event_sources() == {}
    spec = EngineSpec("e", "http://e", events=EventSource("tcp://e:5557"), dp_size=2)
    assert spec.event_sources()[1] == EventSource("tcp://e:5558")


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://e:5557", 0, "tcp://e:5557"),
        ("tcp://e:5557", 3, "tcp://e:5560"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("ipc:///run/kv", 1, "ipc:///run/kv"),
    ],
)
def test_the_rank_is_added_to_the_port(endpoint, rank, expected):
    assert endpoint_of_rank(endpoint, rank) == expected


@pytest.mark.parametrize(
    ("endpoint", "host", "expected"),
    [
        ("tcp://*:5557", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("tcp://0.0.0.0:5557", "e", "tcp://e:5557"),
        ("tcp://[::]:5557", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("tcp://:::5557", "fd00::7", "tcp://[fd00::7]:5557"),
        ("tcp://10.1.1.1:5557", "10.0.0.7", "tcp://10.1.1.1:5557"),
        ("ipc:///run/kv", "10.0.0.7", "ipc:///run/kv"),
    ],
)
def test_a_bound_address_becomes_one_to_connect_to(endpoint, host, expected):
    assert reachable_endpoint(endpoint, host) == expected


ONE, TWO = RankReading(requests_running=1), RankReading(requests_running=2)


@pytest.mark.parametrize(
    ("readings", "rank", "single", "expected"),
    [
        pytest.param({"0": ONE, "1": TWO}, 1, False, TWO, id="its-own"),
        pytest.param({"0": ONE}, 1, False, RankReading(), id="not-another-ranks"),
        pytest.param({"7": ONE}, 0, True, ONE, id="the-only-one-however-labelled"),
        pytest.param({"7": ONE, "8": TWO}, 0, True, RankReading(), id="no-guess-among-several"),
        pytest.param({}, 0, True, RankReading(), id="nothing"),
    ],
)
def test_a_rank_gets_its_own_reading(readings, rank, single, expected):
    assert rank_reading(readings, rank, single=single) == expected


CARDS = [
    ModelCard("tiny", max_model_len=512),
    ModelCard("alias"),
    ModelCard("sql", parent="tiny"),
]


def test_an_engine_is_described_by_what_it_says():
    got = describe_engine(
        EngineSpec("e", "http://e"), CARDS, "0.32.0", node="n", dp_rank=0, ranks=1
    )
    assert (got.id, got.model, got.models, got.adapters) == (
        "e",
        "tiny",
        ("tiny", "alias"),
        ("sql",),
    )
    assert (got.group, got.key_model, got.max_model_len, got.dp_rank) == ("tiny", "tiny", 512, None)


def test_the_configuration_beats_what_an_engine_says():
    spec = EngineSpec("e", "http://e", role="prefill", group="g", key_model="k")
    got = describe_engine(spec, CARDS, None, node="n", dp_rank=1, ranks=2)
    assert (got.id, got.role, got.group, got.key_model, got.dp_rank) == (
        "e/dp1",
        "prefill",
        "g",
        "k",
        1,
    )
