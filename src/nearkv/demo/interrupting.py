"""Running a coroutine so that Ctrl-C and SIGTERM end it in good order."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_interruptibly(work: Coroutine[Any, Any, Result]) -> Result | None:
    """Run a coroutine to its end; return None when a signal ended it.

    The first signal cancels the coroutine, which then stops its processes under deadlines
    of its own. Further signals are ignored: an impatient second Ctrl-C must not leave
    engines behind.
    """
    return asyncio.run(_cancel_on_signal(work))


async def _cancel_on_signal(work: Coroutine[Any, Any, Result]) -> Result | None:
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    was_interrupted = False

    def interrupt() -> None:
        nonlocal was_interrupted
        if not was_interrupted:
            was_interrupted = True
            task.cancel()

    for number in SIGNALS:
        loop.add_signal_handler(number, interrupt)
    try:
        return await task
    except asyncio.CancelledError:
        if was_interrupted:
            return None
        raise
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
