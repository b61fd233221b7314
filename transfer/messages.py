"""Messages between an engine's connector and the node's agent (pure).

An engine has one connection per process that matters: each worker (one per tensor-parallel
rank) registers its KV memory and asks for pulls into it; the scheduler registers the lease
slots, opens and closes leases, and asks what a lease holds before it counts on it. The end of
a connection is the end of what was registered on it.

::

    worker                      agent                       scheduler
      RegisterWorker (memory) ->       <- RegisterScheduler (slots)
                              <- Registered ->
                                       <- OpenLease
                                       <- Lookup         LookupDone ->
      StartPull ->            <- PullDone
      CancelPull ->           <- PullDone (cancelled)
                                          RenewLease, ReleaseLease ->
                                       <- LeaseClosed

Deadlines are absolute milliseconds of CLOCK_MONOTONIC, which all processes of a host share.
"""

import msgspec

from nearkv.transfer.manifest import Compatibility, Prefix

PROTOCOL = 1
MOVER_GRACE_MS = 250
"""How long after a pull's deadline its mover may live; see ``docs/adr/0006``."""

MEMFD = "memfd"
CUDA_VMM = "cuda_vmm"
CUDA_IPC = "cuda_ipc"
MEMORY_KINDS = (MEMFD, CUDA_VMM, CUDA_IPC)
"""What a worker's KV memory can be: host memory, or a device's by descriptor or IPC handle."""


class MemoryMap(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine's KV lies in its memory; see ``layout.KvMemory``. Sizes in bytes."""

    size: int
    layers: int
    blocks: int
    layer_stride: int
    block_stride: int
    block_bytes: int
    offset: int = 0


class LeaseAddress(msgspec.Struct, frozen=True, kw_only=True):
    """How to find a lease: which engine's, in which boot of it, and which agent to ask.

    ``agent`` is the base URL that other agents reach the engine's agent at; it decides
    nothing where ``node`` is the reader's own.
    """

    lease: str
    engine: str
    epoch: str
    node: str = ""
    agent: str = ""

    @property
    def is_store(self) -> bool:
        """Tell whether it means the shared store, not a lease; see :func:`in_store`."""
        return not self.engine


def in_store(request_id: str) -> LeaseAddress:
    """Return what stands for a lease where a request is to be had from the shared store."""
    return LeaseAddress(lease=request_id, engine="", epoch="")


# -- From the engine --------------------------------------------------------------------


class RegisterWorker(msgspec.Struct, frozen=True, kw_only=True, tag="register_worker"):
    """The first message of a worker; brings the descriptor of its KV memory.

    ``memory_kind`` is one of ``MEMORY_KINDS``; ``device`` the UUID of the GPU that the memory
    is on. Memory of the kind ``cuda_ipc`` has a ``handle`` of 64 bytes and no descriptor.
    """

    protocol: int
    engine: str
    epoch: str
    compatibility: Compatibility
    memory: MemoryMap
    tenant: str = ""
    memory_kind: str = MEMFD
    device: str = ""
    handle: bytes = b""
    fds: int = 1


class RegisterScheduler(msgspec.Struct, frozen=True, kw_only=True, tag="register_scheduler"):
    """The first message of a scheduler; brings the descriptor of its lease slots (a memfd).

    ``leases`` are those still open: an agent that was restarted takes them up again.
    """

    protocol: int
    engine: str
    epoch: str
    slots: int
    leases: tuple["OpenLease", ...] = ()
    fds: int = 1


class OpenLease(msgspec.Struct, frozen=True, kw_only=True, tag="open_lease"):
    """A lease was opened: these blocks hold this prefix until it ends.

    ``expires_at_ms`` is on CLOCK_MONOTONIC, as in the slot itself. No reader knows of a lease
    ``for_store``: the agent releases it once it has stored the blocks, or will not.
    """

    lease: str
    slot: int
    generation: int
    expires_at_ms: int
    block_ids: tuple[int, ...]
    prefix: Prefix
    for_store: bool = False


class LeaseClosed(msgspec.Struct, frozen=True, kw_only=True, tag="lease_closed"):
    """The slot of a lease is closed; whatever is still being copied no longer counts."""

    lease: str
    why: str


class Lookup(msgspec.Struct, frozen=True, kw_only=True, tag="lookup"):
    """Ask how much of a lease this engine may use for these tokens (packed u32).

    With an address that :func:`in_store` made it is about the shared store. The engine has
    the first ``first_block`` blocks itself.
    """

    id: int
    address: LeaseAddress
    token_ids: bytes
    cache_salt: str = ""
    lora: str = ""
    deadline_ms: int = 0
    first_block: int = 0


class StartPull(msgspec.Struct, frozen=True, kw_only=True, tag="start_pull"):
    """Bring blocks of a lease into blocks of this worker's memory.

    ``first_block`` counts within the lease's blocks; as many are taken as there are
    ``target_blocks``. The mover is dead or done ``grace_ms`` after the deadline, whatever
    happens (see ``docs/adr/0006``). ``lookup`` is the id of the lookup that found the blocks:
    two requests may bring one lease and be about different tokens. Connectors from before it
    was there leave it 0.
    """

    id: int
    address: LeaseAddress
    first_block: int
    target_blocks: tuple[int, ...]
    deadline_ms: int
    lookup: int = 0


class CancelPull(msgspec.Struct, frozen=True, kw_only=True, tag="cancel_pull"):
    """Stop a pull; ``PullDone`` follows once nobody writes into the blocks any more."""

    id: int


FromEngine = (
    RegisterWorker | RegisterScheduler | OpenLease | LeaseClosed | Lookup | StartPull | CancelPull
)

# -- To the engine ----------------------------------------------------------------------


class Registered(msgspec.Struct, frozen=True, kw_only=True, tag="registered"):
    """The agent took the registration; ``agent`` is what goes into lease addresses.

    Where there is a shared store, ``store_min_tokens`` is the shortest prefix worth asking it
    for, else 0; ``store_all`` says that finished requests are to be kept for it
    (``OpenLease.for_store``).
    """

    node: str
    agent: str
    boot: str
    store_min_tokens: int = 0
    store_all: bool = False


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The agent does not take the registration and closes the connection."""

    reason: str
    message: str


class LookupDone(msgspec.Struct, frozen=True, kw_only=True, tag="lookup_done"):
    """How many leading tokens of the request the lease holds; 0 with the reason why."""

    id: int
    num_tokens: int
    reason: str = ""
    message: str = ""


class PullDone(msgspec.Struct, frozen=True, kw_only=True, tag="pull_done"):
    """A pull ended; nobody writes into its blocks any more. An empty ``reason`` is success."""

    id: int
    reason: str = ""
    message: str = ""
    path: str = ""
    size_bytes: int = 0
    seconds: float = 0.0


class RenewLease(msgspec.Struct, frozen=True, kw_only=True, tag="renew_lease"):
    """A reader is still at it: move the lease's expiry."""

    lease: str
    expires_at_ms: int


class ReleaseLease(msgspec.Struct, frozen=True, kw_only=True, tag="release_lease"):
    """Nobody needs the lease any more: close it and free its blocks."""

    lease: str
    why: str


ToEngine = Registered | Refused | LookupDone | PullDone | RenewLease | ReleaseLease
