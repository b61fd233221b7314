"""Bodies of warm-up requests, read and turned into what engines are asked."""

import msgspec
import pytest

from nearkv.agent.warming.errors import BadWarmRequestError
from nearkv.agent.warming.requests import (
    WarmRequest,
    check_id,
    load_request,
    read_request,
    tokenize_body,
)

MESSAGES = [{"role": "system", "content": "long"}]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("{", "body is no JSON: "),
        ("{}", "prompt, messages or token_ids"),
        ('{"prompt": "x", "token_ids": [1]}', "prompt and token_ids"),
        ('{"prompt": ""}', "prompt"),
        ('{"token_ids": [-1]}', "token_ids"),
        ('{"token_ids": ["x"]}', "token_ids"),
        ('{"prompt": "x", "engines": []}', "engines"),
        ('{"prompt": "x", "engines": ["a"], "group": "g"}', "engines and group"),
        ('{"prompt": "x", "nodes": ["a"]}', "nodes"),
        ("[]", "object"),
        (f'{{"messages": [{{"role": {"[" * 100_000}', "body is no JSON: "),
        (f'{{"messages": [{{"seed": 1{"0" * 400}}}]}}', "messages: cannot be passed on"),
    ],
)
def test_a_bad_body_is_refused_by_the_name_of_its_field(body, named):
    with pytest.raises(BadWarmRequestError, match=named):
        read_request(body.encode())


@pytest.mark.parametrize("prefix_id", ["", "a b", "x" * 65, "../x", "ä"])
def test_ids_that_cannot_be_ids_are_refused(prefix_id):
    with pytest.raises(BadWarmRequestError, match="id: "):
        check_id(prefix_id)


def test_one_prefix_is_told_from_another_whoever_is_to_have_it():
    one = read_request(b'{"prompt": "x", "engines": ["a"]}')
    assert one.digest == read_request(b'{"prompt": "x", "group": "g"}').digest
    assert one.digest != read_request(b'{"prompt": "y"}').digest
    assert one.digest != read_request(b'{"prompt": "x", "cache_salt": "s"}').digest


def test_an_engine_computes_the_prefix_and_one_token():
    request = WarmRequest(prompt="x", cache_salt="s")
    path, body = load_request(request, "m", [1, 2], priority=100)
    assert path == "/v1/completions"
    assert msgspec.json.decode(body) == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 1,
        "temperature": 0,
        "stream": False,
        "priority": 100,
        "cache_salt": "s",
    }


def test_messages_without_known_tokens_go_as_a_chat():
    path, body = load_request(WarmRequest(messages=MESSAGES), "m", None, priority=None)
    assert path == "/v1/chat/completions"
    decoded = msgspec.json.decode(body)
    assert (decoded["messages"], "priority" in decoded) == (MESSAGES, False)


def test_messages_are_tokenized_without_the_opening_of_an_answer():
    question = msgspec.json.decode(tokenize_body(WarmRequest(messages=MESSAGES), "m"))
    assert question == {"model": "m", "messages": MESSAGES, "add_generation_prompt": False}
