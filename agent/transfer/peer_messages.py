"""What agents ask each other (msgpack bodies, pure).

``POST /v1/transfer/<call>``: a lookup is answered with the head of a state packet, ``open``
with :class:`OpenAnswer`, ``probe`` with :class:`ProbeAnswer`, the others with an empty body.
A refusal has :class:`PeerRefusal` as its body. Times are relative: clocks of two hosts have
nothing in common.
"""

from typing import TypeVar

import msgspec

from nearkv.transfer.errors import ProtocolError, Reason, TransferError
from nearkv.transfer.messages import MemoryMap

BODY_TYPE = "application/msgpack"
PATH_PREFIX = "/v1/transfer/"
LOOKUP, OPEN, RENEW, RELEASE, WITHDRAW = "lookup", "open", "renew", "release", "withdraw"
PROBE = "probe"

M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()


class LeaseName(msgspec.Struct, frozen=True, kw_only=True):
    """Which lease, of which boot of which engine."""

    engine: str
    epoch: str
    lease: str


class PeerLookup(LeaseName, frozen=True, kw_only=True):
    """Ask for the manifest of a lease; it may be waited for at most ``wait_ms``."""

    node: str
    tenant: str
    wait_ms: int


class PeerOpen(LeaseName, frozen=True, kw_only=True):
    """Ask to be let at the first ``blocks`` blocks of a lease, as one rank of the engine has them.

    ``backends`` are what the reader could use, best first.
    The grant ends after ``wait_ms``.
    """

    node: str
    tenant: str
    tp_rank: int
    blocks: int
    backends: tuple[str, ...]
    require_rdma: bool
    wait_ms: int


class OpenAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How to get at the blocks: see ``backends.contract``. Renew every ``renew_seconds``.

    ``is_cold`` says that a mover had to be started first, which says nothing of the path.
    """

    backend: str
    offer: bytes
    ticket: bytes
    layout: MemoryMap
    renew_seconds: float
    is_cold: bool = False


class PeerRenew(LeaseName, frozen=True, kw_only=True):
    """A reader is still at it."""


class PeerRelease(LeaseName, frozen=True, kw_only=True):
    """The reader needs the lease no more."""

    why: str = ""


class PeerWithdraw(msgspec.Struct, frozen=True, kw_only=True):
    """A pull is over, and with it what ``open`` had granted."""

    ticket: bytes


class PeerProbe(msgspec.Struct, frozen=True, kw_only=True):
    """Ask to measure the path: to be let at a few bytes that mean nothing, for ``wait_ms``.

    ``backends`` are what the reader could use, best first.
    """

    node: str
    backends: tuple[str, ...]
    require_rdma: bool
    wait_ms: int


class ProbeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How to get at the bytes, as in :class:`OpenAnswer`; ``labels`` are those of the node."""

    backend: str
    offer: bytes
    ticket: bytes
    labels: dict[str, str] = {}
    is_cold: bool = False


class PeerRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why not: ``reason`` is one of :class:`~nearkv.transfer.errors.Reason`."""

    reason: str
    message: str


def encode(message: msgspec.Struct) -> bytes:
    """Return a message as a body."""
    return _encoder.encode(message)


def decode(body: bytes, kind: type[M]) -> M:
    """Read a body; raises :class:`ProtocolError`."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"no {kind.__name__}: {error}") from error


def refusal_error(refusal: PeerRefusal) -> TransferError:
    """Return a peer's refusal as an error of ours; a word we do not know is ``peer_refused``."""
    try:
        reason = Reason(refusal.reason)
    except ValueError:
        reason = Reason.PEER_REFUSED
    return TransferError(reason, refusal.message[:500])
