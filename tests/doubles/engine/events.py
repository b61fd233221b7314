"""KV cache events and their two wire encodings; pure.

vLLM up to 0.23 packs an event as an array ``[tag, field...]``, later versions as a map with the
key ``type``. The batch around them is always the array ``[timestamp, events, dp_rank]``.
A map leaves out fields at their default, as vLLM does, except those it always declares.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

_ENCODER = msgspec.msgpack.Encoder()
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks became readable in one tier; empty ``token_ids`` adds a tier only."""

    hashes: tuple[int, ...]
    parent: int | None
    token_ids: list[int]
    block_size: int
    medium: str = "GPU"
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = 0
    kind: str | None = "full_attention"


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """One block left one tier."""

    hashes: tuple[int, ...]
    medium: str = "GPU"
    group_idx: int | None = 0


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Every block of every tier is gone."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventEncoding:
    """How events are packed: map or array, block hashes as integers or as 32 raw bytes."""

    form: Literal["map", "array"] = "map"
    hash_form: Literal["int", "bytes"] = "int"

    def encode_batch(self, events: Sequence[Event], *, timestamp: float, rank: int) -> bytes:
        """Return the msgpack payload of one batch; ``timestamp`` in seconds since the epoch."""
        return _ENCODER.encode([timestamp, [self._encode(event) for event in events], rank])

    def _encode(self, event: Event) -> dict[str, Any] | list[Any]:
        match event:
            case BlockStored():
                fields = self._stored(event)
            case BlockRemoved():
                fields = self._removed(event)
            case AllBlocksCleared():
                fields = {}
        tag = type(event).__name__
        if self.form == "array":
            return [tag, *fields.values()]
        optional = ("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
        kept = {k: v for k, v in fields.items() if v is not None or k not in optional}
        return {"type": tag, **kept}

    def _stored(self, event: BlockStored) -> dict[str, Any]:
        return {
            "block_hashes": [self._hash(value) for value in event.hashes],
            "parent_block_hash": None if event.parent is None else self._hash(event.parent),
            "token_ids": event.token_ids,
            "block_size": event.block_size,
            "lora_id": event.lora_id,
            "medium": event.medium,
            "lora_name": event.lora_name,
            "extra_keys": event.extra_keys,
            "group_idx": event.group_idx,
            "kv_cache_spec_kind": event.kind,
            "kv_cache_spec_sliding_window": None,
        }

    def _removed(self, event: BlockRemoved) -> dict[str, Any]:
        return {
            "block_hashes": [self._hash(value) for value in event.hashes],
            "medium": event.medium,
            "group_idx": event.group_idx,
        }

    def _hash(self, value: int) -> int | bytes:
        if self.hash_form == "int":
            return value
        # The integer form is the low 64 bits of the digest, so it ends the raw form.
        return (~value & _MASK).to_bytes(8, "big") * 3 + value.to_bytes(8, "big")
