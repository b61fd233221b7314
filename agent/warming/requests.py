"""What a client asks to be loaded, and how an engine is asked for it (pure)."""

import re
from typing import Annotated, Any

import msgspec
from xxhash import xxh3_64_hexdigest

from nearkv.agent.warming.errors import BadWarmRequestError

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class WarmRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prefix and who is to have it.

    Exactly one of ``prompt``, ``messages`` and ``token_ids`` says what. ``engines`` or ``group``
    say who; without them, all engines that serve ``model`` (which may be an adapter's name;
    default: the engine's own model). ``cache_salt`` is that of the requests to come.
    """

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[TokenId] | None = None
    engines: list[str] | None = None
    group: str | None = None
    model: str | None = None
    cache_salt: str | None = None

    @property
    def digest(self) -> str:
        """Tells one prefix from another, whoever is to have it."""
        named = (self.prompt, self.messages, self.token_ids, self.model, self.cache_salt)
        return xxh3_64_hexdigest(msgspec.msgpack.encode(named))


_decoder = msgspec.json.Decoder(WarmRequest)


def read_request(body: bytes) -> WarmRequest:
    """Read a body; raises :class:`BadWarmRequestError` naming the field."""
    try:
        request = _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise BadWarmRequestError(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadWarmRequestError(f"the body is no JSON: {error}") from error
    given = [
        name for name in ("prompt", "messages", "token_ids") if getattr(request, name) is not None
    ]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise BadWarmRequestError(f"prompt, messages or token_ids: give one, got {found}")
    if not getattr(request, given[0]):
        raise BadWarmRequestError(f"{given[0]}: is empty")
    if request.engines is not None and request.group is not None:
        raise BadWarmRequestError("engines and group: give one of them, or none for all engines")
    if request.engines is not None and not request.engines:
        raise BadWarmRequestError("engines: is empty; leave it out for all engines")
    try:
        _ = request.digest
    except (OverflowError, RecursionError, UnicodeError) as error:
        # JSON may say what no engine can be sent, such as numbers of a hundred digits.
        raise BadWarmRequestError(f"{given[0]}: cannot be passed on: {error}") from error
    return request


def check_id(prefix_id: str) -> str:
    """Return an id that can be one; raises :class:`BadWarmRequestError`."""
    if not _ID.fullmatch(prefix_id):
        raise BadWarmRequestError(
            f"id: expected 1 to 64 of A-Z a-z 0-9 _ . : -, got {prefix_id[:80]!r}"
        )
    return prefix_id


def tokenize_body(request: WarmRequest, model: str) -> bytes:
    """Return the question that an engine's ``/tokenize`` answers with the prefix's tokens.

    A chat goes on behind its messages, so that nothing that opens an answer belongs to them.
    """
    question: dict[str, Any] = {"model": model}
    if request.messages is not None:
        question |= {"messages": request.messages, "add_generation_prompt": False}
    else:
        question["prompt"] = request.prompt
    return msgspec.json.encode(question)


def load_request(
    request: WarmRequest, model: str, token_ids: list[int] | None, *, priority: int | None
) -> tuple[str, bytes]:
    """Return path and body that make an engine compute the prefix, and next to nothing else."""
    body: dict[str, Any] = {"model": model, "max_tokens": 1, "temperature": 0, "stream": False}
    if priority is not None:
        body["priority"] = priority
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    if token_ids is None and request.messages is not None:
        return "/v1/chat/completions", msgspec.json.encode(body | {"messages": request.messages})
    prompt = request.prompt if token_ids is None else token_ids
    return "/v1/completions", msgspec.json.encode(body | {"prompt": prompt})
