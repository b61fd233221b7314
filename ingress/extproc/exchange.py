"""One HTTP exchange as the picker sees it (pure): messages of Envoy in, answers out.

The request is held back until all of it is here, since the prompt decides where it goes. The
answer passes through untouched; only its last bytes are kept, where Envoy shows them.

What a client may not say is taken out of its headers: those that name hosts or ranks would
steer traffic behind the router.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from multidict import CIMultiDict

from nearkv.ingress.errors import BodyTooLargeError, IngressError
from nearkv.ingress.extproc.messages import (
    BodyMode,
    BodyModes,
    Header,
    Message,
    Mutation,
    Part,
    body_answer,
    headers_answer,
    plain_answer,
)
from nearkv.ingress.extproc.picking import (
    ENDPOINT_KEY,
    PREFILL_HEADER,
    PREFILLER_HEADER,
    RANK_HEADER,
    Asked,
    Head,
    Pick,
)
from nearkv.ingress.extproc.structs import texts_of

LB_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = ENDPOINT_KEY + "-subset"
SERVED_KEY = ENDPOINT_KEY + "-served"

_PIECE_BYTES = 62_000
"""Some builds of Envoy take pieces of at most 64 KiB."""
_TAIL_BYTES = 4096
_UPSTREAM_ATTRIBUTE = "upstream.address"
_NEVER_FROM_CLIENTS = (
    SUBSET_KEY,
    SERVED_KEY,
    "x-data-parallel-host-port",
    "x-encoder-hosts-ports",
    "x-kv-cache-source-host-port",
    "x-prefiller-url",
)
_WHOLE_MODES = frozenset({BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED})


class ModeError(IngressError):
    """Envoy sends bodies in a way that no pick can be made from."""

    reason = "body_mode"


class Stage(Enum):
    """How far an exchange is."""

    REQUEST = "request"
    PICKING = "picking"
    ANSWER = "answer"


@dataclass(slots=True)
class Exchange:
    """The state of one exchange."""

    limit_bytes: int
    stage: Stage = Stage.REQUEST
    modes: BodyModes = field(default_factory=BodyModes)
    headers: CIMultiDict[str] = field(default_factory=CIMultiDict)
    metadata: dict[str, Any] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)
    size_bytes: int = 0
    has_trailers: bool = False
    has_body: bool = False
    has_answer: bool = False
    head: Head | None = None
    tail: bytes = b""
    is_over: bool = False

    def take_request(self, message: Message) -> list[bytes]:
        """Take a part of the request; the stage is ``PICKING`` once it is whole.

        Raises ``BodyTooLargeError``, and :class:`ModeError` with the first message.
        """
        answers: list[bytes] = []
        if message.part is Part.REQUEST_HEADERS:
            self._take_headers(message)
            if not message.end_of_stream and self.modes.request is BodyMode.BUFFERED:
                answers.append(headers_answer(Part.REQUEST_HEADERS))  # or no body would come
        elif message.part is Part.REQUEST_BODY:
            self.has_body = True
            self.pieces.append(message.body)
            self.size_bytes += len(message.body)
            if self.size_bytes > self.limit_bytes:
                raise BodyTooLargeError(f"the body is over the limit of {self.limit_bytes} bytes")
        elif message.part is Part.REQUEST_TRAILERS:
            self.has_trailers = True
        if message.end_of_stream:
            self.stage = Stage.PICKING
        return answers

    def _take_headers(self, message: Message) -> None:
        self.headers = CIMultiDict(message.headers)
        self.metadata = dict(message.metadata)
        self.modes = message.modes or self.modes
        if not message.end_of_stream and self.modes.request not in _WHOLE_MODES:
            raise ModeError(
                "the picker reads whole bodies: set request_body_mode to FULL_DUPLEX_STREAMED"
                f" (it is {self.modes.request.name})"
            )
        declared = self.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self.limit_bytes:
            raise BodyTooLargeError(
                f"the body has {int(declared)} bytes, the limit is {self.limit_bytes}"
            )

    def asked(self, arrived_at: float) -> Asked:
        """Return the request that is whole now."""
        hint = self.metadata.get(SUBSET_NAMESPACE, {})
        path, _, _ = self.headers.get(":path", "/").partition("?")
        return Asked(
            method=self.headers.get(":method", "GET"),
            path=path,
            headers=self.headers,
            body=self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces),
            arrived_at=arrived_at,
            shows_answer=self.modes.response is not BodyMode.NONE,
            may_change_body=self.modes.request is BodyMode.FULL_DUPLEX_STREAMED,
            endpoints=frozenset(texts_of(hint[SUBSET_KEY])) if SUBSET_KEY in hint else None,
        )

    def send_on(self, pick: Pick, body: bytes) -> Iterator[bytes]:
        """Yield the answers that send the request to where it was picked to go.

        A body of another length than the client's goes without a length.
        """
        resized = len(body) != self.size_bytes
        self.stage = Stage.ANSWER
        self.pieces = []
        value = ",".join((pick.endpoint, *pick.others))
        buffered = self.has_body and self.modes.request is BodyMode.BUFFERED
        yield headers_answer(
            Part.REQUEST_BODY if buffered else Part.REQUEST_HEADERS,
            _steering(pick, value, resized=resized),
            metadata={LB_NAMESPACE: {ENDPOINT_KEY: value}},
            reroute=True,
        )
        if self.has_body and not buffered:
            view = memoryview(body)
            last = max(0, len(view) - 1) // _PIECE_BYTES * _PIECE_BYTES
            for start in range(0, last + 1, _PIECE_BYTES):
                yield body_answer(
                    Part.REQUEST_BODY,
                    view[start : start + _PIECE_BYTES],
                    end_of_stream=start == last and not self.has_trailers,
                )
        if self.has_trailers:
            yield plain_answer(Part.REQUEST_TRAILERS)

    def note_answer(self, message: Message) -> None:
        """Take in a part of the engine's answer."""
        self.is_over |= message.end_of_stream
        if message.part is Part.RESPONSE_HEADERS:
            self.head = _head(message)
        if message.part is Part.RESPONSE_BODY:
            self.has_answer |= bool(message.body)
            self.tail = (self.tail + message.body)[-_TAIL_BYTES:]

    @property
    def outcome(self) -> str:
        """How the exchange ended, once it has."""
        if self.is_over:
            return "complete"
        # Without bodies an answer that ended and one that broke off look the same.
        is_shown = self.modes.response is not BodyMode.NONE
        return "broken_off" if is_shown or self.head is None else "not_shown"

    def let_pass(self, message: Message, ours: Sequence[Header] = ()) -> bytes | None:
        """Return the answer that lets a part of the engine's answer pass, with our headers."""
        part = message.part
        if part is Part.RESPONSE_HEADERS:
            return headers_answer(part, Mutation(set=ours))
        if part is Part.RESPONSE_BODY:
            if self.modes.response is BodyMode.FULL_DUPLEX_STREAMED:
                return body_answer(part, message.body, end_of_stream=message.end_of_stream)
            return plain_answer(part)
        return plain_answer(part) if part is Part.RESPONSE_TRAILERS else None


