"""What it costs to compute a prompt here, elsewhere, or to pull it (pure).

::

    here  = wait + T(missing here)
    pair  = max(wait at P + T(missing at P) + hop, wait at D)
            + set-up(P, D) + KV bytes of what D lacks / bandwidth(P, D)
    T(n)  = n * seconds per token * (1 + stall weight * requests decoding there) + crowding price

All in seconds of the request's own time. D's queue drains while P computes, so of the two
waits only the longer one counts. The stall weight prices what a prefill does to the answers
being decoded beside it (reference/transfer.md section 11 calls it alpha), the crowding price
what tokens computed anew do to later requests (policy ``cost``, see ``quoting``).
"""

from dataclasses import dataclass, field

from nearkv.ingress.quoting import Weights
from nearkv.path_cost import PathCost


@dataclass(frozen=True, slots=True)
class CostTerms:
    """What is the same for all engines.

    ``hop_seconds`` is what a second HTTP request adds. A pair must be cheaper by
    ``hysteresis_ratio``, so that noise does not decide.
    """

    hop_seconds: float = 0.002
    hysteresis_ratio: float = 0.1
    weights: Weights = field(default_factory=lambda: Weights(crowding=0.0))


@dataclass(frozen=True, slots=True)
class EngineCost:
    """What computing a prompt takes on one engine.

    ``decoding`` counts the requests that a prefill would disturb.
    """

    missing_tokens: int
    seconds_per_token: float
    wait_seconds: float = 0.0
    decoding: int = 0


def local_seconds(engine: EngineCost, terms: CostTerms) -> float:
    """Return the time until an engine has computed the prompt by itself."""
    computing = engine.missing_tokens * engine.seconds_per_token
    return engine.wait_seconds + computing + trouble_seconds(engine, terms)


def trouble_seconds(engine: EngineCost, terms: CostTerms) -> float:
    """Return what that counts for the trouble it is to others."""
    weights = terms.weights
    computing = engine.missing_tokens * engine.seconds_per_token
    disturbed = computing * weights.decode_stall * engine.decoding
    return disturbed + weights.crowding_ms(computing * 1000) / 1000


def pair_seconds(
    source: EngineCost,
    target: EngineCost,
    path: PathCost,
    *,
    kv_bytes_per_token: int,
    terms: CostTerms,
) -> float:
    """Return the time until ``target`` has what it lacks from ``source``."""
    computed = local_seconds(source, terms) + terms.hop_seconds
    ready = max(computed, target.wait_seconds)
    return ready + path.seconds(target.missing_tokens * kv_bytes_per_token)


def is_clearly_less(seconds: float, other_seconds: float, terms: CostTerms) -> bool:
    """Tell whether one cost is below another by more than noise."""
    return seconds * (1.0 + terms.hysteresis_ratio) < other_seconds
