"""What ``nearkv doctor upgrade`` finds out about two engines, and its verdicts (pure)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from nearkv.agent.event_sources import EventSource


class Severity(StrEnum):
    """What a difference means for nearkv, worst first."""

    BREAKS = "breaks"
    """Something stops working, or goes wrong while both engines serve side by side."""
    DEGRADES = "degrades"
    """It works with less: a value is unknown, or a slower way is taken."""
    UNKNOWN = "unknown"
    """It could not be compared."""
    DIFFERS = "differs"
    """nearkv sees the difference, and nothing depends on it."""
    SAME = "same"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row: what was compared, how it is at both, what nearkv makes of it, what to do."""

    check: str
    severity: Severity
    old: str = ""
    new: str = ""
    effect: str = ""
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer: ``status`` is ``None`` where none came, and ``error`` says why."""

    status: int | None
    body: bytes = b""
    error: str = ""

    @property
    def is_ok(self) -> bool:
        """Tell whether it is an answer to what was asked."""
        return self.status == 200  # noqa: PLR2004 (HTTP OK)


@dataclass(frozen=True, slots=True)
class Card:
    """A model that an engine serves; ``parent`` is set for adapters."""

    id: str
    parent: str | None = None
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class EventMessage:
    """One message of an engine's event socket; ``seq`` is ``None`` where it had no number."""

    topic: bytes
    seq: int | None
    payload: bytes


@dataclass(frozen=True, slots=True)
class Replay:
    """How a replay was answered: ``framing`` is ``topic`` or ``plain``."""

    messages: int
    framing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFacts:
    """What one prompt of two blocks or more led to.

    ``first`` and ``again`` answer the same prompt, ``handed_over`` the request of a prefill leg.
    ``trouble`` says why events could not be listened to. ``replay`` is ``None`` where none was
    answered.
    """

    token_ids: tuple[int, ...] | None
    first: Reply
    again: Reply
    handed_over: Reply
    messages: Sequence[EventMessage] = ()
    trouble: str = ""
    replay: Replay | None = None


Tokens = tuple[int, ...] | str
"""Token ids, or in words why there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What one engine is and says.

    ``sources`` are the event sockets by rank, ``None`` where the engine does not tell.
    ``endpoints`` holds the status of each path, ``None`` where no answer came; ``tokens`` and
    ``rendered`` what became of each sample. ``prompt`` is ``None`` where none was sent.
    """

    url: str
    version: str | None
    cards: tuple[Card, ...]
    model: str
    metrics: str
    sources: Mapping[int, EventSource] | None = None
    endpoints: Mapping[str, int | None] = field(default_factory=dict)
    tokens: Mapping[str, Tokens] = field(default_factory=dict)
    rendered: Mapping[str, Tokens] = field(default_factory=dict)
    prompt: PromptFacts | None = None


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """What an agent says in ``/v1/status``; ``error`` where it says nothing."""

    url: str
    document: Mapping[str, Any] | None = None
    error: str = ""


def same_or(
    check: str, *, old: str, new: str, severity: Severity, effect: str = "", advice: str = ""
) -> Finding:
    """Return a finding of two texts: ``severity`` where they differ."""
    if old == new:
        return Finding(check=check, severity=Severity.SAME, old=old, new=new)
    return Finding(check=check, severity=severity, old=old, new=new, effect=effect, advice=advice)


def unknown(check: str, why: str, *, old: str = "", new: str = "", advice: str = "") -> Finding:
    """Return a finding of what could not be compared."""
    return Finding(
        check=check, severity=Severity.UNKNOWN, old=old, new=new, effect=why, advice=advice
    )


def count_words(number: int, word: str) -> str:
    """Return a count with its word, such as ``1 token`` or ``2 tokens``."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
