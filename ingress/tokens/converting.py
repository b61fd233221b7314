"""The chat that a request of another API amounts to, for tokenizing only (pure).

An engine that renders ``/v1/responses`` and ``/v1/messages`` itself is asked to. Where none
does, their prompts are put as the chat that vLLM 0.32 makes of them before its template.
Tokens gained so are a guess: an engine of another version may see it differently. What is
forwarded never changes.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec

from nearkv.ingress.errors import TokenizationError
from nearkv.ingress.requests import PromptKind

Fields = dict[str, Any]

_NOT_IN_PROMPTS = "x-anthropic-billing-header"
"""A client's note about itself, another one with each request; engines leave it out."""
_RESULT = "tool_result"
_UNSEEN = ("redacted_thinking",)
_TOOL_FIELDS = ("name", "description", "strict", "defer_loading")
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_UNREADABLE = (AttributeError, KeyError, IndexError, TypeError, ValueError)


def chat_of(kind: PromptKind, body: bytes) -> Fields:
    """Return ``messages`` and what else bears on their rendering.

    Raises :class:`TokenizationError` for a body that cannot be put as a chat of text.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        return _CONVERTERS[kind](fields)
    except (*_UNREADABLE, msgspec.DecodeError, RecursionError) as error:
        raise TokenizationError(f"{kind.value}: cannot be put as a chat: {error}") from error


def _chat(messages: list[Fields], tools: list[Fields], kwargs: object) -> Fields:
    chat: Fields = {"messages": messages}
    if tools:
        chat["tools"] = tools
    if kwargs:
        chat["chat_template_kwargs"] = kwargs
    return chat


def in_plain_text(chat: Fields) -> Fields:
    """Return a chat with the parts of each message joined, as most templates get it."""
    messages = [
        {**message, "content": _text_of(message["content"])} if "content" in message else message
        for message in chat["messages"]
    ]
    return {**chat, "messages": messages}


def _content_of(content: object) -> str | list[Fields]:
    """Return a text, or its parts: how those are put together is the template's to decide."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TypeError("content is neither text nor a list")
    for part in content:
        if part["type"] not in _TEXT_PARTS:
            raise ValueError(f"a part of type {part['type']!r}")
    return [_text_part(part["text"]) for part in content]


def _text_of(content: object) -> str:
    parts = _content_of(content)
    return parts if isinstance(parts, str) else "\n".join(part["text"] for part in parts)


def _text_part(text: str) -> Fields:
    return {"type": "text", "text": text}


def _tool(function: Fields) -> Fields:
    return {"type": "function", "function": function}


def _tool_call(call_id: object, name: object, arguments: object) -> Fields:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


# -- /v1/responses -------------------------------------------------------------------------


def _chat_of_responses(fields: Fields) -> Fields:
    messages: list[Fields] = []
    if fields.get("instructions"):
        messages.append({"role": "system", "content": fields["instructions"]})
    given = fields["input"]
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        _add_items(messages, given)
    tools = [
        _tool({name: value for name, value in tool.items() if name != "type"})
        for tool in fields.get("tools") or ()
        if tool["type"] == "function"
    ]
    kwargs = dict(fields.get("chat_template_kwargs") or {})
    effort = (fields.get("reasoning") or {}).get("effort")
    if effort is not None:
        kwargs = {"enable_thinking": effort != "none", **kwargs, "reasoning_effort": effort}
    return _chat(messages, tools, kwargs)


def _add_items(messages: list[Fields], items: Iterable[Fields]) -> None:
    """Add input items; those of one turn of the assistant become one message."""
    for item in items:
        said = _said_by_assistant(item)
        if said is None:
            messages.append(_other_item(item))
        elif messages and messages[-1]["role"] == "assistant" and _fits(messages[-1], said):
            _join(messages[-1], said)
        else:
            messages.append({"role": "assistant", **said})


def _said_by_assistant(item: Fields) -> Fields | None:
    kind = item.get("type", "message")
    if kind == "function_call":
        return {"tool_calls": [_tool_call(item["call_id"], item["name"], item["arguments"])]}
    if kind == "reasoning":
        parts = item.get("content") or item["summary"]
        return {"reasoning": parts[0]["text"]}
    if kind == "message" and item["role"] == "assistant":
        content = item["content"]
        return {"content": content if isinstance(content, str) else content[0]["text"]}
    return None


def _other_item(item: Fields) -> Fields:
    kind = item.get("type", "message")
    if kind == "function_call_output":
        return {
            "role": "tool",
            "tool_call_id": item["call_id"],
            "content": _text_of(item["output"]),
        }
    if kind != "message":
        raise ValueError(f"an item of type {kind!r}")
    return {"role": item["role"], "content": _content_of(item["content"])}


def _fits(message: Fields, said: Fields) -> bool:
    return "tool_calls" in said or not message.keys() & said.keys()


def _join(message: Fields, said: Fields) -> None:
    calls = [*message.get("tool_calls", ()), *said.get("tool_calls", ())]
    message.update(said)
    if calls:
        message["tool_calls"] = calls


# -- /v1/messages --------------------------------------------------------------------------


def _chat_of_messages(fields: Fields) -> Fields:
    messages: list[Fields] = []
    system = _system_text(fields.get("system") or "")
    if system:
        messages.append({"role": "system", "content": system})
    for message in fields["messages"]:
        _add_message(messages, message["role"], message["content"])
    tools = [_tool(_declared(tool)) for tool in fields.get("tools") or ()]
    return _chat(messages, tools, fields.get("chat_template_kwargs"))


def _declared(tool: Fields) -> Fields:
    function = {name: tool[name] for name in _TOOL_FIELDS if tool.get(name) is not None}
    return function | {"parameters": {"type": "object", **tool["input_schema"]}}


def _system_text(system: str | list[Fields]) -> str:
    parts = [system] if isinstance(system, str) else [block["text"] for block in system]
    return "".join(part for part in parts if not part.startswith(_NOT_IN_PROMPTS))


def _add_message(messages: list[Fields], role: str, content: str | list[Fields]) -> None:
    if role == "system":
        text = _system_text(content)
        if text:
            messages.append({"role": role, "content": text})
    elif isinstance(content, str):
        messages.append({"role": role, "content": content})
    else:
        if role == "user":
            messages += [_tool_result(block) for block in content if block["type"] == _RESULT]
        said = _said(content, without=(_RESULT,) if role == "user" else ())
        if said or role == "assistant":
            messages.append({"role": role, **said})


def _tool_result(block: Fields) -> Fields:
    return {
        "role": "tool",
        "tool_call_id": block["tool_use_id"],
        "content": _text_of(block.get("content") or ""),
    }


def _said(blocks: Iterable[Fields], without: Collection[str]) -> Fields:
    """Return what the blocks of one message say."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Fields] = []
    for block in blocks:
        kind = block["type"]
        if kind == "text":
            texts.append(block["text"])
        elif kind == "thinking":
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {})
            calls.append(_tool_call(block["id"], block["name"], arguments))
        elif kind not in (*_UNSEEN, *without):
            raise ValueError(f"a block of type {kind!r}")
    said: Fields = {}
    if thoughts:
        said["reasoning"] = "".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    parts = list(filter(None, texts))
    if parts:
        said["content"] = parts[0] if len(parts) == 1 else list(map(_text_part, parts))
    return said


_CONVERTERS: Mapping[PromptKind, Callable[[Fields], Fields]] = {
    PromptKind.RESPONSES: _chat_of_responses,
    PromptKind.MESSAGES: _chat_of_messages,
}
