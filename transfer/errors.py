"""Why a transfer does not happen, or does not count.

TransferError
├── PacketError    a state packet cannot be read or must not be used; has a ``reason``
├── LayoutError    a memory layout contradicts itself
└── LeaseError     a lease cannot be opened or used; has a ``reason``

Every reason is a metric label and part of the API. Whatever the reason, the outcome is the
same: fewer tokens, or none, come from the transfer, and the engine computes the rest. It is
never an error to the client, and never a wrong token.
"""

from enum import StrEnum

from nearkv.errors import NearkvError


class Reason(StrEnum):
    """Why KV is not taken over."""

    MALFORMED = "malformed"
    TRUNCATED = "truncated"
    TOO_LARGE = "too_large"
    VERSION = "version"
    CORRUPT = "corrupt"
    AUTH = "auth"
    MODEL = "model"
    DTYPE = "dtype"
    TOPOLOGY = "topology"
    LAYOUT = "layout"
    EPOCH = "epoch"
    PREFIX = "prefix"
    RANGE = "range"
    STALE = "stale"
    EXPIRED = "expired"
    UNKNOWN_LEASE = "unknown_lease"


class TransferError(NearkvError):
    """Base of everything the transfer raises."""


class PacketError(TransferError):
    """A state packet cannot be read, or must not be used."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class LayoutError(TransferError):
    """A memory layout contradicts itself."""


class LeaseError(TransferError):
    """A lease cannot be opened or used."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
