"""How an engine writes its KV events, read off the messages that one prompt led to (pure).

Other clients' prompts lead to events as well, so those of our own are found by their tokens and
followed by their hashes. What nearkv itself can read of them is asked of the agent's decoder.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from nearkv.agent.errors import EventDecodeError
from nearkv.agent.kv_events import BlockStored, Handle, decode_batch
from nearkv.cli.doctor_upgrade_model import EventMessage

_STORED = "BlockStored"
ARRAY_FIELDS = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
)
"""What the positions of an array mean, as far as nearkv reads them (docs/engines.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventTraits:
    """What is seen in the events; texts are for people.

    ``handles`` are the engine's hashes of the prompt's blocks, in order; ``stored_tokens`` how
    many of its tokens they cover. ``unread`` counts what nearkv passes over, by reason.
    """

    encoding: str
    hash_form: str
    fields: frozenset[str]
    media: frozenset[str]
    groups: frozenset[str]
    topic: str
    block_size: int | None
    handles: tuple[Handle, ...]
    stored_tokens: int
    stored_events: int
    unread: dict[str, int]


def holds_prompt(messages: Sequence[EventMessage], tokens: Sequence[int] | None) -> bool:
    """Tell whether all full blocks of the prompt are stored; without its tokens, whether any is."""
    stored = list(_stored(messages))
    if tokens is None or not stored:
        return bool(stored)
    size = next((event.block_size for event in stored if event.token_ids), 0)
    return size > 0 and _follow(messages, tokens).tokens >= len(tokens) // size * size


def read_traits(messages: Sequence[EventMessage], tokens: Sequence[int] | None) -> EventTraits:
    """Return what the messages show of the engine's way to write events."""
    raw = [event for message in messages for event in _raw_events(message.payload)]
    stored = [event for event in raw if _tag(event) == _STORED]
    own = _follow(messages, tokens or ())
    everything = list(_stored(messages))
    return EventTraits(
        encoding=_join({"map" if isinstance(event, dict) else "array" for event in raw}),
        hash_form=_join({_form(handle) for each in everything for handle in each.handles}),
        fields=frozenset(name for event in stored for name in _field_names(event)),
        media=frozenset(each.medium for each in everything),
        groups=frozenset(str(each.group) for each in everything),
        topic=_join({message.topic.decode("utf-8", "replace") for message in messages}),
        block_size=next((each.block_size for each in everything if each.token_ids), None),
        handles=own.handles,
        stored_tokens=own.tokens,
        stored_events=len(stored),
        unread=_count_unread(messages),
    )


@dataclass(frozen=True, slots=True)
class _Chain:
    handles: tuple[Handle, ...] = ()
    tokens: int = 0


def _follow(messages: Sequence[EventMessage], tokens: Sequence[int]) -> _Chain:
    """Return the hashes of the blocks that hold these tokens from the first one on."""
    handles: list[Handle] = []
    covered = 0
    for event in _stored(messages):
        follows = event.parent is None if not handles else event.parent == handles[-1]
        end = covered + len(event.token_ids)
        if event.token_ids and follows and list(tokens[covered:end]) == event.token_ids:
            handles += event.handles
            covered = end
    return _Chain(tuple(handles), covered)


def _stored(messages: Sequence[EventMessage]) -> Iterator[BlockStored]:
    for message in messages:
        try:
            events = decode_batch(message.payload).events
        except EventDecodeError:
            continue
        yield from (event for event in events if isinstance(event, BlockStored))


def _count_unread(messages: Sequence[EventMessage]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for message in messages:
        try:
            skipped = decode_batch(message.payload).skipped
        except EventDecodeError:
            skipped = {"undecodable": 1}
        if message.seq is None:
            skipped = {**skipped, "no sequence number": 1}
        for reason, count in skipped.items():
            counts[reason] = counts.get(reason, 0) + count
    return counts


def _raw_events(payload: bytes) -> list[Any]:
    try:
        batch = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return []
    match batch:
        case [_, list() as events, *_]:
            return events
        case _:
            return []


def _tag(event: Any) -> Any:  # noqa: ANN401 (foreign data)
    if isinstance(event, dict):
        return event.get("type")
    return event[0] if isinstance(event, list) and event else None


def _field_names(event: Any) -> Iterator[str]:  # noqa: ANN401 (foreign data)
    """Yield a map's keys, or the names of an array's positions."""
    if isinstance(event, dict):
        yield from (str(name) for name in event if name != "type")
    else:
        yield from ARRAY_FIELDS[: len(event) - 1]


def _form(handle: Handle) -> str:
    return "integers" if isinstance(handle, int) else f"{len(handle)} bytes"


def _join(words: set[str]) -> str:
    return ", ".join(sorted(words))
