"""Where the bytes of a stream's chunks are on the host, while it is their turn.

Memory of the host is used in place. A region that lies elsewhere (on a device) has methods of
its own that bring chunks to the host and back; see ``cuda.regions``.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

from nearkv.transfer.backends.contract import Region
from nearkv.transfer.backends.stream_plan import Chunk

ChunkOnHost = tuple[Chunk, list[memoryview]]
"""A chunk and its bytes, in order; they may be used until the next chunk is asked for."""


@runtime_checkable
class StagedRegion(Protocol):
    """A region whose bytes are not on the host."""

    def reads(
        self, chunks: Iterable[Chunk], chunk_bytes: int
    ) -> AbstractContextManager[Iterator[ChunkOnHost]]:
        """Bring chunks here."""
        ...

    def writes(
        self, chunks: Iterable[Chunk], chunk_bytes: int
    ) -> AbstractContextManager[Iterator[ChunkOnHost]]:
        """Offer room for chunks, and take each away when the next is asked for."""
        ...


def chunk_reads(
    region: Region, chunks: Iterable[Chunk], chunk_bytes: int
) -> AbstractContextManager[Iterator[ChunkOnHost]]:
    """Go through chunks of at most ``chunk_bytes`` to read them.

    All of it was read when the last chunk was asked for. Raises :class:`PullError`.
    """
    if isinstance(region, StagedRegion):
        return region.reads(chunks, chunk_bytes)
    return nullcontext(_in_place(region.view, chunks))


def chunk_writes(
    region: Region, chunks: Iterable[Chunk], chunk_bytes: int
) -> AbstractContextManager[Iterator[ChunkOnHost]]:
    """Go through chunks of at most ``chunk_bytes`` to fill them.

    Nobody writes into the region any more when the context has ended, however it ends.
    Raises :class:`PullError`.
    """
    if isinstance(region, StagedRegion):
        return region.writes(chunks, chunk_bytes)
    return nullcontext(_in_place(region.view, chunks))


def _in_place(view: memoryview, chunks: Iterable[Chunk]) -> Iterator[ChunkOnHost]:
    return ((chunk, chunk.views(view)) for chunk in chunks)
