"""Reading a peer's whole answer without letting it fill the memory."""

from collections.abc import AsyncIterable

from aiohttp import ClientPayloadError, ClientResponse


class AnswerTooLargeError(ClientPayloadError):
    """A peer's answer is over the limit; handled like any other answer that did not arrive."""


async def read_at_most(response: ClientResponse, limit_bytes: int) -> bytes:
    """Return a response's body; raises :class:`AnswerTooLargeError` when it is longer."""
    return await join_at_most(response.content.iter_any(), limit_bytes)


async def join_at_most(parts: AsyncIterable[bytes], limit_bytes: int) -> bytes:
    """Return an answer's parts as one; raises :class:`AnswerTooLargeError` when it is longer."""
    kept: list[bytes] = []
    size = 0
    async for part in parts:
        size += len(part)
        if size > limit_bytes:
            raise AnswerTooLargeError(f"the answer is over the limit of {limit_bytes} bytes")
        kept.append(part)
    return b"".join(kept)
