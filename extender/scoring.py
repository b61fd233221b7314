"""Scores from fetch times and headroom: integers from 0 to 10, or to 100 (pure).

The network term is the place of a node's fetch time between the candidates' longest and shortest,
in log time: what counts is how many times longer, not how many ms. Two guards keep small
differences from swinging placement: times far below ``indifferent_ms`` are all the same, and
where the longest is less than ``span_ratio`` times the shortest, the network's share of the score
shrinks in proportion and headroom takes its place. So where all times are equal topology has no
effect at all. See docs/adr/0010.
"""

import math
from dataclasses import dataclass

import numpy as np

from nearkv.extender.distance import Bools
from nearkv.extender.fetching import FetchTimes
from nearkv.extender.headroom import DeviceRoom
from nearkv.extender.model import Floats, Ints

_DIGITS = 9
"""Terms are rounded to so many digits, so that rounding errors never decide a tie."""
_LEAST_HIGHEST = 2
_MOST_HIGHEST = 100

NOBODY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreConfig:
    """How the terms are put together; ``highest`` is the best score.

    ``span_ratio`` is how many times longer the longest fetch must take than the shortest for the
    network term to span its whole range, and ``indifferent_ms`` the time that nobody notices.
    """

    network_weight: float = 0.7
    headroom_weight: float = 0.3
    highest: int = 10
    span_ratio: float = 4.0
    indifferent_ms: float = 2.0

    def __post_init__(self) -> None:
        weights = (self.network_weight, self.headroom_weight)
        if not all(0 <= weight < float("inf") for weight in weights):
            raise ValueError("network_weight and headroom_weight must be 0 or more")
        if not _LEAST_HIGHEST <= self.highest <= _MOST_HIGHEST:
            raise ValueError(f"highest must be {_LEAST_HIGHEST} to {_MOST_HIGHEST}")
        if not self.span_ratio > 1 or not self.indifferent_ms > 0:
            raise ValueError("span_ratio must be above 1 and indifferent_ms above 0")

    @property
    def network_share(self) -> float:
        """The share of the network in the score, where fetch times differ enough."""
        total = self.network_weight + self.headroom_weight
        return self.network_weight / total if total else 0.0

    @property
    def edge(self) -> int:
        """By how much one node is put ahead when a burst is dealt out: a tenth of the range."""
        return max(1, self.highest // 10)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Deal:
    """How ties are broken in a burst: by fewest pods expected, then by a seed of the pod.

    ``crowd`` is the number of pods that are expected, by row of the snapshot with one entry more.
    """

    seed: int
    crowd: Floats


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Scores:
    """The score of each candidate, in their order, and the terms (0 to 1) it was made of.

    ``network_share`` is what the network counts for, the rest is headroom's. ``combined`` is the
    score before rounding, 0 to 1; ``flat`` tells that all were equal.
    ``dealt_to`` is the row of the node that was put ahead in a burst, ``NOBODY`` where none was.
    """

    values: Ints
    flat: bool
    network: Floats
    network_share: float
    headroom: Floats
    combined: Floats
    dealt_to: int = NOBODY


def score(
    fetch: FetchTimes,
    room: DeviceRoom,
    rows: Ints,
    config: ScoreConfig,
    *,
    single: bool = False,
    deal: Deal | None = None,
) -> Scores:
    """Score the candidates.

    ``single`` tells that all candidates are one node, which gets the highest score. ``deal`` is
    given in a burst: the best node is then put ahead of the others by ``config.edge``.
    """
    network, share = _network_term(fetch.milliseconds[rows], config)
    headroom = np.round(room.ratio, _DIGITS)
    rest = headroom if config.headroom_weight else 0.5
    combined = np.round(share * network + (1.0 - share) * rest, _DIGITS)
    flat = not len(combined) or bool(combined.min() == combined.max())
    if single:
        values = np.full(len(rows), config.highest, np.int32)
    elif flat:
        values = np.full(len(rows), config.highest // 2, np.int32)
    else:
        values = np.rint(combined * config.highest).astype(np.int32)
    dealt_to = NOBODY
    if deal is not None and not single and len(rows):
        dealt_to = _deal(values, combined, rows, deal, config)
    return Scores(
        values=np.clip(values, 0, config.highest),
        flat=flat,
        network=network,
        network_share=share,
        headroom=headroom,
        combined=combined,
        dealt_to=dealt_to,
    )


def _network_term(milliseconds: Floats, config: ScoreConfig) -> tuple[Floats, float]:
    """Return the network term, 0 to 1, and its share of the score."""
    if not len(milliseconds):
        return np.zeros(0), 0.0
    length = np.round(np.log(milliseconds + config.indifferent_ms), _DIGITS)
    shortest, longest = float(length.min()), float(length.max())
    if shortest == longest:
        return np.full(len(milliseconds), 0.5), 0.0
    term: Floats = np.round((longest - length) / (longest - shortest), _DIGITS)
    reach = min((longest - shortest) / math.log(config.span_ratio), 1.0)
    return term, config.network_share * reach


def _deal(values: Ints, combined: Floats, rows: Ints, deal: Deal, config: ScoreConfig) -> int:
    """Put one of the best nodes ahead of all others; return its row.

    While pods are on their way that are not seen on a node yet, nodes that tie would all be
    picked from at random, and some would get several. The others are lowered where the best is
    at the top already; their order among each other stays.
    """
    tied = np.flatnonzero(combined == combined.max())
    crowd = np.round(deal.crowd[rows[tied]], _DIGITS)
    tied = tied[crowd == crowd.min()]
    keys = _mixed(rows[tied], deal.seed)
    chosen = int(rows[tied[keys.argmin()]])
    ahead = rows == chosen
    behind = ~ahead
    if not behind.any():
        return NOBODY
    best = min(int(values[behind].max()) + config.edge, config.highest)
    best = max(best, int(values[ahead].max()))
    values[ahead] = best
    values[behind] = np.minimum(values[behind], best - config.edge)
    return chosen


def _mixed(rows: Ints, seed: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """Spread rows over 64 bits (the finaliser of splitmix64): equal rows stay equal."""
    mixed = rows.astype(np.uint64) ^ np.uint64(seed)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def best_of(values: Ints) -> Bools:
    """Mark the candidates with the best score, among which the scheduler picks at random."""
    best: Bools = values == values.max(initial=0)
    return best
