"""Loading a folder of prompts into every engine that starts."""

import asyncio
from pathlib import Path

import structlog

from nearkv.agent.node_state import NodeState
from nearkv.agent.warming.errors import BadWarmRequestError, PrefixConflictError, WarmingError
from nearkv.agent.warming.folder import read_folder
from nearkv.agent.warming.service import WarmService
from nearkv.agent.warming.settings import WarmingSettings
from nearkv.state.model import EngineState

_LOOK_SECONDS = 0.5

log = structlog.get_logger(__name__)


class Seeder:
    """Looks for engines that have started, and asks for the folder's prompts there.

    The folder is read anew each time: a ConfigMap may have changed since.
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

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            for engine in self._started():
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
        return started

    async def _seed(self, engine: str) -> None:
        bodies, problems = await asyncio.to_thread(
            read_folder,
            self._folder,
            max_files=self._settings.max_prefixes,
            max_body_bytes=self._settings.max_body_bytes,
        )
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
