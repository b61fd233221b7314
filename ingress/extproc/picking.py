"""What the protocol asks of the router, and what it tells it afterwards.

This is all that the gRPC side knows of routing: a request in, a ticket out. A ticket holds
the pick and keeps the router's books until the exchange is over.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from multidict import CIMultiDict

from nearkv.ingress.errors import IngressError

ENDPOINT_KEY = "x-gateway-destination-endpoint"
"""The header, and the key of dynamic metadata, that name where a request goes."""

PREFILLER_HEADER = "x-prefiller-host-port"
"""The header by which a decode engine's sidecar learns who prefills (llm-d's name)."""

PREFILL_HEADER = "x-nearkv-prefill"
"""The header of an answer by which our sidecar tells what became of the prefill leg."""

RANK_HEADER = "x-data-parallel-rank"


@dataclass(slots=True)
class Asked:
    """A client's request, whole.

    ``shows_answer`` says that the engine's answer will be seen, not just its head.
    ``endpoints`` are those (``ip:port`` or ``ip``) that the gateway restricts the pick to;
    ``None`` is no restriction, nothing in it means that there is nowhere to go. The picker may
    set ``changed_body`` where ``may_change_body`` allows it, for a model under an alias.
    """

    method: str
    path: str
    headers: CIMultiDict[str]
    body: bytes
    arrived_at: float
    shows_answer: bool = True
    endpoints: Collection[str] | None = None
    may_change_body: bool = False
    changed_body: bytes | None = None


@dataclass(frozen=True, slots=True)
class Pick:
    """Where a request goes: endpoints as ``ip:port``, the others being for retries, in order.

    ``prefiller`` is empty where the engine prefills by itself. ``headers`` are further ones
    that the engine gets, ``removed`` those of the client's that it does not.
    """

    endpoint: str
    request_id: str
    others: Sequence[str] = ()
    prefiller: str = ""
    dp_rank: int | None = None
    headers: Sequence[tuple[str, str]] = ()
    removed: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Head:
    """The head of an engine's answer.

    ``served`` is the endpoint that gave it, ``prefill`` what a sidecar says of the prefill leg;
    both are empty where nobody tells.
    """

    status: int
    served: str = ""
    prefill: str = ""


class Ticket(Protocol):
    """One request that was picked for; every ticket is closed, once or more often."""

    @property
    def pick(self) -> Pick:
        """Where it goes."""

    def answered(self, head: Head) -> list[tuple[str, str]]:
        """Take the head of the answer; return the headers that the client gets with it."""

    def began(self) -> None:
        """Note the first byte of the answer's body, where it is seen; once."""

    def close(self, tail: bytes, *, complete: bool) -> None:
        """End it. ``tail`` are the last bytes of the answer, where they were seen.

        ``complete`` is false where the exchange broke off.
        """


class Picker(Protocol):
    """The router, as the protocol sees it."""

    def check_room(self) -> None:
        """Look, before a body is read, whether one more may be; raises ``NoRoomError``."""

    def refused(self, error: IngressError) -> None:
        """Take note of a request that was refused."""

    async def pick(self, asked: Asked) -> Ticket:
        """Choose; raises ``IngressError`` where the request cannot be served."""
