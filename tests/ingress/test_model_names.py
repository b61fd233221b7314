"""Aliases, lists of models, and names that nobody serves."""

import json

import pytest

from nearkv.ingress.errors import RequestError, UnknownModelError
from nearkv.ingress.fleet import EngineView
from nearkv.ingress.model_names import ModelNames, list_models, rename_model
from nearkv.ingress.model_settings import ModelSettings
from nearkv.ingress.requests import parse_completion
from nearkv.state.model import EngineInfo


def view(name, **info):
    return EngineView(EngineInfo(id=name, incarnation="i", url=f"http://{name}", **info), "agent")


FLEET = (
    view("a", models=("tiny", "tiny-2"), model="tiny", adapters=("sql",), max_model_len=2048),
    view("b", models=("tiny",), model="tiny", max_model_len=1024),
    view("c"),
)


def test_an_alias_is_replaced_in_the_request_and_in_the_body():
    body = b'{"prompt": "x" , "model":"gpt", "a": 1.50}'
    names = ModelNames({"gpt": "tiny"})
    parsed, renamed = names.apply(parse_completion(body), body)
    assert parsed.model == "tiny"
    assert json.loads(renamed) == {"prompt": "x", "model": "tiny", "a": 1.5}
    assert b"1.50" in renamed


@pytest.mark.parametrize("body", [b'{"prompt": "x", "model": "tiny"}', b'{"prompt": "x"}'])
def test_other_requests_keep_their_bytes(body):
    parsed = parse_completion(body)
    assert ModelNames({"gpt": "tiny"}).apply(parsed, body) == (parsed, body)


def test_a_body_that_is_no_object_cannot_be_renamed():
    with pytest.raises(RequestError):
        rename_model(b"[]", "tiny")


def test_what_is_too_long_for_a_name_is_nobody_s():
    body = json.dumps({"prompt": "x", "model": "m" * 1025}).encode()
    with pytest.raises(UnknownModelError) as caught:
        ModelNames({}).apply(parse_completion(body), body)
    assert len(str(caught.value)) < 300


def test_each_model_is_listed_once_with_what_all_engines_can_take():
    cards = {card["id"]: card for card in list_models(FLEET, {"gpt": "tiny", "none": "nope"})}
    assert list(cards) == ["gpt", "sql", "tiny", "tiny-2"]
    assert cards["tiny"]["max_model_len"] == 1024
    assert cards["sql"]["parent"] == "tiny"
    assert (cards["gpt"]["root"], cards["gpt"]["max_model_len"]) == ("tiny", 1024)
    assert {card["owned_by"] for card in cards.values()} == {"nearkv"}


def test_an_unknown_model_s_error_says_what_is_served():
    error = ModelNames({"gpt": "tiny"}).unknown("nope", FLEET)
    assert (error.status, error.param) == (404, "model")
    assert str(error) == "The model `nope` does not exist. Known: gpt, sql, tiny, tiny-2."


def test_a_long_list_is_cut():
    many = view("a", models=tuple(f"m{i:03}" for i in range(60)))
    message = str(ModelNames({}).unknown("x" * 1000, [many]))
    assert message.endswith("m049 and 10 more.")
    assert len(message) < 800


@pytest.mark.parametrize("aliases", [{"a": "b", "b": "c"}, {"a": ""}, {"": "a"}, {"a": "a"}])
def test_aliases_stand_for_names(aliases):
    with pytest.raises(ValueError, match="alias"):
        ModelSettings(aliases=aliases)
