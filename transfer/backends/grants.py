"""Which reader may have which blocks, as a server keeps it."""

import hashlib
import hmac
import threading

from nearkv.transfer.backends.contract import Grant, monotonic_ms
from nearkv.transfer.errors import PullError, Reason

MIN_TICKET_BYTES = 16


class Grants:
    """The grants of one server; may be used from any thread."""

    def __init__(self, *, limit: int = 65_536) -> None:
        self._limit = limit
        # By digest: how long a search takes then says nothing about the tickets there are.
        self._grants: dict[bytes, Grant] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how many grants there are, those included that expired unnoticed."""
        return len(self._grants)

    def add(self, grant: Grant) -> None:
        """Admit a reader; raises :class:`PullError` for a poor ticket, or with too many open."""
        if len(grant.ticket) < MIN_TICKET_BYTES:
            raise PullError(Reason.AUTH, f"a ticket has at least {MIN_TICKET_BYTES} bytes")
        with self._lock:
            if len(self._grants) >= self._limit:
                self._drop_expired()
            if len(self._grants) >= self._limit:
                raise PullError(Reason.BUSY, f"{self._limit} grants are open already")
            self._grants[_digest(grant.ticket)] = grant

    def find(self, ticket: bytes) -> Grant:
        """Return the grant of a ticket; raises :class:`PullError` (``AUTH``, ``EXPIRED``)."""
        with self._lock:
            grant = self._grants.get(_digest(ticket))
        if grant is None or not hmac.compare_digest(grant.ticket, ticket):
            raise PullError(Reason.AUTH, "no grant has this ticket")
        check_unexpired(grant)
        return grant

    def check_standing(self, grant: Grant) -> None:
        """Make sure that a grant found before still holds; raises :class:`PullError`."""
        with self._lock:
            standing = self._grants.get(_digest(grant.ticket)) is grant
        if not standing:
            raise PullError(Reason.EXPIRED, "the grant was withdrawn")
        check_unexpired(grant)

    def withdraw(self, ticket: bytes) -> None:
        """End a grant; unknown tickets are passed over."""
        with self._lock:
            self._grants.pop(_digest(ticket), None)

    def clear(self) -> None:
        """End all grants."""
        with self._lock:
            self._grants.clear()

    def _drop_expired(self) -> None:
        now = monotonic_ms()
        expired = [key for key, grant in self._grants.items() if now >= grant.expires_at_ms]
        for key in expired:
            del self._grants[key]


def _digest(ticket: bytes) -> bytes:
    return hashlib.sha256(ticket).digest()


def check_unexpired(grant: Grant) -> None:
    """Make sure that a grant still holds; raises :class:`PullError` (``EXPIRED``)."""
    if monotonic_ms() >= grant.expires_at_ms:
        raise PullError(Reason.EXPIRED, "the grant has expired")


def granted_blocks(grant: Grant, first_block: int, count: int) -> tuple[int, ...]:
    """Return a range of a grant's blocks; raises :class:`PullError` (``RANGE``)."""
    if not 0 <= first_block <= first_block + count <= len(grant.block_ids):
        raise PullError(
            Reason.RANGE,
            f"{count} blocks from {first_block} on, of {len(grant.block_ids)} granted",
        )
    return grant.block_ids[first_block : first_block + count]
