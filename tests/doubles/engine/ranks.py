"""One data-parallel rank: queue, block cache, time model, statistics and event publisher.

Prefills run one after another in order of arrival, as on a busy device; decodes run beside them.
A request is matched against the cache when its prefill starts, not when it arrives, so that one
queued behind an equal prompt finds it cached.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.doubles.engine.block_cache import BlockCache, BlockTable, CacheScope
from tests.doubles.engine.config import EngineDoubleConfig
from tests.doubles.engine.publishing import EventPublisher
from tests.doubles.engine.statistics import RankStatistics
from tests.doubles.engine.timing import TimeModel
from tests.doubles.engine.tokenizing import Prompt


class QueueTimeoutError(Exception):
    """A request found no room in time."""


@dataclass(slots=True)
class Job:
    """One prompt being served; times are monotonic seconds.

    ``cached_tokens`` are those not computed here, as first found: a preemption leaves them alone.
    """

    prompt: Prompt
    reply_tokens: list[int]
    scope: CacheScope
    table: BlockTable
    arrived_at: float
    report_full: bool = False
    remote_prefill: bool = False
    cached_tokens: int = 0
    transferred_tokens: int = 0
    produced: int = 0
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    is_running: bool = False
    is_finished: bool = False


class Rank:
    """Serves jobs; see the module docstring for what it models."""

    def __init__(
        self,
        config: EngineDoubleConfig,
        *,
        index: int,
        times: TimeModel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._times = times
        self._clock = clock
        self._prefilling = asyncio.Lock()
        self._room = asyncio.Event()
        self._awake = asyncio.Event()
        self._awake.set()
        self.index = index
        self.sleep_level: int | None = None
        self.publisher = EventPublisher(config, rank=index) if config.publish_events else None
        self.cache = BlockCache(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            host_blocks=config.cpu_blocks,
        )
        self.statistics = RankStatistics(config.context_tokens, time.time())

    def submit(self, prompt: Prompt, *, reply_tokens: list[int], scope: CacheScope) -> Job:
        """Queue a request; pass the result to ``prefill`` and, whatever happens, ``finish``."""
        known = prompt.hashes(self._config.block_size) if scope == CacheScope() else []
        table = BlockTable(list(prompt.tokens), scope, known)
        self.statistics.waiting += 1
        return Job(prompt, reply_tokens, scope, table, arrived_at=self._clock())

    async def prefill(self, job: Job) -> None:
        """Compute the prompt and produce the first token.

        Raises:
            QueueTimeoutError: when the request did not start within ``queue_seconds``.
        """
        if self._times.is_instant and not self._prefilling.locked() and self._try_admit(job):
            pass  # the benchmark path: no queue, no timer
        else:
            await self._wait_and_prefill(job)
        job.first_token_at = self._clock()
        job.produced = 1
        self._note_prefill(job)
        self._publish()

    async def decode(self, job: Job, count: int) -> None:
        """Produce ``count`` more tokens; blocks they fill become cached and are announced."""
        while count > 0:
            size = self._config.block_size
            step = min(count, size - len(job.table.tokens) % size)
            await self._times.decode(step)
            computed = job.reply_tokens[job.produced - 1 : job.produced - 1 + step]
            while not self.cache.extend(job.table, computed):
                await self._preempt(job)
            job.produced += step
            count -= step
            self._publish()

    def finish(self, job: Job, reason: str = "abort") -> None:
        """Free what the job holds and count it; only the first call counts."""
        if job.is_finished:
            return
        job.is_finished = True
        statistics = self.statistics
        statistics.finished[reason] += 1
        if not job.is_running:
            statistics.waiting -= 1
            return
        statistics.running -= 1
        self.cache.release(job.table)
        self._room.set()
        if reason != "abort":
            self._note_finish(job)

    def sleep(self, level: int) -> None:
        """Stop starting requests; from level 1 on the cache goes, announced by a later batch."""
        self.sleep_level = level
        self._awake.clear()
        if level > 0:
            self.cache.clear()

    def wake_up(self) -> None:
        """Serve again."""
        self.sleep_level = None
        self._awake.set()

    async def _wait_and_prefill(self, job: Job) -> None:
        try:
            async with asyncio.timeout(self._config.queue_seconds) as deadline, self._prefilling:
                await self._awake.wait()
                while not self._try_admit(job):
                    self._room.clear()
                    await self._room.wait()
                deadline.reschedule(None)
                await self._times.prefill(len(job.prompt.tokens) - job.cached_tokens)
        except TimeoutError as error:
            raise QueueTimeoutError from error

    def _try_admit(self, job: Job) -> bool:
        """Start ``job`` if the engine is awake and has room for it."""
        statistics = self.statistics
        if self.sleep_level is not None or statistics.running >= self._config.max_num_seqs:
            return False
        if not self.cache.admit(job.table, report_full=job.report_full):
            return False
        job.admitted_at = self._clock()
        job.is_running = True
        statistics.waiting -= 1
        statistics.running += 1
        if job.remote_prefill:
            # The last token is computed here even when all its KV was received.
            job.transferred_tokens = max(0, len(job.prompt.tokens) - job.table.hit_tokens - 1)
        job.cached_tokens = job.table.hit_tokens + job.transferred_tokens
        return True

    async def _preempt(self, job: Job) -> None:
        """Give the job's blocks up and compute it again when there is room."""
        self.statistics.preemptions += 1
        self.statistics.running -= 1
        self.statistics.waiting += 1
        job.is_running = False
        self.cache.release(job.table)
        self._room.set()
        job.table = BlockTable(job.table.tokens, job.scope)
        try:
            async with asyncio.timeout(self._config.queue_seconds), self._prefilling:
                await self._readmit(job)
        except TimeoutError as error:
            raise QueueTimeoutError from error

    async def _readmit(self, job: Job) -> None:
        # One block more than it had: without room to go on it would give up again at once.
        while not self.cache.admit(job.table, spare_blocks=1):
            self._room.clear()
            await self._room.wait()
        job.is_running = True
        self.statistics.waiting -= 1
        self.statistics.running += 1
        await self._times.prefill(len(job.table.tokens) - job.table.hit_tokens)

    def _publish(self) -> None:
        events = self.cache.take_events()
        if events and self.publisher is not None:
            self.publisher.publish(events)

    def _note_prefill(self, job: Job) -> None:
        statistics, prompt_tokens = self.statistics, len(job.prompt.tokens)
        statistics.queries_tokens += prompt_tokens
        statistics.device_hit_tokens += job.table.device_hit_tokens
        statistics.host_hit_tokens += job.table.host_hit_tokens
        statistics.transferred_tokens += job.transferred_tokens
        if job.remote_prefill or self._config.cpu_blocks:
            statistics.external_queries_tokens += prompt_tokens - job.table.device_hit_tokens
        statistics.computed_tokens += prompt_tokens - job.cached_tokens
        statistics.first_token.observe(job.first_token_at - job.arrived_at)

    def _note_finish(self, job: Job) -> None:
        statistics, now = self.statistics, self._clock()
        prompt_tokens = len(job.prompt.tokens)
        statistics.generated_tokens += job.produced
        statistics.prompt_tokens.observe(prompt_tokens)
        statistics.generation_tokens.observe(job.produced)
        statistics.computed_per_request.observe(prompt_tokens - job.cached_tokens)
        statistics.queue.observe(job.admitted_at - job.arrived_at)
        statistics.prefill.observe(job.first_token_at - job.admitted_at)
        statistics.decode.observe(now - job.first_token_at)
        statistics.inference.observe(now - job.admitted_at)
        statistics.end_to_end.observe(now - job.arrived_at)
