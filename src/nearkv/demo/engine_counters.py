"""What the engines count themselves: prompt tokens computed and prompt tokens reused."""

from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from nearkv.demo.errors import ScenarioError

METRICS_TIMEOUT_SECONDS = 10.0
FAMILY = "vllm:prompt_tokens_by_source"
COMPUTED_SOURCE = "local_compute"
CACHED_SOURCE = "local_cache_hit"


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Prompt tokens by where their KV came from; ``transferred`` came from outside."""

    computed: int = 0
    cached: int = 0
    transferred: int = 0

    @property
    def total(self) -> int:
        """All prompt tokens."""
        return self.computed + self.cached + self.transferred

    def __add__(self, other: "PromptTokens") -> "PromptTokens":
        return PromptTokens(
            self.computed + other.computed,
            self.cached + other.cached,
            self.transferred + other.transferred,
        )

    def __sub__(self, other: "PromptTokens") -> "PromptTokens":
        return PromptTokens(
            self.computed - other.computed,
            self.cached - other.cached,
            self.transferred - other.transferred,
        )


def parse_prompt_tokens(metrics_text: str) -> PromptTokens:
    """Read the counters from an engine's ``/metrics``.

    Raises ``ScenarioError`` when the engine does not have them: missing is not zero.
    """
    tokens_by_source: dict[str, int] = {}
    for family in text_string_to_metric_families(metrics_text):
        if family.name == FAMILY:
            for sample in family.samples:
                if sample.name == f"{FAMILY}_total":
                    source = sample.labels["source"]
                    tokens_by_source[source] = tokens_by_source.get(source, 0) + int(sample.value)
    if COMPUTED_SOURCE not in tokens_by_source:
        raise ScenarioError(f"an engine's metrics lack {FAMILY}_total")
    computed = tokens_by_source.pop(COMPUTED_SOURCE)
    cached = tokens_by_source.pop(CACHED_SOURCE, 0)
    return PromptTokens(computed, cached, transferred=sum(tokens_by_source.values()))


async def read_prompt_tokens(session: aiohttp.ClientSession, url: str) -> PromptTokens:
    """Ask an engine for its counters; raises ``ScenarioError`` when it does not give them."""
    timeout = aiohttp.ClientTimeout(total=METRICS_TIMEOUT_SECONDS)
    try:
        async with session.get(f"{url}/metrics", timeout=timeout) as response:
            response.raise_for_status()
            return parse_prompt_tokens(await response.text())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ScenarioError(f"cannot read the metrics of {url}: {error!r}") from error
