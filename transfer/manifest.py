"""The manifest of a state packet: what the KV is, and whether it fits an engine (pure).

The article (6.3) asks that a packet carry the model and its configuration, the prompt's token
ids, the tensors and the prefix length, and that the receiver check before it loads. The
manifest holds all of that but the tensors, which travel by reference or as the packet's body.
"""

from collections.abc import Sequence

import msgspec

from nearkv.transfer.errors import PacketError, Reason


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Which model, exactly: the name is for people, the hash decides.

    ``config_hash`` covers layers, KV heads, head size, rope and window settings.
    """

    name: str
    config_hash: str
    weights_quantisation: str = ""


class Numerics(msgspec.Struct, frozen=True, kw_only=True):
    """How the elements are to be read; ``scale_digest`` is for scaled fp8 caches."""

    kv_dtype: str
    scale_digest: str = ""


class Parallelism(msgspec.Struct, frozen=True, kw_only=True):
    """Which share of the model this is."""

    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0


class BlockLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How a block lies in memory; all sizes in bytes but ``block_size``, which is in tokens."""

    name: str
    block_size: int
    layers: int
    layer_stride: int
    block_stride: int
    block_bytes: int


class Compatibility(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that must be equal for one engine to use another's KV."""

    model: ModelIdentity
    numerics: Numerics
    parallelism: Parallelism
    layout: BlockLayout


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where the KV lives: the engine, and the boot of it that the block ids belong to."""

    engine: str
    epoch: str
    node: str = ""


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """What the KV was computed from. ``token_ids`` is packed little-endian u32."""

    token_ids: bytes
    num_tokens: int
    block_keys: bytes
    cache_salt: str = ""
    lora: str = ""


class LeaseRef(msgspec.Struct, frozen=True, kw_only=True):
    """The promise that the blocks stay as they are; ``ttl_ms`` counts from the sending."""

    id: str
    slot: int
    generation: int
    ttl_ms: int


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A part of the body, with the xxh3-64 of its bytes."""

    offset: int
    length: int
    digest: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a state packet."""

    compatibility: Compatibility
    source: Source
    prefix: Prefix
    block_ids: tuple[int, ...]
    lease: LeaseRef | None = None
    chunks: tuple[Chunk, ...] = ()


def check_fit(manifest: Manifest, own: Compatibility, token_ids: bytes) -> None:
    """Make sure that an engine may use a packet's KV; raises :class:`PacketError`.

    ``own`` is what the engine is, ``token_ids`` the packed tokens of *its* request: the
    sender's word on what the tokens are is never taken. Cheapest checks first; the message
    names the field that differs.
    """
    theirs = manifest.compatibility
    for reason, ours, other in (
        (Reason.MODEL, own.model, theirs.model),
        (Reason.DTYPE, own.numerics, theirs.numerics),
        (Reason.TOPOLOGY, own.parallelism, theirs.parallelism),
        (Reason.LAYOUT, own.layout, theirs.layout),
    ):
        _check_equal(reason, ours, other, ignored=("name",) if reason is Reason.MODEL else ())
    _check_prefix(manifest, token_ids)


def _check_equal(
    reason: Reason, own: msgspec.Struct, other: msgspec.Struct, *, ignored: Sequence[str]
) -> None:
    if own == other:
        return
    for field in own.__struct_fields__:
        ours, theirs = getattr(own, field), getattr(other, field)
        if ours != theirs and field not in ignored:
            raise PacketError(reason, f"{field}: theirs is {theirs!r}, ours is {ours!r}")


def _check_prefix(manifest: Manifest, token_ids: bytes) -> None:
    prefix = manifest.prefix
    block_size = manifest.compatibility.layout.block_size
    if len(prefix.token_ids) != prefix.num_tokens * 4:
        raise PacketError(Reason.PREFIX, "num_tokens does not match the token ids")
    if len(manifest.block_ids) * block_size > prefix.num_tokens:
        raise PacketError(Reason.RANGE, "more blocks than the prefix fills")
    if not token_ids.startswith(prefix.token_ids[: len(manifest.block_ids) * block_size * 4]):
        raise PacketError(Reason.PREFIX, "the packet's tokens are not the request's")
