"""Named prefixes: whom they are for, what there is to do, and the bounds."""

import pytest

from nearkv.agent.warming.book import (
    Candidate,
    LoadState,
    WarmBook,
    choose_engines,
    targets_to_load,
)
from nearkv.agent.warming.errors import (
    BadWarmRequestError,
    PrefixConflictError,
    UnknownPrefixError,
    WarmingFullError,
)
from nearkv.agent.warming.requests import WarmRequest

ENGINES = [
    Candidate("a", "g", ("tiny", "lora")),
    Candidate("b", "g", ("tiny",)),
    Candidate("c", "h", ("big",)),
]
BORN = {"a": "1", "b": "1"}


def request(**fields):
    return WarmRequest(prompt="x", **fields)


@pytest.mark.parametrize(
    ("fields", "chosen"),
    [
        ({}, ["a", "b", "c"]),
        ({"group": "g"}, ["a", "b"]),
        ({"engines": ["c", "a", "c"]}, ["c", "a"]),
        ({"model": "lora"}, ["a"]),
        ({"group": "g", "model": "tiny"}, ["a", "b"]),
    ],
)
def test_a_request_names_its_engines(fields, chosen):
    assert choose_engines(request(**fields), ENGINES) == chosen


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"engines": ["a", "z"]}, "engines: z"),
        ({"group": "z"}, "group"),
        ({"model": "z"}, "model"),
        ({"engines": ["c"], "model": "tiny"}, "model"),
    ],
)
def test_engines_that_are_not_there_are_named(fields, named):
    with pytest.raises(BadWarmRequestError, match=named):
        choose_engines(request(**fields), ENGINES)


@pytest.fixture
def book():
    return WarmBook(max_prefixes=2, max_bytes=100_000)


def test_an_id_stands_for_one_prefix(book):
    first = book.put("doc", request(), 10)
    assert book.put("doc", request(group="g"), 10) is first
    with pytest.raises(PrefixConflictError, match="doc"):
        book.put("doc", WarmRequest(prompt="other"), 10)
    book.drop("doc")
    assert book.put("doc", WarmRequest(prompt="other"), 10) is not first


def test_prefixes_are_bounded_in_number_and_memory(book):
    book.put("1", request(), 10)
    with pytest.raises(WarmingFullError, match="bytes"):
        book.put("large", WarmRequest(token_ids=[1] * 4000), 10)
    book.put("2", request(), 10)
    with pytest.raises(WarmingFullError, match="2 prefixes"):
        book.put("3", request(), 10)
    book.drop("1")
    book.drop("2")
    assert (len(book), book.size_bytes) == (0, 0)
    with pytest.raises(UnknownPrefixError):
        book.drop("2")


def test_what_is_under_way_or_held_is_not_loaded_again(book):
    prefix = book.put("doc", request(), 10)
    first, second = targets_to_load(prefix, ["a", "b"], BORN, held=[])
    assert targets_to_load(prefix, ["a", "b"], BORN, held=[]) == []
    first.state = second.state = LoadState.LOADED
    prefix.keys = {"a": [1], "b": [1]}
    assert [t.engine for t in targets_to_load(prefix, ["a", "b"], BORN, held=["a"])] == ["b"]


@pytest.mark.parametrize("state", [LoadState.FAILED, LoadState.CANCELLED])
def test_what_failed_is_loaded_again(book, state):
    prefix = book.put("doc", request(), 10)
    (target,) = targets_to_load(prefix, ["a"], BORN, held=[])
    target.state = state
    assert len(targets_to_load(prefix, ["a"], BORN, held=[])) == 1


def test_a_new_incarnation_is_loaded_again_even_where_blocks_cannot_be_told(book):
    prefix = book.put("doc", request(), 10)
    (target,) = targets_to_load(prefix, ["a"], BORN, held=[])
    target.state = LoadState.LOADED
    assert targets_to_load(prefix, ["a"], BORN, held=[]) == []
    assert len(targets_to_load(prefix, ["a"], {"a": "2"}, held=[])) == 1
