"""The blocks that index benchmarks store and look up; standard library only.

Chains of 256 blocks: 64 of one of 20 system prompts, then 192 of their own. Stores come in
events of 16 blocks (64 for a system prompt), as an engine's do. Also read by the peer script,
which runs in an environment of its own.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

SYSTEM_PROMPTS = 20
SHARED_BLOCKS = 64
OWN_BLOCKS = 192
EVENT_BLOCKS = 16


@dataclass(frozen=True)
class Workload:
    """Sizes of a workload; equal seeds give equal keys."""

    engines: int = 16
    blocks_per_engine: int = 50_000
    seed: int = 7

    def system_prompts(self) -> list[list[int]]:
        """Return the keys of each system prompt."""
        source = random.Random(self.seed)
        return [
            [source.getrandbits(64) for _ in range(SHARED_BLOCKS)] for _ in range(SYSTEM_PROMPTS)
        ]

    def chains(self, engine: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (system prompt, own keys) of each chain that an engine holds."""
        source = random.Random(f"{self.seed}:{engine}")
        count = max(1, (self.blocks_per_engine - SYSTEM_PROMPTS * SHARED_BLOCKS) // OWN_BLOCKS)
        for i in range(count):
            yield i % SYSTEM_PROMPTS, [source.getrandbits(64) for _ in range(OWN_BLOCKS)]

    def stores(self, engine: int) -> Iterator[tuple[int | None, list[int]]]:
        """Yield (parent key, keys) of each store event of an engine."""
        shared = self.system_prompts()
        for keys in shared:
            yield None, keys
        for prompt, own in self.chains(engine):
            parent = shared[prompt][-1]
            for start in range(0, OWN_BLOCKS, EVENT_BLOCKS):
                part = own[start : start + EVENT_BLOCKS]
                yield parent, part
                parent = part[-1]

    def prompts(self, count: int) -> list[list[int]]:
        """Return prompts of 256 blocks that some engine holds whole."""
        source = random.Random(f"{self.seed}:prompts")
        shared = self.system_prompts()
        held = [list(self.chains(engine)) for engine in range(self.engines)]
        picked = (source.choice(held[source.randrange(self.engines)]) for _ in range(count))
        return [shared[prompt] + own for prompt, own in picked]

    def misses(self, count: int) -> list[list[int]]:
        """Return prompts of 256 blocks that nobody holds any of."""
        source = random.Random(f"{self.seed}:misses")
        return [[source.getrandbits(64) for _ in range(256)] for _ in range(count)]
