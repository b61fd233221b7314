"""Bodies of the two legs: what is changed, and that nothing else is."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkv.ingress.prefill_leg import (
    ASK_FOR_KV,
    LeaseRef,
    UnreadableAnswerError,
    decode_body,
    lease_of,
    prefill_body,
    read_fields,
    read_params,
    why_whole,
)

PARAMS = msgspec.Raw(b'{"do_remote_prefill":true , "x":1e400,"big":123456789012345678901234567890}')


def prefill(body, *, is_chat=False):
    return prefill_body(read_fields(body), is_chat=is_chat)


def decode(body, params=PARAMS):
    return decode_body(body, read_fields(body), params)


def whole(**fields):
    return why_whole(read_fields(json.dumps({"prompt": "x"} | fields).encode()))


def test_the_prefill_leg_of_a_completion():
    assert json.loads(prefill(b'{"model":"m","prompt":"hi","max_tokens":50,"stream":true}')) == {
        "model": "m",
        "prompt": "hi",
        "stream": False,
        "max_tokens": 1,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }


def test_only_a_chat_has_two_limits():
    body = b'{"messages":[],"max_tokens":9,"max_completion_tokens":9}'
    assert json.loads(prefill(body, is_chat=True)).items() >= {
        ("max_tokens", 1),
        ("max_completion_tokens", 1),
    }
    assert "max_completion_tokens" not in json.loads(prefill(body))


ABOUT_THE_ANSWER = {
    "stream_options": {"include_usage": True},
    "min_tokens": 5,
    "n": 1,
    "best_of": 1,
    "logprobs": True,
    "top_logprobs": 3,
    "logprob_token_ids": [1],
    "prompt_logprobs": None,
    "echo": False,
    "stop": ["x"],
    "stop_token_ids": [7],
    "structured_outputs": {"regex": "a"},
    "return_token_ids": True,
    "stream_interval": 4,
    "use_beam_search": False,
}


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize("name", ABOUT_THE_ANSWER)
def test_what_shapes_the_answer_is_taken_out(name, is_chat):
    body = json.dumps({"prompt": "x", name: ABOUT_THE_ANSWER[name]}).encode()
    assert name not in json.loads(prefill(body, is_chat=is_chat))


ABOUT_THE_PROMPT = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "none",
    "response_format": {"type": "json_object"},  # vLLM 0.32 hands it to the chat template
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "low",
    "add_generation_prompt": False,
    "cache_salt": "s",
    "documents": [{"text": "t"}],
    "some_future_field": [1],
}


@pytest.mark.parametrize("name", ABOUT_THE_PROMPT)
def test_what_may_shape_a_chats_prompt_stays(name):
    body = json.dumps({"messages": [], name: ABOUT_THE_PROMPT[name]}).encode()
    assert json.loads(prefill(body, is_chat=True))[name] == ABOUT_THE_PROMPT[name]


def test_the_form_of_a_completion_shapes_no_prompt():
    assert "response_format" not in json.loads(prefill(b'{"prompt":"x","response_format":{}}'))


EXACT = (
    b'{ "model" : "m",\n "prompt":"\\u00e9\\ud83d\\ude00 \xc3\xa9 \\/ \\"q\\"",'
    b'"temperature":0.70000000000000000001, "seed":123456789012345678901234567890,'
    b'"logit_bias":{"5":-1e2,"5":1E-3},"stop":"\\ud83d\\ude01","user":"kv_transfer_params" }\r\n'
)


def test_values_that_stay_are_those_of_the_client_byte_for_byte():
    leg = prefill(EXACT)
    for value in (
        b'"\\u00e9\\ud83d\\ude00 \xc3\xa9 \\/ \\"q\\""',
        b"0.70000000000000000001",
        b"123456789012345678901234567890",
        b'{"5":-1e2,"5":1E-3}',
    ):
        assert value in leg
    assert b"ude01" not in leg


def test_the_decode_leg_is_the_clients_bytes_and_the_parameters():
    end = b" }\r\n"
    assert (
        decode(EXACT) == EXACT.removesuffix(end) + b' ,"kv_transfer_params":' + bytes(PARAMS) + b"}"
    )


def test_of_equal_names_the_last_counts_as_engines_count_it():
    body = b'{"prompt":"a","n":2,"n":1,"prompt":"b"}'
    assert why_whole(read_fields(body)) == ""
    assert json.loads(prefill(body))["prompt"] == "b"
    assert json.loads(decode(body, ASK_FOR_KV))["prompt"] == "b"
    assert why_whole(read_fields(b'{"prompt":"a","n":1,"n":2}')) == "several_answers"


@pytest.mark.parametrize(
    "body",
    [
        b'{"kv_transfer_params":null,"prompt":"x"}',
        b'{"prompt":"x","kv_transfer_params": null }',
        b'{"kv\\u005ftransfer_params":null,"prompt":"x"}',
    ],
)
def test_parameters_of_null_are_replaced_and_not_doubled(body):
    leg = decode(body)
    assert leg.count(b"transfer_params") == 1
    assert bytes(PARAMS) in leg
    assert read_fields(leg)["prompt"] == msgspec.Raw(b'"x"')


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kv_transfer_params": {}}, "own_params"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "own_params"),
        ({"ec_transfer_params": {"a": 1}}, "own_params"),
        ({"n": 2}, "several_answers"),
        ({"n": "2"}, "several_answers"),
        ({"best_of": 3}, "several_answers"),
        ({"use_beam_search": True}, "beam_search"),
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": -1}, "truncated_prompt"),
        ({"prompt_embeds": "abc"}, "prompt_embeds"),
        ({"prompt": ["a", "b"]}, "several_prompts"),
        ({"prompt": ["a"]}, "several_prompts"),
        ({"prompt": [[1, 2], [3]]}, "several_prompts"),
    ],
)
def test_what_cannot_be_split_and_why(fields, reason):
    assert whole(**fields) == reason


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": None, "best_of": 1, "echo": False, "use_beam_search": None},
        {"kv_transfer_params": None, "prompt_logprobs": None},
        {"prompt": [1, 2, 3]},
        {"prompt": "[[1]]"},
        {"logprobs": 5, "stop": ["a"], "tools": [{}]},
    ],
)
def test_what_can_be_split(fields):
    assert whole(**fields) == ""


def test_space_before_the_first_prompt_hides_nothing():
    assert why_whole(read_fields(b'{"prompt": [' + b" " * 999 + b'"a"]}')) == "several_prompts"
    assert why_whole(read_fields(b'{"prompt": [ \n 5]}')) == ""


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"x"', b"{} x", b"\xff", b'{"a":"\\ud800"}'])
def test_a_body_that_is_no_object_is_said_to_be_none(body):
    with pytest.raises(ValueError, match="not a JSON object"):
        read_fields(body)


def test_parameters_come_out_of_an_answer_verbatim():
    answer = b'{"id":"x","choices":[{}],"kv_transfer_params": ' + bytes(PARAMS) + b"}"
    assert bytes(read_params(answer)) == bytes(PARAMS)


@pytest.mark.parametrize("answer", [b"{}", b'{"kv_transfer_params":null}', b'{"choices":[]}'])
def test_an_answer_without_parameters_has_none(answer):
    assert read_params(answer) is None


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"<html>", b'{"kv_transfer_params":[1]}', b'{"kv_transfer_params":"x"}']
)
def test_an_answer_that_no_engine_gives_is_unreadable(answer):
    with pytest.raises(UnreadableAnswerError):
        read_params(answer)


def test_our_connectors_parameters_name_a_lease():
    params = {"remote_engine_id": "p", "remote_epoch": "e1", "remote_lease_id": "l1", "more": 1}
    found = lease_of(msgspec.Raw(msgspec.json.encode(params)))
    assert found == LeaseRef("p", "e1", "l1")
    assert json.loads(msgspec.json.encode(found)) == {"engine": "p", "epoch": "e1", "lease": "l1"}


@pytest.mark.parametrize(
    "params", [b"{}", b'{"remote_engine_id":"p"}', b'{"remote_lease_id":5}', b"[]", b"nonsense"]
)
def test_other_parameters_name_none(params):
    assert lease_of(msgspec.Raw(params)) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON), st.integers(0, 3), st.booleans())
def test_any_body_comes_through_both_legs_unchanged(fields, indent, escape):
    body = json.dumps({"prompt": "x"} | fields, indent=indent, ensure_ascii=escape).encode(
        errors="surrogatepass"
    )
    try:
        read = read_fields(body)
    except ValueError:  # lone surrogates are no UTF-8
        return
    sent = json.loads(decode_body(body, read, ASK_FOR_KV))
    assert sent.pop("kv_transfer_params") == json.loads(bytes(ASK_FOR_KV))
    expected = json.loads(body)
    expected.pop("kv_transfer_params", None)
    assert sent == expected
