"""The fleet: what is out of the ordinary about engines, and what paths between them cost."""

import pytest

from nearkv.ingress.fleet import ORDINARY
from nearkv.state.model import (
    PathReading,
    TransferInfo,
)
from tests.ingress.fleet_agent import Agent, B, engine_info

MOVES = TransferInfo(mode="agent", compat="c")


def movers(fleet, model="m"):
    return [view.info.id for view in fleet.traits(model).movers]


def with_engines(agent, **engines):
    agent.delta(
        engines=tuple(engine_info(name, models=("m",), **more) for name, more in engines.items())
    )


def test_ordinary_engines_have_no_traits(fleet, agent):
    agent.snapshot({})
    with_engines(agent, e1={}, e2={})
    assert fleet.traits("m") is ORDINARY
    assert fleet.traits("unheard of") is ORDINARY
    assert fleet.traits(None) is ORDINARY


def test_one_whose_kv_moves_is_alone_until_another_fits(fleet, agent):
    agent.snapshot({})
    with_engines(agent, e1={"transfer": MOVES}, e2={})
    assert movers(fleet) == []
    with_engines(agent, e2={"transfer": TransferInfo(mode="nixl", compat="c")})
    assert movers(fleet) == []
    with_engines(agent, e3={"transfer": MOVES})
    assert movers(fleet) == movers(fleet, None) == ["e1", "e3"]
    with_engines(agent, e1={})
    assert movers(fleet) == []
    with_engines(agent, e1={"transfer": MOVES})
    agent.delta(gone=("e3",))
    assert movers(fleet) == []


def test_engines_that_name_no_model_move_for_any(fleet, agent):
    agent.snapshot({})
    agent.delta(engines=tuple(engine_info(e, transfer=MOVES) for e in ("e1", "e2")))
    assert movers(fleet, "whatever") == ["e1", "e2"]


def test_a_role_is_a_trait(fleet, agent):
    agent.snapshot({})
    with_engines(agent, e1={}, e2={"role": "decode"})
    assert fleet.traits("m").has_roles


def path(source, target, seconds=1.0, rate=1e9):
    return PathReading(
        source=source, target=target, path="tcp", setup_seconds=seconds, bytes_per_second=rate
    )


def setup_seconds(fleet, source, target):
    reading = fleet.path_between(fleet.engines[source], fleet.engines[target])
    return None if reading is None else reading.setup_seconds


def test_paths_are_those_of_the_last_snapshot_and_what_came_since(fleet, agent):
    agent.begin(
        engine_info("e1", node="n1"), engine_info("e2", node="n2"), paths=[path("n1", "n2")]
    )
    assert setup_seconds_known(agent) == []
    agent.end()
    assert setup_seconds(fleet, "e1", "e2") == 1.0
    assert setup_seconds(fleet, "e2", "e1") is None
    agent.delta(paths=(path("n1", "n2", 2.0), path("n2", "n1", 3.0)))
    assert (setup_seconds(fleet, "e1", "e2"), setup_seconds(fleet, "e2", "e1")) == (2.0, 3.0)
    agent.snapshot({"e1": (), "e2": ()})
    assert setup_seconds_known(agent) == []


def setup_seconds_known(agent):
    return list(agent.fleet.agents[agent.url].paths.readings)


def test_the_targets_agent_knows_best_what_a_path_costs(fleet, agent):
    other = Agent(fleet, B, boot="x")
    agent.begin(engine_info("e1", node="n1"), paths=[path("n1", "n2", 1.0), path("n2", "n1", 2.0)])
    agent.end()
    other.begin(engine_info("e2", node="n2"), paths=[path("n1", "n2", 5.0)])
    other.end()
    assert setup_seconds(fleet, "e1", "e2") == 5.0
    assert setup_seconds(fleet, "e2", "e1") == 2.0


@pytest.mark.parametrize(
    ("seconds", "rate"), [(-1.0, 1e9), (float("nan"), 1e9), (1.0, 0.0), (1.0, float("inf"))]
)
def test_paths_that_cannot_be_are_not_believed(fleet, agent, seconds, rate):
    agent.snapshot({"e1": ()}, paths=[path("", "", seconds, rate)])
    assert setup_seconds(fleet, "e1", "e1") is None
