"""Reading what routing needs from a request body (pure).

Only the fields that routing acts on are checked here; the engine sees the client's bytes
unchanged and judges the rest. Errors name the field, as the engine's own do.
"""

import re
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from xxhash import xxh3_128_digest

from nearkv.ingress.dialects import MESSAGES_PATH, RESPONSES_PATH, response_id_in
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

_IRRELEVANT_TO_RESPONSES = frozenset(
    {
        "background", "cache_salt", "frequency_penalty", "ignore_eos", "include",
        "include_reasoning", "kv_transfer_params", "logit_bias", "max_tool_calls", "metadata",
        "min_p", "parallel_tool_calls", "presence_penalty", "priority", "prompt_cache_key",
        "repetition_penalty", "request_id", "seed", "service_tier", "session_id", "stop",
        "stop_token_ids", "store", "stream", "stream_options", "temperature", "top_k",
        "top_logprobs", "top_p", "user",
    }
)  # fmt: skip
"""As above; ``max_output_tokens`` counts, since ``truncation`` makes room for it."""

_IRRELEVANT_TO_MESSAGES = frozenset(
    {
        "cache_salt", "kv_transfer_params", "max_tokens", "metadata", "service_tier",
        "stop_sequences", "stream", "temperature", "top_k", "top_p",
    }
)  # fmt: skip

_PLAIN_PROMPT_FIELDS = frozenset({"model", "prompt"})
_NO_PROMPT = b"null"
_NULL = msgspec.Raw(_NO_PROMPT)
_MOST_FIELDS = 1024
"""APIs have a hundred; to sort a million made-up ones would stop all else for a second."""
_TRANSFER_FIELDS = ("kv_transfer_params", "ec_transfer_params")
_NESTED = re.compile(rb'\[[ \t\r\n]*["[]')
_MISSING = re.compile(r"Object missing required field `(\w+)`")


class PromptKind(StrEnum):
    """How a prompt reaches the engine."""

    TEXT = "text"
    TOKENS = "tokens"
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"
    NONE = "none"


_IRRELEVANT = {
    PromptKind.TEXT: _IRRELEVANT_TO_TOKENS,
    PromptKind.CHAT: _IRRELEVANT_TO_CHATS,
    PromptKind.RESPONSES: _IRRELEVANT_TO_RESPONSES,
    PromptKind.MESSAGES: _IRRELEVANT_TO_MESSAGES,
}


class GenerateRequest(msgspec.Struct, frozen=True):
    """What routing knows of a request before tokens.

    ``digest`` is equal for equal prompts of equal templates, whatever else differs.
    ``plain`` says that the prompt text alone determines the tokens. ``response_id`` is the
    earlier response that this request goes on from, or asks about: only the engine that made
    it knows it. ``may_render_otherwise`` says that the engine's rendering for us may differ
    from the one it serves by. ``transfer_field`` is the field of the body by which the client
    says where KV lies, empty as nearly always. Of ``several`` prompts only one is in here.
    """

    model: str | None
    kind: PromptKind
    stream: bool = False
    cache_salt: str = ""
    text: str = ""
    token_ids: tuple[int, ...] = ()
    digest: bytes = b""
    plain: bool = False
    response_id: str = ""
    may_render_otherwise: bool = False
    transfer_field: str = ""
    several: bool = False


class _Body(msgspec.Struct, kw_only=True):
    """What every body may have: fields by which engines are told where KV lies, and whose."""

    kv_transfer_params: msgspec.Raw = _NULL
    ec_transfer_params: msgspec.Raw = _NULL
    vllm_xargs: msgspec.Raw = _NULL


class _Completion(_Body, kw_only=True):
    model: str | None = None
    prompt: msgspec.Raw = _NULL
    stream: bool | None = None
    cache_salt: str | None = None


class _Chat(_Body, kw_only=True):
    messages: msgspec.Raw
    model: str | None = None
    stream: bool | None = None
    cache_salt: str | None = None


class _Responses(_Body, kw_only=True):
    input: msgspec.Raw
    model: str | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    previous_response_id: str | None = None


class _Thinking(msgspec.Struct):
    type: str | None = None


class _Messages(_Body, kw_only=True):
    messages: msgspec.Raw
    model: str | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    thinking: _Thinking | None = None


class _Any(_Body, kw_only=True):
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
_list = msgspec.json.Decoder(list[msgspec.Raw])
_prompt = msgspec.json.Decoder(str | tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)], ...])
_chat = msgspec.json.Decoder(_Chat)
_responses = msgspec.json.Decoder(_Responses)
_messages = msgspec.json.Decoder(_Messages)
_any = msgspec.json.Decoder(_Any)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def parse_request(
    method: str, path: str, body: bytes, content_type: Callable[[], str]
) -> GenerateRequest:
    """Parse a request by its path; raises :class:`RequestError`.

    ``content_type`` is asked only where the path does not say what the body is.
    """
    if method == "POST":
        parse = _PARSERS.get(path)
        if parse is not None:
            return parse(body)
    response_id = response_id_in(path)
    if method != "POST":
        return GenerateRequest(model=None, kind=PromptKind.NONE, response_id=response_id)
    parsed = parse_other(body, content_type())
    return msgspec.structs.replace(parsed, response_id=response_id) if response_id else parsed


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
        transfer_field="" if parsed.kv_transfer_params is None else _TRANSFER_FIELDS[0],
    )


