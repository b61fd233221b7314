"""The ingress's own endpoints: models, status, named prefixes."""

from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from nearkv.health import Readiness
from nearkv.ingress.answers import (
    ENGINE_HEADER,
    NO_ENGINE,
    REASON_HEADER,
    REQUEST_ID_HEADER,
    error_response,
)
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.model_names import ModelNames, list_models
from nearkv.ingress.settings import IngressSettings
from nearkv.ingress.status import describe_ingress

_MOST_PREFIXES = 1000


class OwnApi:
    """Handlers that need no engine."""

    def __init__(
        self,
        settings: IngressSettings,
        knowledge: Knowledge,
        readiness: Readiness,
        *,
        now: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._know = knowledge
        self._readiness = readiness
        self._now = now

    async def status(self, _request: web.Request) -> web.Response:
        """Answer this replica's view as JSON."""
        described = describe_ingress(
            self._settings, self._know, ready=self._readiness.is_ready, now=self._now()
        )
        return _json(described)

    async def prefixes(self, request: web.Request) -> web.Response:
        """List named prefixes, latest first, with the tokens of each that engines hold now.

        These are the article's prefix ids (its 3.3): as JSON, since as labels they would
        grow without bound. ``?limit=`` takes 1 to 1000.
        """
        text = request.query.get("limit", "100")
        limit = int(text) if text.isdecimal() and len(text) <= len(str(_MOST_PREFIXES)) else 0
        if not 1 <= limit <= _MOST_PREFIXES:
            raise web.HTTPBadRequest(
                text=f"limit: expected 1 to {_MOST_PREFIXES}, got {text[:20]!r}"
            )
        fleet = self._know.fleet
        listed = [
            {
                "id": _readable(prefix_id),
                "blocks": len(hint.keys),
                "last_engine": hint.engine,
                "held_tokens": {
                    engine: depth * (fleet.engines[engine].info.block_size or 0)
                    for engine, depth in sorted(fleet.match(hint.keys).items())
                },
            }
            for prefix_id, hint in self._know.hints.latest(limit)
        ]
        return _json({"known": len(self._know.hints), "prefixes": listed})

    async def models(self, _request: web.Request) -> web.Response:
        """List the models, adapters and aliases that can be asked for, each once."""
        return _json({"object": "list", "data": self._list_models()})

    async def model(self, request: web.Request) -> web.Response:
        """Answer one of them by name."""
        name = request.match_info["name"]
        for card in self._list_models():
            if card["id"] == name:
                return _json(card)
        error = ModelNames(self._settings.models.aliases).unknown(
            name, self._know.fleet.engines.values()
        )
        return error_response(error, request_id=request.headers.get(REQUEST_ID_HEADER, ""))

    def _list_models(self) -> list[dict[str, Any]]:
        return list_models(self._know.fleet.engines.values(), self._settings.models.aliases)


def _readable(name: str) -> str:
    """Return a name without what no JSON can hold; header values are any bytes."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def _json(value: object) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value),
        content_type="application/json",
        headers={ENGINE_HEADER: NO_ENGINE, REASON_HEADER: "own_answer"},
    )
