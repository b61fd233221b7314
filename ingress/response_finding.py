"""Asking engines which of them has a response that this replica knows nothing of.

Replicas share nothing, so the engine that made a response may be known only to another one.
The question costs an engine a look into a table. It is put to a bounded number of engines at
once, with a deadline, and to no more than a few sets of engines at the same time, so that
made-up ids cannot multiply requests.
"""

import asyncio
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from urllib.parse import quote

import aiohttp
from aiohttp import hdrs

from nearkv.ingress.dialects import RESPONSES_PATH
from nearkv.ingress.fleet import EngineView
from nearkv.state.model import EngineState

_MOST_ENGINES = 32
_MOST_SEARCHES = 8
_MOST_CHARACTERS = 256


class ResponseFinder:
    """Finds the engine that has a response."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        timeout_seconds: float,
        api_key: str | None,
        keeps_keys: bool = False,
    ) -> None:
        """Make a finder; with ``keeps_keys`` clients' keys are for the ingress alone."""
        self._session = session
        self._keeps_keys = keeps_keys
        self._timeout_seconds = timeout_seconds
        self._api_key = api_key
        self._searches = 0

    async def find(
        self, response_id: str, views: Sequence[EngineView], headers: Mapping[str, str]
    ) -> EngineView | None:
        """Return the engine that says it has the response, ``None`` where none does.

        ``headers`` are the client's: its key is shown where the ingress has none of its own and
        does not keep theirs.
        """
        if self._searches >= _MOST_SEARCHES or len(response_id) > _MOST_CHARACTERS:
            return None
        by_url: dict[str, EngineView] = {}
        for view in views:
            if view.info.state in (EngineState.READY, EngineState.DRAINING):
                by_url.setdefault(view.info.url, view)
        self._searches += 1
        try:
            return await self._first(response_id, list(by_url.values()), self._key(headers))
        finally:
            self._searches -= 1

    def _key(self, headers: Mapping[str, str]) -> dict[str, str]:
        if self._api_key is not None:
            return {hdrs.AUTHORIZATION: f"Bearer {self._api_key}"}
        given = None if self._keeps_keys else headers.get(hdrs.AUTHORIZATION)
        return {} if given is None else {hdrs.AUTHORIZATION: given}

    async def _first(
        self, response_id: str, views: Sequence[EngineView], key: dict[str, str]
    ) -> EngineView | None:
        path = f"{RESPONSES_PATH}/{quote(response_id, safe='')}"
        asked = {
            asyncio.create_task(self._has(view.info.url + path, key)): view
            for view in views[:_MOST_ENGINES]
        }
        try:
            async with asyncio.timeout(self._timeout_seconds):
                for answered in asyncio.as_completed(asked):
                    if await answered:
                        return next(v for task, v in asked.items() if _said_yes(task))
        except TimeoutError:
            pass
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        return None

    async def _has(self, url: str, key: dict[str, str]) -> bool:
        try:
            async with self._session.get(url, headers=key, allow_redirects=False) as response:
                return response.status == HTTPStatus.OK
        except (aiohttp.ClientError, OSError):
            return False


def _said_yes(task: "asyncio.Task[bool]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None and task.result()
