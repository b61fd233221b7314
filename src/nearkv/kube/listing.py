"""LIST in pages: all objects or an error, never a part of them."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

import msgspec

from nearkv.kube.access import ApiAccess
from nearkv.kube.errors import ApiError, Trouble
from nearkv.kube.events import EventReader, Page

TakePage = Callable[[list[msgspec.Raw]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListLimits:
    """Bounds of a list: objects and bytes of a page, seconds for a page and for all of them."""

    page_objects: int = 500
    page_bytes: int = 64 << 20
    page_seconds: float = 60.0
    silence_seconds: float = 30.0
    total_seconds: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What of a collection is wanted.

    ``cached`` lets the server answer from its cache, which it indexes by ``spec.nodeName``: for
    selections of a few objects that thousands of clients ask for. It answers in one page then.
    """

    path: str
    label_selector: str = ""
    field_selector: str = ""
    cached: bool = False

    def params(self) -> dict[str, str]:
        """Return the selectors as query parameters."""
        selectors = {"labelSelector": self.label_selector, "fieldSelector": self.field_selector}
        return {name: value for name, value in selectors.items() if value}


class Lister:
    """Lists one selection, page by page.

    A page over the limit of bytes halves the objects of a page from then on.
    """

    def __init__(
        self, access: ApiAccess, selection: Selection, *, limits: ListLimits, reader: EventReader
    ) -> None:
        self._access = access
        self._selection = selection
        self._limits = limits
        self._reader = reader

    async def pages(self, take: TakePage, *, at_least: str = "") -> str:
        """Hand every page to ``take``; return the version of the list.

        ``at_least`` is a version that an answer from the cache must have reached, ``0`` for any,
        empty for the newest state, not from the cache. Raises :class:`ApiError`; what was taken
        until then is worth nothing.
        """
        try:
            async with asyncio.timeout(self._limits.total_seconds):
                return await self._pages(take, self._first(at_least))
        except TimeoutError as error:
            message = f"the list took more than {self._limits.total_seconds:g} s"
            raise ApiError(Trouble.SILENT, message) from error

    async def _pages(self, take: TakePage, first: Mapping[str, str]) -> str:
        page = await self._page(first)
        version = page.version
        while True:
            await take(page.items)
            if not page.more:
                return version
            following = await self._page(self._with_limit({"continue": page.more}))
            if following.more == page.more:
                raise ApiError(Trouble.GARBAGE, "the list continues with the same page for ever")
            page = following

    def _first(self, at_least: str) -> dict[str, str]:
        if self._selection.cached and at_least:
            # Pages are not made from the cache.
            return {"resourceVersion": at_least, "resourceVersionMatch": "NotOlderThan"}
        return self._with_limit({})

    def _with_limit(self, params: dict[str, str]) -> dict[str, str]:
        return {"limit": str(self._limits.page_objects), **params}

    async def _page(self, params: Mapping[str, str]) -> Page:
        limits = self._limits
        try:
            body = await self._access.read(
                "GET",
                self._selection.path,
                params={**self._selection.params(), **params},
                limit_bytes=limits.page_bytes,
                total_seconds=limits.page_seconds,
                silence_seconds=limits.silence_seconds,
            )
        except ApiError as error:
            if error.trouble is Trouble.TOO_LARGE and limits.page_objects > 1:
                self._limits = replace(limits, page_objects=limits.page_objects // 2)
            raise
        return self._reader.page(body)
