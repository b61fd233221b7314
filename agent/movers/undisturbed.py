"""Clean-up that a cancelled task must still do."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any


async def undisturbed(work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` to its end, even when this task is cancelled (again) meanwhile.

    The work must have a bound of its own. A cancellation that came meanwhile is raised
    afterwards.
    """
    task = asyncio.ensure_future(work)
    disturbed = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            disturbed = True
    with suppress(asyncio.CancelledError):
        task.result()
    if disturbed:
        raise asyncio.CancelledError
