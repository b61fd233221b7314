"""Reading what routing needs from a request body (pure).

Only the fields that routing acts on are checked here; the engine sees the client's bytes
unchanged and judges the rest. Errors name the field, as the engine's own do.
"""

import re
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec
from xxhash import xxh3_128_digest

from nearkv.ingress.errors import RequestError

_IRRELEVANT_TO_TOKENS = frozenset(
    {
        "best_of", "cache_salt", "echo", "frequency_penalty", "ignore_eos", "kv_transfer_params",
        "logit_bias", "logprobs", "max_completion_tokens", "max_tokens", "metadata", "min_p",
        "min_tokens", "n", "parallel_tool_calls", "presence_penalty", "priority",
        "repetition_penalty", "request_id", "response_format", "seed", "service_tier",
        "session_id", "stop", "stop_token_ids", "store", "stream", "stream_options",
        "temperature", "top_k", "top_logprobs", "top_p", "user",
    }
)  # fmt: skip
"""Fields that change nothing about the prompt's tokens. An unknown field may, so it counts."""

_IRRELEVANT_TO_CHATS = _IRRELEVANT_TO_TOKENS - {"response_format"}
"""Chat templates may read ``response_format`` (vLLM 0.32 hands it to them)."""

_PLAIN_PROMPT_FIELDS = frozenset({"model", "prompt"})
_MISSING = re.compile(r"Object missing required field `(\w+)`")


class PromptKind(StrEnum):
    """How a prompt reaches the engine."""

    TEXT = "text"
    TOKENS = "tokens"
    CHAT = "chat"
    NONE = "none"


class GenerateRequest(msgspec.Struct, frozen=True):
    """What routing knows of a request before tokens.

    ``digest`` is equal for equal prompts of equal templates, whatever else differs.
    ``plain`` says that the prompt text alone determines the tokens.
    """

    model: str | None
    kind: PromptKind
    stream: bool = False
    cache_salt: str = ""
    text: str = ""
    token_ids: tuple[int, ...] = ()
    digest: bytes = b""
    plain: bool = False


class _Completion(msgspec.Struct):
    model: str | None = None
    prompt: str | list[Any] | None = None
    stream: bool | None = None
    cache_salt: str | None = None


class _Chat(msgspec.Struct):
    messages: msgspec.Raw
    model: str | None = None
    stream: bool | None = None
    cache_salt: str | None = None


class _Any(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None


_Plain = msgspec.defstruct(
    "_Plain",
    [
        ("prompt", str),
        ("model", str | None, None),
        ("stream", bool | None, None),
        ("cache_salt", str | None, None),
        *((name, Any, None) for name in sorted(_IRRELEVANT_TO_TOKENS - {"stream", "cache_salt"})),
    ],
    forbid_unknown_fields=True,
)
"""A completion whose prompt text alone determines the tokens, as nearly all are."""

_plain = msgspec.json.Decoder(_Plain)
_completion = msgspec.json.Decoder(_Completion)
_chat = msgspec.json.Decoder(_Chat)
_any = msgspec.json.Decoder(_Any)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def parse_request(
    method: str, path: str, body: bytes, content_type: Callable[[], str]
) -> GenerateRequest:
    """Parse a request by its path; raises :class:`RequestError`.

    ``content_type`` is asked only where the path does not say what the body is.
    """
    if method != "POST":
        return GenerateRequest(model=None, kind=PromptKind.NONE)
    if path == "/v1/completions":
        return parse_completion(body)
    if path == "/v1/chat/completions":
        return parse_chat(body)
    return parse_other(body, content_type())


def parse_completion(body: bytes) -> GenerateRequest:
    """Parse a ``/v1/completions`` body; raises :class:`RequestError`."""
    try:
        return _plain_request(_plain.decode(body))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return _parse_any_completion(body)


def _plain_request(parsed: Any) -> GenerateRequest:  # noqa: ANN401 (a struct made above)
    model, text = parsed.model, parsed.prompt
    return GenerateRequest(
        model=model,
        kind=PromptKind.TEXT,
        stream=bool(parsed.stream),
        cache_salt=parsed.cache_salt or "",
        text=text,
        digest=xxh3_128_digest(f"plain\0{len(model or '')}\0{model or ''}{text}".encode()),
        plain=True,
    )


def _parse_any_completion(body: bytes) -> GenerateRequest:
    parsed = _decode(_completion, body)
    prompt = parsed.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        # Several prompts in one request: the first one decides where all of them go.
        prompt = prompt[0]
    common = {
        "model": parsed.model,
        "stream": bool(parsed.stream),
        "cache_salt": parsed.cache_salt or "",
    }
    if isinstance(prompt, str):
        digest, plain = _digest(body, PromptKind.TEXT)
        return GenerateRequest(
            kind=PromptKind.TEXT, text=prompt, digest=digest, plain=plain, **common
        )
    if isinstance(prompt, list) and prompt:
        # Not isinstance: JSON's true and false are no token ids.
        if not all(type(token) is int and 0 <= token < 1 << 32 for token in prompt):
            raise RequestError(
                "prompt: expected text, a list of token ids, or a list of either", param="prompt"
            )
        return GenerateRequest(kind=PromptKind.TOKENS, token_ids=tuple(prompt), **common)
    return GenerateRequest(kind=PromptKind.NONE, **common)


def parse_chat(body: bytes) -> GenerateRequest:
    """Parse a ``/v1/chat/completions`` body; raises :class:`RequestError`."""
    parsed = _decode(_chat, body)
    if not bytes(parsed.messages).startswith(b"["):
        raise RequestError("messages: expected a list", param="messages")
    return GenerateRequest(
        model=parsed.model,
        kind=PromptKind.CHAT,
        stream=bool(parsed.stream),
        cache_salt=parsed.cache_salt or "",
        digest=_digest(body, PromptKind.CHAT)[0],
    )


def parse_other(body: bytes, content_type: str) -> GenerateRequest:
    """Read the model from any other JSON body; a body that is not JSON names none."""
    if not body or "json" not in content_type:
        return GenerateRequest(model=None, kind=PromptKind.NONE)
    parsed = _decode(_any, body)
    return GenerateRequest(model=parsed.model, kind=PromptKind.NONE, stream=bool(parsed.stream))


def _digest(body: bytes, kind: PromptKind) -> tuple[bytes, bool]:
    """Digest the fields that may bear on the tokens; tell whether the prompt alone does.

    Names are quoted by their length, so that no name can pass for other fields.
    """
    fields = _decode(_fields, body)
    is_chat = kind is PromptKind.CHAT
    irrelevant = _IRRELEVANT_TO_CHATS if is_chat else _IRRELEVANT_TO_TOKENS
    relevant = sorted(fields.keys() - irrelevant)
    plain = _PLAIN_PROMPT_FIELDS.issuperset(relevant)
    parts = [kind.value.encode()]
    for name in relevant:
        spelled = name.encode()
        parts.append(b"%d:%s=%s" % (len(spelled), spelled, bytes(fields[name])))
    return xxh3_128_digest(b"\x00".join(parts)), plain


def _decode(decoder: Any, body: bytes) -> Any:  # noqa: ANN401 (a decoder gives its own type)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message = str(error)
        raise RequestError(message, param=_param(message)) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error


def _param(message: str) -> str | None:
    """Take the field out of msgspec's ``... - at `$.field[0]``` or ``... required field `f```."""
    missing = _MISSING.fullmatch(message)
    if missing is not None:
        return missing[1]
    _, at, path = message.rpartition("at `$")
    return path.rstrip("`").lstrip(".") or None if at else None
