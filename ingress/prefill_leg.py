"""The bodies of a split request (pure): what P is asked, what it says, what D is asked.

P gets the client's request made small: one token, nothing streamed, nothing of the answer
shaped; whatever shapes the *prompt* stays, byte for byte, since both engines must see the
same tokens. D gets the client's bytes with P's parameters added and nothing else touched.
What P says travels verbatim, keys we do not know included.

Field lists follow the request models of vLLM 0.32.
"""

import msgspec

NULL = b"null"
_ABSENT = frozenset({NULL})
_FALSY = frozenset({NULL, b"false"})
_SINGLE = frozenset({NULL, b"1"})
_JSON_SPACE = b" \t\r\n"
_PARAMS = "kv_transfer_params"
_LOOKED_AT_BYTES = 256

ASK_FOR_KV = msgspec.Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
"""The parameters that make an engine keep its KV for another one."""

_NEVER_SPLIT: tuple[tuple[str, frozenset[bytes], str], ...] = (
    ("kv_transfer_params", _ABSENT, "own_params"),
    ("ec_transfer_params", _ABSENT, "own_params"),
    ("n", _SINGLE, "several_answers"),
    ("best_of", _SINGLE, "several_answers"),
    ("use_beam_search", _FALSY, "beam_search"),
    ("echo", _FALSY, "echo"),
    # For these, engines compute the whole prompt themselves.
    ("prompt_logprobs", _ABSENT, "prompt_logprobs"),
    # What is cut off may depend on max_tokens, which P does not get.
    ("truncate_prompt_tokens", _ABSENT, "truncated_prompt"),
    ("prompt_embeds", _ABSENT, "prompt_embeds"),
    # Of /v1/responses, whose answers are limited and kept by other fields.
    ("input", frozenset(), "other_api"),
)
"""Field, values that mean nothing, and why any other value keeps a request whole."""

_ABOUT_THE_ANSWER = frozenset(
    {
        "best_of", "echo", "include_stop_str_in_output", "kv_transfer_params", "logprob_token_ids",
        "logprobs", "max_completion_tokens", "max_tokens", "min_tokens", "n", "prompt_logprobs",
        "repetition_detection", "return_prompt_text", "return_token_ids",
        "return_tokens_as_token_ids", "stop", "stop_token_ids", "stream", "stream_interval",
        "stream_options", "structured_outputs", "top_logprobs", "use_beam_search",
    }
)  # fmt: skip
"""Fields that P must not see: they shape the answer, or have P refuse one of one token.

``tools``, ``tool_choice`` and, in chats, ``response_format`` stay: chat templates read them.
"""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(NULL)


class LeaseRef(msgspec.Struct, frozen=True):
    """The lease that P's own agent keeps, as its release call names it."""

    engine: str
    epoch: str
    lease: str


class _LeaseKeys(msgspec.Struct):
    remote_engine_id: str
    remote_epoch: str
    remote_lease_id: str


_answer = msgspec.json.Decoder(_Answer)
_lease_keys = msgspec.json.Decoder(_LeaseKeys)


class UnreadableAnswerError(ValueError):
    """P's answer is not what an engine says."""


def read_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """Return a body's top-level fields, values as their bytes; the last of equal names counts.

    Raises ``ValueError`` when the body is no JSON object.
    """
    try:
        return _fields.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"not a JSON object: {error}") from error


def why_whole(fields: dict[str, msgspec.Raw]) -> str:
    """Return the reason that a request cannot be split, empty if it can."""
    for name, harmless, reason in _NEVER_SPLIT:
        if name in fields and bytes(fields[name]) not in harmless:
            return reason
    return "several_prompts" if _is_nested(fields.get("prompt")) else ""


def prefill_body(fields: dict[str, msgspec.Raw], *, is_chat: bool) -> bytes:
    """Return the body for P; values that stay are those of the client, byte for byte.

    ``max_completion_tokens`` is a field of chats only.
    """
    kept = {name: value for name, value in fields.items() if name not in _ABOUT_THE_ANSWER}
    kept["stream"] = msgspec.Raw(b"false")
    kept["max_tokens"] = msgspec.Raw(b"1")
    if is_chat:
        kept["max_completion_tokens"] = msgspec.Raw(b"1")
    else:
        kept.pop("response_format", None)
    kept[_PARAMS] = ASK_FOR_KV
    return msgspec.json.encode(kept)


def decode_body(body: bytes, fields: dict[str, msgspec.Raw], params: msgspec.Raw) -> bytes:
    """Return the body for D: the client's bytes, with P's parameters as the last field."""
    if _PARAMS in fields:  # null, else the request would not be split; no name twice
        return msgspec.json.encode({**fields, _PARAMS: params})
    head = body.rstrip(_JSON_SPACE)[:-1]
    return b'%s,"%s":%s}' % (head, _PARAMS.encode(), bytes(params))


def read_params(answer: bytes) -> msgspec.Raw | None:
    """Return the parameters in P's answer, ``None`` where it kept nothing.

    Raises :class:`UnreadableAnswerError`.
    """
    try:
        params = _answer.decode(answer).kv_transfer_params
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UnreadableAnswerError(str(error)) from error
    said = bytes(params)
    if said == NULL:
        return None
    if not said.startswith(b"{"):
        raise UnreadableAnswerError(f"{_PARAMS} is no object")
    return params


def lease_of(params: msgspec.Raw) -> LeaseRef | None:
    """Return the lease in P's parameters; other connectors than ours name none."""
    try:
        keys = _lease_keys.decode(params)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return LeaseRef(keys.remote_engine_id, keys.remote_epoch, keys.remote_lease_id)


def _is_nested(prompt: msgspec.Raw | None) -> bool:
    """Tell whether a prompt is a list of anything but token ids."""
    start = b"" if prompt is None else bytes(memoryview(prompt)[:_LOOKED_AT_BYTES])
    return start.startswith(b"[") and not start[1:].lstrip(_JSON_SPACE)[:1].isdigit()
