"""The HTTP API of warm-up."""

from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from nearkv.agent.warming.errors import WarmingError
from nearkv.agent.warming.service import WarmService
from nearkv.agent.warming.settings import WarmingSettings

_RETRY_AFTER_SECONDS = "5"
_TOO_MANY = 429


class WarmApi:
    """Handlers over the named prefixes of one node."""

    def __init__(
        self, service: WarmService, settings: WarmingSettings, *, may_change: bool
    ) -> None:
        """Make the handlers; without ``may_change`` prefixes can only be looked at."""
        self._service = service
        self._settings = settings
        self._may_change = may_change

    def add_routes(self, app: web.Application) -> None:
        """Add the routes to an application."""
        app.router.add_get("/v1/prefixes", self.list_all)
        app.router.add_get("/v1/prefixes/{id}", self.show)
        app.router.add_post("/v1/prefixes/{id}/warm", self.warm)
        app.router.add_delete("/v1/prefixes/{id}", self.cancel)

    async def list_all(self, _request: web.Request) -> web.Response:
        """Answer all prefixes, the oldest first."""
        described = [self._service.describe_prefix(prefix) for prefix in self._service.book]
        return _json({"prefixes": described})

    async def show(self, request: web.Request) -> web.Response:
        """Answer one prefix."""
        return self._answer(lambda: self._service.book.get(request.match_info["id"]))

    async def warm(self, request: web.Request) -> web.Response:
        """Begin to load a prefix; 202, as it goes on when this is answered."""
        if not self._may_change:
            return _refused()
        limit = self._settings.max_body_bytes
        body = await request.content.read(limit + 1)
        while len(body) <= limit and (more := await request.content.read(limit + 1 - len(body))):
            body += more
        if len(body) > limit:
            return _error(413, f"the body is over the limit of {limit} bytes")
        prefix_id = request.match_info["id"]
        return self._answer(lambda: self._service.warm(prefix_id, body), status=202)

    async def cancel(self, request: web.Request) -> web.Response:
        """Stop loading a prefix and forget its name; what engines hold of it stays."""
        if not self._may_change:
            return _refused()
        return self._answer(lambda: self._service.cancel(request.match_info["id"]))

    def _answer(self, act: Callable[[], Any], *, status: int = 200) -> web.Response:
        try:
            prefix = act()
        except WarmingError as error:
            return _error(error.status, str(error))
        return _json(self._service.describe_prefix(prefix), status=status)


def _refused() -> web.Response:
    return _error(
        403, "prefixes can be changed only where token or tls.client_ca is set, or on loopback"
    )


def _error(status: int, message: str) -> web.Response:
    headers = {"Retry-After": _RETRY_AFTER_SECONDS} if status == _TOO_MANY else None
    return _json({"error": message}, status=status, headers=headers)


def _json(
    value: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value),
        status=status,
        content_type="application/json",
        headers=headers,
    )
