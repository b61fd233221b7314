"""Other routers' policies, made from their public descriptions, to compare with (pure).

None of their code is used. What each one looks at is what it would see: state of blocks comes
to them as to us, readings as often as they take them, and what they count themselves at once.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from nearkv.ingress.fleet import Fleet
from nearkv.ingress.prefix_index import PrefixIndex
from nearkv.replay.engine_model import SimulatedEngine
from nearkv.replay.fleet_feed import AGENT_URL
from nearkv.replay.routing import Clock, Route
from nearkv.replay.traces import Arrival
from nearkv.state.model import Frame


@dataclass(slots=True)
class _Sent:
    engine: str
    new_tokens: int
    computing: bool = True


@dataclass(slots=True)
class Load:
    """What a router itself counts of one engine."""

    requests: int = 0
    prefill_tokens: int = 0


@dataclass(slots=True)
class Reading:
    """What a router read of one engine's metrics last."""

    waiting: int = 0
    used_ratio: float = 0.0


class PeerRouter:
    """Counts what it sent; how to choose is for those derived from it."""

    max_waiting = 0
    wait_seconds = 0.0

    def __init__(self, clock: Clock, engines: Sequence[SimulatedEngine], seed: int) -> None:
        self.clock = clock
        self.engines = {engine.name: engine for engine in engines}
        self.names = sorted(self.engines)
        self.block_tokens = engines[0].profile.block_tokens
        self.chance = random.Random(seed)  # noqa: S311 (a simulation, not a secret)
        self.loads = {name: Load() for name in self.names}
        self._sent: dict[int, _Sent] = {}

    def hear(self, frame: Frame) -> None:
        """Take one frame; those that look at blocks do."""

    def choose(self, arrival: Arrival) -> tuple[str, int]:
        """Return an engine, and the prompt's tokens thought to be cached there."""
        raise NotImplementedError

    def route(self, number: int, arrival: Arrival) -> Route | None:
        """Choose for a request, and count it as sent."""
        engine, cached = self.choose(arrival)
        new_tokens = max(0, arrival.prompt_tokens - cached)
        self._sent[number] = _Sent(engine, new_tokens)
        load = self.loads[engine]
        load.requests += 1
        load.prefill_tokens += new_tokens
        return Route(engine)

    def prefilled(self, number: int) -> None:
        """Nothing: these split no requests."""

    def first_token(self, number: int) -> None:
        """Note that the prompt is computed."""
        self._computed(self._sent[number])

    def ended(self, number: int, cached_tokens: int) -> None:  # noqa: ARG002 (part of the protocol)
        """Note the end of an answer."""
        sent = self._sent.pop(number)
        self._computed(sent)
        load = self.loads[sent.engine]
        load.requests -= 1

    def _computed(self, sent: _Sent) -> None:
        if sent.computing:
            sent.computing = False
            self.loads[sent.engine].prefill_tokens -= sent.new_tokens

    def any_of(self, names: Sequence[str]) -> str:
        """Return one of several that are as good."""
        return names[0] if len(names) == 1 else self.chance.choice(names)


class RandomRouter(PeerRouter):
    """Any engine."""

    def choose(self, arrival: Arrival) -> tuple[str, int]:  # noqa: ARG002 (it looks at nothing)
        """Return any engine."""
        return self.any_of(self.names), 0


class LeastRequestRouter(PeerRouter):
    """The engine with the fewest of our own requests in flight."""

    def choose(self, arrival: Arrival) -> tuple[str, int]:  # noqa: ARG002 (it looks at loads only)
        """Return the one with the fewest requests."""
        least = min(load.requests for load in self.loads.values())
        return self.any_of([n for n in self.names if self.loads[n].requests == least]), 0


@dataclass(slots=True)
class _Tree:
    """What one engine was sent, as the router remembers it."""

    size: int = 0
    keys: dict[int, int] = field(default_factory=dict)


class StringTrieRouter(PeerRouter):
    """Cache-aware routing by remembered texts, as SGLang's gateway describes it.

    Where loads differ by more than 32 and a tenth: the least loaded. Else the engine with the
    longest match, if that is more than half of the prompt; else the one that was sent the least.
    It never hears of evictions.
    """

    most_apart = 32
    most_ratio = 1.1
    match_ratio = 0.5

    def __init__(self, clock: Clock, engines: Sequence[SimulatedEngine], seed: int) -> None:
        super().__init__(clock, engines, seed)
        self._trees = {name: _Tree() for name in self.names}
        self._turn = 0

    def choose(self, arrival: Arrival) -> tuple[str, int]:
        """Return an engine by remembered texts, and remember this one."""
        name = self._pick(arrival)
        tree = self._trees[name]
        self._turn += 1
        for key in arrival.keys:
            if key not in tree.keys:
                tree.size += 1
            tree.keys[key] = self._turn
        return name, 0

    def _pick(self, arrival: Arrival) -> str:
        requests = {name: self.loads[name].requests for name in self.names}
        least, most = min(requests.values()), max(requests.values())
        if most - least > self.most_apart and most > self.most_ratio * least:
            return self.any_of([n for n in self.names if requests[n] == least])
        depths = {name: self._depth(name, arrival.keys) for name in self.names}
        deepest = max(depths.values())
        if arrival.keys and deepest > self.match_ratio * len(arrival.keys):
            holders = [n for n in self.names if depths[n] == deepest]
            last = arrival.keys[deepest - 1]
            return max(holders, key=lambda name: self._trees[name].keys[last])
        return min(self.names, key=lambda name: (self._trees[name].size, name))

    def _depth(self, name: str, keys: Sequence[int]) -> int:
        known = self._trees[name].keys
        depth = 0
        for key in keys:
            if key not in known:
                break
            depth += 1
        return depth


