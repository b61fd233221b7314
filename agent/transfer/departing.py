"""Clearing away after engines that are gone, in the order in which it is safe."""

import asyncio
from collections.abc import Callable

import structlog

from nearkv.agent.movers.pool import MoverPool
from nearkv.agent.transfer.connection import close_fds
from nearkv.agent.transfer.pulling import PullDesk
from nearkv.agent.transfer.registry import Departure, Registration
from nearkv.agent.transfer.sourcing import SourceDesk

log = structlog.get_logger(__name__)


class Departures:
    """Ends all that depends on what left the registry."""

    def __init__(
        self,
        pool: MoverPool,
        pulls: PullDesk,
        source: SourceDesk,
        *,
        on_gone: Callable[[Registration], None],
        on_scheduler_gone: Callable[[Registration], None],
    ) -> None:
        self._pool = pool
        self._pulls = pulls
        self._source = source
        self._on_gone = on_gone
        self._on_scheduler_gone = on_scheduler_gone
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, departure: Departure) -> None:
        """Start clearing away; at once nobody finds the engine any more."""
        registration = departure.registration
        if departure.memories:
            self._on_gone(registration)
        if departure.leases is not None:
            self._source.leases_lost(registration, departure.leases)
            self._on_scheduler_gone(registration)
        task = asyncio.create_task(self._clear(departure))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Wait until all is cleared away; each step has its bound."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _clear(self, departure: Departure) -> None:
        """End pulls, then mappings, then what was replaced; close descriptors last.

        A connection that was replaced stays until nobody writes into its engine's blocks: an
        engine counts on that soon after it has lost its agent.
        """
        try:
            await self._pulls.cancel_into(departure.memories)
            for owner in departure.owners:
                owner.replaced()
            for memory in departure.memories:
                await self._pool.drop(memory.key)
        except Exception:
            log.exception("departure_is_defect", engine=departure.registration.engine)
        finally:
            close_fds(departure.fds)
