"""One pull, checked and ready to be brought (plain data)."""

from dataclasses import dataclass, field

from nearkv.agent.movers.jobs import EngineMemory
from nearkv.agent.transfer.known_leases import KnownLease
from nearkv.agent.transfer.registry import Registration
from nearkv.transfer.backends.contract import Fence, PullRequest
from nearkv.transfer.errors import PullError, Reason
from nearkv.transfer.layout import KvMemory


@dataclass(slots=True, eq=False, kw_only=True)
class PullOrder:
    """Which blocks of a known lease go into which blocks of one rank's memory.

    ``backend`` is the transport of the last try, once there is one. ``is_cold`` says that a
    mover had to be started for it, so that the time it took says nothing of the path.
    """

    reader: Registration
    rank: int
    target: EngineMemory
    known: KnownLease
    first_block: int
    target_blocks: tuple[int, ...]
    deadline_ms: int
    number: int
    backend: str = field(default="")
    is_cold: bool = field(default=False)

    @property
    def source_node(self) -> str:
        """Where the blocks come from; nothing for the shared store."""
        return "" if self.from_store else self.known.address.node

    @property
    def from_store(self) -> bool:
        """Whether the blocks come from the shared store."""
        return self.known.stored is not None

    @property
    def last_block(self) -> int:
        """The block of the lease behind the last one taken."""
        return self.first_block + len(self.target_blocks)

    @property
    def size_bytes(self) -> int:
        """Bytes to bring."""
        layout = self.target.layout
        return len(self.target_blocks) * layout.layers * layout.block_bytes

    def request(self, source_layout: KvMemory, ticket: bytes = b"") -> PullRequest:
        """Return the order as movers take it; raises :class:`PullError`."""
        ref = self.known.ref
        if ref is None:  # for the type checker: only verified leases are pulled from
            raise PullError(Reason.UNKNOWN_LEASE, "the lease was not looked up")
        return PullRequest(
            ticket=ticket,
            first_block=self.first_block,
            source_blocks=self.known.block_ids[self.first_block : self.last_block],
            source_layout=source_layout,
            target_blocks=self.target_blocks,
            fence=Fence(ref.slot, ref.generation),
        )

    def check_target(self) -> None:
        """Make sure that the engine is still there to be written to."""
        if self.reader.memories.get(self.rank) is not self.target:
            raise PullError(Reason.CANCELLED, "the engine is gone")