class _IndexedRouter(PeerRouter):
    """Knows which blocks engines hold, by their events."""

    def __init__(self, clock: Clock, engines: Sequence[SimulatedEngine], seed: int) -> None:
        super().__init__(clock, engines, seed)
        self._fleet = Fleet(PrefixIndex())
        self._fleet.add_agent(AGENT_URL)

    def hear(self, frame: Frame) -> None:
        """Take one frame of the agents' state."""
        self._fleet.apply(AGENT_URL, frame, self.clock.now())

    def depths(self, arrival: Arrival) -> dict[str, int]:
        """Return the leading blocks that each engine holds."""
        return self._fleet.match(arrival.keys) if arrival.keys else {}


class WeightedScoresRouter(_IndexedRouter):
    """Weighted scores, as llm-d describes its precise profile: prefix 3, queue 2, KV use 2.

    Each score is within 0..1: the share of the prompt's blocks, how short the queue is between
    the longest and the shortest, and free KV. Readings are 50 ms old at most; the highest sum
    wins.
    """

    prefix_weight = 3.0
    queue_weight = 2.0
    kv_weight = 2.0
    reading_seconds = 0.05

    def __init__(self, clock: Clock, engines: Sequence[SimulatedEngine], seed: int) -> None:
        super().__init__(clock, engines, seed)
        self._read_at = -1.0
        self._readings = {name: Reading() for name in self.names}

    def choose(self, arrival: Arrival) -> tuple[str, int]:
        """Return the engine with the highest sum of scores."""
        self._read()
        depths = self.depths(arrival)
        queues = [reading.waiting for reading in self._readings.values()]
        longest, shortest = max(queues), min(queues)
        scores = {}
        for name in self.names:
            reading = self._readings[name]
            queue = 1.0
            if longest > shortest:
                queue = (longest - reading.waiting) / (longest - shortest)
            prefix = depths.get(name, 0) / len(arrival.keys) if arrival.keys else 0.0
            scores[name] = (
                self.prefix_weight * prefix
                + self.queue_weight * queue
                + self.kv_weight * (1.0 - reading.used_ratio)
            )
        best = max(scores.values())
        name = self.any_of([n for n in self.names if scores[n] == best])
        return name, depths.get(name, 0) * self.block_tokens

    def _read(self) -> None:
        now = self.clock.now()
        if now - self._read_at < self.reading_seconds:
            return
        self._read_at = now
        for name, engine in self.engines.items():
            self._readings[name] = Reading(engine.waiting, engine.used_ratio)


class BlockCostRouter(_IndexedRouter):
    """A cost in blocks, as Dynamo describes it: prefill blocks still to compute, and blocks in use.

    ``scale * prefill + decode``, where prefill is what is being computed there and what this
    request would add, and decode the blocks of all requests there with this one; those that
    requests have in common are counted once. Both are counted by the router itself; the lowest
    cost wins.
    """

    prefill_scale = 1.0

    def __init__(self, clock: Clock, engines: Sequence[SimulatedEngine], seed: int) -> None:
        super().__init__(clock, engines, seed)
        self.held: dict[str, Counter[int]] = {name: Counter() for name in self.names}
        self._of: dict[int, tuple[str, Sequence[int]]] = {}

    def choose(self, arrival: Arrival) -> tuple[str, int]:
        """Return the engine with the lowest cost."""
        depths = self.depths(arrival)
        size = self.block_tokens
        costs = {}
        for name in self.names:
            load = self.loads[name]
            new_tokens = max(0, arrival.prompt_tokens - depths.get(name, 0) * size)
            prefill = (load.prefill_tokens + new_tokens) / size
            held = self.held[name]
            more = sum(1 for key in arrival.keys if key not in held)
            # The end of each prompt is a block that it has for itself.
            costs[name] = self.prefill_scale * prefill + len(held) + load.requests + more
        best = min(costs.values())
        name = self.any_of([n for n in self.names if costs[n] == best])
        return name, depths.get(name, 0) * size

    def route(self, number: int, arrival: Arrival) -> Route | None:
        """Choose for a request, and count its blocks as held there."""
        route = super().route(number, arrival)
        if route is not None:
            self._of[number] = route.engine, arrival.keys
            self.held[route.engine].update(arrival.keys)
        return route

    def ended(self, number: int, cached_tokens: int) -> None:
        """Note the end of an answer, and that its blocks are held no more."""
        super().ended(number, cached_tokens)
        engine, keys = self._of.pop(number)
        held = self.held[engine]
        for key in keys:
            held[key] -= 1
            if not held[key]:
                del held[key]


class PrefillBlockCostRouter(BlockCostRouter):
    """The same with the setting that was measured best: prefill counts eight times."""

    prefill_scale = 8.0


PEERS: Mapping[str, type[PeerRouter]] = MappingProxyType(
    {
        "random": RandomRouter,
        "least-request": LeastRequestRouter,
        "string-trie": StringTrieRouter,
        "llm-d-style": WeightedScoresRouter,
        "dynamo-style": BlockCostRouter,
        "dynamo-style-8": PrefillBlockCostRouter,
    }
)
"""Peers by the name that ``nearkv replay --policy`` takes."""
