"""Request bodies the double understands, and vLLM's answers to those it does not.

The usual request takes one strict decode. Only a body that fails it is looked at again, first
with pydantic's leniency (``"8"`` is an integer), then to describe the failure as vLLM does.
"""

import re
from typing import Any, TypeVar

import msgspec

_Body = TypeVar("_Body", bound=msgspec.Struct)
_EXPECTED = re.compile(r"Expected `([^`]+)`, got `(\w+)`(?: - at `\$(.*)`)?")
_MISSING = re.compile(r"Object missing required field `(\w+)`(?: - at `\$(.*)`)?")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_POSITION = re.compile(r"\(byte (\d+)\)")

# (expected, got) -> (type, message); pydantic names them.
_COMPLAINTS = {
    ("int", "str"): (
        "int_parsing",
        "Input should be a valid integer, unable to parse string as an integer",
    ),
    ("int", "float"): (
        "int_from_float",
        "Input should be a valid integer, got a number with a fractional part",
    ),
    ("int", ""): ("int_type", "Input should be a valid integer"),
    ("bool", "str"): ("bool_parsing", "Input should be a valid boolean, unable to interpret input"),
    ("bool", ""): ("bool_type", "Input should be a valid boolean"),
    ("str", ""): ("string_type", "Input should be a valid string"),
    ("array", ""): ("list_type", "Input should be a valid list"),
    ("object", ""): ("dict_type", "Input should be a valid dictionary"),
}


class ApiError(Exception):
    """A request the engine refuses, with the fields of its error body."""

    def __init__(self, status: int, message: str, kind: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param


class StreamOptions(msgspec.Struct):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """Fields the generating endpoints share; unknown fields are ignored, as in vLLM."""

    model: str | None = None
    max_tokens: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | list[int | str | list[int]]
    add_special_tokens: bool = True


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of /v1/chat/completions; messages stay raw, they are the key of the prompt memo."""

    messages: msgspec.Raw
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    tools: msgspec.Raw = msgspec.Raw()
    chat_template_kwargs: msgspec.Raw = msgspec.Raw()


class ResponsesRequest(GenerationRequest, kw_only=True):
    """Body of /v1/responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    request_id: str | None = None
    store: bool = True


class MessagesRequest(GenerationRequest, kw_only=True):
    """Body of /v1/messages and /v1/messages/count_tokens."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of /tokenize: a prompt, or messages with the options of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: msgspec.Raw = msgspec.Raw()
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False
    tools: msgspec.Raw = msgspec.Raw()
    chat_template_kwargs: msgspec.Raw = msgspec.Raw()


class SamplingParams(msgspec.Struct):
    """The part of vLLM's sampling parameters that matters here."""

    max_tokens: int | None = None


class GenerateRequest(GenerationRequest, kw_only=True):
    """Body of /inference/v1/generate: token ids in, token ids out."""

    token_ids: list[int]
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)


class EmbeddingRequest(msgspec.Struct):
    """Body of /v1/embeddings."""

    input: str | list[int | str | list[int]]
    model: str | None = None


class RequestDecoder:
    """Decodes bodies of each kind with a decoder built once."""

    def __init__(self) -> None:
        self._decoders: dict[type[msgspec.Struct], msgspec.json.Decoder[Any]] = {}

    def decode(self, body: bytes, kind: type[_Body]) -> _Body:
        """Return ``body`` as ``kind``.

        Raises:
            ApiError: status 400 with vLLM's description of what is wrong.
        """
        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = self._decoders[kind] = msgspec.json.Decoder(kind)
        try:
            decoded: _Body = decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return _decode_leniently(body, kind)
        return decoded


def _decode_leniently(body: bytes, kind: type[_Body]) -> _Body:
    try:
        plain = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(str(error)) from error
    try:
        converted = msgspec.convert(plain, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), plain) from error
    # Raw fields need the bytes back, so the converted values are decoded once more.
    return msgspec.json.decode(msgspec.json.encode(converted), type=kind)


def _malformed(reason: str) -> ApiError:
    found = _POSITION.search(reason)
    place = f"body.{found[1] if found else 0}"
    detail = {"type": "json_invalid", "loc": place, "msg": "JSON decode error", "input": {}}
    return _validation_error(detail | {"ctx": {"error": reason}})


def _invalid(reason: str, plain: Any) -> ApiError:
    missing = _MISSING.search(reason)
    if missing:
        place = f"body.{missing[1]}"
        detail = {"type": "missing", "loc": place, "msg": "Field required", "input": plain}
        return _validation_error(detail)
    found = _EXPECTED.search(reason)
    if not found:
        return _validation_error(
            {"type": "value_error", "loc": "body", "msg": reason, "input": plain}
        )
    expected, got, path = found[1].split(" | ")[0], found[2], found[3] or ""
    steps = [name or int(index) for name, index in _STEP.findall(path)]
    for step in steps:
        plain = plain[step]
    fallback = ("value_error", f"Input should be a valid {expected}")
    complaint = _COMPLAINTS.get((expected, got)) or _COMPLAINTS.get((expected, "")) or fallback
    place = ".".join(["body", *(str(step) for step in steps)])
    return _validation_error(
        {"type": complaint[0], "loc": place, "msg": complaint[1], "input": plain}
    )


def _validation_error(detail: dict[str, Any]) -> ApiError:
    message = f"1 validation error:\n  {detail}"
    return ApiError(400, message, "Bad Request", param=detail["loc"])
