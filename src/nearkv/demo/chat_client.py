"""One streamed chat request to the ingress, with what its answer says about routing."""

import time
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from nearkv.demo.errors import ScenarioError
from nearkv.demo.scenario import MAX_ANSWER_TOKENS, Message

REQUEST_DEADLINE_SECONDS = 300.0
ERROR_EXCERPT_CHARACTERS = 400
DATA_PREFIX = b"data:"


class PromptDetails(msgspec.Struct):
    """``usage.prompt_tokens_details``."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """``usage`` of the last chunk."""

    prompt_tokens: int
    prompt_tokens_details: PromptDetails | None = None


class Delta(msgspec.Struct):
    """The text that a chunk adds."""

    content: str | None = None


class Choice(msgspec.Struct):
    """One alternative; only one is asked for."""

    delta: Delta


class Chunk(msgspec.Struct):
    """One event of a streamed chat completion, as far as it is used here."""

    choices: list[Choice] = []
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer, what it cost and who gave it. Token counts are None when not reported."""

    text: str
    engine: str
    reason: str
    prompt_tokens: int
    cached_tokens: int | None
    predicted_cached_tokens: int | None
    ttft_seconds: float
    prefill_engine: str | None = None


async def ask(
    session: aiohttp.ClientSession, url: str, *, model: str, messages: Sequence[Message]
) -> Reply:
    """Send one request and read its answer to the end.

    Raises ``ScenarioError`` for any answer but a complete stream with usage and routing
    headers.
    """
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": MAX_ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    timeout = aiohttp.ClientTimeout(total=REQUEST_DEADLINE_SECONDS)
    start = time.monotonic()
    try:
        async with session.post(
            f"{url}/v1/chat/completions", json=body, timeout=timeout
        ) as response:
            await _raise_for_status(response)
            return await _read_reply(response, start)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ScenarioError(f"a request to {url} failed: {error!r}") from error


async def _raise_for_status(response: aiohttp.ClientResponse) -> None:
    if not response.ok:
        excerpt = (await response.text())[:ERROR_EXCERPT_CHARACTERS]
        raise ScenarioError(f"the ingress answered {response.status}: {excerpt}")


async def _read_reply(response: aiohttp.ClientResponse, start: float) -> Reply:
    pieces: list[str] = []
    usage: Usage | None = None
    ttft_seconds: float | None = None
    async for chunk in read_chunks(response.content):
        usage = chunk.usage or usage
        text = "".join(choice.delta.content or "" for choice in chunk.choices)
        if text and ttft_seconds is None:
            ttft_seconds = time.monotonic() - start
        pieces.append(text)
    if usage is None or ttft_seconds is None:
        raise ScenarioError("the stream of an answer ended without text or without usage")
    details = usage.prompt_tokens_details
    return Reply(
        text="".join(pieces),
        engine=routing_header(response.headers, "engine"),
        reason=routing_header(response.headers, "reason"),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=details.cached_tokens if details else None,
        predicted_cached_tokens=predicted_tokens(response.headers),
        ttft_seconds=ttft_seconds,
        prefill_engine=response.headers.get("x-nearkv-prefill-engine"),
    )


async def read_chunks(lines: AsyncIterable[bytes]) -> AsyncIterator[Chunk]:
    """Decode the events of a stream up to ``[DONE]``; raise ``ScenarioError`` for a bad one."""
    async for line in lines:
        if not line.startswith(DATA_PREFIX):
            continue
        data = line.removeprefix(DATA_PREFIX).strip()
        if data == b"[DONE]":
            return
        try:
            yield msgspec.json.decode(data, type=Chunk)
        except msgspec.MsgspecError as error:
            excerpt = data[:ERROR_EXCERPT_CHARACTERS].decode(errors="replace")
            raise ScenarioError(f"a streamed event cannot be read: {excerpt}") from error


def routing_header(headers: Mapping[str, str], name: str) -> str:
    """Return a header that the ingress puts on every answer."""
    value = headers.get(f"x-nearkv-{name}")
    if value is None:
        raise ScenarioError(f"an answer came without the header x-nearkv-{name}")
    return value


def predicted_tokens(headers: Mapping[str, str]) -> int | None:
    """Return the ingress' prediction, or None where it made none."""
    value = headers.get("x-nearkv-predicted-cached-tokens", "")
    return int(value) if value.isdecimal() else None
