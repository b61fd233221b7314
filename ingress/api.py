"""The ingress's own endpoints: models, status, named prefixes."""

from collections.abc import Callable

import msgspec
from aiohttp import web

from nearkv.health import Readiness
from nearkv.ingress.answers import ENGINE_HEADER, NO_ENGINE, REASON_HEADER
from nearkv.ingress.knowledge import Knowledge
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
        limit = int(text) if text.isdecimal() else 0
        if not 1 <= limit <= _MOST_PREFIXES:
            raise web.HTTPBadRequest(
                text=f"limit: expected 1 to {_MOST_PREFIXES}, got {text[:20]!r}"
            )
        fleet = self._know.fleet
        listed = [
            {
                "id": prefix_id,
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
        """List the models and adapters that the fleet serves, each once."""
        lengths: dict[str, int | None] = {}
        parents: dict[str, str] = {}
        for view in self._know.fleet.engines.values():
            for name in view.info.models:
                lengths.setdefault(name, view.info.max_model_len)
            for name in view.info.adapters:
                lengths.setdefault(name, view.info.max_model_len)
                parents.setdefault(name, view.info.model)
        cards = [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "nearkv",
                "max_model_len": length,
                "parent": parents.get(name),
            }
            for name, length in sorted(lengths.items())
        ]
        return _json({"object": "list", "data": cards})


def _json(value: object) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value),
        content_type="application/json",
        headers={ENGINE_HEADER: NO_ENGINE, REASON_HEADER: "own_answer"},
    )
