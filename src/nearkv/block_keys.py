"""Block keys: our own 64-bit chain hash of a block's token ids.

Routing never depends on an engine's block hashes. Those change with the engine's version,
hash algorithm and seed, so they are opaque handles here; what agents publish and ingresses
look up are keys made from the token ids themselves::

    root  = blake2b-64(tagged, length-prefixed namespace; keyed with the cluster secret)
    key_0 = xxh3-64(root  as little-endian u64 | tokens of block 0 as little-endian u32)
    key_i = xxh3-64(key_i-1 as little-endian u64 | tokens of block i as little-endian u32)

A key therefore names the whole prefix up to and including its block (DESIGN section 2).
The root is keyed so that published state does not confirm a guessed prompt to somebody who
lacks the secret; agents and ingresses of one cluster must share it.
"""

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 4
KEY_BYTES = 8
MAX_SECRET_BYTES = 64
_TAG = b"nearkv/block-key/1"


@dataclass(frozen=True, slots=True)
class KeyNamespace:
    """What separates equal token ids: the model, the LoRA adapter and the cache salt."""

    model: str
    lora: str = ""
    salt: str = ""


def root_key(namespace: KeyNamespace, secret: bytes = b"") -> int:
    """Return the parent key of a prompt's first block.

    ``secret`` is the cluster secret, at most 64 bytes; a longer one raises ``ValueError``.
    """
    digest = blake2b(digest_size=KEY_BYTES, key=secret)
    for part in (_TAG, namespace.model.encode(), namespace.lora.encode(), namespace.salt.encode()):
        digest.update(struct.pack("<I", len(part)))
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Pack token ids as little-endian u32.

    Raises ``ValueError`` for anything that is not an integer in 0..2**32-1.
    """
    try:
        packed = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers in 0..2**32-1: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def chain_keys(parent: int, packed_tokens: bytes, block_size: int) -> list[int]:
    """Return the keys of the full blocks in ``packed_tokens``, following ``parent``.

    ``block_size`` is in tokens; a tail shorter than a block has no key.
    """
    step = block_size * TOKEN_BYTES
    keys: list[int] = []
    append = keys.append
    for start in range(0, len(packed_tokens) - step + 1, step):
        parent = xxh3_64_intdigest(
            parent.to_bytes(KEY_BYTES, "little") + packed_tokens[start : start + step]
        )
        append(parent)
    return keys


def fold_extra(key: int, extra: bytes) -> int:
    """Mix what is not a token (a multimodal item, say) into a block's key.

    The result is a valid parent for the blocks that follow, and equal only where the
    same extra stood at the same place.
    """
    return xxh3_64_intdigest(key.to_bytes(KEY_BYTES, "little") + b"extra" + extra)


def pack_keys(keys: Sequence[int]) -> bytes:
    """Pack keys as little-endian u64, the form they travel in."""
    return struct.pack(f"<{len(keys)}Q", *keys)


def unpack_keys(packed: bytes) -> tuple[int, ...]:
    """Undo :func:`pack_keys`; raises ``ValueError`` when bytes are left over."""
    count, rest = divmod(len(packed), KEY_BYTES)
    if rest:
        raise ValueError(f"packed keys must be a multiple of {KEY_BYTES} bytes, got {len(packed)}")
    return struct.unpack(f"<{count}Q", packed)
