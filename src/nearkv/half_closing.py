"""Answering clients that close their sending half once they have asked.

asyncio closes a connection when the peer will send no more, and aiohttp leaves it at that: the
answer to a request that was complete would be lost. HTTP does not ask for that (RFC 9112, 9.6).
TLS has no half-closed connections; there everything stays as it is.
"""

from typing import Any

from aiohttp import StreamReader, web


class HalfClosingRunner(web.AppRunner):
    """An ``AppRunner`` whose connections stay until what was asked is answered.

    Of requests sent ahead of answers (pipelining, which hardly anybody does) it is the first.
    """

    __slots__ = ()

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _Server(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            **server._kwargs,  # noqa: SLF001 (the runner has no other way to its settings)
        )


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    __slots__ = ()

    def eof_received(self) -> Any:  # noqa: ANN401 (aiohttp says None, asyncio's protocol a bool)
        """Answer what was asked, then close the connection; an idle one is closed at once.

        A body that cannot be completed any more raises ``RequestPayloadError`` where it is read.
        """
        is_idle = self._waiter is not None and not self._waiter.done()
        if self.transport is None or self.transport.get_extra_info("ssl_object") or is_idle:
            return False
        self.close()
        for _, body in self._messages:
            _break_off(body)
        # A request that was taken off the queue just now is known one step later.
        self._loop.call_soon(self._break_off_current)
        return True

    def _break_off_current(self) -> None:
        if self._current_request is not None:
            _break_off(self._current_request.content)


def _break_off(body: StreamReader) -> None:
    if not body.is_eof() and body.exception() is None:
        body.set_exception(web.RequestPayloadError("the client stopped sending"))
