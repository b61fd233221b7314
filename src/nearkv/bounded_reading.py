"""Reading a peer's whole answer without letting it fill the memory."""

from aiohttp import ClientPayloadError, ClientResponse


class AnswerTooLargeError(ClientPayloadError):
    """A peer's answer is over the limit; handled like any other answer that did not arrive."""


async def read_at_most(response: ClientResponse, limit_bytes: int) -> bytes:
    """Return a response's body; raises :class:`AnswerTooLargeError` when it is longer."""
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > limit_bytes:
            raise AnswerTooLargeError(f"the answer is over the limit of {limit_bytes} bytes")
        parts.append(part)
    return b"".join(parts)
