"""Loading a folder of prompts into every engine that starts."""

import asyncio
import random
from pathlib import Path

import structlog

from nearkv.agent.node_state import NodeState
from nearkv.agent.warming.book import LoadState
from nearkv.agent.warming.errors import BadWarmRequestError, PrefixConflictError, WarmingError
from nearkv.agent.warming.folder import read_folder
from nearkv.agent.warming.service import WarmService
from nearkv.agent.warming.settings import WarmingSettings
from nearkv.state.model import EngineState

_LOOK_SECONDS = 0.5
_RETRY_SECONDS = (10.0, 60.0, 300.0)
"""Pauses before what failed is tried again: an engine that has just started may be busy."""

log = structlog.get_logger(__name__)


class Seeder:
    """Looks for engines that have started, and asks for the folder's prompts there.

    Prompts that fail are asked for again, a few times. The folder is read anew each time: a
    ConfigMap may have changed since.
    """

    def __init__(
        self,
        folder: Path,
        service: WarmService,
        state: NodeState,
        settings: WarmingSettings,
        *,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self._folder = folder
        self._service = service
        self._state = state
        self._settings = settings
        self._look_seconds = look_seconds
        self._seeded: dict[str, str] = {}
        self._prompts: set[str] = set()
        self._retries: dict[str, tuple[int, float]] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            for engine in self._started():
                self._retries.pop(engine, None)
                await self._seed(engine)
            for engine in self._due_again():
                await self._seed(engine)
            await asyncio.sleep(self._look_seconds)

    def _started(self) -> list[str]:
        ready = {
            engine: tracker.incarnation
            for engine, tracker in self._state.trackers.items()
            if tracker.info.state is EngineState.READY
        }
        started = [e for e, incarnation in ready.items() if self._seeded.get(e) != incarnation]
        self._seeded = {
            engine: incarnation
            for engine, incarnation in self._seeded.items()
            if engine in self._state.trackers
        } | ready
        self._retries = {e: retry for e, retry in self._retries.items() if e in self._seeded}
        return started

    def _due_again(self) -> list[str]:
        """Return engines where prompts failed some time ago, and not too often."""
        failed = {
            engine
            for prefix in self._service.book
            if prefix.id in self._prompts
            for engine, target in prefix.targets.items()
            if target.state is LoadState.FAILED
        }
        now = self._state.now()
        due = []
        for engine in failed & self._seeded.keys():
            tries, at = self._retries.get(engine, (0, float("inf")))
            if at <= now:
                due.append(engine)
            elif tries:
                continue
            if tries < len(_RETRY_SECONDS):
                jitter = random.uniform(0.75, 1.25)  # noqa: S311 (spreads load, guards nothing)
                self._retries[engine] = (tries + 1, now + _RETRY_SECONDS[tries] * jitter)
            else:
                self._retries[engine] = (tries, float("inf"))
        return due

    async def _seed(self, engine: str) -> None:
        bodies, problems = await asyncio.to_thread(
            read_folder,
            self._folder,
            max_files=self._settings.max_prefixes,
            max_body_bytes=self._settings.max_body_bytes,
        )
        self._prompts = set(bodies)
        for prefix_id, body in bodies.items():
            try:
                self._warm(prefix_id, body, engine)
            except BadWarmRequestError as error:
                # A prompt may be for the engines of other nodes only.
                log.info("prompt_not_for_here", prefix=prefix_id, engine=engine, why=str(error))
            except WarmingError as error:
                problems.append(f"{prefix_id}: {error}")
        self._service.folder_problems = problems
        log.info("prompts_seeded", engine=engine, prompts=len(bodies), problems=problems)

    def _warm(self, prefix_id: str, body: bytes, engine: str) -> None:
        try:
            self._service.warm(prefix_id, body, only=engine)
        except PrefixConflictError:
            self._service.cancel(prefix_id)
            self._service.warm(prefix_id, body, only=engine)
