"""What serving a request takes on one engine, in milliseconds (pure; DESIGN section 4).

::

    wait        for what was sent there before
    recompute   fixed part of a request + tokens not cached * ms per token
    load        cached tokens that lie on a slower tier than the device
    disturb     what the computing costs others: recompute * stall weight * requests decoding
                there, and its crowding price

The first three are the request's own time to its first token; their sum and ``disturb`` is
what engines are compared by. The crowding price is of what tokens computed anew do to later
requests: each pushes a cached block out, and delays those behind it. It grows ever more slowly
towards a limit, so that the longest prompts, whose users wait longest, look to their own time.
"""

import math
from dataclasses import dataclass

import msgspec

from nearkv.ingress.routing import Candidate, trusted_tokens


class EngineTerms(msgspec.Struct, frozen=True, gc=False):
    """What is known of one engine now: its queue, its speed, its running requests.

    ``host_ms_per_token`` and ``disk_ms_per_token`` are what bringing a cached token back to
    the device takes from either tier.
    """

    wait_ms: float = 0.0
    fixed_ms: float = 0.0
    ms_per_token: float = 0.05
    decoding: int = 0
    host_ms_per_token: float = 0.0
    disk_ms_per_token: float = 0.0


@dataclass(frozen=True, slots=True)
class Weights:
    """What the trouble for others counts, beside a request's own time.

    ``crowding`` is its price for a short computing, as a share of that; ``crowding_most_ms`` for
    an endless one.
    """

    decode_stall: float = 0.02
    crowding: float = 1.0
    crowding_most_ms: float = math.inf

    def for_priority(self, priority: int) -> "Weights":
        """Return the weights for a request: urgent ones look to themselves, others twice."""
        if priority == 0:
            return self
        factor = 0.0 if priority > 0 else 2.0
        return Weights(self.decode_stall * factor, self.crowding * factor, self.crowding_most_ms)

    def crowding_ms(self, recompute_ms: float) -> float:
        """Return the crowding price of computing for so long."""
        price = self.crowding * recompute_ms
        return price / (1.0 + price / self.crowding_most_ms)


class Quote(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The terms of one engine for one request, in milliseconds.

    ``cost_ms``, their sum, is what engines are compared by; ``held_tokens`` is what of the
    prompt was taken to be cached.
    """

    engine: str
    held_tokens: int = 0
    wait_ms: float = 0.0
    recompute_ms: float = 0.0
    load_ms: float = 0.0
    disturb_ms: float = 0.0
    cost_ms: float = 0.0

    @property
    def first_token_ms(self) -> float:
        """The predicted time to the first token."""
        return self.wait_ms + self.recompute_ms + self.load_ms


def quote(candidate: Candidate, terms: EngineTerms, tokens: int, weights: Weights) -> Quote:
    """Return what a prompt of so many tokens takes on one engine."""
    cached = trusted_tokens(candidate)
    cached = min(cached, tokens)
    recompute_ms = terms.fixed_ms + (tokens - cached) * terms.ms_per_token
    load_ms = 0.0
    if candidate.host_tokens or candidate.disk_tokens:
        load_ms = _load_ms(candidate, cached, terms)
    disturb_ms = recompute_ms * weights.decode_stall * terms.decoding
    disturb_ms += weights.crowding_ms(recompute_ms)
    wait_ms = terms.wait_ms
    cost_ms = wait_ms + recompute_ms + load_ms + disturb_ms
    return Quote(candidate.engine, cached, wait_ms, recompute_ms, load_ms, disturb_ms, cost_ms)


def _load_ms(candidate: Candidate, cached: int, terms: EngineTerms) -> float:
    """Return the time to bring slower tiers' tokens to the device.

    The device's part of a prefix comes first, then the host's. No tier costs more than
    computing, which an engine could do instead, nor less than a nearer one.
    """
    on_device = candidate.cached_tokens - candidate.host_tokens - candidate.disk_tokens
    from_host = min(candidate.host_tokens, max(0, cached - on_device))
    from_disk = max(0, cached - on_device - from_host)
    host_ms = min(terms.host_ms_per_token, terms.ms_per_token)
    disk_ms = min(max(terms.disk_ms_per_token, host_ms), terms.ms_per_token)
    return from_host * host_ms + from_disk * disk_ms
