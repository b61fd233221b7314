"""Asking one engine who it is and how it does, over HTTP (reference/vllm.md section 4)."""

import asyncio
import re
from collections.abc import Iterable
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from nearkv.agent.engine_metrics import (
    MOST_SAMPLES,
    EngineReading,
    Sample,
    find_samples,
    put_together,
)
from nearkv.agent.errors import EngineProbeError
from nearkv.agent.event_sources import EventSource, reachable_endpoint
from nearkv.bounded_reading import read_at_most
from nearkv.http_failures import explain_failure

_MAX_ANSWER_BYTES = 16 << 20
_MAX_NAMES_CHARACTERS = 128 << 10
"""Of all names that an engine serves; its state goes to all consumers in one frame."""
MAX_VERSION_CHARACTERS = 128
_MAX_RANKS = 1024
_RANK = re.compile(r"[0-9]{1,4}")
_PIECE_CHARACTERS = 1 << 18
"""How much of a long answer is looked through before others get their turn."""

T = TypeVar("T")


class ModelCard(msgspec.Struct):
    """One entry of ``/v1/models``; an adapter names its base model as ``parent``."""

    id: str
    parent: str | None = None
    max_model_len: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] | None = None


class _Models(msgspec.Struct):
    data: list[ModelCard]


class _Version(msgspec.Struct):
    version: str


class _Source(msgspec.Struct):
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""
    enable_kv_cache_events: bool = True


def open_engine_session() -> aiohttp.ClientSession:
    """Return a session for engines; it keeps no cookies, which an engine could set without end."""
    return aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())


class EngineProbe:
    """Reads one engine's HTTP API; every call has a deadline."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        *,
        timeout_seconds: float,
        bearer_token: str | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._session = session
        self._timeout_seconds = timeout_seconds
        self._headers = {"Authorization": f"Bearer {bearer_token}"} if bearer_token else {}

    async def models(self) -> list[ModelCard]:
        """Return the models served; raises :class:`EngineProbeError`."""
        cards = self._decode(await self._get("/v1/models"), _Models).data
        if sum(len(card.id) for card in cards) > _MAX_NAMES_CHARACTERS:
            raise EngineProbeError(
                f"{self._url}/v1/models: names of over {_MAX_NAMES_CHARACTERS} characters in all"
            )
        return cards

    async def version(self) -> str | None:
        """Return the engine's version, or ``None`` where it does not tell."""
        body = await self._get_optional("/version")
        if body is None:
            return None
        return self._decode(body, _Version).version[:MAX_VERSION_CHARACTERS]

    async def event_sources(self) -> dict[int, EventSource] | None:
        """Return the event endpoints by data-parallel rank.

        ``None`` where the engine has no ``/kv_event_sources`` (before vLLM 0.32).
        """
        body = await self._get_optional("/kv_event_sources")
        if body is None:
            return None
        sources = self._decode(body, dict[str, _Source])
        if len(sources) > _MAX_RANKS:
            raise EngineProbeError(
                f"{self._url}/kv_event_sources: over {_MAX_RANKS} data-parallel ranks"
            )
        host = urlsplit(self._url).hostname or "127.0.0.1"
        return {
            int(rank): EventSource(
                endpoint=reachable_endpoint(source.endpoint, host),
                replay_endpoint=source.replay_endpoint
                and reachable_endpoint(source.replay_endpoint, host),
            )
            for rank, source in sources.items()
            if _RANK.fullmatch(rank) and source.enable_kv_cache_events and source.endpoint
        }

    async def reading(self) -> EngineReading:
        """Scrape ``/metrics``; raises :class:`EngineProbeError`."""
        text = (await self._get("/metrics")).decode("utf-8", "replace")
        samples: list[Sample] = []
        for piece in _pieces(text):
            samples += find_samples(piece)
            if len(samples) > MOST_SAMPLES:
                break
            await asyncio.sleep(0)
        return put_together(samples)

    async def _get_optional(self, path: str) -> bytes | None:
        try:
            return await self._get(path)
        except EngineProbeError as error:
            if error.status in (403, 404, 405):
                return None
            raise

    async def _get(self, path: str) -> bytes:
        try:
            async with (
                asyncio.timeout(self._timeout_seconds),
                self._session.get(
                    self._url + path, headers=self._headers, allow_redirects=False
                ) as response,
            ):
                body = await read_at_most(response, _MAX_ANSWER_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineProbeError(
                f"{self._url}{path}: {explain_failure(error)}",
                nobody_listens=_is_refused(error),
            ) from error
        if response.status != 200:  # noqa: PLR2004 (HTTP OK)
            remedy = "; set its api_key" if response.status == 401 else ""  # noqa: PLR2004 (HTTP)
            raise EngineProbeError(
                f"{self._url}{path}: status {response.status}{remedy}", status=response.status
            )
        return body

    @staticmethod
    def _decode(body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise EngineProbeError(f"unexpected answer: {error}") from error


def _pieces(text: str) -> Iterable[str]:
    """Cut a text at ends of lines."""
    start = 0
    while start < len(text):
        cut = text.find("\n", start + _PIECE_CHARACTERS)
        end = len(text) if cut < 0 else cut
        yield text[start:end]
        start = end


def _is_refused(error: Exception) -> bool:
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return isinstance(cause, ConnectionRefusedError)
