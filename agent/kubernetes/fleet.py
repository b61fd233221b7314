"""Watches of engines that come and go: started, told and stopped step by step."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog

from nearkv.agent.discovering import EngineSpec
from nearkv.agent.kubernetes.roster import Step
from nearkv.agent.watching import EngineWatch

log = structlog.get_logger(__name__)

MakeWatch = Callable[[EngineSpec], EngineWatch]


class EngineFleet:
    """One running watch for each engine; use it on the event loop's thread only.

    ``on_defect`` gets the error of a watch that ended, which none should.
    """

    def __init__(self, make: MakeWatch, *, on_defect: Callable[[Exception], None]) -> None:
        self._make = make
        self._on_defect = on_defect
        self._watches: dict[str, EngineWatch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: dict[asyncio.Task[None], str] = {}

    def apply(self, step: Step) -> None:
        """Do what a step asks for; an engine that is told of elsewhere is watched anew."""
        before, after = step.before, step.after
        if after is None:
            if before is not None:
                self._stop(before.uid)
            return
        if before is None or before.spec != after.spec or after.uid not in self._watches:
            self._start(after.uid, after.spec)
        watch = self._watches[after.uid]
        watch.admit(admitted=after.is_ready)
        if after.is_leaving:
            watch.drain()

    async def first_looks(self) -> None:
        """Return once every engine was asked once."""
        await asyncio.gather(*(watch.first_look() for watch in self._watches.values()))

    async def close(self) -> None:
        """Stop all watches; their engines are gone from the state then."""
        for uid in list(self._tasks):
            self._stop(uid)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _start(self, uid: str, spec: EngineSpec) -> None:
        self._stop(uid)
        earlier = [task for task, engine in self._ending.items() if engine == uid]
        watch = self._watches[uid] = self._make(spec)
        self._tasks[uid] = asyncio.create_task(self._run(watch, earlier))

    def _stop(self, uid: str) -> None:
        self._watches.pop(uid, None)
        task = self._tasks.pop(uid, None)
        if task is not None:
            task.cancel()
            self._ending[task] = uid
            task.add_done_callback(lambda ended: self._ending.pop(ended, None))

    async def _run(self, watch: EngineWatch, earlier: Sequence[asyncio.Task[None]]) -> None:
        """Run a watch once earlier ones have taken their engine out of the state."""
        if earlier:
            await asyncio.wait(earlier)
        try:
            with suppress(asyncio.CancelledError):
                await watch.run()
        except Exception as error:
            log.exception("engine_watch_failed")
            self._on_defect(error)
