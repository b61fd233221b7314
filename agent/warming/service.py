"""Loading named prefixes into engines: a few at a time, never one engine twice at once."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import structlog

from nearkv.agent.block_table import BlockChanges
from nearkv.agent.engine_tracking import EngineTracker
from nearkv.agent.node_state import NodeState
from nearkv.agent.warming.book import (
    Candidate,
    LoadState,
    Prefix,
    Target,
    WarmBook,
    choose_engines,
    describe,
    targets_to_load,
)
from nearkv.agent.warming.calling import EngineAddress, EngineCaller
from nearkv.agent.warming.errors import LoadError
from nearkv.agent.warming.requests import WarmRequest, check_id, read_request
from nearkv.agent.warming.residency import Residency
from nearkv.agent.warming.settings import WarmingSettings
from nearkv.block_keys import KeyNamespace, chain_keys, pack_tokens, root_key
from nearkv.state.model import EngineState, EventsState

LOAD_OUTCOMES = (
    *("loaded", "resident", "cancelled", "engine_gone"),
    *("refused", "timeout", "unreachable", "unreadable", "defect"),
)
"""What can become of a load; ``resident`` was there already."""

log = structlog.get_logger(__name__)


class WarmService:
    """Keeps the named prefixes, has them loaded, and knows who holds them."""

    def __init__(
        self,
        state: NodeState,
        caller: EngineCaller,
        settings: WarmingSettings,
        *,
        secret: bytes = b"",
    ) -> None:
        self._state = state
        self._caller = caller
        self._settings = settings
        self._secret = secret
        self.book = WarmBook(max_prefixes=settings.max_prefixes, max_bytes=settings.max_bytes)
        self.loads: Counter[str] = Counter()
        self.folder_problems: list[str] = []
        self._residency = Residency()
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._free_at: dict[str, float] = {}
        self._slots = asyncio.Semaphore(settings.concurrency)
        state.log.observe_blocks(self._observe)

    # -- For clients -------------------------------------------------------------------------

    def warm(self, prefix_id: str, body: bytes, *, only: str | None = None) -> Prefix:
        """Begin to load a prefix into the engines that a body names; ``only`` into one of them.

        Asked for again, it loads what failed or is not held any more. Raises
        :class:`~nearkv.agent.warming.errors.WarmingError` saying what is wrong.
        """
        request = read_request(body)
        self._forget_gone()
        engines = choose_engines(request, self._candidates())
        if only is not None:
            engines = [engine for engine in engines if engine == only]
        prefix = self.book.put(check_id(prefix_id), request, len(body))
        incarnations = {
            engine: tracker.incarnation for engine, tracker in self._state.trackers.items()
        }
        held = [engine for engine in engines if self._resident_ratio(prefix, engine) == 1.0]
        for target in targets_to_load(prefix, engines, incarnations, held):
            self._start(prefix, target)
        return prefix

    def cancel(self, prefix_id: str) -> Prefix:
        """Stop loading a prefix and forget it; raises :class:`UnknownPrefixError`."""
        prefix = self.book.drop(prefix_id)
        for engine in prefix.targets:
            task = self._tasks.get((prefix_id, engine))
            if task is not None:
                task.cancel()
        for engine, keys in prefix.keys.items():
            self._forget(engine, keys)
        return prefix

    def describe_prefix(self, prefix: Prefix) -> dict[str, Any]:
        """Return a prefix as plain JSON types."""
        ratios = {
            engine: ratio
            for engine in prefix.targets
            if (ratio := self._resident_ratio(prefix, engine)) is not None
        }
        return describe(prefix, ratios, self._uses(prefix, prefix.targets))

    def named_prefixes(self, engine: str) -> list[tuple[str, int]]:
        """Return (id, uses) of the prefixes that an engine, on any of its ranks, holds whole.

        A use is something new that was stored right behind a prefix: a question about a document
        that nobody had asked before.
        """
        found = []
        for prefix in self.book:
            holding = [
                rank
                for rank in prefix.keys
                if rank.partition("/dp")[0] == engine or rank == engine
                if self._resident_ratio(prefix, rank) == 1.0
            ]
            if holding:
                found.append((prefix.id, self._uses(prefix, holding)))
        return found

    # -- For status ----------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return how many prefixes there are, and how many loads are under way."""
        return {"prefixes": len(self.book), "bytes": self.book.size_bytes, "loads": self.under_way}

    def problems(self) -> list[str]:
        """Return what is wrong with the folder of prompts."""
        return [f"warming.folder: {problem}" for problem in self.folder_problems]

    @property
    def under_way(self) -> int:
        """How many loads wait or run."""
        return len(self._tasks)

    # -- Life ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Cancel what is under way at the end."""
        try:
            yield
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, prefix: Prefix, target: Target) -> None:
        place = (prefix.id, target.engine)
        task = asyncio.create_task(self._load(prefix, target))
        self._tasks[place] = task

        def done(ended: asyncio.Task[None]) -> None:
            if self._tasks.get(place) is ended:
                del self._tasks[place]

        task.add_done_callback(done)

    async def _load(self, prefix: Prefix, target: Target) -> None:
        try:
            async with self._turn(target.engine):
                target.state = LoadState.LOADING
                outcome = await self._load_now(prefix, target)
            target.state = LoadState.LOADED
            self.loads[outcome] += 1
        except LoadError as error:
            self._note_failure(prefix, target, error.reason, str(error))
        except asyncio.CancelledError:
            target.state = LoadState.CANCELLED
            self.loads["cancelled"] += 1
            raise
        except Exception as error:
            # Else it would count as under way for ever, and never be tried again.
            log.exception("warming_failed", prefix=prefix.id, engine=target.engine)
            self._note_failure(prefix, target, "defect", repr(error)[:200])

    def _note_failure(self, prefix: Prefix, target: Target, reason: str, why: str) -> None:
        target.state, target.error = LoadState.FAILED, why
        self.loads[reason] += 1
        log.warning("prefix_not_loaded", prefix=prefix.id, engine=target.engine, error=why)

    @asynccontextmanager
    async def _turn(self, engine: str) -> AsyncIterator[None]:
        """Wait until an engine may load: alone, after its pause, with few others."""
        async with self._turns.setdefault(engine, asyncio.Lock()):
            await asyncio.sleep(max(0.0, self._free_at.get(engine, 0.0) - self._state.now()))
            async with self._slots:
                try:
                    yield
                finally:
                    self._free_at[engine] = self._state.now() + self._settings.pause_seconds

    async def _load_now(self, prefix: Prefix, target: Target) -> str:
        tracker = self._tracker(target.engine)
        request = prefix.request
        address = _address(tracker, request)
        token_ids = prefix.token_ids.get(address.model)
        if token_ids is None:
            token_ids = await self._caller.tokenize(address, request)
            if token_ids is not None:
                prefix.token_ids[address.model] = token_ids
        self._follow(prefix, tracker, token_ids)
        if self._resident_ratio(prefix, target.engine) == 1.0:
            return "resident"
        loaded = await self._caller.load(address, request, token_ids)
        target.prompt_tokens, target.cached_tokens = loaded.prompt_tokens, loaded.cached_tokens
        self._follow(prefix, tracker, token_ids)
        log.info("prefix_loaded", prefix=prefix.id, engine=target.engine)
        return "loaded"

    def _tracker(self, engine: str) -> EngineTracker:
        tracker = self._state.trackers.get(engine)
        if tracker is None:
            raise LoadError("the engine is gone", reason="engine_gone")
        return tracker

    def _candidates(self) -> Iterator[Candidate]:
        for engine, tracker in self._state.trackers.items():
            if tracker.info.state is EngineState.READY:
                identity = tracker.identity
                yield Candidate(engine, identity.group, (*identity.models, *identity.adapters))

    # -- Who holds what --------------------------------------------------------------------------

    def _follow(self, prefix: Prefix, tracker: EngineTracker, token_ids: list[int] | None) -> None:
        """Follow a prefix's blocks on one engine, once they can be told."""
        engine = tracker.identity.id
        block_size = tracker.info.block_size
        if token_ids is None or block_size is None:
            return
        keys = _keys_of(prefix.request, tracker, token_ids, block_size, self._secret)
        if not keys:
            return
        known = prefix.keys.get(engine)
        if known == keys and keys[-1] in tracker.table.uses:
            return
        if known is not None:
            del prefix.keys[engine]
            self._forget(engine, known)
        prefix.keys[engine] = keys
        prefix.resident.pop(engine, None)
        self._residency.watch(keys)
        tracker.table.uses.setdefault(keys[-1], 0)
        self._residency.scan(engine, tracker.table.keys_by_tier())

    def _forget_gone(self) -> None:
        """Drop what is kept of engines that are gone: pods come and go for months."""
        known = self._state.trackers
        for prefix in self.book:
            for engine in [e for e in prefix.targets if e not in known]:
                if (prefix.id, engine) not in self._tasks:
                    del prefix.targets[engine]
                    prefix.resident.pop(engine, None)
                    self._residency.unwatch(prefix.keys.pop(engine, []))
        for engine in [e for e in self._turns if e not in known]:
            if not self._turns[engine].locked():
                del self._turns[engine]
                self._free_at.pop(engine, None)
        self._residency.forget(known.keys())

    def _forget(self, engine: str, keys: list[int]) -> None:
        self._residency.unwatch(keys)
        tracker = self._state.trackers.get(engine)
        shared = any(others.keys.get(engine, keys[:0])[-1:] == keys[-1:] for others in self.book)
        if tracker is not None and not shared:
            tracker.table.uses.pop(keys[-1], None)

    def _observe(self, engine: str, changes: BlockChanges) -> None:
        self._residency.observe(engine, changes)

    def _resident_ratio(self, prefix: Prefix, engine: str) -> float | None:
        keys = prefix.keys.get(engine)
        tracker = self._state.trackers.get(engine)
        if not keys or tracker is None or tracker.info.events is EventsState.OFF:
            return None  # an engine that tells no events may hold it or not
        version = self._residency.version(engine)
        known = prefix.resident.get(engine)
        if known is None or known[0] != version:
            ratio = self._residency.leading(engine, keys) / len(keys)
            known = prefix.resident[engine] = (version, ratio)
        return known[1]

    def _uses(self, prefix: Prefix, engines: Iterable[str]) -> int:
        trackers = self._state.trackers
        return sum(
            trackers[engine].table.uses.get(prefix.keys[engine][-1], 0)
            for engine in engines
            if engine in trackers and prefix.keys.get(engine)
        )


def _address(tracker: EngineTracker, request: WarmRequest) -> EngineAddress:
    identity = tracker.identity
    return EngineAddress(
        url=identity.url,
        model=request.model or identity.model,
        api_key=identity.api_key,
        rank=identity.dp_rank,
    )


def _keys_of(
    request: WarmRequest,
    tracker: EngineTracker,
    token_ids: list[int],
    block_size: int,
    secret: bytes,
) -> list[int]:
    identity = tracker.identity
    lora = request.model if request.model in identity.adapters else None
    namespace = KeyNamespace(identity.key_model, lora or "", request.cache_salt or "")
    return chain_keys(root_key(namespace, secret), pack_tokens(token_ids), block_size)
