"""One connection to an engine, one request after the other.

Parsing is llhttp's (as in aiohttp and in vLLM's own server); here is what becomes of it: the
answer is filled, and the connection is either ready for another request or closed.
"""

import asyncio
from collections.abc import Callable
from typing import cast

import httptools
from aiohttp import hdrs
from multidict import CIMultiDict

from nearkv.ingress.upstream.answer import Answer
from nearkv.ingress.upstream.errors import AnswerBrokenError, EngineLeftError

_HEAD_LIMIT_BYTES = 64 << 10
_ONE_WRITE_BYTES = 64 << 10
_FIRST_FINAL_STATUS = 200
_SWITCHING_PROTOCOLS = 101


class EngineConnection(asyncio.Protocol):
    """A protocol for ``create_connection``.

    ``on_free`` is told when it may be used again, ``on_lost`` when it is no more.
    """

    def __init__(
        self,
        on_free: Callable[["EngineConnection"], None],
        on_lost: Callable[["EngineConnection"], None],
    ) -> None:
        self.idle_since = 0.0
        self._on_free = on_free
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: Answer | None = None
        self._headers: CIMultiDict[str] = CIMultiDict()
        self._head_bytes = 0
        self._is_until_eof = self._is_bodiless = self._is_complete = False
        self._is_kept = self._is_paused = False

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, method: str, head: bytes, body: bytes) -> Answer:
        """Send a request; the answer is filled as it comes. One at a time."""
        transport = self._transport
        if transport is None or self._answer is not None:
            raise RuntimeError("the connection is not free")
        answer = self._answer = Answer(self)
        self._headers = CIMultiDict()
        self._head_bytes = 0
        self._is_bodiless = method == hdrs.METH_HEAD
        self._is_until_eof = self._is_complete = False
        if len(body) <= _ONE_WRITE_BYTES:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)
        return answer

    def close(self) -> None:
        """Close at once; an answer under way fails."""
        if self._transport is not None:
            self._transport.abort()

    # -- Of the answer -----------------------------------------------------------------

    def leave(self, answer: Answer) -> None:
        """Close, since nobody wants the rest of an answer."""
        if self._answer is answer:
            self._answer = None
            self.close()

    def pause(self, answer: Answer) -> None:
        """Let the engine wait: its answer is not read as fast as it comes."""
        transport = self._transport
        if self._answer is not answer or self._is_paused or transport is None:
            return
        if not transport.is_closing():
            self._is_paused = True
            transport.pause_reading()

    def resume(self, answer: Answer) -> None:
        """Read on."""
        transport = self._transport
        if self._answer is not answer or not self._is_paused or transport is None:
            return
        if not transport.is_closing():
            self._is_paused = False
            transport.resume_reading()

    # -- Of the transport --------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Parse what came; whatever belongs to no answer closes the connection."""
        answer = self._answer
        if answer is None:
            self.close()
            return
        if not answer.has_begun:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._end(answer, may_be_reused=False)
        except httptools.HttpParserError as error:
            if self._is_complete:  # what is wrong came behind the answer
                self._end(answer, may_be_reused=False)
            else:
                self._break_off(answer, f"what came is no HTTP: {error}")
        else:
            if self._is_complete:
                self._end(answer, may_be_reused=self._is_kept)
            elif self._head_bytes > _HEAD_LIMIT_BYTES and not answer.has_begun:
                self._break_off(answer, f"its head is over {_HEAD_LIMIT_BYTES} bytes")

    def connection_lost(self, exc: Exception | None) -> None:
        """End the answer under way: with the connection where that is its end, else broken."""
        answer, self._answer = self._answer, None
        self._transport = None
        self._on_lost(self)
        why = "" if exc is None else f": {exc}"
        if answer is None:
            return
        if self._is_until_eof and exc is None:
            answer.end()
        elif self._head_bytes:
            answer.fail(AnswerBrokenError(f"the connection ended within the answer{why}"))
        else:
            answer.fail(EngineLeftError(f"the connection was closed before an answer{why}"))

    def _break_off(self, answer: Answer, why: str) -> None:
        self._answer = None
        answer.fail(AnswerBrokenError(why))
        self.close()

    def _end(self, answer: Answer, *, may_be_reused: bool) -> None:
        self.resume(answer)
        self._answer = None
        answer.end()
        if self._is_bodiless:  # the parser, which sees answers only, waits for the body
            self._parser = httptools.HttpResponseParser(self)
        if may_be_reused and answer.has_ended and self._has_sent_all():
            self._on_free(self)
        else:
            self.close()

    def _has_sent_all(self) -> bool:
        """Tell whether the engine has the whole request; else it may never read the next."""
        return (
            self._transport is not None
            and not self._transport.is_closing()
            and self._transport.get_write_buffer_size() == 0
        )

    # -- Of the parser -----------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Refuse a second answer to one request."""
        if self._is_complete:
            raise ValueError("more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; a trailer, which nobody asked for, is dropped."""
        if self._answer is not None and not self._answer.has_begun:
            self._headers.add(
                name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape")
            )

    def on_headers_complete(self) -> None:
        """Begin the answer, unless this is only an interim one (1xx)."""
        status = self._parser.get_status_code()
        if status < _FIRST_FINAL_STATUS and status != _SWITCHING_PROTOCOLS:
            return
        headers = self._headers
        length = headers.get("Content-Length")
        is_chunked = "Transfer-Encoding" in headers
        self._is_until_eof = length is None and not is_chunked
        if self._answer is not None:
            told = None if length is None or is_chunked else int(length)
            self._answer.begin(status, headers, told)
        if self._is_bodiless:
            self.on_message_complete()

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the body."""
        if self._answer is not None and not self._is_bodiless:
            self._answer.feed(body)

    def on_message_complete(self) -> None:
        """Note the answer's end, unless it was an interim one."""
        if self._answer is not None and not self._answer.has_begun:
            self._headers = CIMultiDict()
            return
        self._is_complete = True
        self._is_kept = self._parser.should_keep_alive()  # which it knows only here
