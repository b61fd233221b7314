"""Why a transfer does not happen, or does not count.

TransferError      has a ``reason``
├── PacketError    a state packet cannot be read or must not be used
├── LayoutError    a memory layout contradicts itself
├── LeaseError     a lease cannot be opened or used
├── PullError      KV could not be pulled, or does not count
└── ProtocolError  a message between engine, agent and mover cannot be read

Every reason is a metric label and part of the API. Whatever the reason, the outcome is the
same: fewer tokens, or none, come from the transfer, and the engine computes the rest. It is
never an error to the client, and never a wrong token.
"""

from enum import StrEnum

from nearkv.errors import NearkvError


class Reason(StrEnum):
    """Why KV is not taken over.

    The first group is about what the KV is, the second about the way to it.
    """

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
    KV_GROUPS = "kv_groups"
    MEMORY = "memory"
    TENANT = "tenant"

    NO_AGENT = "no_agent"
    NO_SOURCE = "no_source"
    NO_PATH = "no_path"
    RDMA_REQUIRED = "rdma_required"
    BUSY = "busy"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    PEER_LOST = "peer_lost"
    PEER_REFUSED = "peer_refused"
    MOVER_LOST = "mover_lost"
    AGENT_LOST = "agent_lost"
    STORE_FULL = "store_full"
    NOT_STORED = "not_stored"
    INTERNAL = "internal"


class TransferError(NearkvError):
    """Base of everything the transfer raises; ``reason`` is the metric label."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class PacketError(TransferError):
    """A state packet cannot be read, or must not be used."""


class LayoutError(TransferError):
    """A memory layout contradicts itself, or two of them do not fit each other."""

    def __init__(self, message: str, reason: Reason = Reason.LAYOUT) -> None:
        super().__init__(reason, message)


class LeaseError(TransferError):
    """A lease cannot be opened or used."""


class PullError(TransferError):
    """KV could not be pulled, or what was pulled does not count."""


class ProtocolError(TransferError):
    """A message between an engine, the agent and a mover cannot be read."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.MALFORMED, message)
