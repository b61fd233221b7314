"""What both engines are asked: texts and chats to tokenize, endpoints, one prompt (pure)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nearkv.ingress.prefill_leg import ASK_FOR_KV

DEFAULT_BLOCK_TOKENS = 128
"""The largest default block size known (vLLM on CPUs), where an engine does not tell its own."""
_SPARE_TOKENS = 16

TEXTS: Mapping[str, str] = MappingProxyType(
    {
        "words": "Routers read block tables, then choose where a prompt goes.",
        "code": "for i in range(10):\n\tprint(f'{i:>4}')  # one line each\n",
        "other scripts": "Grüße, 你好、こんにちは, привет, नमस्ते 🙂",
        "numbers and spaces": "  3.14159   1,000,000\r\n\r\n12:30  ",
        "special tokens in text": "<s>[INST] <|im_start|> <|eot_id|> </s>",
    }
)
_USER = {"role": "user", "content": "Which engine holds this prompt?"}
_SYSTEM = {"role": "system", "content": "Answer in one word."}
_ANSWER = {"role": "assistant", "content": "The second."}
_PARTS = {"role": "user", "content": [{"type": "text", "text": "And now?"}]}
_TOOL = {
    "type": "function",
    "function": {
        "name": "find_engine",
        "description": "Find the engine of a prompt.",
        "parameters": {"type": "object", "properties": {"prompt": {"type": "string"}}},
    },
}
CHATS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "one message": {"messages": [_USER]},
        "with a system message": {"messages": [_SYSTEM, _USER]},
        "several turns": {"messages": [_USER, _ANSWER, _PARTS]},
        "with tools": {"messages": [_USER], "tools": [_TOOL]},
    }
)

TOKENIZE = "/tokenize"
RENDER_TEXT = "/v1/completions/render"
RENDER_CHAT = "/v1/chat/completions/render"
EVENT_SOURCES = "/kv_event_sources"
SLEEP = "/sleep"


@dataclass(frozen=True, slots=True)
class Probe:
    """How to find out whether an endpoint is there; without ``body`` it is a GET."""

    path: str
    body: Mapping[str, Any] | None = None


def endpoint_probes(model: str) -> Sequence[Probe]:
    """Return a harmless request for each endpoint.

    ``/sleep`` takes only POST: the refusal of a GET shows that it is there, without putting the
    engine to sleep.
    """
    named = {"model": model, "max_tokens": 1}
    return (
        Probe(TOKENIZE, {"model": model, "prompt": "a"}),
        Probe(RENDER_TEXT, {**named, "prompt": "a"}),
        Probe(RENDER_CHAT, {**named, "messages": [_USER]}),
        Probe("/v1/responses/render", {"model": model, "input": "a"}),
        Probe("/v1/messages/render", {**named, "messages": [_USER]}),
        Probe(EVENT_SOURCES),
        Probe("/version"),
        Probe("/load"),
        Probe(SLEEP),
    )


def make_prompt(nonce: str, block_tokens: int) -> str:
    """Return a text of at least two blocks that no cache holds yet.

    ``nonce`` comes first, since a block's hash covers all before it. A word takes a token or more
    in every vocabulary.
    """
    return nonce + " the" * (2 * block_tokens + _SPARE_TOKENS)


def completion_body(model: str, prompt: str, *, hand_over: bool = False) -> dict[str, Any]:
    """Return a request for one token; with ``hand_over`` as the ingress asks a prefill engine."""
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    return body | ({"kv_transfer_params": ASK_FOR_KV} if hand_over else {})
