"""When moving KV cache beats computing it again (pure).

::

    recompute(n | c cached) = (2 P n + 4 L d (n c + n^2 / 2)) / effective FLOP/s
    pull(n)                 = set-up + n * KV bytes per token / bandwidth
    break-even bandwidth    = KV bytes / recompute time

P parameters, L layers, d hidden size. Effective FLOP/s is what prefill really reaches; about
half of the data sheet's dense figure on current GPUs. Measured values replace all of these
where there are any; this is the prior, and what ``nearkv plan`` prints.
"""

from dataclasses import dataclass

from nearkv.kv_size import ModelShape

GPU_EFFECTIVE_FLOPS = {
    "a10": 62e12,
    "l4": 60e12,
    "l40s": 181e12,
    "a100": 156e12,
    "h100": 495e12,
    "h200": 495e12,
    "b200": 1125e12,
}
"""Half of the dense 16-bit peak, in FLOP/s for one GPU."""

LINK_BYTES_PER_SECOND = {
    "nvlink": 150e9,
    "400g-rdma": 49.5e9,
    "100g-rdma": 12.2e9,
    "tcp-host": 4e9,
    "tcp-gpu": 0.55e9,
}
"""What transfers were seen to reach over a link, in bytes per second."""


@dataclass(frozen=True, slots=True)
class Link:
    """A path between two engines: name, set-up time, bandwidth."""

    name: str
    bytes_per_second: float
    setup_seconds: float = 0.001


@dataclass(frozen=True, slots=True)
class PullEstimate:
    """What it takes to bring ``tokens`` of KV cache to an engine, either way."""

    tokens: int
    kv_bytes: int
    recompute_seconds: float
    pull_seconds: float

    @property
    def pays(self) -> bool:
        """Tell whether the pull is clearly faster: by a tenth, so that noise does not decide."""
        return self.pull_seconds * 1.1 < self.recompute_seconds

    @property
    def break_even_bytes_per_second(self) -> float:
        """The bandwidth at which both take equally long, set-up left out."""
        return self.kv_bytes / self.recompute_seconds


def recompute_seconds(
    shape: ModelShape, tokens: int, *, effective_flops: float, cached_tokens: int = 0
) -> float:
    """Return the time to prefill ``tokens`` behind ``cached_tokens``.

    Raises ``ValueError`` when the model's number of parameters is unknown.
    """
    if shape.parameters is None:
        raise ValueError("the number of parameters is unknown")
    dense = 2.0 * shape.parameters * tokens
    attention = 4.0 * shape.layers * shape.hidden_size * (tokens * cached_tokens + tokens**2 / 2)
    return (dense + attention) / effective_flops


def estimate_pull(
    shape: ModelShape, tokens: int, link: Link, *, effective_flops: float
) -> PullEstimate:
    """Compare pulling ``tokens`` over a link with computing them."""
    kv_bytes = tokens * shape.kv_bytes_per_token
    return PullEstimate(
        tokens=tokens,
        kv_bytes=kv_bytes,
        recompute_seconds=recompute_seconds(shape, tokens, effective_flops=effective_flops),
        pull_seconds=link.setup_seconds + kv_bytes / link.bytes_per_second,
    )


def break_even_tokens(shape: ModelShape, link: Link, *, effective_flops: float) -> int | None:
    """Return the least number of tokens from which a pull pays; ``None`` when it never does."""
    low, high = 1, 1
    most = 1 << 24
    while not estimate_pull(shape, high, link, effective_flops=effective_flops).pays:
        low, high = high + 1, high * 2
        if high > most:
            return None
    while low < high:
        middle = (low + high) // 2
        if estimate_pull(shape, middle, link, effective_flops=effective_flops).pays:
            high = middle
        else:
            low = middle + 1
    return high
