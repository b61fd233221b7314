"""A simulated engine: chunked prefill, batched decode, a block cache and a queue (pure).

::

    step    = base + per request * decoding + per token * KV tokens of those decoding
              + prefill tokens of the step / prefill rate
    each step computes up to one chunk of the prompt at the head of the queue, and gives every
    decoding request one token

Between two events nothing of this changes, so time passes in one go instead of step by step:
an hour of traffic is some thousands of events. Prompts are computed one after another, first
come first served; one waits for its KV blocks at the head of the queue. Room for the answer is
taken with the prompt's, so nothing is preempted.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from nearkv.replay.block_store import BlockStore, Claim

_NEVER = math.inf
_SOON = 1e-5
"""So little of a token left is what rounding of times leaves: it counts as done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """What an engine can do; see ``presets`` for values of real ones."""

    blocks: int
    block_tokens: int
    prefill_tokens_per_second: float
    chunk_tokens: int = 8192
    step_seconds: float = 0.012
    step_seconds_per_request: float = 0.00005
    step_seconds_per_kv_token: float = 1e-8
    overhead_seconds: float = 0.0
    max_running: int = 256
    kv_bytes_per_token: int = 131_072


@dataclass(slots=True)
class Work:
    """One request at one engine.

    ``pulled_tokens`` of the prompt come from elsewhere and need not be computed;
    ``prefill_only`` ends with the first token and keeps its blocks until it is let go.
    """

    number: int
    keys: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    prefill_only: bool = False
    pulled_tokens: int = 0
    claim: Claim | None = None
    cached_tokens: int = 0
    computed_tokens: int = 0


@dataclass(slots=True)
class FirstToken:
    """A prompt is computed: blocks ``stored`` since, after others were ``removed`` for them."""

    work: Work
    stored: list[int]
    removed: list[int]


@dataclass(slots=True)
class Ended:
    """A request is done; ``fits`` is false where it can never be served here."""

    work: Work
    fits: bool = True


Change = FirstToken | Ended


@dataclass(slots=True)
class _Speed:
    """What the engine's own histograms would tell: a fading mean of seconds per token."""

    seconds: float = 0.0
    tokens: float = 0.0
    keep: float = field(default=0.98)

    def observe(self, seconds: float, tokens: float) -> None:
        self.seconds = self.seconds * self.keep + seconds
        self.tokens = self.tokens * self.keep + tokens


