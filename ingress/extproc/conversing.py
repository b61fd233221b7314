"""One gRPC stream of Envoy: read, pick, send on, let the answer pass, close the books."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import structlog

from nearkv.ingress.answers import ENGINE_HEADER, NO_ENGINE, REASON_HEADER, error_body
from nearkv.ingress.bodies import BodyRoom, HeldRoom
from nearkv.ingress.dialects import dialect_of
from nearkv.ingress.errors import BodyTimeoutError, IngressError, NoEngineError, NoRoomError
from nearkv.ingress.extproc.exchange import Exchange, Stage
from nearkv.ingress.extproc.messages import Header, Message, decode_message, immediate_answer
from nearkv.ingress.extproc.metrics import ExtProcMetrics
from nearkv.ingress.extproc.picking import Picker, Ticket
from nearkv.protobuf import WireError

DROPPED_HEADER = "x-llm-d-request-dropped-reason"
"""Says why a request was not served, in the words of llm-d's picker."""

Send = Callable[[bytes], Awaitable[None]]

log = structlog.get_logger(__name__)


class Call(Protocol):
    """A gRPC stream: bytes in, bytes out."""

    def messages(self) -> AsyncIterator[bytes]:
        """Yield what Envoy sends until it closes its side."""

    async def send(self, answer: bytes) -> None:
        """Send an answer."""


class Conversation:
    """Serves streams, each with an exchange of its own."""

    def __init__(
        self,
        picker: Picker,
        metrics: ExtProcMetrics,
        *,
        bodies: BodyRoom,
        limit_bytes: int,
        body_seconds: float,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._picker = picker
        self._metrics = metrics
        self._bodies = bodies
        self._limit_bytes = limit_bytes
        self._body_seconds = body_seconds
        self._now = now

    async def serve(self, call: Call) -> None:
        """Serve one stream to its end; raises ``WireError`` for what is no message."""
        exchange = Exchange(self._limit_bytes)
        messages = call.messages()
        ticket: Ticket | None = None
        try:
            with self._bodies.hold() as held:
                ticket = await self._request(exchange, messages, call.send, held)
            if ticket is not None:
                async for data in messages:
                    await self._take_answer(exchange, decode_message(data), call.send, ticket)
        except WireError:
            self._metrics.streams.add("unreadable")
            raise
        finally:
            if ticket is not None:
                outcome = exchange.outcome
                ticket.close(exchange.tail, complete=outcome != "broken_off")
                self._metrics.streams.add(outcome)

    async def _request(
        self, exchange: Exchange, messages: AsyncIterator[bytes], send: Send, held: HeldRoom
    ) -> Ticket | None:
        """Take the request in, pick for it and send it on.

        Returns ``None`` where it was refused, or the client left before it was whole.
        """
        arrived_at = self._now()
        try:
            if not await self._read(exchange, messages, send, held):
                return None
            asked = exchange.asked(arrived_at)
            ticket = await self._picker.pick(asked)
        except IngressError as error:
            await send(self._refuse(error, exchange))
            return None
        except WireError:
            raise
        except Exception:
            # The last line of defence: a defect is an answer, not a broken stream.
            log.exception("pick_failed")
            await send(self._refuse(IngressError("an error inside the picker"), exchange))
            return None
        try:
            body = asked.body if asked.changed_body is None else asked.changed_body
            for answer in exchange.send_on(ticket.pick, body):
                await send(answer)
        except BaseException:
            ticket.close(b"", complete=False)
            self._metrics.streams.add("broken_off")
            raise
        self._metrics.picks.add("split" if ticket.pick.prefiller else "whole")
        return ticket

    async def _read(
        self, exchange: Exchange, messages: AsyncIterator[bytes], send: Send, held: HeldRoom
    ) -> bool:
        """Read until the request is whole; False where the client left before that."""
        seconds = self._body_seconds
        try:
            async with asyncio.timeout(seconds):
                async for data in messages:
                    if not exchange.headers:
                        self._picker.check_room()
                    for answer in exchange.take_request(decode_message(data)):
                        await send(answer)
                    held.take(exchange.size_bytes - held.taken_bytes)
                    if exchange.stage is Stage.PICKING:
                        return True
        except TimeoutError as error:
            raise BodyTimeoutError(f"the body did not arrive within {seconds:g} s") from error
        return False

    async def _take_answer(
        self,
        exchange: Exchange,
        message: Message,
        send: Send,
        ticket: Ticket,
    ) -> None:
        ours: list[Header] = []
        had_head, had_answer = exchange.head, exchange.has_answer
        exchange.note_answer(message)
        head = exchange.head
        if head is not None and had_head is None:
            ours = ticket.answered(head)
            self._metrics.served.add(_served_as(head.served, ticket))
        if exchange.has_answer and not had_answer:
            ticket.began()
        answer = exchange.let_pass(message, ours)
        if answer is not None:
            await send(answer)

    def _refuse(self, error: IngressError, exchange: Exchange) -> bytes:
        self._metrics.streams.add("refused")
        self._metrics.refusals.add(error.reason)
        self._picker.refused(error)
        request_id = exchange.headers.get("x-request-id", "")
        log.info("refused", reason=error.reason, error=str(error), request_id=request_id)
        path, _, _ = exchange.headers.get(":path", "").partition("?")
        body = error_body(error, dialect_of(path))
        return immediate_answer(
            error.status, refusal_headers(error, request_id), body, error.reason
        )


def refusal_headers(error: IngressError, request_id: str) -> list[Header]:
    """Return the headers of an answer that is an error."""
    headers = [
        ("content-type", "application/json"),
        (ENGINE_HEADER, NO_ENGINE),
        (REASON_HEADER, error.reason),
    ]
    if request_id:
        headers.append(("x-request-id", request_id))
    if isinstance(error, NoRoomError):
        headers.append(("retry-after", str(error.retry_after_seconds)))
        headers.append((DROPPED_HEADER, "rejected-saturated"))
    elif isinstance(error, NoEngineError):
        headers.append((DROPPED_HEADER, "rejected-no-endpoints"))
    return headers


def _served_as(served: str, ticket: Ticket) -> str:
    if not served:
        return "unknown"
    if served == ticket.pick.endpoint:
        return "picked"
    return "fallback" if served in ticket.pick.others else "other"
