"""Tokenizing by an engine: ``/render`` and ``/tokenize`` (reference/vllm.md section 4).

The engine's own view of a prompt is the only one that cannot drift from what its cache
holds. vLLM answers 403 to ``/render`` without ``--enable-scale-out``; what an engine does
not offer is remembered for that incarnation.
"""

import asyncio
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeVar

import aiohttp
import msgspec

from nearkv.bounded_reading import read_at_most
from nearkv.ingress.errors import TokenizationError

_MAX_ANSWER_BYTES = 256 << 20
_LARGE_BYTES = 1 << 20
"""From here on aiohttp wants a file, which it sends in pieces, and warns of bytes."""
_ANSWERED_BY_LISTS = frozenset({"/v1/completions"})
"""Only completions may hold several prompts."""
_NOT_OFFERED = frozenset({403, 404, 405, 501})

T = TypeVar("T")
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


@dataclass(frozen=True, slots=True)
class EngineRef:
    """An engine to ask: where it is, and which incarnation of it."""

    id: str
    incarnation: str
    url: str


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Token ids, and how each token is spelled where that was asked for."""

    token_ids: list[int]
    token_strs: list[str] | None = None


class _Rendered(msgspec.Struct):
    token_ids: list[TokenId]


class _TokenizeAnswer(msgspec.Struct):
    tokens: list[TokenId]
    token_strs: list[str] | None = None


_rendered = msgspec.json.Decoder(_Rendered)
_rendered_list = msgspec.json.Decoder(list[_Rendered])
_tokenized = msgspec.json.Decoder(_TokenizeAnswer)


class EngineTokenizer:
    """Asks engines for token ids; one HTTP call per question, each with a deadline."""

    def __init__(
        self, session: aiohttp.ClientSession, *, timeout_seconds: float, api_key: str | None
    ) -> None:
        self._session = session
        self._timeout_seconds = timeout_seconds
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._not_offered: set[tuple[str, str, str]] = set()

    def offers(self, engine: EngineRef, path: str) -> bool:
        """Tell whether an engine has not declined this path yet."""
        return (engine.id, engine.incarnation, path) not in self._not_offered

    def forget(self, known: set[tuple[str, str]]) -> None:
        """Drop what was learnt of engines and incarnations no longer known."""
        self._not_offered = {item for item in self._not_offered if item[:2] in known}

    async def render(self, engine: EngineRef, path: str, body: bytes) -> Tokenized:
        """Have the engine render a whole request; ``path`` is the client's.

        Raises :class:`TokenizationError`.
        """
        answer = await self._post(engine, f"{path}/render", body)
        if path not in _ANSWERED_BY_LISTS:
            return Tokenized(_decode(_rendered, answer).token_ids)
        prompts = _decode(_rendered_list, answer)
        if not prompts:
            raise TokenizationError("render answered an empty list")
        return Tokenized(prompts[0].token_ids)

    async def tokenize(
        self, engine: EngineRef, question: Mapping[str, object], *, spelled: bool = False
    ) -> Tokenized:
        """Have the engine tokenize ``{"prompt": ...}`` or ``{"messages": ...}``.

        Raises :class:`TokenizationError`.
        """
        asked = {**question, "return_token_strs": True} if spelled else question
        answer = await self._post(engine, "/tokenize", msgspec.json.encode(asked))
        parsed = _decode(_tokenized, answer)
        return Tokenized(parsed.tokens, parsed.token_strs)

    async def _post(self, engine: EngineRef, path: str, body: bytes) -> bytes:
        data = body if len(body) <= _LARGE_BYTES else io.BytesIO(body)
        try:
            async with (
                asyncio.timeout(self._timeout_seconds),
                self._session.post(engine.url + path, data=data, headers=self._headers) as response,
            ):
                answer = await read_at_most(response, _MAX_ANSWER_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TokenizationError(
                f"{path}: {type(error).__name__}: {error}",
                unreachable=isinstance(error, aiohttp.ClientConnectorError),
            ) from error
        if response.status in _NOT_OFFERED:
            self._not_offered.add((engine.id, engine.incarnation, path))
        if response.status != 200:  # noqa: PLR2004 (HTTP OK)
            raise TokenizationError(f"{path}: status {response.status}")
        return answer


def _decode(decoder: msgspec.json.Decoder[T], answer: bytes) -> T:
    try:
        return decoder.decode(answer)
    except msgspec.DecodeError as error:
        raise TokenizationError(f"unexpected answer: {error}") from error
