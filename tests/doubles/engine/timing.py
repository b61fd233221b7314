"""How long a pretended engine takes."""

import asyncio

from tests.doubles.engine.config import EngineDoubleConfig


class TimeModel:
    """Prefill by tokens computed, decode by tokens produced, and a fixed cost per request.

    ``slow_factor`` multiplies all of it. A zero duration does not yield to the event loop.
    """

    def __init__(self, config: EngineDoubleConfig) -> None:
        rate = config.prefill_tokens_per_second
        self._seconds_per_prefill_token = 1.0 / rate if rate > 0 else 0.0
        self._seconds_per_decode_token = config.decode_seconds_per_token
        self._overhead_seconds = config.overhead_seconds
        self.is_instant = max(self._seconds_per_prefill_token, self._overhead_seconds) == 0
        self.slow_factor = 1.0

    async def prefill(self, tokens: int) -> None:
        """Take the time of one request's prefill."""
        await self._spend(self._overhead_seconds + tokens * self._seconds_per_prefill_token)

    async def decode(self, tokens: int) -> None:
        """Take the time of ``tokens`` decode steps."""
        await self._spend(tokens * self._seconds_per_decode_token)

    async def _spend(self, seconds: float) -> None:
        if seconds > 0:
            await asyncio.sleep(seconds * self.slow_factor)