class SimulatedEngine:
    """One engine; call :meth:`advance` at every time that :meth:`next_at` names."""

    def __init__(self, name: str, profile: EngineProfile) -> None:
        self.name = name
        self.profile = profile
        self.store = BlockStore(profile.blocks)
        self._waiting: deque[Work] = deque()
        self._prefill: Work | None = None
        self._left_tokens = 0.0
        self._began_at = 0.0
        self._decoding: list[tuple[float, int, Work]] = []
        self._numbers = count()
        self._tokens_each = 0.0
        self._kv_tokens = 0
        self._at = 0.0
        self._speed = _Speed()

    # -- What an agent would read ------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests that decode or whose prompt is being computed."""
        return len(self._decoding) + (self._prefill is not None)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def seconds_per_token(self) -> float | None:
        """Prefill of one token, as its histograms tell; ``None`` before the first."""
        return self._speed.seconds / self._speed.tokens if self._speed.tokens else None

    @property
    def used_ratio(self) -> float:
        """Share of the KV cache held by running requests."""
        return self.store.used_blocks / self.profile.blocks

    # -- Work --------------------------------------------------------------------------

    def submit(self, work: Work, now: float) -> list[Change]:
        """Queue a request at ``now``, up to which :meth:`advance` must have been called."""
        self._at = now
        self._waiting.append(work)
        return self._admit()

    def let_go(self, work: Work) -> list[Change]:
        """Give back the blocks that a prefill kept for another engine."""
        if work.claim is not None:
            self.store.release(work.claim)
        return self._admit()

    def next_at(self) -> float:
        """Return when something happens next, infinity for never."""
        return min(self._prefill_ends_at(), self._decode_ends_at())

    def advance(self, now: float) -> list[Change]:
        """Let time pass up to ``now``; returns what happened."""
        changes: list[Change] = []
        while True:
            due = self.next_at()
            self._pass_time(min(due, now))
            if due > now:
                return changes
            if self._prefill is not None and self._left_tokens <= _SOON:
                changes += self._end_prefill(self._prefill)
            if self._decoding and self._decoding[0][0] <= self._tokens_each + _SOON:
                changes += self._end_decode()

    def _step_seconds(self) -> float:
        """Return the time of a step's decoding part."""
        if not self._decoding:
            return 0.0
        profile = self.profile
        return (
            profile.step_seconds
            + profile.step_seconds_per_request * len(self._decoding)
            + profile.step_seconds_per_kv_token * self._kv_tokens
        )

    def _seconds_of_step(self) -> float:
        chunk = self.profile.chunk_tokens / self.profile.prefill_tokens_per_second
        return self._step_seconds() + (chunk if self._prefill is not None else 0.0)

    def _prefill_ends_at(self) -> float:
        if self._prefill is None:
            return _NEVER
        left = max(0.0, self._left_tokens)
        # The last chunk is as long as what is left, so decoding slows it by whole steps only.
        steps = left / self.profile.chunk_tokens
        return self._at + steps * self._seconds_of_step()

    def _decode_ends_at(self) -> float:
        if not self._decoding:
            return _NEVER
        left = max(0.0, self._decoding[0][0] - self._tokens_each)
        return self._at + left * self._seconds_of_step()

    def _pass_time(self, until: float) -> None:
        elapsed = until - self._at
        if elapsed > 0:
            steps = elapsed / self._seconds_of_step() if self.running else 0.0
            if self._decoding:
                self._tokens_each += steps
            if self._prefill is not None:
                self._left_tokens -= steps * self.profile.chunk_tokens
        self._at = max(self._at, until)

    def _admit(self) -> list[Change]:
        """Begin the prompt at the head of the queue, if there is room for it."""
        refused: list[Change] = []
        while self._prefill is None and self._waiting:
            work = self._waiting[0]
            profile = self.profile
            answer_tokens = 1 if work.prefill_only else work.output_tokens
            blocks = -(-(work.prompt_tokens + answer_tokens) // profile.block_tokens)
            if blocks > profile.blocks:
                self._waiting.popleft()
                refused.append(Ended(work, fits=False))
                continue
            if self.running >= profile.max_running:
                break
            reusable = max(0, work.prompt_tokens - 1) // profile.block_tokens
            claim = self.store.claim(work.keys, most_reused=reusable, blocks=blocks)
            if claim is None:
                break
            self._waiting.popleft()
            self._begin(work, claim)
        return refused

    def _begin(self, work: Work, claim: Claim) -> None:
        profile = self.profile
        work.claim = claim
        work.cached_tokens = claim.depth * profile.block_tokens
        known = max(work.cached_tokens, min(work.pulled_tokens, work.prompt_tokens - 1))
        work.computed_tokens = max(1, work.prompt_tokens - known)
        overhead_tokens = profile.overhead_seconds * profile.prefill_tokens_per_second
        self._prefill = work
        self._left_tokens = work.computed_tokens + overhead_tokens
        self._began_at = self._at

    def _end_prefill(self, work: Work) -> list[Change]:
        self._prefill = None
        self._left_tokens = 0.0
        self._speed.observe(self._at - self._began_at, work.computed_tokens)
        assert work.claim is not None  # noqa: S101 (for the type checker; _begin set it)
        removed = self.store.take_removed()
        changes: list[Change] = [FirstToken(work, self.store.name(work.claim), removed)]
        if work.prefill_only:
            changes.append(Ended(work))
        elif work.output_tokens <= 1:
            changes.append(self._end(work))
        else:
            self._kv_tokens += work.prompt_tokens
            ends_at = self._tokens_each + work.output_tokens - 1
            heappush(self._decoding, (ends_at, next(self._numbers), work))
        return changes + self._admit()

    def _end_decode(self) -> list[Change]:
        _, _, work = heappop(self._decoding)
        self._kv_tokens -= work.prompt_tokens
        return [self._end(work), *self._admit()]

    def _end(self, work: Work) -> Change:
        if work.claim is not None:
            self.store.release(work.claim)
        return Ended(work)
