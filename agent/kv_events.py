"""Decoding of an engine's KV events (the ZMQ payload of vLLM and SGLang, docs/engines.md).

The payload is a msgpack array ``[timestamp, events, dp_rank]``. Each event is a positional
array ``[tag, fields...]`` up to vLLM 0.23 and a map with ``type`` from 0.24 on. Both are
read, unknown keys, extra positions and unknown tags are passed over, and what cannot be
used is counted by reason instead of being dropped in silence.

SGLang sends the same events with names of its own for the tiers, the cache salt as a field
and, with EAGLE, pairs of tokens. The events say so themselves: whoever is asked for an
engine's kind may be wrong, and a salted block taken for a plain one would be a false hit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeGuard, cast

import msgspec

from nearkv.agent.errors import EventDecodeError
from nearkv.state.model import TIER_DEVICE

Handle = int | bytes
"""An engine's own hash of a block: opaque, only good for finding parents and removals."""

REUSABLE_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""KV group kinds whose blocks alone prove a reusable prefix (reference/vllm.md 1.3)."""

_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
_MOST_MEDIUM_CHARACTERS = 64
_HANDLE_TYPES = frozenset({int, bytes})
_TIERS = MappingProxyType({"CPU_PINNED": "CPU", "DISK": "STORAGE"})
"""SGLang's names of tiers that vLLM has as well; its EXTERNAL, a shared pool, has no other."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that an engine now holds; ``token_ids`` empty means that a tier was gained."""

    handles: list[Handle]
    parent: Handle | None
    token_ids: list[int]
    block_size: int
    medium: str = TIER_DEVICE
    lora: str = ""
    extra_keys: list[Any] | None = None
    group: int = 0


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks that an engine no longer holds in one medium and group."""

    handles: list[Handle]
    medium: str = TIER_DEVICE
    group: int = 0


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The engine threw its whole prefix cache away."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The usable events of one message, in order, and why others were passed over."""

    events: list[Event]
    dp_rank: int | None
    skipped: dict[str, int] = field(default_factory=dict)


def decode_batch(payload: bytes) -> EventBatch:
    """Decode one message; raises :class:`EventDecodeError` when it is no event batch."""
    try:
        batch = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise EventDecodeError(f"payload is not msgpack: {error}") from error
    match batch:
        case [int() | float(), list() as raw_events, *rest]:
            dp_rank = rest[0] if rest and isinstance(rest[0], int) else None
        case _:
            raise EventDecodeError("payload is not [timestamp, events, dp_rank]")
    events: list[Event] = []
    skipped: dict[str, int] = {}
    for raw in raw_events:
        event = _decode_event(raw)
        if isinstance(event, str):
            skipped[event] = skipped.get(event, 0) + 1
        else:
            events.append(event)
    return EventBatch(events, dp_rank, skipped)


def _decode_event(raw: Any) -> Event | str:  # noqa: ANN401 (foreign data)
    """Return the event, or the reason why it cannot be used."""
    if isinstance(raw, dict):
        tag, fields = raw.get("type"), cast("Mapping[str, Any]", raw)
    elif isinstance(raw, list) and raw:
        tag, fields = raw[0], _name_fields(raw)
    else:
        return "malformed"
    if tag == "BlockStored":
        return _decode_stored(fields)
    if tag == "BlockRemoved":
        return _decode_removed(fields)
    if tag == "AllBlocksCleared":
        return AllBlocksCleared()
    return "unknown_tag"


def _name_fields(raw: list[Any]) -> Mapping[str, Any]:
    names = _REMOVED_FIELDS if raw[0] == "BlockRemoved" else _STORED_FIELDS
    return dict(zip(names, raw[1:], strict=False))


def _decode_stored(fields: Mapping[str, Any]) -> BlockStored | str:
    handles = fields.get("block_hashes")
    token_ids = fields.get("token_ids")
    block_size = fields.get("block_size")
    parent = fields.get("parent_block_hash")
    place = _decode_place(fields)
    if place is None or not _are_handles(handles) or not isinstance(token_ids, list):
        return "malformed"
    # True is an int, too, but none that consumers of the state take.
    if type(block_size) is not int or not isinstance(parent, int | bytes | None):
        return "malformed"
    # Offload tiers say 0 where they send no tokens (seen in 0.32).
    if token_ids and (block_size < 1 or len(token_ids) != len(handles) * block_size):
        return "token_count"
    if token_ids and isinstance(token_ids[0], list):
        token_ids = _first_of_each(token_ids)
    kind = fields.get("kv_cache_spec_kind")
    if kind is not None and not (isinstance(kind, str) and kind in REUSABLE_KINDS):
        return "not_reusable_kind"
    extra_keys = fields.get("extra_keys")
    if not isinstance(extra_keys, list) or not any(extra_keys):
        extra_keys = None
    lora = _lora_name(fields)
    salt = fields.get("cache_salt")
    if salt:
        if not isinstance(salt, str):
            return "malformed"
        extra_keys = extra_keys or _salt_as_extra(salt, lora, parent)
    return BlockStored(
        handles=handles,
        parent=parent,
        token_ids=token_ids,
        block_size=block_size,
        medium=place[0],
        lora=lora,
        extra_keys=extra_keys,
        group=place[1],
    )


def _decode_removed(fields: Mapping[str, Any]) -> BlockRemoved | str:
    handles = fields.get("block_hashes")
    place = _decode_place(fields)
    if place is None or not _are_handles(handles):
        return "malformed"
    return BlockRemoved(handles=handles, medium=place[0], group=place[1])


def _decode_place(fields: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return medium and KV group, or ``None`` where they are of no use."""
    medium = fields.get("medium") or TIER_DEVICE
    group = fields.get("group_idx") or 0
    if not isinstance(medium, str) or not isinstance(group, int):
        return None
    if len(medium) > _MOST_MEDIUM_CHARACTERS:
        return None
    return _TIERS.get(medium, medium), group


def _are_handles(value: Any) -> TypeGuard[list[Handle]]:  # noqa: ANN401 (foreign data)
    return isinstance(value, list) and _HANDLE_TYPES.issuperset(map(type, value))


def _salt_as_extra(salt: str, lora: str, parent: Handle | None) -> list[Any] | None:
    """Return a salt as vLLM has it: among the extra keys of the first block of a chain."""
    if parent is not None:
        return None
    return [[lora, salt] if lora else [salt]]


def _first_of_each(pairs: list[Any]) -> list[Any]:
    """Return the tokens of a block that EAGLE's cache gave as pairs (a token and its next one).

    The last block of a prefix is then found even where the token after it differs, which the
    engine would compute again: one block too much at most.
    """
    return [pair[0] if isinstance(pair, list) and pair else pair for pair in pairs]


def _lora_name(fields: Mapping[str, Any]) -> str:
    """Return the adapter's name; engines before ``lora_name`` gave only a number."""
    name = fields.get("lora_name")
    if name:
        return str(name)
    number = fields.get("lora_id")
    return "" if number is None else f"#{number}"
