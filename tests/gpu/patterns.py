"""Bytes that can be told from others: made of a seed, recognised by a digest."""

import hashlib

import numpy as np
import numpy.typing as npt

from nearkv.transfer.backends.stream_plan import Chunk
from nearkv.transfer.cuda.regions import DeviceRegion
from nearkv.transfer.layout import KvMemory

Bytes = npt.NDArray[np.uint8]
CHUNK_BYTES = 4 << 20


def pattern(seed: int, size_bytes: int) -> Bytes:
    """Return random bytes."""
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)


def digest_of(data: Bytes) -> str:
    """Return what a pattern is recognised by."""
    return hashlib.blake2b(data.data, digest_size=16).hexdigest()


def chunks_of(size_bytes: int) -> list[Chunk]:
    """Return the chunks of a memory from its beginning to its end."""
    begins = range(0, size_bytes, CHUNK_BYTES)
    sizes = [min(CHUNK_BYTES, size_bytes - begin) for begin in begins]
    return [Chunk(size, [begin], [size]) for begin, size in zip(begins, sizes, strict=True)]


def write_pattern(region: DeviceRegion, seed: int) -> None:
    """Fill a device's memory with a pattern, through pinned memory."""
    data = pattern(seed, region.layout.size).data
    with region.writes(chunks_of(region.layout.size), CHUNK_BYTES) as staged:
        for chunk, (room,) in staged:
            (begin,) = chunk.offsets
            room[:] = data[begin : begin + chunk.size_bytes]


def read_digest(region: DeviceRegion) -> str:
    """Return the digest of what lies in a device's memory now."""
    digest = hashlib.blake2b(digest_size=16)
    with region.reads(chunks_of(region.layout.size), CHUNK_BYTES) as staged:
        for _, (part,) in staged:
            digest.update(part)
    return digest.hexdigest()


def as_layout(size_bytes: int, layers: int, block_bytes: int) -> KvMemory:
    """Return a layout whose blocks fill a memory, layer by layer."""
    blocks = size_bytes // layers // block_bytes
    return KvMemory(
        size=size_bytes,
        layers=layers,
        blocks=blocks,
        layer_stride=blocks * block_bytes,
        block_stride=block_bytes,
        block_bytes=block_bytes,
    )
