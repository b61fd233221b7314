"""Which part is hurt next, how and for how long (pure): the same seed gives the same plan."""

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

_PAUSE_SECONDS = (0.3, 1.5)
_TROUBLE_SECONDS = (0.5, 4.0)
_MOST_AT_ONCE = 3


class Harm(StrEnum):
    """What is done to a process."""

    KILL = "kill"
    STOP = "stop"
    SLOW = "slow"


@dataclass(frozen=True, slots=True)
class Victim:
    """A part that may be hurt.

    Those that are not ``mortal`` are not killed, so that their memory can be followed.
    """

    name: str
    is_engine: bool = False
    mortal: bool = True


@dataclass(frozen=True, slots=True)
class Trouble:
    """One fault: a killed part is started again after ``seconds``, others go on then."""

    victim: str
    harm: Harm
    seconds: float
    pause_seconds: float


class Plan:
    """Draws faults; half of the engines stay well at any time."""

    def __init__(self, victims: Sequence[Victim], seed: int) -> None:
        self._victims = victims
        self._random = random.Random(seed)
        self._most_engines = sum(victim.is_engine for victim in victims) // 2

    def next(self, in_trouble: Collection[str]) -> Trouble | None:
        """Return the next fault while these parts are in trouble; ``None``: not now."""
        able = list(self._able(in_trouble))
        if not able or len(in_trouble) >= _MOST_AT_ONCE:
            return None
        victim = self._random.choice(able)
        harm = self._random.choice([harm for harm in Harm if victim.mortal or harm != Harm.KILL])
        seconds = self._random.uniform(*_TROUBLE_SECONDS)
        return Trouble(victim.name, harm, seconds, self._random.uniform(*_PAUSE_SECONDS))

    def _able(self, in_trouble: Collection[str]) -> Iterator[Victim]:
        engines = sum(v.is_engine and v.name in in_trouble for v in self._victims)
        others = sum(not v.is_engine and v.name in in_trouble for v in self._victims)
        for victim in self._victims:
            if victim.name in in_trouble:
                continue
            # One replica and one agent at a time: a client needs somebody to ask.
            if engines < self._most_engines if victim.is_engine else not others:
                yield victim
