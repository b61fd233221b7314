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


class PromptWatch:
    """Follows the blocks of one prompt through messages; a busy engine's are of many prompts.

    ``tokens`` is ``None`` where nobody knows them: then any stored block will do.
    """

    def __init__(self, tokens: Sequence[int] | None) -> None:
        self._wanted = tokens
        self._tokens = list(tokens or ())
        self.handles: list[Handle] = []
        self.covered_tokens = 0
        self.is_complete = False

    def add(self, message: EventMessage) -> bool:
        """Take the next message; return whether all full blocks of the prompt are stored."""
        for event in _stored(message):
            if self._wanted is None:
                self.is_complete = True
            elif event.token_ids:
                self._follow(event)
        return self.is_complete

    def _follow(self, event: BlockStored) -> None:
        follows = event.parent is None if not self.handles else event.parent == self.handles[-1]
        end = self.covered_tokens + len(event.token_ids)
        if follows and self._tokens[self.covered_tokens : end] == event.token_ids:
            self.handles += event.handles
            self.covered_tokens = end
            self.is_complete = end >= len(self._tokens) // event.block_size * event.block_size


def watch_all(messages: Sequence[EventMessage], tokens: Sequence[int] | None) -> PromptWatch:
    """Return a watch that has seen these messages."""
    watch = PromptWatch(tokens)
    for message in messages:
        watch.add(message)
    return watch


def read_traits(messages: Sequence[EventMessage], tokens: Sequence[int] | None) -> EventTraits:
    """Return what the messages show of the engine's way to write events."""
    raw = [event for message in messages for event in _raw_events(message.payload)]
    stored = [event for event in raw if _tag(event) == _STORED]
    own = watch_all(messages, tokens or ())
    everything = [event for message in messages for event in _stored(message)]
    return EventTraits(
        encoding=_join({"map" if isinstance(event, dict) else "array" for event in raw}),
        hash_form=_join({_form(handle) for each in everything for handle in each.handles}),
        fields=frozenset(name for event in stored for name in _field_names(event)),
        media=frozenset(each.medium for each in everything),
        groups=frozenset(str(each.group) for each in everything),
        topic=_join({message.topic.decode("utf-8", "replace") for message in messages}),
        block_size=next((each.block_size for each in everything if each.token_ids), None),
        handles=tuple(own.handles),
        stored_tokens=own.covered_tokens,
        stored_events=len(stored),
        unread=_count_unread(messages),
    )


def _stored(message: EventMessage) -> list[BlockStored]:
    try:
        events = decode_batch(message.payload).events
    except EventDecodeError:
        return []
    return [event for event in events if isinstance(event, BlockStored)]


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
