"""What separating prefill from decode would bring, from measured figures (pure).

::

    busy        = prefill time / engine time: the share of an engine's time that prompts take
    gain        = decode time of a request * busy     (no token comes while a prompt is computed)
    price       = set-up + prompt tokens * KV bytes per token / bandwidth      (on its first token)
    P : D       = busy / 0.7 : decoding share of engine time

Requests also wait for each other's prompts either way, so that counts on neither side. Prefill
engines are planned 70 % busy: first tokens queue there.
"""

from dataclasses import dataclass
from fractions import Fraction

from nearkv.break_even import Link, PullEstimate

PREFILL_TARGET_RATIO = 0.7
_CLEARLY = 1.1
_LARGEST_PART = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Means of what requests took; ``busy_ratio`` and ``decoding_ratio`` are of engine time."""

    prompt_tokens: float
    seconds_per_token: float
    decode_seconds: float
    busy_ratio: float
    decoding_ratio: float


@dataclass(frozen=True, slots=True)
class Separation:
    """What a request would gain and pay, in seconds, and from how many tokens a move pays."""

    gain_seconds: float
    price_seconds: float
    pull: PullEstimate
    break_even_tokens: int | None

    @property
    def pays(self) -> bool:
        """Tell whether the gain is clearly more than the price."""
        return self.gain_seconds > self.price_seconds * _CLEARLY


def separate(measured: Measured, link: Link, kv_bytes_per_token: float) -> Separation:
    """Return what separating would bring on average."""
    tokens = round(measured.prompt_tokens)
    kv_bytes = round(tokens * kv_bytes_per_token)
    pull = PullEstimate(
        tokens=tokens,
        kv_bytes=kv_bytes,
        recompute_seconds=tokens * measured.seconds_per_token,
        pull_seconds=link.setup_seconds + kv_bytes / link.bytes_per_second,
    )
    return Separation(
        gain_seconds=measured.decode_seconds * measured.busy_ratio,
        price_seconds=pull.pull_seconds,
        pull=pull,
        break_even_tokens=_break_even(measured.seconds_per_token, link, kv_bytes_per_token),
    )


def _break_even(seconds_per_token: float, link: Link, kv_bytes_per_token: float) -> int | None:
    """Return from how many tokens moving KV beats computing it, clearly; ``None``: never."""
    saved = seconds_per_token - _CLEARLY * kv_bytes_per_token / link.bytes_per_second
    return None if saved <= 0 else int(_CLEARLY * link.setup_seconds / saved) + 1


def advised_ratio(busy_ratio: float, decoding_ratio: float) -> tuple[int, int]:
    """Return P : D in small whole numbers, 1 : 8 and 8 : 1 at the ends."""
    prefill = busy_ratio / PREFILL_TARGET_RATIO
    if decoding_ratio <= 0:
        return _LARGEST_PART, 1
    ratio = prefill / decoding_ratio
    if ratio <= 1 / _LARGEST_PART:
        return 1, _LARGEST_PART
    if ratio >= _LARGEST_PART:
        return _LARGEST_PART, 1
    small = Fraction(ratio).limit_denominator(_LARGEST_PART)
    return small.numerator, small.denominator
