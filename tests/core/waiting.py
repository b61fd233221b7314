"""Waiting for what takes a moment, without the programs that most tests run."""

import asyncio
import time

DEADLINE_SECONDS = 30.0


async def eventually(condition, *, what):
    """Wait until a condition holds; fails with ``what`` when the time is up."""
    give_up_at = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < give_up_at, f"never came true: {what}"
        await asyncio.sleep(0.005)
