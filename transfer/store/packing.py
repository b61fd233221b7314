"""Cutting a prefix into segments, and segments into packets (pure).

A segment is a run of at most ``segment_blocks`` blocks; cuts lie at multiples of that number, so
conversations that grow share all segments but their last. Its key is a digest of everything
that the KV depends on: what the engine is (names left out), the salt, the adapter, and the
block key of the segment's last block, which stands for the whole prefix before it, with the
number of blocks.

Keys of 64 bits may collide, and a store may be wrong. So each packet holds all tokens up to
its segment's end, and a reader compares them with its own: 4 bytes per token, beside some
10,000 to 100,000 of KV.
"""

import hashlib
import hmac
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from nearkv.block_keys import TOKEN_BYTES, pack_keys
from nearkv.transfer.errors import PacketError, Reason
from nearkv.transfer.manifest import Compatibility, Manifest, Prefix, Source, check_fit
from nearkv.transfer.packet import (
    MAJOR,
    MAX_HEADER_BYTES,
    chunk_of,
    decode_head,
    encode_head,
    verified_chunks,
)
from nearkv.transfer.store.contract import Bytes, StoredPrefix

MAX_HEAD_BYTES = MAX_HEADER_BYTES + 64
"""No packet's head is longer: prefix, digest and signature take 64 bytes."""
_KEY_BYTES = 20
_SALT_BYTES = 16
_TAG = f"nearkv/store/{MAJOR}"


@dataclass(frozen=True, slots=True)
class Segment:
    """Blocks ``begin`` to ``end`` (not included) of a prefix."""

    begin: int
    end: int

    def __len__(self) -> int:
        """Return how many blocks there are."""
        return self.end - self.begin


def segments(blocks: int, segment_blocks: int) -> Iterator[Segment]:
    """Yield the segments of a prefix, from its front."""
    for begin in range(0, blocks, segment_blocks):
        yield Segment(begin, min(begin + segment_blocks, blocks))


@dataclass(frozen=True, slots=True)
class Packer:
    """Makes and reads the packets of one engine.

    ``secret`` signs heads and keys the digests; readers with another find nothing, nor do
    those of another ``tenant``.
    """

    own: Compatibility
    source: Source
    secret: bytes | None = None
    tenant: str = ""
    chunk_bytes: int = 4 << 20

    def body_bytes(self, blocks: int) -> int:
        """Return how long the body of a segment is."""
        return self.own.layout.layers * self.own.layout.block_bytes * blocks

    def key(self, prefix: StoredPrefix, segment: Segment) -> str:
        """Return a segment's key in a store, in hex."""
        model = msgspec.structs.replace(self.own.model, name="")
        facts = msgspec.msgpack.encode(
            (
                _TAG,
                msgspec.structs.replace(self.own, model=model),
                self.tenant,
                prefix.cache_salt,
                prefix.lora,
                prefix.block_keys[segment.end - 1],
                len(segment),
            )
        )
        return hmac.digest(self.secret or b"", facts, hashlib.sha256).hex()[: 2 * _KEY_BYTES]

    def pack(self, prefix: StoredPrefix, segment: Segment, body: memoryview) -> tuple[Bytes, ...]:
        """Return a packet in parts: its head, and ``body`` as it is.

        Raises :class:`PacketError` (``TOO_LARGE``) for a prefix of more than a million tokens.
        """
        chunks = tuple(
            chunk_of(at, body[at : at + self.chunk_bytes])
            for at in range(0, len(body), self.chunk_bytes)
        )
        tokens = self._tokens(prefix, segment)
        manifest = Manifest(
            compatibility=self.own,
            source=self.source,
            prefix=Prefix(
                token_ids=tokens,
                num_tokens=len(tokens) // TOKEN_BYTES,
                block_keys=pack_keys(prefix.block_keys[segment.begin : segment.end]),
                cache_salt=_salt_digest(prefix.cache_salt),
                lora=prefix.lora,
            ),
            block_ids=tuple(range(segment.begin, segment.end)),
            chunks=chunks,
        )
        return encode_head(manifest, key=self.secret), body

    def unpack(self, prefix: StoredPrefix, segment: Segment, packet: Bytes) -> memoryview:
        """Return a packet's body when all of it is right; raises :class:`PacketError`."""
        view = memoryview(packet)
        head = decode_head(view, key=self.secret)
        self._check(head.manifest, prefix, segment)
        if head.body_bytes != self.body_bytes(len(segment)):
            raise PacketError(
                Reason.RANGE,
                f"body of {head.body_bytes} bytes for {self.body_bytes(len(segment))} of blocks",
            )
        body = view[head.head_bytes :]
        for _ in verified_chunks(head, body):
            pass
        return body

    def _check(self, manifest: Manifest, prefix: StoredPrefix, segment: Segment) -> None:
        """Make sure that a packet is about this engine, this prefix and this segment."""
        check_fit(manifest, self.own, prefix.token_ids)
        theirs = manifest.prefix
        # check_fit compares as many tokens as there are blocks; a segment has a prefix before it.
        if theirs.token_ids != self._tokens(prefix, segment):
            raise PacketError(Reason.PREFIX, "token_ids: the packet's are not the request's")
        if theirs.cache_salt != _salt_digest(prefix.cache_salt):
            raise PacketError(Reason.PREFIX, "cache_salt: theirs is not the request's")
        if theirs.lora != prefix.lora:
            raise PacketError(
                Reason.PREFIX, f"lora: theirs is {theirs.lora!r}, ours is {prefix.lora!r}"
            )
        if manifest.block_ids != tuple(range(segment.begin, segment.end)):
            raise PacketError(Reason.RANGE, "block_ids: the packet holds other blocks")

    def _tokens(self, prefix: StoredPrefix, segment: Segment) -> bytes:
        return prefix.token_ids[: segment.end * self.own.layout.block_size * TOKEN_BYTES]


def some_blocks(body: memoryview, *, layers: int, begin: int, end: int, block_bytes: int) -> Bytes:
    """Return blocks ``begin`` to ``end`` of a body, which is in (layer, block) order."""
    layer_bytes = len(body) // layers
    if not begin and end * block_bytes == layer_bytes:
        return body
    parts: Sequence[memoryview] = [
        body[at + begin * block_bytes : at + end * block_bytes]
        for at in range(0, layers * layer_bytes, layer_bytes)
    ]
    return b"".join(parts)


def _salt_digest(salt: str) -> str:
    """Return what is stored of a salt, which is a secret: it says only that two are equal."""
    if not salt:
        return ""
    return hashlib.blake2b(salt.encode(), digest_size=_SALT_BYTES).hexdigest()