def _parse_any_completion(body: bytes) -> GenerateRequest:
    parsed = _decode(_completion, body)
    prompt, several = _first_prompt(parsed.prompt)
    common = {
        "model": parsed.model,
        "stream": bool(parsed.stream),
        "cache_salt": parsed.cache_salt or "",
        "transfer_field": _transfer_field(parsed),
        "several": several,
    }
    if isinstance(prompt, str):
        digest, plain = _digest(body, PromptKind.TEXT)
        return GenerateRequest(
            kind=PromptKind.TEXT, text=prompt, digest=digest, plain=plain, **common
        )
    if prompt:
        return GenerateRequest(kind=PromptKind.TOKENS, token_ids=prompt, **common)
    return GenerateRequest(kind=PromptKind.NONE, **common)


def _first_prompt(given: msgspec.Raw) -> tuple[str | tuple[int, ...], bool]:
    """Return a prompt, and whether there are several; of those the first one decides.

    Token ids are decoded as such: to look at millions of them one by one would stop all else.
    """
    try:
        prompt, several = given, False
        if _NESTED.match(memoryview(given)):
            prompts = _list.decode(given)
            prompt, several = prompts[0], len(prompts) > 1
        if bytes(prompt) == _NO_PROMPT:
            return (), several
        return _prompt.decode(prompt), several
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(
            "prompt: expected text, a list of token ids, or a list of either", param="prompt"
        ) from error


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
        transfer_field=_transfer_field(parsed),
    )


def parse_responses(body: bytes) -> GenerateRequest:
    """Parse a ``/v1/responses`` body; raises :class:`RequestError`.

    One that goes on from an earlier response has a prompt that only that one's engine knows.
    """
    parsed = _decode(_responses, body)
    if not bytes(parsed.input).startswith((b"[", b'"')):
        raise RequestError("input: expected text or a list", param="input")
    previous = parsed.previous_response_id or ""
    return GenerateRequest(
        model=parsed.model,
        kind=PromptKind.NONE if previous else PromptKind.RESPONSES,
        stream=bool(parsed.stream),
        cache_salt=parsed.cache_salt or "",
        digest=b"" if previous else _digest(body, PromptKind.RESPONSES)[0],
        response_id=previous,
        transfer_field=_transfer_field(parsed),
    )


def parse_messages(body: bytes) -> GenerateRequest:
    """Parse a ``/v1/messages`` body; raises :class:`RequestError`.

    With thinking disabled vLLM 0.32 serves some models at low effort and renders at none.
    """
    parsed = _decode(_messages, body)
    if not bytes(parsed.messages).startswith(b"["):
        raise RequestError("messages: expected a list", param="messages")
    return GenerateRequest(
        model=parsed.model,
        kind=PromptKind.MESSAGES,
        stream=bool(parsed.stream),
        cache_salt=parsed.cache_salt or "",
        digest=_digest(body, PromptKind.MESSAGES)[0],
        may_render_otherwise=parsed.thinking is not None and parsed.thinking.type == "disabled",
        transfer_field=_transfer_field(parsed),
    )


def parse_other(body: bytes, content_type: str) -> GenerateRequest:
    """Read the model from any other JSON body; a body that is not JSON names none."""
    if not body or "json" not in content_type:
        return GenerateRequest(model=None, kind=PromptKind.NONE)
    parsed = _decode(_any, body)
    return GenerateRequest(
        model=parsed.model,
        kind=PromptKind.NONE,
        stream=bool(parsed.stream),
        transfer_field=_transfer_field(parsed),
    )


_PARSERS: dict[str, Callable[[bytes], GenerateRequest]] = {
    "/v1/completions": parse_completion,
    "/v1/chat/completions": parse_chat,
    RESPONSES_PATH: parse_responses,
    MESSAGES_PATH: parse_messages,
}


def _digest(body: bytes, kind: PromptKind) -> tuple[bytes, bool]:
    """Digest the fields that may bear on the tokens; tell whether the prompt alone does.

    Names are quoted by their length, so that no name can pass for other fields.
    """
    fields = _decode(_fields, body)
    if len(fields) > _MOST_FIELDS:
        raise RequestError(f"the body has {len(fields)} fields, at most {_MOST_FIELDS} may be")
    relevant = sorted(fields.keys() - _IRRELEVANT[kind])
    plain = _PLAIN_PROMPT_FIELDS.issuperset(relevant)
    parts = [kind.value.encode()]
    for name in relevant:
        spelled = name.encode()
        parts.append(b"%d:%s=%s" % (len(spelled), spelled, bytes(fields[name])))
    return xxh3_128_digest(b"\x00".join(parts)), plain


def _transfer_field(parsed: _Body) -> str:
    """Return the field by which a client says where KV lies, empty if it says nothing.

    vLLM puts what is in ``vllm_xargs`` beside its own arguments, so the names count there too.
    """
    for name in _TRANSFER_FIELDS:
        if bytes(getattr(parsed, name)) != b"null":
            return name
    if bytes(parsed.vllm_xargs).startswith(b"{"):
        arguments = _decode(_fields, parsed.vllm_xargs)
        return next((f"vllm_xargs.{name}" for name in _TRANSFER_FIELDS if name in arguments), "")
    return ""


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
