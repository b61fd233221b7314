"""Reading requests of /v1/responses and /v1/messages."""

import json

import pytest

from nearkv.ingress.errors import RequestError
from nearkv.ingress.requests import (
    PromptKind,
    parse_messages,
    parse_request,
    parse_responses,
)

TEXT = {"model": "m", "input": "hello"}
TALK = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


def responses(**fields):
    return parse_responses(json.dumps(TEXT | fields).encode())


def messages(**fields):
    return parse_messages(json.dumps(TALK | fields).encode())


def by_path(path, body=b"", method="POST"):
    return parse_request(method, path, body, lambda: "application/json")


def test_what_routing_needs_is_taken():
    parsed = responses(stream=True, cache_salt="s")
    assert (parsed.kind, parsed.model) == (PromptKind.RESPONSES, "m")
    assert (parsed.stream, parsed.cache_salt, parsed.response_id) == (True, "s", "")
    parsed = messages(stream=True, cache_salt="s")
    assert (parsed.kind, parsed.model) == (PromptKind.MESSAGES, "m")
    assert (parsed.stream, parsed.cache_salt) == (True, "s")


def test_a_prompt_that_goes_on_from_a_response_is_known_to_its_engine_only():
    parsed = responses(previous_response_id="resp_1")
    assert (parsed.kind, parsed.response_id) == (PromptKind.NONE, "resp_1")


@pytest.mark.parametrize(
    ("method", "path", "response_id"),
    [
        ("GET", "/v1/responses/resp_1", "resp_1"),
        ("DELETE", "/v1/responses/resp_1", "resp_1"),
        ("POST", "/v1/responses/resp_1/cancel", "resp_1"),
        ("GET", "/v1/other", ""),
    ],
)
def test_a_request_about_a_response_names_it(method, path, response_id):
    assert by_path(path, method=method).response_id == response_id


def test_each_path_has_its_kind():
    assert by_path("/v1/responses", json.dumps(TEXT).encode()).kind is PromptKind.RESPONSES
    assert by_path("/v1/messages", json.dumps(TALK).encode()).kind is PromptKind.MESSAGES
    counted = by_path("/v1/messages/count_tokens", json.dumps(TALK).encode())
    assert (counted.kind, counted.model) == (PromptKind.NONE, "m")


def test_thinking_that_is_disabled_may_be_rendered_otherwise():
    assert messages(thinking={"type": "disabled"}).may_render_otherwise
    assert not messages(thinking={"type": "enabled", "budget_tokens": 4}).may_render_otherwise
    assert not messages(thinking=None).may_render_otherwise


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5},
        {"metadata": {"a": "b"}},
        {"store": False},
        {"user": "u"},
        {"stream": True},
        {"cache_salt": "s"},
    ],
    ids=str,
)
def test_equal_prompts_of_responses_are_equal(fields):
    assert responses(**fields).digest == responses().digest


@pytest.mark.parametrize(
    "fields",
    [
        {"instructions": "be brief"},
        {"input": "other"},
        {"tools": []},
        {"reasoning": {"effort": "low"}},
        {"truncation": "auto"},
        {"max_output_tokens": 5},
        {"never_heard_of": 1},
    ],
    ids=str,
)
def test_what_may_bear_on_the_prompt_of_responses_counts(fields):
    assert responses(**fields).digest != responses().digest


@pytest.mark.parametrize(
    ("fields", "equal"),
    [
        ({"max_tokens": 6}, True),
        ({"stop_sequences": ["x"]}, True),
        ({"top_k": 3}, True),
        ({"system": "be brief"}, False),
        ({"thinking": {"type": "adaptive"}}, False),
        ({"tools": []}, False),
        ({"output_config": {"effort": "low"}}, False),
    ],
    ids=str,
)
def test_what_counts_of_messages(fields, equal):
    assert (messages(**fields).digest == messages().digest) is equal


def test_prompts_of_different_apis_are_never_equal():
    body = json.dumps(TEXT | TALK).encode()
    assert parse_responses(body).digest != parse_messages(body).digest


@pytest.mark.parametrize(
    ("parse", "body", "param"),
    [
        pytest.param(parse_responses, b"{}", "input", id="no input"),
        pytest.param(parse_responses, b'{"input": 7}', "input", id="number"),
        pytest.param(parse_responses, b'{"input": null}', "input", id="null"),
        pytest.param(
            parse_responses,
            b'{"input": "x", "previous_response_id": 7}',
            "previous_response_id",
            id="previous",
        ),
        pytest.param(parse_messages, b"{}", "messages", id="no messages"),
        pytest.param(parse_messages, b'{"messages": "x"}', "messages", id="text"),
        pytest.param(parse_messages, b'{"messages": [], "thinking": 1}', "thinking", id="thinking"),
        pytest.param(parse_messages, b'{"messages": [], "model": 1}', "model", id="model"),
        pytest.param(parse_messages, b'{"messages": [', None, id="truncated"),
        pytest.param(parse_responses, b"\xff", None, id="no text"),
    ],
)
def test_bad_requests_name_the_field(parse, body, param):
    with pytest.raises(RequestError) as caught:
        parse(body)
    assert caught.value.param == param