def _steering(pick: Pick, value: str, *, resized: bool) -> Mutation:
    headers = [(ENDPOINT_KEY, value), ("x-request-id", pick.request_id), *pick.headers]
    remove = [*_NEVER_FROM_CLIENTS, *pick.removed]
    if resized:
        remove.append("content-length")
    for name, wanted in (
        (PREFILLER_HEADER, pick.prefiller),
        (RANK_HEADER, "" if pick.dp_rank is None else str(pick.dp_rank)),
    ):
        if wanted:
            headers.append((name, wanted))
        else:
            remove.append(name)
    return Mutation(headers, remove)


def _head(message: Message) -> Head:
    headers = CIMultiDict(message.headers)
    status = headers.get(":status", "")
    return Head(
        status=int(status) if status.isascii() and status.isdigit() else 0,
        served=_served(message),
        prefill=headers.get(PREFILL_HEADER, ""),
    )


def _served(message: Message) -> str:
    """Return the endpoint that served: the gateway's word, else where Envoy connected to."""
    said = message.metadata.get(LB_NAMESPACE, {}).get(SERVED_KEY)
    if isinstance(said, str) and said:
        return said
    for attributes in message.attributes.values():
        upstream = attributes.get(_UPSTREAM_ATTRIBUTE)
        if isinstance(upstream, str):
            return upstream
    return ""
