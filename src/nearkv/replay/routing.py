"""What a replay asks of a router (pure)."""

from dataclasses import dataclass
from typing import Protocol

from nearkv.replay.traces import Arrival
from nearkv.state.model import Frame


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes; with ``source``, that engine computes the prompt first.

    ``transfer_seconds`` is what moving the KV then takes.
    """

    engine: str
    source: str | None = None
    transfer_seconds: float = 0.0


class Router(Protocol):
    """A policy with what it knows; every call is about the present time of its clock.

    Of the requests without room so many wait, so long; the others are turned away.
    """

    max_waiting: int
    wait_seconds: float

    def hear(self, frame: Frame) -> None:
        """Take one frame of the agents' state."""

    def route(self, number: int, arrival: Arrival) -> Route | None:
        """Choose for a request, and count it as sent; ``None``: there is no room now."""

    def prefilled(self, number: int) -> None:
        """Note that the source of a split request is done."""

    def first_token(self, number: int) -> None:
        """Note the first byte of an answer."""

    def ended(self, number: int, cached_tokens: int) -> None:
        """Note the end of an answer, and what the engine says it had cached."""


class Clock:
    """The simulation's time in seconds, for whoever asks for a clock."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        """Return the present time."""
        return self.seconds
