"""Asking an engine over HTTP for ``nearkv doctor upgrade``; each request has a deadline."""

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from nearkv.bounded_reading import read_at_most
from nearkv.cli.doctor_upgrade_model import Reply, Tokens
from nearkv.cli.doctor_upgrade_samples import (
    CHATS,
    RENDER_CHAT,
    RENDER_TEXT,
    TEXTS,
    TOKENIZE,
    endpoint_probes,
)
from nearkv.http_failures import explain_failure

_MAX_ANSWER_BYTES = 16 << 20
_MAX_SHOWN_CHARACTERS = 160


class EngineAsker:
    """Puts questions to one engine; what fails is a :class:`Reply` with an error, too."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        *,
        timeout_seconds: float,
        api_key: str | None,
    ) -> None:
        self._url = url.rstrip("/")
        self._session = session
        self._timeout_seconds = timeout_seconds
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """GET, or POST a JSON ``body``; redirects are not followed."""
        sent = {**self._headers, **(headers or {})}
        if body is not None:
            sent["Content-Type"] = "application/json"
        try:
            async with (
                asyncio.timeout(self._timeout_seconds),
                self._session.request(
                    "GET" if body is None else "POST",
                    self._url + path,
                    data=None if body is None else msgspec.json.encode(body),
                    headers=sent,
                    allow_redirects=False,
                ) as response,
            ):
                answer = await read_at_most(response, _MAX_ANSWER_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return Reply(None, error=explain_failure(error))
        return Reply(response.status, answer, "" if response.status == 200 else _why(answer))  # noqa: PLR2004 (HTTP OK)

    async def endpoints(self, model: str) -> dict[str, int | None]:
        """Return the status of each endpoint that nearkv knows."""
        probes = endpoint_probes(model)
        replies = [await self.ask(probe.path, probe.body) for probe in probes]
        return {probe.path: reply.status for probe, reply in zip(probes, replies, strict=True)}

    async def tokens(self, model: str) -> dict[str, Tokens]:
        """Return what ``/tokenize`` makes of each sample."""
        found = {}
        for name, text in TEXTS.items():
            found[f"text: {name}"] = read_tokens(
                await self.ask(TOKENIZE, {"model": model, "prompt": text})
            )
        for name, chat in CHATS.items():
            found[f"chat: {name}"] = read_tokens(await self.ask(TOKENIZE, {"model": model, **chat}))
        return found

    async def rendered(self, model: str) -> dict[str, Tokens]:
        """Return what ``/render`` makes of each sample."""
        found = {}
        named = {"model": model, "max_tokens": 1}
        for name, text in TEXTS.items():
            found[f"text: {name}"] = read_tokens(
                await self.ask(RENDER_TEXT, {**named, "prompt": text})
            )
        for name, chat in CHATS.items():
            found[f"chat: {name}"] = read_tokens(await self.ask(RENDER_CHAT, {**named, **chat}))
        return found

    async def tokenize(self, model: str, text: str) -> tuple[int, ...] | None:
        """Return a text's tokens, ``None`` where the engine does not give them."""
        tokens = read_tokens(await self.ask(TOKENIZE, {"model": model, "prompt": text}))
        return None if isinstance(tokens, str) else tokens


class _Answer(msgspec.Struct):
    """``/tokenize`` says ``tokens``, ``/render`` says ``token_ids``."""

    tokens: list[int] | None = None
    token_ids: list[int] | None = None


_answers = msgspec.json.Decoder(_Answer | list[_Answer])


def read_tokens(reply: Reply) -> Tokens:
    """Return the token ids in an answer of ``/tokenize`` or ``/render``, or why there are none."""
    if not reply.is_ok:
        return reply.error if reply.status is None else f"status {reply.status}"
    try:
        answer = _answers.decode(reply.body)
    except (msgspec.DecodeError, RecursionError):
        return "unexpected answer"
    # Only completions may hold several prompts, and are answered by a list.
    first = answer if isinstance(answer, _Answer) else next(iter(answer), _Answer())
    tokens = first.tokens if first.token_ids is None else first.token_ids
    return "unexpected answer" if tokens is None else tuple(tokens)


def _why(answer: bytes) -> str:
    return answer[:_MAX_SHOWN_CHARACTERS].decode("utf-8", "replace")
