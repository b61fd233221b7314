"""Asking an engine for tokens, and making it compute a prefix."""

import asyncio
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import aiohttp
import msgspec

from nearkv.agent.warming.errors import LoadError
from nearkv.agent.warming.requests import TokenId, WarmRequest, load_request, tokenize_body
from nearkv.bounded_reading import read_at_most
from nearkv.http_failures import explain_failure

_MAX_ANSWER_BYTES = 64 << 20
_MAX_TOKENS = 4 << 20
_OK = 200
_BAD_REQUEST = 400
_NOT_OFFERED = frozenset({403, 404, 405, 501})
_SHOWN_CHARACTERS = 200

T = TypeVar("T")


class _Tokens(msgspec.Struct):
    tokens: Annotated[list[TokenId], msgspec.Meta(max_length=_MAX_TOKENS)]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine's API is, and what it wants; ``rank`` where there are several behind it."""

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the engine said of a prefix that it computed."""

    prompt_tokens: int | None
    cached_tokens: int | None


class EngineCaller:
    """Calls engines; cancelling a call makes the engine drop the request."""

    session: aiohttp.ClientSession
    """Set by whoever opens it, before the first call."""

    def __init__(self, *, deadline_seconds: float, priority: int) -> None:
        self._deadline_seconds = deadline_seconds
        self._priority = priority

    async def tokenize(self, engine: EngineAddress, request: WarmRequest) -> list[int] | None:
        """Return the prefix's tokens; ``None`` where the engine does not tell them.

        Raises :class:`LoadError`.
        """
        if request.token_ids is not None:
            return request.token_ids
        body = tokenize_body(request, engine.model)
        try:
            return _decode(await self._post(engine, "/tokenize", body), _Tokens).tokens
        except LoadError as error:
            if error.engine_status in _NOT_OFFERED:
                return None
            raise

    async def load(
        self, engine: EngineAddress, request: WarmRequest, token_ids: list[int] | None
    ) -> Loaded:
        """Have the prefix computed; raises :class:`LoadError`."""
        path, body = load_request(request, engine.model, token_ids, priority=self._priority)
        try:
            answer = await self._post(engine, path, body)
        except LoadError as error:
            if error.engine_status != _BAD_REQUEST or "priority" not in str(error).lower():
                raise
            # Engines that do not schedule by priority may refuse one.
            path, body = load_request(request, engine.model, token_ids, priority=None)
            answer = await self._post(engine, path, body)
        usage = _decode(answer, _Answer).usage or _Usage()
        details = usage.prompt_tokens_details or _Details()
        return Loaded(usage.prompt_tokens, details.cached_tokens)

    async def _post(self, engine: EngineAddress, path: str, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        if engine.api_key:
            headers["Authorization"] = f"Bearer {engine.api_key}"
        if engine.rank is not None:
            headers["X-data-parallel-rank"] = str(engine.rank)
        try:
            async with (
                asyncio.timeout(self._deadline_seconds),
                self.session.post(
                    engine.url.rstrip("/") + path,
                    data=body,
                    headers=headers,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=None),
                ) as response,
            ):
                answer = await read_at_most(response, _MAX_ANSWER_BYTES)
        except TimeoutError as error:
            raise LoadError(f"{path}: no answer in time", reason="timeout") from error
        except (aiohttp.ClientError, OSError) as error:
            raise LoadError(f"{path}: {explain_failure(error)}", reason="unreachable") from error
        if response.status != _OK:
            said = answer[:_SHOWN_CHARACTERS].decode("utf-8", "replace")
            raise LoadError(
                f"{path}: status {response.status}: {said}",
                reason="refused",
                status=response.status,
            )
        return answer


def _decode(answer: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise LoadError(f"unexpected answer: {error}", reason="unreadable") from error
