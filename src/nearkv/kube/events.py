"""Reading what LIST and WATCH answer: pages, lines, events (pure).

Objects stay raw here; only versions are read. https://kubernetes.io/docs/reference/using-api/api-concepts/
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import msgspec

from nearkv.kube.errors import ApiError, Trouble
from nearkv.kube.failing import ApiStatus

ChangeKind = Literal["ADDED", "MODIFIED", "DELETED"]
_KINDS: Mapping[str, ChangeKind] = MappingProxyType(
    {"ADDED": "ADDED", "MODIFIED": "MODIFIED", "DELETED": "DELETED"}
)


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str | None = msgspec.field(default=None, name="continue")


class _List(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None


class _ObjectVersion(msgspec.Struct, rename="camel"):
    resource_version: str


class _Versioned(msgspec.Struct):
    metadata: _ObjectVersion


class _ObjectName(msgspec.Struct):
    name: str
    namespace: str = ""


class _Named(msgspec.Struct):
    metadata: _ObjectName


class _Event(msgspec.Struct):
    # Text, not a choice: a type that is not known must not look like garbage.
    type: str
    object: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a list; ``more`` is the token of the next one, empty for the last."""

    version: str
    more: str
    items: list[msgspec.Raw]


@dataclass(frozen=True, slots=True)
class Change:
    """An event about an object."""

    kind: ChangeKind
    version: str
    raw: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Bookmark:
    """An event that only tells how far the watch has got."""

    version: str


class EventReader:
    """Decodes pages and lines; one for each watch, since decoders are not free to make."""

    def __init__(self) -> None:
        self._lists = msgspec.json.Decoder(_List)
        self._events = msgspec.json.Decoder(_Event)
        self._objects = msgspec.json.Decoder(_Versioned)
        self._statuses = msgspec.json.Decoder(ApiStatus)

    def page(self, body: bytes) -> Page:
        """Return a page; raises :class:`ApiError` for whatever else was answered.

        A list without a version is refused: a watch without one makes the server send everything.
        """
        try:
            answer = self._lists.decode(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ApiError(Trouble.GARBAGE, f"the answer is no list: {error}") from error
        version = answer.metadata.resource_version
        if version in {"", "0"}:
            raise ApiError(Trouble.GARBAGE, "the list has no resource version")
        return Page(version, answer.metadata.continue_ or "", answer.items or [])

    def event(self, line: bytes) -> Change | Bookmark | None:
        """Return an event, ``None`` for one of a type that is not known.

        Raises :class:`ApiError` for a line that is no event, and for the error an event tells.
        """
        try:
            event = self._events.decode(line)
            if event.type == "ERROR":
                raise self._statuses.decode(event.object).as_error()
            version = self._objects.decode(event.object).metadata.resource_version
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ApiError(Trouble.GARBAGE, f"a line is no event: {error}") from error
        if event.type == "BOOKMARK":
            return Bookmark(version)
        kind = _KINDS.get(event.type)
        return None if kind is None else Change(kind, version, event.object)


def name_of(raw: bytes) -> str:
    """Return the name of an object that may be broken, as ``namespace/name``; empty without."""
    try:
        metadata = msgspec.json.decode(raw, type=_Named).metadata
    except (msgspec.MsgspecError, RecursionError):
        return ""
    return f"{metadata.namespace}/{metadata.name}".lstrip("/")


class LineSplitter:
    """Cuts a stream into lines of at most ``limit_bytes``."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._begun = bytearray()

    @property
    def is_within_line(self) -> bool:
        """Whether a line has begun that has not ended."""
        return bool(self._begun)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that ``data`` completes, without empty ones.

        Raises :class:`ApiError` when a line is over the limit.
        """
        *complete, rest = data.split(b"\n")
        for part in complete:
            if len(self._begun) + len(part) > self._limit_bytes:
                raise self._too_long()
            line = bytes(self._begun) + part if self._begun else part
            self._begun.clear()
            if line.strip():
                yield line
        if len(self._begun) + len(rest) > self._limit_bytes:
            raise self._too_long()
        self._begun += rest

    def _too_long(self) -> ApiError:
        return ApiError(Trouble.TOO_LARGE, f"a line is over {self._limit_bytes} bytes")
