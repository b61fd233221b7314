"""Messages between the agent and one of its movers (pure).

::

    agent                                    mover
      Setup ->                               <- Ready
      AddTarget, AddSource (descriptors) ->
      Pull, Cancel ->                        <- PullFinished
      MakeOffer, Withdraw ->                 <- Offered
      PutPrefix ->                           <- PutFinished
      AskStore ->                            <- StoreAnswered
      Forget ->                              <- Forgotten
      RunProbe ->                            <- Probed
      Quit ->                                (exits)
                                             <- Trouble (to be logged)

Every message with an ``id`` gets exactly one answer with the same ``id``; a mover that dies
answers none. Deadlines are absolute milliseconds of CLOCK_MONOTONIC. An empty ``reason`` is
success.
"""

from typing import Any

import msgspec

from nearkv.transfer.backends.contract import Fence, Grant, Probe, PullReport, PullRequest
from nearkv.transfer.layout import KvMemory
from nearkv.transfer.manifest import Compatibility, Source
from nearkv.transfer.messages import MEMFD
from nearkv.transfer.store.contract import StoreReport

# -- To the mover -----------------------------------------------------------------------


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag="setup"):
    """The first message: bounds, and keyword arguments for the backends by name."""

    threads: int
    max_links: int
    options: dict[str, dict[str, Any]] = {}


class MemoryForm(msgspec.Struct, frozen=True, kw_only=True):
    """What kind of memory a descriptor is of; see ``transfer.messages.RegisterWorker``."""

    kind: str = MEMFD
    device: str = ""
    handle: bytes = b""


HOST_MEMORY = MemoryForm()


class AddTarget(msgspec.Struct, frozen=True, kw_only=True, tag="add_target"):
    """The memory that this mover pulls into; brings its descriptor."""

    layout: KvMemory
    form: MemoryForm = HOST_MEMORY
    fds: int = 1


class AddSource(msgspec.Struct, frozen=True, kw_only=True, tag="add_source"):
    """Memory to pull from, to serve, or to store (``for_store``), and its lease slots.

    Brings both descriptors.
    """

    key: str
    layout: KvMemory
    slots: int
    form: MemoryForm = HOST_MEMORY
    for_store: bool = False
    fds: int = 2


class Pull(msgspec.Struct, frozen=True, kw_only=True, tag="pull"):
    """Pull from a source added before, or with no ``source_key`` from where ``offer`` says."""

    id: int
    request: PullRequest
    deadline_ms: int
    backend: str
    source_key: str = ""
    offer: bytes = b""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """End the pull with this id; its ``PullFinished`` says that nobody writes any more."""

    id: int


class Forget(msgspec.Struct, frozen=True, kw_only=True, tag="forget"):
    """A source's engine is gone: end pulls from it and unmap its memory."""

    id: int
    key: str


class MakeOffer(msgspec.Struct, frozen=True, kw_only=True, tag="make_offer"):
    """Serve a source to one more reader."""

    id: int
    key: str
    backend: str
    grant: Grant


class Withdraw(msgspec.Struct, frozen=True, kw_only=True, tag="withdraw"):
    """End a grant."""

    ticket: bytes


class RunProbe(msgspec.Struct, frozen=True, kw_only=True, tag="run_probe"):
    """Find out whether a backend can be used here."""

    id: int
    backend: str


class StoreSubject(msgspec.Struct, frozen=True, kw_only=True):
    """Whose KV is put into the store, or wanted from it: the engine rank and the prefix.

    ``token_ids`` is packed little-endian u32; whole blocks of it count. It is the ``offer`` of
    a pull from the store, too (in msgpack).
    """

    own: Compatibility
    source: Source
    token_ids: bytes
    tenant: str = ""
    cache_salt: str = ""
    lora: str = ""


class PutPrefix(msgspec.Struct, frozen=True, kw_only=True, tag="put_prefix"):
    """Store a prefix that lies in these blocks of a source, for as long as the fence holds."""

    id: int
    key: str
    subject: StoreSubject
    block_ids: tuple[int, ...]
    fence: Fence
    deadline_ms: int


class AskStore(msgspec.Struct, frozen=True, kw_only=True, tag="ask_store"):
    """Say how many leading blocks the store has, for one that has ``first_block`` itself."""

    id: int
    subject: StoreSubject
    first_block: int
    deadline_ms: int


class Quit(msgspec.Struct, frozen=True, kw_only=True, tag="quit"):
    """Close connections and exit; the kernel sees to it after ``within_ms``."""

    within_ms: int


ToMover = (
    Setup
    | AddTarget
    | AddSource
    | Pull
    | Cancel
    | Forget
    | MakeOffer
    | Withdraw
    | RunProbe
    | PutPrefix
    | AskStore
    | Quit
)

# -- To the agent -----------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The mover has started and takes messages."""


class PullFinished(msgspec.Struct, frozen=True, kw_only=True, tag="pull_finished"):
    """A pull ended, well (with a report) or not; nobody writes into its blocks any more."""

    id: int
    report: PullReport | None = None
    reason: str = ""
    message: str = ""


class Offered(msgspec.Struct, frozen=True, kw_only=True, tag="offered"):
    """What a reader's link needs to connect."""

    id: int
    offer: bytes = b""
    reason: str = ""
    message: str = ""


class Forgotten(msgspec.Struct, frozen=True, kw_only=True, tag="forgotten"):
    """No pull from the source is left; ``unmapped`` says whether its memory is let go, too."""

    id: int
    unmapped: bool


class Probed(msgspec.Struct, frozen=True, kw_only=True, tag="probed"):
    """What the probe found."""

    id: int
    probe: Probe


class PutFinished(msgspec.Struct, frozen=True, kw_only=True, tag="put_finished"):
    """A put ended; with a report, part of it may be stored. Nothing of the source is read."""

    id: int
    report: StoreReport | None = None
    reason: str = ""
    message: str = ""


class StoreAnswered(msgspec.Struct, frozen=True, kw_only=True, tag="store_answered"):
    """How many leading blocks the store has; 0 for none beyond those that are there."""

    id: int
    blocks: int = 0
    reason: str = ""
    message: str = ""


class Trouble(msgspec.Struct, frozen=True, kw_only=True, tag="trouble"):
    """A defect, for the agent's log; ``event`` is a log event's name."""

    event: str
    error: str


FromMover = (
    Ready | PullFinished | Offered | Forgotten | Probed | PutFinished | StoreAnswered | Trouble
)
