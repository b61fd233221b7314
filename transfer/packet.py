"""The state packet on the wire (pure).

::

    offset  size
    0       4     magic "KVSP"
    4       2     major version: another one is refused
    6       2     minor version: a newer one may add manifest fields, which are passed over
    8       4     header length, at most 4 MiB
    12      8     body length: exactly the sum of the manifest's chunks
    20      4     flags: 1 = signed
    24      ...   header: the manifest in msgpack
            8     xxh3-64 of everything before
            32    HMAC-SHA256 of everything before, where signed
            ...   body: the chunks, back to back

All integers are little-endian. Nothing is unpickled, nothing is trusted before its length
was checked against what is really there.
"""

import hmac
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from xxhash import xxh3_64_intdigest

from nearkv.transfer.errors import PacketError, Reason
from nearkv.transfer.manifest import Chunk, Manifest

MAGIC = b"KVSP"
MAJOR, MINOR = 1, 0
MAX_HEADER_BYTES = 4 << 20
_PREFIX = struct.Struct("<4sHHIQI")
_DIGEST = struct.Struct("<Q")
_SIGNED = 1
_MAC_BYTES = 32

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


@dataclass(frozen=True, slots=True)
class Head:
    """A packet's head, read and verified; the body starts at ``head_bytes``."""

    manifest: Manifest
    minor: int
    head_bytes: int
    body_bytes: int


def chunk_of(offset: int, data: bytes | memoryview) -> Chunk:
    """Describe a part of a body."""
    return Chunk(offset, len(data), xxh3_64_intdigest(data))


def encode_head(manifest: Manifest, *, key: bytes | None = None) -> bytes:
    """Return a packet's bytes up to its body; with ``key`` they are signed.

    Raises :class:`PacketError` when the manifest is over the limit.
    """
    header = _encoder.encode(manifest)
    if len(header) > MAX_HEADER_BYTES:
        raise PacketError(Reason.TOO_LARGE, f"header of {len(header)} bytes is over the limit")
    body_bytes = sum(chunk.length for chunk in manifest.chunks)
    flags = _SIGNED if key is not None else 0
    head = _PREFIX.pack(MAGIC, MAJOR, MINOR, len(header), body_bytes, flags) + header
    head += _DIGEST.pack(xxh3_64_intdigest(head))
    return head if key is None else head + hmac.digest(key, head, "sha256")


def decode_head(data: bytes | memoryview, *, key: bytes | None = None) -> Head:
    """Read and verify a packet's head; raises :class:`PacketError`.

    ``data`` may go on behind the head. With ``key``, a packet that is not signed with it is
    refused; without, signatures are not looked at. ``Reason.TRUNCATED`` says that more bytes
    may help.
    """
    view = memoryview(data)
    if len(view) < _PREFIX.size:
        raise PacketError(Reason.TRUNCATED, f"{len(view)} bytes are no packet head")
    magic, major, minor, header_bytes, body_bytes, flags = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise PacketError(Reason.MALFORMED, "the magic number is missing")
    if major != MAJOR:
        raise PacketError(Reason.VERSION, f"major version {major}, we read {MAJOR}")
    if header_bytes > MAX_HEADER_BYTES:
        raise PacketError(Reason.TOO_LARGE, f"header of {header_bytes} bytes is over the limit")
    head_end = _check_integrity(view, _PREFIX.size + header_bytes, flags, key)
    manifest = _decode_manifest(view[_PREFIX.size : _PREFIX.size + header_bytes])
    _check_chunks(manifest.chunks, body_bytes)
    return Head(manifest, minor, head_end, body_bytes)


def verified_chunks(head: Head, body: bytes | memoryview) -> Iterator[memoryview]:
    """Yield the body's chunks, each after its digest was checked; raises :class:`PacketError`."""
    view = memoryview(body)
    if len(view) != head.body_bytes:
        raise PacketError(
            Reason.TRUNCATED, f"body of {len(view)} bytes, the head says {head.body_bytes}"
        )
    for i, chunk in enumerate(head.manifest.chunks):
        part = view[chunk.offset : chunk.offset + chunk.length]
        if xxh3_64_intdigest(part) != chunk.digest:
            raise PacketError(Reason.CORRUPT, f"chunk {i} does not have its digest")
        yield part


def _check_integrity(view: memoryview, end: int, flags: int, key: bytes | None) -> int:
    """Check digest and signature behind the header; returns where the body starts."""
    mac_end = end + _DIGEST.size
    head_end = mac_end + (_MAC_BYTES if flags & _SIGNED else 0)
    if len(view) < head_end:
        raise PacketError(Reason.TRUNCATED, f"head of {head_end} bytes, {len(view)} are here")
    if _DIGEST.unpack_from(view, end) != (xxh3_64_intdigest(view[:end]),):
        raise PacketError(Reason.CORRUPT, "the header does not have its digest")
    if key is None:
        return head_end
    if not flags & _SIGNED:
        raise PacketError(Reason.AUTH, "the packet is not signed")
    expected = hmac.digest(key, view[:mac_end], "sha256")
    if not hmac.compare_digest(expected, view[mac_end:head_end]):
        raise PacketError(Reason.AUTH, "the packet is signed with another key")
    return head_end


def _decode_manifest(header: memoryview) -> Manifest:
    try:
        return _decoder.decode(header)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise PacketError(Reason.MALFORMED, f"the header is no manifest: {error}") from error


def _check_chunks(chunks: Sequence[Chunk], body_bytes: int) -> None:
    """Make sure that chunks lie back to back and fill the body exactly."""
    end = 0
    for i, chunk in enumerate(chunks):
        if chunk.offset != end or chunk.length <= 0:
            raise PacketError(Reason.RANGE, f"chunk {i} does not follow the one before it")
        end += chunk.length
    if end != body_bytes:
        raise PacketError(Reason.RANGE, f"chunks of {end} bytes, body of {body_bytes}")
