"""Requests of other APIs as the chat they amount to."""

import json
from pathlib import Path

import pytest

from nearkv.ingress.errors import TokenizationError
from nearkv.ingress.requests import PromptKind
from nearkv.ingress.tokens.converting import chat_of, in_plain_text


def responses(given, **fields):
    return chat_of(PromptKind.RESPONSES, json.dumps({"input": given, **fields}).encode())


def messages(*given, **fields):
    return chat_of(PromptKind.MESSAGES, json.dumps({"messages": given, **fields}).encode())


def user(content):
    return {"role": "user", "content": content}


def part(words):
    return {"type": "text", "text": words}


def call(call_id, name="f", arguments="{}"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_parts_can_be_joined():
    chat = responses([user([part("a"), part("b")]), {"role": "assistant", "content": "c"}])
    assert [message["content"] for message in in_plain_text(chat)["messages"]] == ["a\nb", "c"]


def test_a_response_s_text_is_what_the_user_says():
    assert responses("hi") == {"messages": [user("hi")]}


def test_instructions_come_first():
    assert responses("hi", instructions="be brief")["messages"] == [
        {"role": "system", "content": "be brief"},
        user("hi"),
    ]


def test_items_of_one_turn_become_one_message():
    chat = responses(
        [
            user([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]),
            {"type": "reasoning", "summary": [{"text": "hm"}]},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "yes"}],
            },
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "3"},
            {"role": "assistant", "content": "so"},
            {"role": "assistant", "content": "there"},
        ]
    )
    assert chat["messages"] == [
        user([part("a"), part("b")]),
        {
            "role": "assistant",
            "reasoning": "hm",
            "content": "yes",
            "tool_calls": [call("1"), call("2")],
        },
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "assistant", "content": "so"},
        {"role": "assistant", "content": "there"},
    ]


def test_a_response_s_tools_and_effort():
    chat = responses(
        "hi",
        tools=[
            {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True},
            {"type": "web_search"},
        ],
        reasoning={"effort": "none"},
        chat_template_kwargs={"x": 1},
    )
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert chat["chat_template_kwargs"] == {
        "enable_thinking": False,
        "reasoning_effort": "none",
        "x": 1,
    }


def test_system_texts_are_joined_without_what_engines_leave_out():
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: 17"},
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
    ]
    assert messages(user("hi"), system=system)["messages"][0] == {
        "role": "system",
        "content": "ab",
    }
    assert messages(user("hi"), system="s")["messages"][0]["content"] == "s"


def test_blocks_of_a_message():
    chat = messages(
        user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "yes"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
            ],
        },
        user(
            [
                {"type": "tool_result", "tool_use_id": "1", "content": "3"},
                {"type": "text", "text": "go on"},
            ]
        ),
        tools=[{"name": "f", "input_schema": {"properties": {}}}],
    )
    assert chat["messages"] == [
        user([part("a"), part("b")]),
        {
            "role": "assistant",
            "reasoning": "hm",
            "tool_calls": [call("1", arguments='{"a": 1}')],
            "content": "yes",
        },
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        user("go on"),
    ]
    assert chat["tools"][0]["function"]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (PromptKind.RESPONSES, {"input": [user([{"type": "input_image", "image_url": "x"}])]}),
        (PromptKind.RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}),
        (PromptKind.RESPONSES, {"input": [7]}),
        (PromptKind.RESPONSES, {"input": [{"role": "user"}]}),
        (PromptKind.RESPONSES, {"input": 7}),
        (PromptKind.RESPONSES, {}),
        (PromptKind.MESSAGES, {"messages": [user([{"type": "image", "source": {}}])]}),
        (PromptKind.MESSAGES, {"messages": [user(7)]}),
        (PromptKind.MESSAGES, {"messages": [{"role": "user"}]}),
        (PromptKind.MESSAGES, {"messages": {}, "system": 7}),
        (PromptKind.MESSAGES, []),
    ],
    ids=str,
)
def test_what_is_no_chat_of_text_has_no_tokens(kind, body):
    with pytest.raises(TokenizationError):
        chat_of(kind, json.dumps(body).encode())


CAPTURED = Path(__file__).parents[1] / "data" / "vllm" / "converted_chats.jsonl"
"""What vLLM 0.32's own conversions made of some requests, nulls left out."""


@pytest.mark.parametrize("line", CAPTURED.read_text().splitlines(), ids=lambda line: line[9:60])
def test_chats_are_those_that_vllm_makes(line):
    captured = json.loads(line.replace("input_text", "text"))
    kind = PromptKind(captured["kind"])
    assert chat_of(kind, json.dumps(captured["request"]).encode()) == captured["chat"]
