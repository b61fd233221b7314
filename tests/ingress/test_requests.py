"""Reading request bodies: what is taken from them, and what is refused."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nearkv.ingress.errors import RequestError
from nearkv.ingress.requests import (
    PromptKind,
    parse_chat,
    parse_completion,
    parse_messages,
    parse_other,
    parse_responses,
)

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hello"}


def completion(**fields):
    return parse_completion(json.dumps(COMPLETION | fields).encode())


def chat(**fields):
    return parse_chat(json.dumps(CHAT | fields).encode())


@pytest.mark.parametrize(
    ("prompt", "kind", "text", "token_ids"),
    [
        pytest.param("hello", PromptKind.TEXT, "hello", (), id="text"),
        pytest.param("", PromptKind.TEXT, "", (), id="empty text"),
        pytest.param("ünï \U0001f600", PromptKind.TEXT, "ünï \U0001f600", (), id="unicode"),
        pytest.param(["a", "b"], PromptKind.TEXT, "a", (), id="texts: the first decides"),
        pytest.param([1, 2**32 - 1], PromptKind.TOKENS, "", (1, 2**32 - 1), id="token ids"),
        pytest.param([[1, 2], [3]], PromptKind.TOKENS, "", (1, 2), id="lists: the first decides"),
        pytest.param([], PromptKind.NONE, "", (), id="empty list"),
        pytest.param([[]], PromptKind.NONE, "", (), id="list of an empty list"),
        pytest.param(None, PromptKind.NONE, "", (), id="null"),
    ],
)
def test_each_kind_of_prompt(prompt, kind, text, token_ids):
    parsed = completion(prompt=prompt)
    assert (parsed.kind, parsed.text, parsed.token_ids) == (kind, text, token_ids)
    assert parsed.model == "m"


def test_blanks_before_the_first_of_several_prompts_are_passed_over():
    parsed = parse_completion(b'{"prompt": [' + b" \r\n\t" * 300 + b'"a", "b"]}')
    assert (parsed.text, parsed.several) == ("a", True)


def test_what_routing_needs_is_taken():
    assert completion(stream=True, cache_salt="s").stream
    assert chat(cache_salt="s").cache_salt == "s"
    assert chat().kind is PromptKind.CHAT
    assert not chat(stream=None).stream
    assert parse_chat(b' { "messages" : [ ] } ').model is None


def test_of_a_field_given_twice_the_last_one_counts_as_in_the_engine():
    body = b'{"prompt": "a", "prompt": "b"}'
    assert parse_completion(body).text == json.loads(body)["prompt"] == "b"
    assert parse_completion(body).digest == parse_completion(b'{"prompt": "b"}').digest


BAD_FOR_BOTH = [
    pytest.param(b"", None, id="empty"),
    pytest.param(b'{"prompt": "x", "messages": [', None, id="truncated"),
    pytest.param(b'{"prompt": "x", "messages": []} x', None, id="something after it"),
    pytest.param(b"[]", None, id="a list"),
    pytest.param(b"null", None, id="null"),
    pytest.param(b'{"prompt": "x", "messages": [], "model": 5}', "model", id="model"),
    pytest.param(b'{"prompt": "x", "messages": [], "stream": "yes"}', "stream", id="stream"),
    pytest.param(b'{"prompt": "x", "messages": [], "cache_salt": 1}', "cache_salt", id="salt"),
    pytest.param(b'{"prompt": "x", "messages": [], "model": "\xff"}', None, id="not UTF-8"),
    pytest.param(b'{"prompt": "x", "messages": [], "\xff": 1}', None, id="name not UTF-8"),
    pytest.param(b'{"prompt": "x", "messages": [], "\\ud800": 1}', None, id="half a surrogate"),
    pytest.param(b'{"prompt": "x", "messages": [], "a": 01}', None, id="bad number"),
    pytest.param(
        b'{"prompt": "x", "messages": [], "a": ' + b"[" * 50_000, None, id="nested too deep"
    ),
]


@pytest.mark.parametrize("parse", [parse_completion, parse_chat])
@pytest.mark.parametrize(("body", "param"), BAD_FOR_BOTH)
def test_bad_bodies_are_refused(parse, body, param):
    with pytest.raises(RequestError) as refused:
        parse(body)
    assert refused.value.param == param
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        pytest.param(b"5", "prompt", id="number"),
        pytest.param(b'{"a": 1}', "prompt", id="object"),
        pytest.param(b"[-1]", "prompt", id="negative token"),
        pytest.param(b"[4294967296]", "prompt", id="token over 32 bits"),
        pytest.param(b"[true]", "prompt", id="true is no token"),
        pytest.param(b"[1.5]", "prompt", id="half a token"),
        pytest.param(b'[1, "a"]', "prompt", id="mixed"),
        pytest.param(b"[null]", "prompt", id="null in a list"),
        pytest.param(b"[[[1]]]", "prompt", id="nested too often"),
        pytest.param(b"[1e999]", "prompt", id="infinite"),
        pytest.param(b"[" + b"9" * 5000 + b"]", "prompt", id="huge"),
    ],
)
def test_bad_prompts_are_refused_by_name(prompt, param):
    with pytest.raises(RequestError) as refused:
        parse_completion(b'{"prompt": ' + prompt + b"}")
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("parse", "needed"),
    [(parse_completion, {"prompt": "x"}), (parse_chat, {"messages": []})],
    ids=["completion", "chat"],
)
def test_very_many_fields_are_refused(parse, needed):
    parse(json.dumps(needed | {f"f{i}": 1 for i in range(1000)}).encode())
    with pytest.raises(RequestError, match="1101 fields"):
        parse(json.dumps(needed | {f"f{i}": 1 for i in range(1100)}).encode())


@pytest.mark.parametrize(
    "body",
    [b"{}", b'{"messages": null}', b'{"messages": "hi"}', b'{"messages": {}}'],
    ids=["missing", "null", "text", "object"],
)
def test_a_chat_needs_a_list_of_messages(body):
    with pytest.raises(RequestError) as refused:
        parse_chat(body)
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "extra",
    [b'"max_tokens": 1e999', b'"seed": ' + b"9" * 5000, b'"temperature": "hot"'],
    ids=["infinite", "huge", "wrong type"],
)
def test_what_does_not_concern_routing_is_left_to_the_engine(extra):
    assert parse_completion(b'{"prompt": "x", ' + extra + b"}").text == "x"


@pytest.mark.parametrize(
    ("body", "content_type", "model"),
    [
        pytest.param(b'{"model": "m", "input": 1}', "application/json", "m", id="json"),
        pytest.param(b'{"input": "x"}', "application/json", None, id="no model"),
        pytest.param(b"", "application/json", None, id="empty"),
        pytest.param(b"\x00binary", "audio/wav", None, id="not json"),
    ],
)
def test_other_bodies_give_their_model(body, content_type, model):
    parsed = parse_other(body, content_type)
    assert (parsed.model, parsed.kind) == (model, PromptKind.NONE)


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"model": 1}'], ids=["broken", "list", "type"])
def test_other_json_bodies_must_be_sound(body):
    with pytest.raises(RequestError):
        parse_other(body, "application/json")


IRRELEVANT = {
    "temperature": 0.5,
    "top_p": 0.5,
    "max_tokens": 7,
    "max_completion_tokens": 7,
    "seed": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "stop": ["x"],
    "n": 2,
    "user": "u",
    "logprobs": 1,
    "priority": 1,
    "metadata": {},
    "session_id": "s",
    "cache_salt": "s",  # it separates keys by their root instead
}


@pytest.mark.parametrize("parse", [completion, chat])
@pytest.mark.parametrize("field", IRRELEVANT)
def test_the_digest_ignores_what_cannot_change_the_tokens(parse, field):
    assert parse(**{field: IRRELEVANT[field]}).digest == parse().digest


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "other"},
        {"add_special_tokens": False},
        {"truncate_prompt_tokens": 5},
        {"tools": []},
        {"tool_choice": "none"},
        {"chat_template": "x"},
        {"chat_template_kwargs": {"a": 1}},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"a field of tomorrow": 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("parse", [completion, chat])
def test_the_digest_heeds_everything_else(parse, fields):
    assert parse(**fields).digest != parse().digest


def test_only_a_chats_digest_heeds_the_form_of_the_answer():
    form = {"response_format": {"type": "json_object"}}
    assert chat(**form).digest != chat().digest
    assert completion(**form).digest == completion().digest


def test_the_digest_heeds_the_prompt_and_not_the_order_of_fields():
    assert completion(prompt="a").digest != completion(prompt="b").digest
    assert completion(prompt=["a"]).digest != completion(prompt=["a", "b"]).digest
    turned = dict(reversed(CHAT.items()))
    assert parse_chat(json.dumps(turned).encode()).digest == chat().digest


def test_a_chat_and_a_completion_of_one_body_differ():
    body = json.dumps(CHAT | COMPLETION).encode()
    assert parse_chat(body).digest != parse_completion(body).digest


def test_no_name_of_a_field_can_pass_for_other_fields():
    hidden = {"messages": [], "n1\x011\x00n2": 2}
    plain = {"messages": [], "n1": 1, "n2": 2}
    digests = {parse_chat(json.dumps(body).encode()).digest for body in (hidden, plain)}
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("fields", "plain"),
    [
        ({}, True),
        ({"temperature": 0, "cache_salt": "s"}, True),
        ({"add_special_tokens": False}, False),
        ({"truncate_prompt_tokens": 5}, False),
        ({"unknown": 1}, False),
    ],
    ids=["nothing else", "irrelevant", "special tokens", "truncated", "unknown"],
)
def test_a_prompt_is_plain_when_its_text_alone_decides(fields, plain):
    assert completion(**fields).plain is plain


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{}", ""),
        (b'{"kv_transfer_params":null,"ec_transfer_params": null,"vllm_xargs":{"a":"b"}}', ""),
        (b'{"kv_transfer_params":{}}', "kv_transfer_params"),
        (b'{"kv_transfer_params":[1]}', "kv_transfer_params"),
        (rb'{"kv_t\u0072ansfer_params":{}}', "kv_transfer_params"),
        (b'{"kv_transfer_params":null,"kv_transfer_params":{}}', "kv_transfer_params"),
        (b'{"ec_transfer_params":{"a":1}}', "ec_transfer_params"),
        (b'{"vllm_xargs":{"kv_transfer_params":"x"}}', "vllm_xargs.kv_transfer_params"),
        (rb'{"vllm_xargs":{"kv_t\u0072ansfer_params":"x"}}', "vllm_xargs.kv_transfer_params"),
    ],
)
@pytest.mark.parametrize(
    ("parse", "needs"),
    [
        (parse_completion, b'"prompt":"x",'),
        (parse_completion, b'"prompt":[1,2],'),
        (parse_chat, b'"messages":[],'),
        (parse_responses, b'"input":"x",'),
        (parse_messages, b'"messages":[],'),
        (lambda body: parse_other(body, "application/json"), b'"input":"x",'),
    ],
    ids=["text", "tokens", "chat", "responses", "messages", "other"],
)
def test_a_client_that_says_where_kv_lies_is_noticed(parse, needs, body, field):
    assert parse((b"{" + needs + body[1:]).replace(b",}", b"}")).transfer_field == field


scraps = st.lists(
    st.sampled_from(
        [b"{", b"}", b"[", b"]", b'"', b":", b",", b'"prompt"', b'"messages"', b'"model"', b"1",
         b"null", b"true", b"-", b"e9", b"\\", b"u", b"d800", b"\xff", b"\x00", b" "]
    )
).map(b"".join)  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
names = st.sampled_from(["prompt", "messages", "model", "stream", "cache_salt"]) | st.text()
bodies = st.dictionaries(names, values).map(lambda body: json.dumps(body).encode())


@pytest.mark.parametrize(
    "parse",
    [parse_completion, parse_chat, lambda body: parse_other(body, "application/json")],
    ids=["completion", "chat", "other"],
)
@given(body=st.binary() | scraps | bodies)
@example(body=b'{"prompt": "x", "messages": [], "\xff": 1}')
def test_no_body_raises_anything_but_a_request_error(parse, body):
    try:
        parsed = parse(body)
    except RequestError:
        return
    parsed.text.encode()
